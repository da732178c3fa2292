"""Synchronize with the controller in threads: one sends events, one fetches plans, one reports problems.

Events are sent in the order of their numbers and deleted once the controller has stored them. Each message states in
which database this node is recorded and up to which event; a controller whose database is another one, or was restored,
requests everything that the node holds (`state.py`). It plans nothing for the node until it has that. A plan is
acknowledged by requesting the next one, and only after it is on this node's disk, so the controller may rely on it.
"""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import closing

from slurm_migbatch.mig.driver import DriverError
from slurm_migbatch.node import inventory, plan
from slurm_migbatch.node.auth import AuthError, make_signer
from slurm_migbatch.node.config import NodeConfig
from slurm_migbatch.node.controller_client import ControllerClient, ControllerError
from slurm_migbatch.node.executor import Executor
from slurm_migbatch.node.findings import Finding, tell
from slurm_migbatch.node.gpus import Gpus
from slurm_migbatch.node.journal import NAME, Corrupt, Journal, JournalError
from slurm_migbatch.node.state import state

BATCH = 500
BATCH_BYTES = 512 << 10
"""Bytes of one message's events; the controller refuses more than [node_api] max_body_kb."""
BACKOFF_MAX_S = 15.0
BACKOFF_SEVERAL_S = 3.0
"""The same with several controllers: one of them is about to serve."""
INVENTORY_EVERY_S = 60.0
HELLO_EVERY_S = 20.0
"""Seconds after which an idle node sends an empty message: the database may have been replaced meanwhile."""
STATE_EVERY_S = 10.0
"""Minimum seconds between two full state events, whatever the controller requests."""
log = logging.getLogger("migbatch.node")


class ControllerSync:
    """Send events and fetch plans by the node API. Without a Controller= it does nothing."""

    def __init__(
        self,
        config: NodeConfig,
        gpus: Gpus,
        stopping: threading.Event,
        checks: Callable[[Gpus], Iterable[Finding]] | None = None,
    ) -> None:
        """Set up. `checks`: problems of this node, which are reported every `CheckEvery`."""
        self._config = config
        self._checks = checks
        self._gpus = gpus
        self._stopping = stopping
        self._last_inventory: str | None = None
        self._client: ControllerClient | None = None
        self._lock = threading.Lock()
        self._journal: Journal | None = None
        self._inventory_due = self._hello_due = self._state_due = 0.0
        #: set when a controller answers again: it may be another one
        self._answered_again = threading.Event()

    def threads(self) -> list[threading.Thread]:
        """Create the threads, not yet started. Daemonic: a pending request must not delay the agent's exit."""
        if not self._config.controllers:
            return []
        jobs: list[tuple[str, Callable[[], None]]] = [("events", self._events), ("plans", self._plans)]
        if self._checks is not None and self._config.check_every:
            jobs.append(("findings", self._findings))
        return [threading.Thread(target=self._loop, args=job, name=job[0], daemon=True) for job in jobs]

    def stop(self) -> None:
        """Interrupt a request that waits for a plan."""
        if self._client is not None:
            self._client.interrupt()

    def _loop(self, name: str, step: Callable[[], None]) -> None:
        pause, failing = 0.5, False
        longest = BACKOFF_SEVERAL_S if len(self._config.controllers) > 1 else BACKOFF_MAX_S
        while not self._stopping.is_set():
            try:
                step()
                if failing:
                    log.info("%s: the controller answers again", name)
                    self._answered_again.set()
                pause, failing = 0.5, False
            except (ControllerError, AuthError, JournalError, plan.PlanError, ValueError, OSError) as error:
                if self._stopping.is_set():
                    return
                if not failing:
                    log.warning("%s: %s; will retry", name, error)
                failing = True
            except Exception as error:
                if not failing:
                    log.exception("%s: %r; will be tried again", name, error)
                failing = True
            if failing:
                self._stopping.wait(pause * random.uniform(0.7, 1.3))  # noqa: S311
                pause = min(pause * 2, longest)
        if name == "events":
            self._close_journal()

    def _controller(self) -> ControllerClient:
        with self._lock:  # the threads start together, and `stop` must interrupt the client that they share
            if self._client is None:
                signer = make_signer(
                    self._config.auth,
                    munge_socket=self._config.munge_socket,
                    token_file=self._config.token_file,
                    uids=self._config.peer_uids,
                )
                self._client = ControllerClient(
                    self._config.controllers, signer, self._config.node, moved=self._answered_again.set
                )
            return self._client

    # -- events --------------------------------------------------------------------------------------------------

    def _events(self) -> None:
        """Send waiting events, or an empty message if one is due; one message at most."""
        if self._journal is not None and self._journal.replaced:
            self._close_journal()
        journal = self._journal = self._journal or Journal(f"{self._config.state_dir}/{NAME}")
        try:
            if not journal.built:  # the runs that the node has are not in it yet
                raise JournalError(f"{journal.path} is new; the next hook or housekeeping fills it")
            now = time.monotonic()
            if now >= self._inventory_due:
                self._inventory(journal)
                self._inventory_due = now + INVENTORY_EVERY_S
            hello = now >= self._hello_due or self._answered_again.is_set()
            self._answered_again.clear()
            if not self.ship(journal, hello=hello):
                self._stopping.wait(self._config.ship_every)
        except BaseException as error:
            self._hello_due = 0.0
            self._close_journal()
            if isinstance(error, Corrupt):  # hooks may never read the damaged part
                with self._gpus.using(), closing(Executor(self._config, self._gpus)) as executor:
                    executor.check()
            raise

    def _close_journal(self) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def ship(self, journal: Journal, *, hello: bool = False) -> bool:
        """Send one batch, with `hello` also without events; return whether there were any.

        Raises ControllerError, JournalError, ValueError.
        """
        events = journal.spooled(BATCH, BATCH_BYTES)
        if not events and not hello:
            return False
        database, acked = journal.recorded
        message = {
            "node": self._config.node,
            "journal": journal.identity,
            "boot_id": journal.meta("boot_id"),
            "database": database,
            "acked": acked,
            "events": events,
        }
        answer = json.loads(self._controller().post("/node/v1/events", message))
        if not isinstance(answer, dict) or type(answer.get("acked")) is not int:
            raise ControllerError("the controller's answer to events has no number")
        self._hello_due = time.monotonic() + HELLO_EVERY_S
        if any(event["kind"] == "fault" and event.get("drain") for event in events):
            # the node is not used until it sends its inventory again; by then Slurm has drained it
            self._last_inventory, self._inventory_due = None, time.monotonic() + INVENTORY_EVERY_S
        elif any(event["kind"] == "fault" for event in events):
            self._inventory_due = 0.0  # the GPU may be withdrawn
        stored, database = answer["acked"], str(answer.get("database", ""))
        if answer.get("told") is False and time.monotonic() >= self._state_due:
            self._spool_state(journal, stored, database)
        else:
            journal.acknowledge(stored, database)
        return bool(events)

    def _spool_state(self, journal: Journal, stored: int, database: str) -> None:
        gpus = self._list_gpus()
        if gpus is None:
            journal.acknowledge(stored, database)
            return
        log.info("the controller has no state of this node; sending everything")
        journal.spool_state(lambda: self._state(journal, gpus), stored, database)
        self._last_inventory = json.dumps(gpus, sort_keys=True)
        self._state_due = time.monotonic() + STATE_EVERY_S

    @staticmethod
    def _state(journal: Journal, found: list[dict[str, object]]) -> dict[str, object]:
        return state(found, journal.slices(), {(run.job, run.restart): run for run in journal.runs("state<>'ended'")})

    def _inventory(self, journal: Journal) -> None:
        """Spool the inventory if it differs from what this process spooled last."""
        gpus = self._list_gpus()
        text = json.dumps(gpus, sort_keys=True)
        if gpus is not None and text != self._last_inventory:
            with journal.write():
                journal.event("inventory", {"gpus": gpus})
            self._last_inventory = text

    def _list_gpus(self) -> list[dict[str, object]] | None:
        try:
            with self._gpus.using():
                return inventory.inventory(self._gpus)
        except DriverError as error:
            log.warning("cannot list the GPUs: %s", error)  # events continue
            return None

    # -- findings ------------------------------------------------------------------------------------------------

    def _findings(self) -> None:
        """Report problems of this node; `migbatch doctor --nodes` shows them on the controller."""
        assert self._checks is not None
        with self._gpus.using():
            found = list(self._checks(self._gpus))
        tell(self._controller(), self._config.node, found)
        self._stopping.wait(self._config.check_every)

    # -- plans ---------------------------------------------------------------------------------------------------

    def _plans(self) -> None:
        self.pull(plan.load(self._config.state_dir).version)  # read again: the file may have been deleted

    def pull(self, have: int) -> int:
        """Request a newer plan, which also acknowledges `have`; return the version on disk afterwards."""
        message = {"node": self._config.node, "have": have, "wait": self._config.plan_wait}
        raw = self._controller().post("/node/v1/plan", message, patience=self._config.plan_wait)
        answer = json.loads(raw)
        if not isinstance(answer, dict) or type(answer.get("version")) is not int:
            raise ControllerError("the controller's answer is not a plan")
        if "gpus" not in answer or answer["version"] == have:
            self._stopping.wait(0.05)  # repeated immediate answers must not become a busy loop
            return have
        return plan.store(self._config.state_dir, raw).version

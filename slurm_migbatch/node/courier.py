"""Two threads between node and controller: one brings events there, one brings plans back.

Events go in the order of their numbers and are deleted once the controller has stored them. A plan is acknowledged by
asking for the next one, and only after it lies on this node's disk, so the controller may count on it.
"""

from __future__ import annotations

import json
import logging
import random
import threading
from collections.abc import Callable

from slurm_migbatch.mig.driver import DriverError
from slurm_migbatch.node import inventory, plan
from slurm_migbatch.node.auth import AuthError, make_signer
from slurm_migbatch.node.config import Config
from slurm_migbatch.node.gpus import Gpus
from slurm_migbatch.node.journal import NAME, Journal, JournalError
from slurm_migbatch.node.link import Link, LinkError

BATCH = 500
BACKOFF_MAX_S = 30.0
INVENTORY_EVERY_S = 60.0
log = logging.getLogger("migbatch.node")


class Courier:
    """The node's side of the node API. Without a Controller= there is nothing to carry."""

    def __init__(self, config: Config, gpus: Gpus, stopping: threading.Event) -> None:
        self._config = config
        self._gpus = gpus
        self._stopping = stopping
        self._told: str | None = None
        self._link: Link | None = None

    def threads(self) -> list[threading.Thread]:
        """The threads, not yet started. Daemonic: a request that still waits must not hold up the end."""
        if not self._config.controller:
            return []
        jobs: list[tuple[str, Callable[[], None]]] = [("events", self._events), ("plans", self._plans)]
        return [threading.Thread(target=self._loop, args=job, name=job[0], daemon=True) for job in jobs]

    def stop(self) -> None:
        """Interrupt a request that waits for a plan."""
        if self._link is not None:
            self._link.interrupt()

    def _loop(self, name: str, step: Callable[[], None]) -> None:
        pause, quiet = 0.5, False
        while not self._stopping.is_set():
            try:
                step()
                if quiet:
                    log.info("%s: the controller answers again", name)
                pause, quiet = 0.5, False
            except (LinkError, AuthError, JournalError, plan.PlanError, ValueError, OSError) as error:
                if self._stopping.is_set():
                    return
                if not quiet:
                    log.warning("%s: %s; will be tried again", name, error)
                quiet = True
                self._stopping.wait(pause * random.uniform(0.7, 1.3))  # noqa: S311
                pause = min(pause * 2, BACKOFF_MAX_S)

    def _controller(self) -> Link:
        if self._link is None:
            signer = make_signer(
                self._config.auth,
                munge_socket=self._config.munge_socket,
                token_file=self._config.token_file,
                uids=self._config.peer_uids,
            )
            self._link = Link(self._config.controller, signer)
        return self._link

    # -- events --------------------------------------------------------------------------------------------------

    def _events(self) -> None:
        journal = Journal(f"{self._config.state_dir}/{NAME}")
        try:
            waited = INVENTORY_EVERY_S
            while not self._stopping.is_set():
                if waited >= INVENTORY_EVERY_S:
                    self._inventory(journal)
                    waited = 0.0
                if not self.ship(journal):
                    self._stopping.wait(self._config.ship_every)
                    waited += self._config.ship_every
        finally:
            journal.close()

    def ship(self, journal: Journal) -> bool:
        """Send one batch; whether there was anything. Raises LinkError, JournalError, ValueError."""
        events = journal.spooled(BATCH)
        if not events:
            return False
        message = {
            "node": self._config.node,
            "journal": journal.identity,
            "boot_id": journal.meta("boot_id"),
            "events": events,
        }
        answer = json.loads(self._controller().post("/node/v1/events", message))
        acked = answer.get("acked") if isinstance(answer, dict) else None
        if type(acked) is not int:
            raise LinkError("the controller's answer to events names no number")
        journal.acknowledge(acked)
        return True

    def _inventory(self, journal: Journal) -> None:
        """Spool the inventory where it is not what was told last (by this process)."""
        try:
            found = inventory.inventory(self._gpus)
        except DriverError as error:
            log.warning("the GPUs cannot be listed: %s", error)  # events go on all the same
            return
        text = json.dumps(found, sort_keys=True)
        if text != self._told:
            with journal.write():
                journal.event("inventory", {"gpus": found})
            self._told = text

    # -- plans ---------------------------------------------------------------------------------------------------

    def _plans(self) -> None:
        have = plan.load(self._config.state_dir).version
        while not self._stopping.is_set():
            have = self.pull(have)

    def pull(self, have: int) -> int:
        """Ask for a newer plan, which also acknowledges `have`; the version on disk afterwards."""
        message = {"node": self._config.node, "have": have, "wait": self._config.plan_wait}
        raw = self._controller().post("/node/v1/plan", message, patience=self._config.plan_wait)
        answer = json.loads(raw)
        if not isinstance(answer, dict) or type(answer.get("version")) is not int:
            raise LinkError("the controller's answer is no plan")
        if "gpus" not in answer or answer["version"] == have:
            self._stopping.wait(0.05)  # an answer at once, over and over, must not become a busy loop
            return have
        return plan.store(self._config.state_dir, raw).version

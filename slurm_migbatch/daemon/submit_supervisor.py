"""Supervise the process that answers submissions, and send it updates of the catalog, the model and recurring jobs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slurm_migbatch.config import Config
from slurm_migbatch.daemon.children import ONE_THREAD, Child
from slurm_migbatch.daemon.facts import SiteFacts, chooser_of
from slurm_migbatch.daemon.metrics import Metrics
from slurm_migbatch.daemon.tasks import ProcessEnded
from slurm_migbatch.daemon.writer import StoreWriter
from slurm_migbatch.submit.service import reserved
from slurm_migbatch.workload.catalog import SiteCatalog

log = logging.getLogger(__name__)
_PROGRAM = "slurm_migbatch.daemon.submit_worker"
_WRITE_EVERY_S = 0.5
_RECORD_EVERY_S = 0.2
#: recurring jobs per line: reading it must not delay an answer
_JOBS_AT_ONCE = 50


class SubmitSupervisor:
    """Runs the submit service once the site is known; until then slurmctld's shim works without it.

    The service is `submit_worker`, a child process, which is restarted whenever it ends.

    Attributes:
        error: why the last process ended, until the next one serves; empty if none has ended.
    """

    def __init__(
        self, config: Config, writer: StoreWriter, metrics: Metrics, decided: Callable[[str], None] = lambda gres: None
    ) -> None:
        """Set up. `decided` is called with the GRES of each granted submission."""
        self._config, self._writer, self._decided = config, writer, decided
        self._known = asyncio.Event()
        self._child: Child | None = None
        #: children of previous services, which answer until this service's child does
        self._before: list[Child] = []
        self._leaving = False
        self._rows: list[Mapping[str, Any]] = []
        self._statistics: Mapping[str, Any] = {}
        self._past: Callable[[], Mapping[str, Any]] = dict
        self.facts = SiteFacts(config, chooser_of(config), self._changed)
        self.error = ""
        self._missing: Path | None = None
        self._ending: asyncio.Task[None] | None = None
        self._taking: asyncio.Task[None] | None = None
        self._relieving: asyncio.Task[None] | None = None
        #: set while submissions are answered
        self.serving = asyncio.Event()
        if self.facts.catalog.partitions:
            self._known.set()
        metrics.gauge(
            "migbatch_submit_answers",
            "Submit requests answered since the last start.",
            lambda: self._statistics.get("answers", {}),
            "verdict",
        )
        metrics.gauge(
            "migbatch_submit_seconds",
            "Handling time that a share of the last requests kept.",
            self._times,
            "quantile",
        )

    async def run(self) -> None:
        """Serve, as soon as there is a catalog, until cancelled.

        Raises:
            Ended: the child ended by itself, or because one of its sockets was missing.
        """
        try:
            await self._known.wait()
            await self._serve()
        except Exception as error:
            self.error = str(error)
            raise
        finally:
            if not self._leaving:
                await asyncio.shield(self._relieve(self._before))

    def leave(self) -> None:
        """Leave the child running at the end of `run`: the next service's supervisor ends it, see `succeed`."""
        self._leaving = True

    def succeed(self, before: SubmitSupervisor) -> None:
        """Let the child of a previous supervisor continue until this one's answers, so that there is no gap."""
        self._before, before._before = before._before, []

    async def close(self) -> None:
        """End the child that was left for a next service, if there will be none."""
        await self._relieve(self._before)
        self._hand_over()

    async def _serve(self) -> None:
        Path(self._config.submit.socket).parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        # in a session of its own, because with Linux autogroup scheduling rounds then do not delay answers
        self._child = child = await Child.start("the submit service", _PROGRAM, ONE_THREAD, own_session=True)
        try:
            child.configure(self._config, catalog=self.facts.catalog.to_dict())
            self.ran(self._past())
            await self._listen(child)
            if self._missing is not None:
                raise ProcessEnded(f"the submit service was ended because {self._missing} is missing")
            raise ProcessEnded(f"the submit service exited with {await child.process.wait()}")
        finally:
            self._child = self._missing = None
            self.serving.clear()
            if self._leaving and child.process.returncode is None:
                self._before.append(child)
            else:
                await asyncio.shield(child.end(self._listen))
            self._hand_over()

    async def _relieve(self, children: list[Child]) -> None:
        """End children of previous services, and read their remaining output."""
        while children:
            await children.pop().end(self._listen)

    async def keep_record(self) -> None:
        """Pass decisions to the record, several at a time, forever."""
        while True:
            await asyncio.sleep(_RECORD_EVERY_S)
            self._hand_over()

    async def keep_files(self) -> None:
        """Update the catalog file and the compiled table, and see to the sockets, forever."""
        try:
            while True:
                if self.facts.unwritten:
                    await asyncio.to_thread(self.facts.write)
                self._check_sockets()
                await asyncio.sleep(_WRITE_EVERY_S)
        except asyncio.CancelledError:
            self.facts.ended = True
            raise

    def _check_sockets(self) -> None:
        """End the process if one of its sockets was removed: the next one creates both."""
        if self._child is None or not self.serving.is_set():
            return
        socket = Path(self._config.submit.socket)
        self._missing = next((path for path in (reserved(socket), socket) if not path.exists()), None)
        if self._missing is not None:
            self.serving.clear()
            self._ending = asyncio.create_task(self._child.end())

    def model_changed(self, version: int) -> None:
        """Use the current model, in this process and in the one that answers."""
        self._send({"model": version})
        self._taking = asyncio.create_task(self._take_model())

    def follow(self, past: Callable[[], Mapping[str, Any]]) -> None:
        """Set the source of the runs of all recurring jobs, which a newly started process is sent."""
        self._past = past

    def ran(self, changed: Mapping[str, Any]) -> None:
        """Send the current runs of recurring jobs to the process that answers, some jobs at a time."""
        keys = list(changed)
        for start in range(0, len(keys), _JOBS_AT_ONCE):
            self._send({"recurring": {key: changed[key] for key in keys[start : start + _JOBS_AT_ONCE]}})

    async def _take_model(self) -> None:
        try:
            self.facts.use(await asyncio.to_thread(chooser_of, self._config))
        except Exception:  # the table is unchanged; submissions are answered by the other process
            log.exception("cannot update the compiled table with the new model")

    async def _listen(self, child: Child) -> None:
        async for message in child.messages():
            if "decision" in message:
                self._decided(str(message["decision"].pop("granted")))
                self._rows.append(message["decision"])
            elif "statistics" in message:
                self._statistics = message["statistics"]
            elif "serving" in message and child is self._child:
                log.info(
                    "serving submissions", extra={"socket": self._config.submit.socket, "child": child.process.pid}
                )
                self.error = ""
                self.serving.set()
                # only running ones: this service's child is added if the service ends before they have ended
                before, self._before = self._before, []
                self._relieving = asyncio.create_task(self._relieve(before))

    def _changed(self, catalog: SiteCatalog) -> None:
        self._known.set()
        self._send({"catalog": catalog.to_dict()})

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._child is not None:  # else the next one gets the newest catalog
            self._child.send(message)

    def _hand_over(self) -> None:
        rows, self._rows = self._rows, []
        if rows:
            self._writer.post(lambda store: store.record_decisions(rows), "decisions", len(rows))

    def _times(self) -> Mapping[str, float]:
        return {name: self._statistics[name] for name in ("p50", "p99") if name in self._statistics}

"""The submit side of the service: the socket that slurmctld asks, and the facts behind its answers."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from pathlib import Path

from slurm_migbatch.config import Config
from slurm_migbatch.daemon.doorman import Doorman
from slurm_migbatch.daemon.facts import SiteFacts, chooser_of, policy_of, slurm_uids
from slurm_migbatch.daemon.metrics import Labels, Metrics
from slurm_migbatch.daemon.records import record_of
from slurm_migbatch.daemon.writer import StoreWriter
from slurm_migbatch.submit.decision import Decision
from slurm_migbatch.submit.service import SubmitService
from slurm_migbatch.workload.catalog import SiteCatalog

log = logging.getLogger(__name__)
_WRITE_EVERY_S = 0.5
_RECORD_EVERY_S = 0.2


class FrontDoor:
    """Serves submissions once the site is known; until then slurmctld's shim does without."""

    def __init__(
        self, config: Config, writer: StoreWriter, metrics: Metrics, decided: Callable[[Decision], None]
    ) -> None:
        """`decided` is called in a thread of its own after each granted submission."""
        self._path = Path(config.submit.socket)
        self._writer, self._decided = writer, decided
        chooser = chooser_of(config)
        self._known = asyncio.Event()
        self._rows: list[Decision] = []
        self._lock = threading.Lock()
        self.facts = SiteFacts(config, chooser, self._changed)
        self.service = SubmitService(
            self.facts.catalog, chooser, self._record, policy=policy_of(config), slurm_uids=slurm_uids(config)
        )
        self.serving = asyncio.Event()
        if self.facts.catalog.partitions:
            self._known.set()
        metrics.gauge("migbatch_submit_answers", "Submit requests answered, by verdict.", self._answers)
        metrics.gauge("migbatch_submit_p99_seconds", "Handling time that 99 % of the last requests kept.", self._p99)

    async def run(self) -> None:
        """Serve for ever, from the moment that there is a catalog."""
        await self._known.wait()
        self._path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        doorman = Doorman(self._path, self.service)
        try:
            await asyncio.to_thread(doorman.start)
            log.info("serving submissions", extra={"socket": self._path})
            self.serving.set()
            await asyncio.Event().wait()
        finally:
            self.serving.clear()
            doorman.stop()

    async def keep_record(self) -> None:
        """Hand decisions to the record, several at a time, for ever."""
        while True:
            await asyncio.sleep(_RECORD_EVERY_S)
            self._hand_over()

    async def keep_files(self) -> None:
        """Keep the catalog file and the compiled table in step, for ever."""
        while True:
            await asyncio.to_thread(self.facts.write)
            await asyncio.sleep(_WRITE_EVERY_S)

    def close(self) -> None:
        """Hand over the decisions that wait."""
        self.service.close()
        self._hand_over()

    def _changed(self, catalog: SiteCatalog) -> None:
        self.service.use(catalog=catalog)
        self._known.set()

    def _record(self, decision: Decision) -> None:
        self._decided(decision)
        with self._lock:
            self._rows.append(decision)

    def _hand_over(self) -> None:
        with self._lock:
            batch, self._rows = self._rows, []
        if batch:
            self._writer.post(
                lambda store: store.record_decisions([record_of(decision) for decision in batch]),
                "decisions",
                len(batch),
            )

    def _answers(self) -> dict[Labels, float]:
        return {(("verdict", verdict),): float(n) for verdict, n in self.service.statistics.answers.items()}

    def _p99(self) -> dict[Labels, float]:
        return {(): self.service.statistics.quantile(0.99)}

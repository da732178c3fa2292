"""Remove records older than [store] keep, and progress reports and decisions without a job after a day.

It does so while nothing else waits for the database.

The record is scanned once an hour, in short transactions of `store.retention` with pauses several times as long, so
that the writer is mostly free however much is removed. A scan interrupted by a restart is completed by the next one.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable
from operator import methodcaller
from typing import Final

from slurm_migbatch.config import Config
from slurm_migbatch.daemon.log import FaultReporter
from slurm_migbatch.daemon.metrics import Metrics
from slurm_migbatch.daemon.tasks import attempt
from slurm_migbatch.daemon.writer import StoreWriter
from slurm_migbatch.store.retention import PruneCursor, newest_end

log = logging.getLogger(__name__)

FIRST_S: Final = 120.0
"""Seconds after the start: submissions, nodes and the queue come first."""
EVERY_S: Final = 3600.0
"""Seconds between two passes."""
GAP_S: Final = 7 * 86400.0
"""How far the clock may be ahead of the newest end of a run at the start of the service. Beyond that ages count from
that end: the clock of a host that has just booted may be years ahead, and nothing brings back what was removed.
"""
REPORTS_S: Final = 86400.0
"""How long progress reports and decisions without a job are kept. A node that was cut off for longer may repeat some
reports, to no effect.
"""
_SHARE: Final = 4.0
"""Pauses as a multiple of the duration of a removal."""
_PAUSE_S: Final = 0.05


class Retention:
    """Removes old records; `removed` counts them by table."""

    def __init__(
        self, config: Config, writer: StoreWriter, metrics: Metrics, clock: Callable[[], float] = time.time
    ) -> None:
        self._keep_s, self._lessons = config.store.keep_s, config.learning.runs
        self._writer, self._clock = writer, clock
        self._started, self._latest = time.monotonic(), math.nan
        self._fault = FaultReporter("cannot remove old records", "retrying later", log, longest=EVERY_S)
        self.removed = metrics.counter("migbatch_store_removed_total", "Records removed because of their age.", "table")

    async def run(self) -> None:
        """Remove forever."""
        while math.isnan(self._latest):  # before Slurm ends jobs whose limit is over by a wrong clock
            await asyncio.sleep(await attempt(self._fault, self._look(), FIRST_S))
        while True:
            await asyncio.sleep(max(EVERY_S, await attempt(self._fault, self.once(), EVERY_S)))

    async def _look(self) -> None:
        """Determine the latest time that the clock could have shown at the start."""
        newest = await self._writer.answer(lambda store: store.read(newest_end), "newest run")
        self._latest = math.inf if newest is None else newest + GAP_S
        if self._clock() > self._latest:
            text = (
                "the clock is more than %d days ahead of the newest run: until the next start ages count from its end"
            )
            log.warning(text, GAP_S // 86400)

    async def once(self) -> Counter[str]:
        """Scan the record once; return what was removed, by table."""
        if math.isnan(self._latest):
            await self._look()
        now = min(self._clock(), self._latest + time.monotonic() - self._started)
        before, total = max(0.0, now - self._keep_s), Counter[str]()  # 0: keep = "forever"
        going: PruneCursor | None = PruneCursor()
        while going is not None:
            while len(self._writer):
                await asyncio.sleep(_PAUSE_S)
            began = time.monotonic()
            step = methodcaller("prune", before, self._lessons, going, now - REPORTS_S)
            rows, going = await self._writer.answer(step, "old records")
            removed = {table: count for table, count in rows.items() if count}
            total.update(removed)
            for table, count in removed.items():
                self.removed.labels(table).inc(count)
            if removed:
                await asyncio.sleep(max(_PAUSE_S, _SHARE * (time.monotonic() - began)))
        if total:
            log.info("old records were removed", extra=dict(sorted(total.items())))
        return total

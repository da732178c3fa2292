"""Read runs of recurring jobs from the record and pass them to the process that answers submissions.

Runs come in the order of lessons, each once it has ended, and again when more is known of it. Only the newest runs of
each job are kept, and only the jobs that ran most recently; if they are too many, users with the most lose some first.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import methodcaller
from typing import Any, Final

from slurm_migbatch.daemon.log import FaultReporter
from slurm_migbatch.daemon.tasks import attempt, with_timeout
from slurm_migbatch.daemon.writer import StoreWriter
from slurm_migbatch.predict.recurring import WINDOW, PastRun
from slurm_migbatch.store.recurring import RecurringRun, newest_lesson, recurring_runs

log = logging.getLogger(__name__)

MOST_JOBS: Final = 10_000
"""Number of recurring jobs whose runs are kept."""
_BEHIND: Final = 100_000
"""Number of lessons read when the service starts."""
_AT_ONCE: Final = 500
_LABEL: Final = "runs of recurring jobs"
_EVERY_S: Final = 5.0
"""Seconds between two queries of the record if no run is reported to have ended."""
_SOON_S: Final = 0.3
"""Minimum seconds between two queries."""
_LATELY_S: Final = 3600.0
"""Runs that ended so many seconds before the start may have been left to this service; Slurm forgets them earlier."""


def past_run(row: RecurringRun) -> PastRun:
    """Return a run of the record as the predictor takes it."""
    profile = (row.profile or "").replace("+", ".")
    return PastRun(row.run, profile, row.ended, row.peak_mib, row.sm, row.dram, row.engine, row.work)


class RecurringJobs:
    """The newest runs of each recurring job, by its key."""

    def __init__(self, most: int = MOST_JOBS) -> None:
        self._runs: dict[str, list[PastRun]] = {}
        #: of each job, as its first run named him: the name may be missing until Slurm has been queried
        self._user_of: dict[str, str] = {}
        #: the keys of each user's jobs, that of the last run at the end
        self._keys_of: dict[str, dict[str, None]] = {}
        self._most = most

    def take(self, rows: Iterable[RecurringRun]) -> dict[str, list[list[Any]]]:
        """Add runs; return what changed, as in `listed`: jobs that are no longer kept have no runs."""
        changed: dict[str, None] = {}
        for row in rows:
            if not row.recurring or not row.ended or row.profile is None:
                continue
            run = past_run(row)
            runs = [past for past in self._runs.pop(row.recurring, []) if past.run != row.run]
            self._runs[row.recurring] = sorted([*runs, run], key=lambda past: past.run)[-WINDOW:]
            keys = self._keys_of.setdefault(self._user_of.setdefault(row.recurring, row.user), {})
            keys.pop(row.recurring, None)
            keys[row.recurring] = changed[row.recurring] = None
        while len(self._runs) > self._most:
            changed[self._drop()] = None
        return {key: self._rows(key) for key in changed}

    def _drop(self) -> str:
        """Drop the job that ran least recently of the user with the most jobs, and return its key."""
        user = max(self._keys_of, key=lambda user: len(self._keys_of[user]))
        key = next(iter(self._keys_of[user]))
        del self._runs[key], self._user_of[key], self._keys_of[user][key]
        if not self._keys_of[user]:
            del self._keys_of[user]
        return key

    def listed(self) -> Mapping[str, list[list[Any]]]:
        """Return the runs of all jobs, JSON-able."""
        return {key: self._rows(key) for key in self._runs}

    def past(self, key: str) -> Sequence[PastRun]:
        """Return the runs of one job, the newest last."""
        return self._runs.get(key, ())

    def _rows(self, key: str) -> list[list[Any]]:
        return [list(run) for run in self._runs.get(key, ())]


class RecurringWatch:
    """Reads ended runs from the record as they come."""

    def __init__(
        self,
        writer: StoreWriter,
        publish: Callable[[Mapping[str, list[list[Any]]]], None],
        ended: Callable[[Sequence[RecurringRun]], None],
    ) -> None:
        """Set up. `publish` receives changes of recurring jobs; `ended` all new rows, and at the start the latest."""
        self._writer, self._publish, self._ended = writer, publish, ended
        self.jobs = RecurringJobs()
        self._reached: int | None = None
        self._nudged = asyncio.Event()
        self._fault = FaultReporter("runs of recurring jobs cannot be read", "jobs get the site's default", log)

    def nudge(self) -> None:
        """Query soon: a run has ended."""
        self._nudged.set()

    async def run(self) -> None:
        """Query forever."""
        while True:
            self._nudged.clear()
            wait = await attempt(self._fault, self._update(), _EVERY_S)
            await asyncio.sleep(_SOON_S)
            try:
                await with_timeout(self._nudged.wait(), wait)
            except asyncio.TimeoutError:
                continue

    async def _update(self) -> None:
        first = self._reached is None
        newest = await self._writer.answer(lambda store: store.read(newest_lesson), _LABEL)
        reached = max(0, newest - _BEHIND) if self._reached is None else self._reached
        latest: list[RecurringRun] = []
        while reached < newest:
            read = methodcaller("read", recurring_runs, reached, _AT_ONCE)
            rows: list[RecurringRun] = await self._writer.answer(read, _LABEL)
            reached = rows[-1].number if rows else newest
            if changed := self.jobs.take(rows):
                self._publish(changed)
            if first:
                latest += [row for row in rows if row.until >= time.time() - _LATELY_S]
            elif rows:
                self._ended(rows)
        self._reached = reached
        if latest:
            self._ended(latest)

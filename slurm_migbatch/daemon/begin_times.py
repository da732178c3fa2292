"""Jobs whose start time has passed without Slurm having examined them.

A requeued job is given a start time two seconds ahead (`SlurmClient.shorten_requeue_delay`). Slurm's backfill
scheduler runs only after changes of jobs, nodes or partitions, and its main scheduler otherwise once a minute
(`sched_interval`): on a quiet cluster the job may start up to a minute late. Seen with Slurm 22.05 to 26.05.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from slurm_migbatch.decide.capacity.demand import waits_for_begin
from slurm_migbatch.slurm.client import JobRow

_EXAMINED_S: Final = 1.0
"""How long after its start time Slurm usually has examined a job on a cluster that is not quiet."""
_WATCHED_S: Final = 60.0


class BeginTimes:
    """Jobs to which migbatchd has given a start time, until Slurm has examined them after it."""

    def __init__(self) -> None:
        self._given: dict[int, float] = {}

    def note(self, jobs: Iterable[int], now: float) -> None:
        """Record that these jobs may have been given a start time now (unix seconds)."""
        self._given.update(dict.fromkeys(jobs, now))

    def overlooked(self, queue: Iterable[JobRow], now: float) -> list[JobRow]:
        """Return the jobs that still wait for a start time that has passed; each is returned once.

        Args:
            queue: every job that Slurm lists.
            now: the time at which it was listed.
        """
        if not self._given:
            return []
        rows = {row.job_id: row for row in queue if row.job_id in self._given}
        found = []
        for job, given in list(self._given.items()):
            row = rows.get(job)
            if row is None or not row.pending or now > given + _WATCHED_S:
                del self._given[job]
            elif row.eligible is not None and row.eligible <= now - _EXAMINED_S and now > given + _EXAMINED_S:
                del self._given[job]
                if waits_for_begin(row, now):
                    found.append(row)
        return found

"""Learn which part of their time limits jobs use.

Most users ask for much more time than their jobs need. It is not persisted: after a restart of migbatchd it is learned
again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from slurm_migbatch.slurm.client import JobRow
from slurm_migbatch.workload.loans import GRES

_MOST: Final = 256
"""Jobs to remember, those that ended last."""
_ASSUMED: Final = (1.0, 1.0)
"""Parts that are assumed beside those of ended jobs."""
_OF_JOBS: Final = 0.9
"""Share of the jobs that do not exceed the usual part."""
_LEAST: Final = 0.01
"""Minimum of the usual part, by which limits are divided."""


@dataclass
class UsedLimits:
    """Parts of their time limits that jobs with slices have used.

    Attributes:
        running: start and time limit in seconds of active jobs.
        parts: those of the jobs that ended last.
    """

    running: dict[int, tuple[float, float]] = field(default_factory=dict)
    parts: tuple[float, ...] = ()

    def follow(self, rows: Mapping[int, JobRow], fresh: Iterable[JobRow], now: float) -> None:
        """Record the jobs that have ended or started.

        Args:
            rows: the queue, by job.
            fresh: its rows that have changed, at least.
            now: unix seconds.
        """
        for job in [job for job in self.running if job not in rows]:
            start, limit_s = self.running.pop(job)
            self.parts = (*self.parts, min(1.0, max(0.0, now - start) / limit_s))[-_MOST:]
        for row in fresh:
            if GRES in row.gres and row.active and row.start is not None and row.time_limit_s:
                self.running[row.job_id] = row.start, float(row.time_limit_s)
            else:
                self.running.pop(row.job_id, None)

    @property
    def usual(self) -> float:
        """The part of its time limit that a job does not exceed, in nine of ten cases."""
        parts = sorted((*_ASSUMED, *self.parts))
        return max(_LEAST, parts[math.ceil(_OF_JOBS * len(parts)) - 1])

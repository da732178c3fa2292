"""Learn which part of their time limits the jobs of each user use.

Most users ask for much more time than their jobs need. It is not persisted: after a restart of migbatchd it is learned
again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import Final, TypeAlias

from slurm_migbatch.slurm.client import JobRow
from slurm_migbatch.workload.loans import GRES

PartsOfUsers: TypeAlias = Mapping[int, tuple[float, ...]]
"""Parts of their time limits that ended jobs have used, by the number of their user."""

NOTHING_ENDED: Final[PartsOfUsers] = MappingProxyType({})
_MOST: Final = 32
"""Jobs to remember of each user, those that ended last."""
_USERS: Final = 256
"""Users to remember, those whose jobs ended last."""
_ASSUMED: Final = (1.0, 1.0)
"""Parts that are assumed beside those of ended jobs."""
_OF_JOBS: Final = 0.9
"""Share of the jobs that do not exceed the usual part."""
_ENOUGH: Final = 18
"""Least number of ended jobs of a user by which his usual part is that of one of them, and not an assumed one."""
_LEAST: Final = 0.01
"""Minimum of the usual part, by which limits are multiplied."""


@dataclass
class UsedLimits:
    """Parts of their time limits that jobs with slices have used.

    Attributes:
        running: user, start and time limit in seconds of active jobs.
        parts: those of each user's jobs that ended last; replaced by each change.
    """

    running: dict[int, tuple[int, float, float]] = field(default_factory=dict)
    parts: dict[int, tuple[float, ...]] = field(default_factory=dict)

    def follow(self, rows: Mapping[int, JobRow], fresh: Iterable[JobRow], now: float) -> None:
        """Record the jobs that have ended or started.

        Args:
            rows: the queue, by job.
            fresh: its rows that have changed, at least.
            now: unix seconds.
        """
        if ended := [job for job in self.running if job not in rows]:
            parts = dict(self.parts)
            for uid, start, limit_s in map(self.running.pop, ended):
                used = min(1.0, max(0.0, now - start) / limit_s)
                parts[uid] = (*parts.pop(uid, ()), used)[-_MOST:]
            self.parts = dict(list(parts.items())[-_USERS:])
        for row in fresh:
            if GRES in row.gres and row.active and row.start is not None and row.time_limit_s:
                self.running[row.job_id] = row.uid, row.start, float(row.time_limit_s)
            else:
                self.running.pop(row.job_id, None)


class UsualParts:
    """The parts of their time limits that jobs do not exceed, in nine of ten cases, computed when they are asked for.

    A user with fewer than `_ENOUGH` ended jobs has that of all users' jobs, or the largest of his own if that is more.
    Of each user equally many jobs count, so the many short ones of one do not determine it.
    """

    def __init__(self, parts: PartsOfUsers) -> None:
        self._parts = parts
        self._known: dict[int | None, float] = {}

    def of(self, uid: int) -> float:
        """Return the part for a user's jobs."""
        known = self._known.get(uid)
        if known is None:
            own = self._parts.get(uid, ())
            known = _usual(own) if len(own) >= _ENOUGH else max((self._of_all(), *own))
            self._known[uid] = known
        return known

    def _of_all(self) -> float:
        if None not in self._known:
            self._known[None] = _usual(chain.from_iterable(self._parts.values()))
        return self._known[None]


def _usual(used: Iterable[float]) -> float:
    parts = sorted((*_ASSUMED, *used))
    return max(_LEAST, parts[math.ceil(_OF_JOBS * len(parts)) - 1])

"""Slurm's queue from snapshot to snapshot: which rows are new, and what planning needs of those that stay.

A row that is the same object as in the snapshot before is not looked at again, so a caller that keeps the objects of
unchanged rows saves work. A row that is another object counts as new whatever it says, so nothing depends on that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from slurm_migbatch.decide.capacity.sharing import GUEST, is_guest
from slurm_migbatch.slurm.client import JobRow

#: Slurm's name of the gres.
GRES: Final = "mig"


class JobQueue:
    """The queue of the newest snapshot.

    Attributes:
        jobs: it, in Slurm's order; `keys`: the identity of each row.
        rows: by job id; of several rows of a job the last.
        version: how many queues there were; who follows `fresh` and `gone` must have seen every one.
        fresh: rows that the queue before did not hold; `gone`: those that it held and this one does not.
        changed: job ids of both.
        guests: jobs that Slurm has started as guests.
        running: how many tasks of each array are active.
    """

    def __init__(self) -> None:
        self.jobs: Sequence[JobRow] = ()
        self.keys: Sequence[int] = ()
        self.rows: dict[int, JobRow] = {}
        self.version = 0
        self.fresh: Sequence[JobRow] = ()
        self.gone: Sequence[JobRow] = ()
        self.changed: frozenset[int] = frozenset()
        self.guests: frozenset[int] = frozenset()
        self.running: Counter[int] = Counter()
        self._by_key: dict[int, JobRow] = {}
        #: by node, jobs that have MIG slices there; by the row's identity
        self._holders: dict[str, dict[int, JobRow]] = {}
        self._twice = False
        self._whole = True

    @classmethod
    def of(cls, jobs: Sequence[JobRow]) -> JobQueue:
        """Return one queue by itself."""
        queue = cls()
        queue.update(jobs)
        return queue

    def update(self, jobs: Sequence[JobRow]) -> None:
        """Take in the next queue."""
        if not self._whole:  # the last one was not taken in to its end, and nobody has seen that version
            self.rows, self._by_key, self._holders = {}, {}, {}
            self.running, self.guests = Counter(), frozenset()
        self._whole = False
        self.version += 1
        self.jobs, self.keys = jobs, list(map(id, jobs))
        before, now = self._by_key, dict(zip(self.keys, jobs, strict=True))
        self._by_key = now
        self.fresh = [now[key] for key in now.keys() - before.keys()]
        self.gone = [before[key] for key in before.keys() - now.keys()]
        self.changed = frozenset([row.job_id for rows in (self.gone, self.fresh) for row in rows])
        started = set(self.guests)
        for row in self.gone:
            self.rows.pop(row.job_id, None)
            self._drop(row, started)
        for row in self.fresh:
            self.rows[row.job_id] = row
            self._add(row, started)
        if len(self.rows) != len(now) or self._twice:  # a job has two rows, and the last one counts
            self.rows = {row.job_id: row for row in jobs}
            started = {row.job_id for row in jobs if GUEST in row.gres and row.active and is_guest(row.gres)}
        self._twice = len(self.rows) != len(now)
        self.guests = frozenset(started)
        self._whole = True

    def holders(self, node: str) -> Iterable[JobRow]:
        """Return the jobs that have MIG slices on a node; one that is completing may have given them back."""
        return self._holders.get(node, {}).values()

    def _add(self, row: JobRow, started: set[int]) -> None:
        if not row.active:
            return
        if row.array_job is not None:
            self.running[row.array_job] += 1
        if GRES in row.gres:
            if row.state != "COMPLETING":
                for node in row.nodes:
                    self._holders.setdefault(node, {})[id(row)] = row
            if GUEST in row.gres and is_guest(row.gres):
                started.add(row.job_id)

    def _drop(self, row: JobRow, started: set[int]) -> None:
        if not row.active:
            return
        if row.array_job is not None:
            self.running[row.array_job] -= 1
            if not self.running[row.array_job]:
                del self.running[row.array_job]
        if GRES in row.gres:
            for node in row.nodes:
                held = self._holders.get(node, {})
                held.pop(id(row), None)
                if not held:
                    self._holders.pop(node, None)
            started.discard(row.job_id)

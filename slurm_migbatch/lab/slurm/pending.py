"""Keep the pending jobs in Slurm's order, and by shape: a pass examines each pending shape, not each job."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

from slurm_migbatch.lab.slurm.records import Shape
from slurm_migbatch.slurm.client import JobRow


class Key(NamedTuple):
    """Sort key in the queue.

    Partition tier and priority (both negated), submit time (0: not used), id of the array or of the first component,
    array task, job id.
    """

    tier: int
    priority: int
    submit: int
    array: int
    task: int
    job: int


class PendingQueue:
    """Every pending job by its key; those that could start are also in the bucket of their shape.

    Attributes:
        rows: the row of every pending job, in Slurm's order.
    """

    def __init__(self) -> None:
        self.rows: list[JobRow] = []
        self._order: list[Key] = []
        self._keys: dict[int, Key] = {}
        self._shapes: dict[int, Shape] = {}
        self.buckets: dict[Shape, list[Key]] = {}

    def put(self, row: JobRow, key: Key, shape: Shape | None) -> None:
        """Insert a job, or move it to its new position; `shape` None: it is in the queue, but cannot start."""
        if self._keys.get(key.job) == key and self._shapes.get(key.job) == shape:
            self.renew(row)
            return
        self.drop(key.job)
        self._keys[key.job] = key
        position = bisect_left(self._order, key)
        self._order.insert(position, key)
        self.rows.insert(position, row)
        if shape is not None:
            self._shapes[key.job] = shape
            insort(self.buckets.setdefault(shape, []), key)

    def renew(self, row: JobRow) -> None:
        """Replace the row of a pending job that keeps its position."""
        self.rows[bisect_left(self._order, self._keys[row.job_id])] = row

    def drop(self, job: int) -> None:
        """Remove a job that is no longer pending."""
        key = self._keys.pop(job, None)
        if key is None:
            return
        position = bisect_left(self._order, key)
        del self._order[position], self.rows[position]
        shape = self._shapes.pop(job, None)
        if shape is not None:
            bucket = self.buckets[shape]
            del bucket[bisect_left(bucket, key)]
            if not bucket:
                del self.buckets[shape]

    def __len__(self) -> int:
        return len(self._order)

"""Keep the pending jobs in Slurm's order, and by shape: a pass examines each pending shape, not each job."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter
from typing import Final, NamedTuple

from slurm_migbatch.lab.slurm.records import Shape


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


_JOB: Final = attrgetter("job")


class PendingQueue:
    """Every pending job by its key; those that could start are also in the bucket of their shape."""

    def __init__(self) -> None:
        self._order: list[Key] = []
        self._keys: dict[int, Key] = {}
        self._shapes: dict[int, Shape] = {}
        self.buckets: dict[Shape, list[Key]] = {}

    def put(self, key: Key, shape: Shape | None) -> None:
        """Insert a job, or move it to its new position; `shape` None: it is in the queue, but cannot start."""
        if self._keys.get(key.job) == key and self._shapes.get(key.job) == shape:
            return
        self.drop(key.job)
        self._keys[key.job] = key
        insort(self._order, key)
        if shape is not None:
            self._shapes[key.job] = shape
            insort(self.buckets.setdefault(shape, []), key)

    def drop(self, job: int) -> None:
        """Remove a job that is no longer pending."""
        key = self._keys.pop(job, None)
        if key is None:
            return
        del self._order[bisect_left(self._order, key)]
        shape = self._shapes.pop(job, None)
        if shape is not None:
            bucket = self.buckets[shape]
            del bucket[bisect_left(bucket, key)]
            if not bucket:
                del self.buckets[shape]

    def __iter__(self) -> Iterator[int]:
        return map(_JOB, self._order)

    def __len__(self) -> int:
        return len(self._order)

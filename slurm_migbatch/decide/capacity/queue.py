"""Track Slurm's queue between snapshots: which rows are new or removed, and indexes of the rows.

A row that is the same object as in the previous snapshot is not processed again, so a caller that keeps the objects of
unchanged rows saves work. A different object counts as new whatever its content, so correctness does not depend on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Final

from slurm_migbatch.decide.capacity.edits import Edit, edits
from slurm_migbatch.decide.capacity.sharing import GUEST, is_guest
from slurm_migbatch.slurm.client import JobRow
from slurm_migbatch.slurm.dependencies import PIPELINE_HINT
from slurm_migbatch.workload.loans import GRES

_DECISION: Final = "#"
"""Part of a job's comment before the name of the submit filter's decision."""
_SIGNAL: Final = "signal="
"""Part of a job's comment that states which signal it takes as a warning."""


class JobQueue:
    """The queue of the newest snapshot.

    Attributes:
        jobs: the queue, in Slurm's order.
        rows: by job id; of several rows of a job the last.
        version: number of queues so far; users of `edits` must have processed every one.
        edits: edits from the previous queue to this one.
        fresh: rows that are new, or at another position than before; `removed`: those that were removed.
        changed: job ids of both.
        guests: jobs that Slurm has started as guests.
        running: number of active tasks of each array.
    """

    def __init__(self) -> None:
        self.jobs: tuple[JobRow, ...] = ()
        self.rows: dict[int, JobRow] = {}
        self.version = 0
        self.edits: Sequence[Edit] = ()
        self.fresh: Sequence[JobRow] = ()
        self.removed: Sequence[JobRow] = ()
        self.changed: frozenset[int] = frozenset()
        self.guests: frozenset[int] = frozenset()
        self.running: Counter[int] = Counter()
        #: by node, jobs that have MIG slices there; by the row's identity
        self._holders: dict[str, dict[int, JobRow]] = {}
        #: active jobs with the hint `signal=`, by the row's identity
        self._signalled: dict[int, JobRow] = {}
        #: rows of arrays, and of jobs of pipelines, by the row's identity
        self._of_arrays: dict[int, JobRow] = {}
        self._of_pipelines: dict[int, JobRow] = {}
        #: identities of the rows of pending jobs whose marker names a decision of the submit filter
        self._decided: set[int] = set()
        self._whole = True

    @classmethod
    def of(cls, jobs: Sequence[JobRow]) -> JobQueue:
        """Return a single queue, without edits from an earlier one."""
        queue = cls()
        queue.update(jobs)
        return queue

    def update(self, jobs: Sequence[JobRow]) -> None:
        """Set the next queue; the same rows again are the same queue."""
        same = jobs is self.jobs or (len(jobs) == len(self.jobs) and all(map(is_, jobs, self.jobs)))
        if same and self._whole:
            return
        if not self._whole:  # the last update was incomplete, or a job had two rows
            self._forget()
        self._whole = False
        rows = tuple(jobs)
        self._follow(rows, edits(self.jobs, rows))
        if len(self.rows) == len(rows):
            self._whole = True
        else:  # a job has two rows, and the last one counts
            self._forget()
            self._follow(rows, [Edit(0, 0, rows)])

    def _forget(self) -> None:
        """Clear all state; users of `edits` see a gap in `version` and must do so too."""
        self.version += 1
        self.jobs, self.rows, self._holders, self._signalled = (), {}, {}, {}
        self._of_arrays, self._of_pipelines, self._decided = {}, {}, set()
        self.running, self.guests = Counter(), frozenset()

    def _follow(self, now: tuple[JobRow, ...], found: Sequence[Edit]) -> None:
        removed, position = list[JobRow](), 0
        for start, end, _ in found:
            removed += self.jobs[position:start]
            position = end
        removed += self.jobs[position:]
        self.version += 1
        self.edits, self.jobs, self.removed = found, now, removed
        fresh = list(chain.from_iterable([edit.new for edit in found]))
        by_job = {row.job_id: row for row in fresh}
        if len(by_job) < len(fresh):  # some row is listed twice
            fresh = list({id(row): row for row in fresh}.values())
        self.fresh = fresh
        self.changed = frozenset(chain(by_job, [row.job_id for row in removed]))
        started = set(self.guests)
        for row in self.removed:
            self.rows.pop(row.job_id, None)
            self._of_arrays.pop(id(row), None)
            self._of_pipelines.pop(id(row), None)
            self._decided.discard(id(row))
            if row.active:
                self._drop(row, started)
        self.rows.update(by_job)
        for row in self.fresh:
            if row.array_job is not None:
                self._of_arrays[id(row)] = row
            if PIPELINE_HINT in row.comment:
                self._of_pipelines[id(row)] = row
            if _DECISION in row.comment and row.pending:
                self._decided.add(id(row))
            if row.active:
                self._add(row, started)
        self.guests = frozenset(started)

    def signalled(self) -> list[JobRow]:
        """Return the active jobs with the hint `signal=`, in Slurm's order."""
        return self._listed(self._signalled)

    def of_arrays(self) -> list[JobRow]:
        """Return the rows of arrays, in Slurm's order."""
        return self._listed(self._of_arrays)

    def of_pipelines(self) -> list[JobRow]:
        """Return the jobs whose comment may name a pipeline, in Slurm's order."""
        return self._listed(self._of_pipelines)

    def any_decided(self) -> bool:
        """Return whether any pending job may have slices that the submit filter chose; does not search the queue."""
        return bool(self._decided)

    def _listed(self, index: Mapping[int, JobRow]) -> list[JobRow]:
        return [row for row in self.jobs if id(row) in index] if index else []

    def count_signalled(self, holds: Callable[[JobRow], bool]) -> int:
        """Return for how many active jobs with the hint `signal=` `holds` is true; does not search the queue."""
        return sum(map(holds, self._signalled.values()))

    def holders(self, node: str) -> Collection[JobRow]:
        """Return the jobs that have MIG slices on a node; one that is completing may have given them back."""
        return self._holders.get(node, {}).values()

    def _add(self, row: JobRow, started: set[int]) -> None:
        """Add an active job to the indexes."""
        if row.array_job is not None:
            self.running[row.array_job] += 1
        if _SIGNAL in row.comment:
            self._signalled[id(row)] = row
        if GRES in row.gres:
            if holds_slices(row):
                for node in row.nodes:
                    self._holders.setdefault(node, {})[id(row)] = row
            if GUEST in row.gres and is_guest(row.gres):
                started.add(row.job_id)

    def _drop(self, row: JobRow, started: set[int]) -> None:
        """Remove a job that was active from the indexes."""
        if row.array_job is not None:
            self.running[row.array_job] -= 1
            if not self.running[row.array_job]:
                del self.running[row.array_job]
        self._signalled.pop(id(row), None)
        if GRES in row.gres:
            for node in row.nodes:
                holders = self._holders.get(node, {})
                holders.pop(id(row), None)
                if not holders:
                    self._holders.pop(node, None)
            started.discard(row.job_id)


def holds_slices(row: JobRow) -> bool:
    """Return whether a job has MIG slices now; one that is completing may have given them back."""
    return GRES in row.gres and row.active and row.state != "COMPLETING"

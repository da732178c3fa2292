"""Split the pending tasks of job arrays into their records if squeue shows them as one row.

A task that was requeued or changed individually is a job record of its own, with its own id, GRES and restart count.
squeue shows it as part of the array's row while several others of the array are pending too, and that row loses its
throttle; if one other is pending, they have a row each. 22.05 has an option that prevents this (SQUEUE_ARRAY_UNIQUE);
24.11 and 26.05 only have the opposite (`--array`), a row for each task. So a listing with `--array` and few fields
finds the tasks with their own records, and only those are listed again.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar

from slurm_migbatch.slurm.client import JobRow, SlurmError
from slurm_migbatch.slurm.listing import only_jobs
from slurm_migbatch.slurm.taskexpr import fold_tasks

#: runs squeue with arguments; raises SlurmError
Run = Callable[..., str]
#: returns `scontrol show job` of each of these ids, nothing for a missing one; raises SlurmError
Show = Callable[[Sequence[str]], list[str]]
#: lists the jobs with these ids, as in `SlurmClient.jobs`
List = Callable[[Sequence[str]], list[JobRow]]

_Item = TypeVar("_Item")
#: ids of jobs in one command; Linux lets an argument have 128 KiB
_AT_ONCE = 5000
_THROTTLE = re.compile(r" ArrayTaskThrottle=(\d+)(?: |$)")


@dataclass(frozen=True)
class WaitingTasks:
    """Pending tasks of an array: those in the array's record, and those with their own record (record -> task)."""

    own: tuple[int, ...]
    others: dict[int, int]


def split_arrays(rows: Sequence[JobRow], run: Run, show: Show, listed: List) -> list[JobRow]:
    """Split pending arrays into their records; runs no command if no array is pending."""
    arrays = [row.job_id for row in rows if row.pending and row.array_job == row.job_id]
    if not arrays:
        return list(rows)
    parts: dict[int, WaitingTasks] = {}
    for chunk in chunks(arrays):
        parts |= parse_tasks(run(*tasks_command(chunk)))
    mixed = {array: part for array, part in parts.items() if part.others and part.own}
    if not mixed:
        return list(rows)
    alone = [str(job) for part in mixed.values() for job in part.others]
    firsts = [f"{array}_{part.own[0]}" for array, part in mixed.items()]
    present = {row.job_id for row in rows}
    others = [row for chunk in chunks(alone) for row in listed(chunk) if row.job_id not in present]
    own = {row.job_id: row for chunk in chunks(firsts) for row in listed(chunk)}
    limits = dict(zip(mixed, map(throttle, show(firsts)), strict=True))
    result = []
    for row in rows:
        part = mixed.get(row.job_id)
        if part is None or not row.pending:
            result.append(row)
        elif row.job_id in own:
            text, limit = fold_tasks(part.own), limits[row.job_id]
            task = text + (f"%{limit}" if limit else "")
            result.append(replace(own[row.job_id], array_task=task, tasks=len(part.own), throttle=limit))
    return _with_tasks(result, others)


def tasks_command(arrays: Sequence[int]) -> tuple[str, ...]:
    """Return the squeue command that shows each pending task of these arrays, one line each."""
    return (
        "squeue",
        "--noheader",
        "--all",
        "--array",
        "--states=PENDING",
        only_jobs(arrays),
        "--Format=JobID:0|,ArrayJobID:0|,ArrayTaskID:0",
    )


def parse_tasks(output: str) -> dict[int, WaitingTasks]:
    """Parse the output of `tasks_command` by array; raises SlurmError."""
    tasks_by_array: dict[int, tuple[list[int], dict[int, int]]] = {}
    try:
        for line in output.splitlines():
            job, array, task = map(int, line.split("|"))
            own, others = tasks_by_array.setdefault(array, ([], {}))
            if job == array:
                own.append(task)
            else:
                others[job] = task
    except ValueError:
        raise SlurmError(f"cannot parse squeue's list of array tasks near {line[:80]!r}") from None
    return {array: WaitingTasks(tuple(sorted(own)), others) for array, (own, others) in tasks_by_array.items()}


def throttle(record: str) -> int | None:
    """Return how many tasks of an array may run at once, by `scontrol show job`; None for no limit.

    The job name, which its user chooses and which may contain whole lines, comes after the part that is read.
    """
    match = _THROTTLE.search(record.partition(" JobName=")[0])
    return int(match[1]) or None if match else None


def chunks(items: Sequence[_Item], size: int = _AT_ONCE) -> Iterator[Sequence[_Item]]:
    """Yield parts of at most `size`, by default those that fit into one argument of a command."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _with_tasks(rows: Sequence[JobRow], tasks: Sequence[JobRow]) -> list[JobRow]:
    """Return the rows with these tasks among the pending jobs of their partitions: by priority, before the rest of
    their arrays, in their own order otherwise.
    """
    by_partition: dict[str, deque[JobRow]] = {}
    for task in sorted(tasks, key=_rank):
        by_partition.setdefault(task.partition, deque()).append(task)
    merged = []
    for row in rows:
        waiting = by_partition.get(row.partition) if row.pending else None
        while waiting and _rank(waiting[0]) <= (-row.priority, row.job_id):
            merged.append(waiting.popleft())
        merged.append(row)
    return [*merged, *chain.from_iterable(by_partition.values())]


def _rank(task: JobRow) -> tuple[int, int]:
    return -task.priority, task.array_job or 0

"""Compute the fewest concurrent tasks with which a job array meets its deadline.

ElasticBatch (Xiao et al., IEEE TPDS 35(10), 2024) makes the instances of batch inference elastic. Only its abstract is
public, so this is a reconstruction. Slurm starts the tasks of an array; only their number can be chosen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

_TOLERANCE: Final = 1e-9
_SPARE: Final = 0.1
"""Share by which tasks may be slower than expected."""


@dataclass(frozen=True)
class Array:
    """A job array on slices of one profile, with a deadline.

    `pending` tasks have not begun, each of which takes `task_s` seconds including its start; `running` has the
    remaining seconds of each that has.
    """

    pending: int
    running: tuple[float, ...]
    task_s: float
    deadline: float


def at_once(array: Array, now: float, max_tasks: int, *, current: int | None = None) -> int:
    """Return the fewest concurrent tasks, from 1 to `max_tasks`, with which the array meets its deadline, else
    `max_tasks`.

    Tasks cannot be stopped: with fewer than are running, none starts until enough have ended, so the slots that remain
    are those that are busy the longest. A number below `current` is only returned if it would be enough with twice the
    spare time, so that the number does not oscillate.
    """
    if max_tasks < 1:
        raise ValueError(f"an array needs at least one concurrent task, not {max_tasks}")
    if not array.pending:
        return 1
    count = _fewest(array, now, max_tasks, _SPARE) or max_tasks
    if current is not None and count < current:
        return min(max(count, _fewest(array, now, max_tasks, 2 * _SPARE) or max_tasks), max(current, 1), max_tasks)
    return count


def ends_in_time(array: Array, now: float, max_tasks: int) -> bool:
    """Return whether an array can meet its deadline with at most so many concurrent tasks; see `at_once`."""
    return not array.pending or _fewest(array, now, max_tasks, _SPARE) is not None


def work_s(array: Array) -> float:
    """Return the sum of the remaining seconds of all tasks, with spare time."""
    return (array.pending * array.task_s + sum(array.running)) * (1 + _SPARE)


def _fewest(array: Array, now: float, max_tasks: int, spare: float) -> int | None:
    left_s = array.deadline - now
    task_s = array.task_s * (1 + spare)
    fresh = _tasks(left_s, task_s)
    busy = sorted(_tasks(left_s - rest_s * (1 + spare), task_s) for rest_s in array.running)
    tasks_in_time = 0
    for count in range(1, max_tasks + 1):
        tasks_in_time += busy[count - 1] if count <= len(busy) else fresh
        if tasks_in_time >= array.pending:
            return count
        if count >= len(busy) and not fresh:
            break
    return None


def _tasks(seconds: float, task_s: float) -> int:
    """Return how many tasks in sequence end within so many seconds."""
    return max(math.floor(seconds / task_s * (1 + _TOLERANCE)), 0) if task_s > 0 else 1 << 30

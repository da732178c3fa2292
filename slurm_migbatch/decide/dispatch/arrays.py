"""How many tasks of an inference array may run at once: what its deadline needs, and what there is for it.

An array whose hints hold `items=` and `deadline=` is elastic: each task does `items`, and all of them are to be done
`deadline` after the first of them started. Slurm starts the tasks; what follows the load here is its ArrayTaskThrottle.
It is the fewest with which the array ends in time (`decide.dispatch.elasticity.at_once`, after ElasticBatch: as few
instances as the load needs, more at once where it grows). While nobody else waits for room a number is lowered with
reserve only, so that it does not go up and down; while others wait it is lowered at once.

Where the arrays of several users need more than there is, the next task is that of the user who was served least over
the last sessions (D-STACK's rule for gaps; `lab.papers.sessions`), served meaning compute slices times seconds, and
a session the longest deadline among them. One task more than there is room for is always let through, so that the
arrays keep their place in Slurm's own order for what falls free.

What a user set as throttle himself (`--array=...%n`, or scontrol) is never exceeded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import fmean
from typing import Any, Final

from slurm_migbatch.decide.capacity.demand import GRES, slices
from slurm_migbatch.decide.capacity.free import FreeCapacity
from slurm_migbatch.decide.dispatch.elasticity import Array, at_once
from slurm_migbatch.mig.grant import strip
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm.client import JobRow
from slurm_migbatch.workload import hints as hinting
from slurm_migbatch.workload.hints import Hints
from slurm_migbatch.workload.refusal import Refusal

HISTORY: Final = 10
"""Deadlines, of the longest, over which the GPU time of users is compared."""
START_S: Final = 2.0
"""From the end of one task to the start of the next: Epilog, a scheduling cycle of Slurm's, Prolog."""
MEASURED: Final = 32
"""Finished tasks, the newest, whose mean length is taken for that of the next."""
OVERDUE: Final = 0.1
"""A task that has run longer than they do is taken to need this share of their length more."""


@dataclass(frozen=True)
class Task:
    """One run of a task by the record: unix seconds, `ended` None while it runs, `done` where it came to its end."""

    started: float
    ended: float | None = None
    done: bool = False


@dataclass(frozen=True)
class Elastic:
    """An elastic array, as Slurm lists it and as the record has it.

    Attributes:
        array: its job id; `user` its owner.
        comment: of its tasks, with the marker.
        profile, each: what a task asks for.
        pending: tasks that have not started; `running`: when the others did, unix seconds.
        throttle: what Slurm has now (None: none); of an array with one task to start Slurm does not show it, and
            `shown` is false.
        deadline_s, items: its hints, items those of one task.
        runs: tasks that the record knows.
        predicted_s: what a task takes by the prediction that was counted on; None: unknown.
        pool: nodes on which it may run.
    """

    array: int
    user: str
    comment: str
    profile: Profile
    each: int
    pending: int
    running: tuple[float, ...]
    throttle: int | None
    deadline_s: int
    items: int
    runs: tuple[Task, ...] = ()
    predicted_s: float | None = None
    pool: frozenset[str] = frozenset()
    shown: bool = True

    @property
    def first(self) -> float | None:
        """When its first task started."""
        return min((*self.running, *(run.started for run in self.runs)), default=None)

    @property
    def task_s(self) -> float | None:
        """What a task takes with its start; of those that ended, where any did."""
        lasted = [run.ended - run.started for run in self.runs if run.done and run.ended is not None][-MEASURED:]
        known = fmean(lasted) if lasted else self.predicted_s
        return None if known is None else known + START_S

    @property
    def units(self) -> int:
        """Compute slices of one task."""
        return self.profile.compute * self.each

    @property
    def measured(self) -> bool:
        """Whether a task of it has ended."""
        return any(run.done for run in self.runs)


def elastic_arrays(jobs: Iterable[JobRow]) -> list[Elastic]:
    """The elastic arrays of a queue that have tasks to start, without what only the record knows."""
    members: dict[int, list[JobRow]] = {}
    for row in jobs:
        if row.array_job is not None and GRES in row.gres and (row.pending or row.active):
            members.setdefault(row.array_job, []).append(row)
    found = []
    for array, rows in sorted(members.items()):
        waiting = [row for row in rows if row.pending]
        told = deadline_hints(waiting[0].comment) if waiting else None
        if told is None:
            continue
        asked = slices(waiting[0].gres)
        if len(asked) != 1 or waiting[0].num_nodes != 1:
            continue
        ((profile, each),) = asked.items()
        found.append(
            Elastic(
                array=array,
                user=waiting[0].user,
                comment=waiting[0].comment,
                profile=profile,
                each=each,
                pending=sum(row.tasks for row in waiting),
                running=tuple(sorted(row.start for row in rows if row.active and row.start is not None)),
                throttle=next((row.throttle for row in waiting if row.throttle), None),
                deadline_s=told[0],
                items=told[1],
                shown=any(row.tasks > 1 for row in waiting),
            )
        )
    return found


@lru_cache(maxsize=1 << 14)
def deadline_hints(comment: str) -> tuple[int, int] | None:
    """Deadline in seconds and items by a comment's hints; None where it has not both, or is of training."""
    try:
        told: Hints = hinting.parse(strip(comment))
    except Refusal:
        return None
    if told.deadline_s is None or told.items is None or told.role == "train":
        return None
    return told.deadline_s, told.items


# -- what users set themselves -----------------------------------------------------------------------------------------


@dataclass
class Bounds:
    """The throttle that each array's user set himself (None: none), told from those that were set here.

    Whatever Slurm shows that was not the last set here is somebody else's word. So that this outlives a restart, what
    is to be set is in the record before Slurm is told.
    """

    asked: dict[int, int | None] = field(default_factory=dict)
    ours: dict[int, int] = field(default_factory=dict)

    def replay(self, actions: Iterable[Mapping[str, Any]]) -> None:
        """Learn from the record's actions of kind throttle, oldest first."""
        for action in actions:
            if action.get("kind") != "throttle" or action.get("dry_run") or action.get("outcome"):
                continue
            array, after = int(action["job_id"]), read_throttle(action.get("after"))
            self.of(array, read_throttle(action.get("before")))
            if after is not None:
                self.ours[array] = after

    def of(self, array: int, now: int | None) -> int | None:
        """What its user allows, seeing the throttle that Slurm has `now`."""
        if array not in self.ours or self.ours[array] != now:
            self.asked[array] = now
            self.ours.pop(array, None)
        return self.asked[array]

    def set(self, array: int, after: int) -> None:
        """Slurm is about to be told."""
        self.ours[array] = after

    def forget_but(self, arrays: Iterable[int]) -> None:
        """Only arrays of the present queue matter."""
        kept = set(arrays)
        for known in (self.asked, self.ours):
            for array in [array for array in known if array not in kept]:
                del known[array]


def shown_throttle(throttle: int | None) -> str:
    """As the record has it."""
    return "none" if throttle is None else str(throttle)


def read_throttle(text: object) -> int | None:
    """The other way round."""
    return int(text) if isinstance(text, str) and text.isdigit() and int(text) > 0 else None


# -- how many at once --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Throttle:
    """A new throttle for an array, and why."""

    array: Elastic
    after: int
    why: str


def throttles(
    now: float,
    arrays: Sequence[Elastic],
    bounds: Bounds,
    space: FreeCapacity,
    scarce: Callable[[Elastic], bool],
) -> list[Throttle]:
    """The throttles that should change. Arrays of which nobody knows how long a task takes keep theirs.

    Args:
        now: unix seconds.
        arrays: those that have tasks to start.
        bounds: what their users allow.
        space: room that nobody is meant to have.
        scarce: whether others wait for room where this array's tasks could run.
    """
    wanted: list[tuple[Elastic, int, str]] = []
    for array in arrays:
        if not array.shown:
            if array.array not in bounds.asked:
                continue
            array = replace(array, throttle=bounds.ours.get(array.array, bounds.asked[array.array]))
        asked = bounds.of(array.array, array.throttle)
        most = array.pending + len(array.running)
        if asked is not None:
            most = min(most, asked)
        task_s = array.task_s
        if task_s is None or not array.pending:
            continue
        first = now if array.first is None else array.first
        rests = tuple([max(task_s - (now - start), OVERDUE * task_s) for start in array.running])
        left = Array(array.pending, rests, task_s, first + array.deadline_s)
        need = at_once(left, now, most, current=None if scarce(array) else array.throttle)
        wanted.append((array, need, _why(array, task_s, need, first + array.deadline_s - now, asked)))
    shares = _shares([(array, need) for array, need, _ in wanted], space, _served(now, arrays))
    found = []
    for array, need, why in wanted:
        share = shares.get(array.array, need)
        if share < need:
            why += f"; {share} is the share of {array.user}, who with others needs more than there is"
        every = array.pending + len(array.running)
        if min(share, every) != min(array.throttle or every, every):
            found.append(Throttle(array, share, why))
    return found


def _why(array: Elastic, task_s: float, need: int, left_s: float, asked: int | None) -> str:
    kind = "measured" if array.measured else "predicted"
    text = f"{array.pending} tasks to start, {task_s:.3g} s each ({kind}), {max(left_s, 0):.0f} s to the deadline: "
    text += f"{need} at once"
    return text if asked is None or need < asked else f"{text}, which is all that its user allows"


def _served(now: float, arrays: Sequence[Elastic]) -> dict[str, float]:
    """Compute-slice seconds of each user in the last sessions."""
    since = now - HISTORY * max((array.deadline_s for array in arrays), default=0)
    spent: dict[str, float] = {}
    for array in arrays:
        for run in array.runs:
            seconds = max((now if run.ended is None else run.ended) - max(run.started, since), 0.0)
            spent[array.user] = spent.get(array.user, 0.0) + seconds * array.units
    return spent


def _shares(wanted: Sequence[tuple[Elastic, int]], space: FreeCapacity, served: Mapping[str, float]) -> dict[int, int]:
    """Tasks at once of the arrays that compete, where it is less than they need; nothing for all others."""
    pools: dict[frozenset[str], list[tuple[Elastic, int]]] = {}
    for array, need in wanted:
        pools.setdefault(array.pool, []).append((array, need))
    found: dict[int, int] = {}
    for pool, members in pools.items():
        if len({array.user for array, _ in members}) < 2:
            continue
        asked = sum(need * a.units for a, need in members)
        idle = max(space.count(pool, a.profile, a.each, asked) * a.units for a, _ in members)
        there = idle + sum(len(a.running) * a.units for a, _ in members)
        if asked > there:
            found.update(_rationed(members, there, dict(served)))
    return found


def _rationed(members: Sequence[tuple[Elastic, int]], there: int, spent: dict[str, float]) -> dict[int, int]:
    """Every array has one task (Slurm knows no throttle of none); each further one is the least served user's."""
    shares = {array.array: 1 for array, _ in members}
    used = sum(array.units for array, _ in members)
    while used <= there:
        open_ones = [(array, need) for array, need in members if shares[array.array] < need]
        if not open_ones:
            break
        array, _ = min(open_ones, key=lambda pair: (spent.get(pair[0].user, 0.0), pair[0].array))
        shares[array.array] += 1
        used += array.units
        spent[array.user] = spent.get(array.user, 0.0) + (array.task_s or 0.0) * array.units
    return shares


def known(array: Elastic, runs: Sequence[Task], predicted_s: float | None, pool: frozenset[str]) -> Elastic:
    """The array with what the record, the predictor and the site know of it."""
    return replace(array, runs=tuple(runs), predicted_s=predicted_s, pool=pool)

"""How many tasks of an elastic array may run at once: what it needs, and what there is for it.

An array is elastic by its hints. With `items=` and `deadline=` each task does `items`, and all of them are to be done
`deadline` after the first of them started, unless they are a job of a pipeline, whose deadline it is. With `role=serve`
and `rate=` each task is an instance of a service, and all of them get `rate` items or requests a second. Slurm starts
the tasks; what follows the load here is its ArrayTaskThrottle. It is the fewest with which the array ends in time
(`decide.dispatch.elasticity.at_once`), or which carry the service's load (`decide.dispatch.instances`), after
ElasticBatch: as few instances as the load needs, more at once where it grows. While nobody else waits for room the
number of a deadline is lowered with reserve only, so that it does not go up and down; while others wait it is lowered
at once. No task is ever stopped: a lower number counts as tasks end.

Where the arrays of several users need more than there is, `decide.dispatch.shares` says who gets it: earliest deadlines
first, where they can be kept, and what is left to the user who was served least (D-STACK).

What a user set as throttle himself (`--array=...%n`, or scontrol) is never exceeded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import fmean
from typing import Any, Final, NamedTuple

from slurm_migbatch.decide.capacity.comments import hints_of
from slurm_migbatch.decide.capacity.demand import GRES, slices
from slurm_migbatch.decide.capacity.free import FreeCapacity
from slurm_migbatch.decide.dispatch.elasticity import Array, at_once, ends_in_time, work_s
from slurm_migbatch.decide.dispatch.instances import HOLD_S, LOAD_S, InstanceLoad, LoadHistory, carried, instances
from slurm_migbatch.decide.dispatch.shares import Claim, ServedTime, Share, shares
from slurm_migbatch.decide.snapshot import Run
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm.client import JobRow
from slurm_migbatch.workload.hints import SERVE

HISTORY: Final = 10
"""Sessions (longest deadlines) over which the GPU time of users is compared."""
SESSION_S: Final = 86_400.0
"""The longest session: longer deadlines are taken for this one where users are compared."""
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
class ElasticArray:
    """An elastic array, as Slurm lists it and as the record has it.

    Attributes:
        array: its job id; `user` its owner.
        comment: of its tasks, with the marker.
        profile, each: what a task asks for.
        pending: tasks that have not started; `running`: when the others did, unix seconds.
        throttle: what Slurm has now (None: none); of an array with one task to start Slurm does not show it, and
            `shown` is false.
        deadline_s, items: its hints, items those of one task; None: it is a service.
        runs: tasks that the record knows.
        predicted_s: what a task takes by the prediction that was counted on; None: unknown.
        pool: nodes on which it may run.
        rate, limit_ms: hints of a service, items a second of all tasks, and the longest time for a batch.
        carries: items a second of one task by the prediction that was counted on; None: unknown.
        load: what instances of a service do by their reports.
        placed: tasks to start for which supply has planned room.
    """

    array: int
    user: str
    comment: str
    profile: Profile
    each: int
    pending: int
    running: tuple[float, ...]
    throttle: int | None
    deadline_s: int | None
    items: int | None
    runs: tuple[Task, ...] = ()
    predicted_s: float | None = None
    pool: frozenset[str] = frozenset()
    shown: bool = True
    rate: float | None = None
    limit_ms: float | None = None
    carries: float | None = None
    load: InstanceLoad | None = None
    placed: int = 0

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


def elastic_arrays(jobs: Iterable[JobRow]) -> list[ElasticArray]:
    """Return the elastic arrays of a queue that have tasks to start, without what only the record knows."""
    members: dict[int, list[JobRow]] = {}
    for row in jobs:
        if row.array_job is not None and GRES in row.gres and (row.pending or row.active):
            members.setdefault(row.array_job, []).append(row)
    arrays = []
    for array, rows in sorted(members.items()):
        waiting = [row for row in rows if row.pending]
        hints = elastic_hints(waiting[0].comment) if waiting else None
        if hints is None:
            continue
        asked = slices(waiting[0].gres)
        if len(asked) != 1 or waiting[0].num_nodes != 1:
            continue
        ((profile, slices_per_task),) = asked.items()
        arrays.append(
            ElasticArray(
                array=array,
                user=waiting[0].user,
                comment=waiting[0].comment,
                profile=profile,
                each=slices_per_task,
                pending=sum(row.tasks for row in waiting),
                running=tuple(sorted(row.start for row in rows if row.active and row.start is not None)),
                throttle=next((row.throttle for row in waiting if row.throttle), None),
                deadline_s=hints.deadline_s,
                items=hints.items,
                shown=any(row.tasks > 1 for row in waiting),
                rate=hints.rate,
                limit_ms=hints.limit_ms,
            )
        )
    return arrays


class ElasticHints(NamedTuple):
    """What makes an array elastic: `deadline_s` and `items`, or, of a service, `rate` (a second) and `limit_ms`."""

    deadline_s: int | None = None
    items: int | None = None
    rate: float | None = None
    limit_ms: float | None = None


@lru_cache(maxsize=1 << 14)
def elastic_hints(comment: str) -> ElasticHints | None:
    """Return what a comment's hints say of an elastic array; None where it is none, or is of training."""
    hints = hints_of(comment)
    if hints is None:
        return None
    if hints.role == SERVE:
        limit_ms = None if hints.slo_us is None else hints.slo_us / 1000
        return None if hints.llm.rate is None else ElasticHints(rate=hints.llm.rate / 1000, limit_ms=limit_ms)
    if hints.deadline_s is None or hints.items is None or hints.role == "train" or hints.pipeline is not None:
        return None
    return ElasticHints(hints.deadline_s, hints.items)


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
        """Return the throttle that its user allows, given the one that Slurm shows `now`."""
        if array not in self.ours or self.ours[array] != now:
            self.asked[array] = now
            self.ours.pop(array, None)
        return self.asked[array]

    def set(self, array: int, after: int) -> None:
        """Note the throttle that Slurm is about to be given."""
        self.ours[array] = after

    def forget_but(self, arrays: Iterable[int]) -> None:
        """Forget all arrays but these."""
        current = set(arrays)
        for known in (self.asked, self.ours):
            for array in [array for array in known if array not in current]:
                del known[array]


def shown_throttle(throttle: int | None) -> str:
    """Return a throttle as the record has it."""
    return "none" if throttle is None else str(throttle)


def read_throttle(text: object) -> int | None:
    """Return the throttle that the record shows as this text; None for none."""
    return int(text) if isinstance(text, str) and text.isdigit() and int(text) > 0 else None


# -- how many at once --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ArrayHistory:
    """What is remembered of elastic arrays: what their users allow and had, and the load of services."""

    bounds: Bounds = field(default_factory=Bounds)
    served: ServedTime = field(default_factory=ServedTime)
    loads: LoadHistory = field(default_factory=LoadHistory)


@dataclass(frozen=True)
class Throttle:
    """A new throttle for an array, and why."""

    array: ElasticArray
    after: int
    why: str


@dataclass(frozen=True)
class _Wanted:
    """What an array needs, and why."""

    array: ElasticArray
    claim: Claim
    why: str


def throttles(
    now: float,
    arrays: Sequence[ElasticArray],
    history: ArrayHistory,
    space: FreeCapacity,
    scarce: Callable[[ElasticArray], bool],
) -> list[Throttle]:
    """Return the throttles that should change.

    Arrays of which nobody knows what a task takes or carries keep theirs.

    Args:
        now: unix seconds.
        arrays: those that have tasks to start.
        history: what is remembered of them.
        space: room that nobody is meant to have, these arrays neither.
        scarce: whether others wait for room where this array's tasks could run.
    """
    wanted: list[_Wanted] = []
    for array in arrays:
        if not array.shown:
            if array.array not in history.bounds.asked:
                continue
            bounds = history.bounds
            array = replace(array, throttle=bounds.ours.get(array.array, bounds.asked[array.array]))
        asked = history.bounds.of(array.array, array.throttle)
        if not array.pending:
            continue
        if array.rate is None:
            need = _of_deadline(now, array, asked, None if scarce(array) else array.throttle)
        else:
            need = _of_service(now, array, array.rate, asked, history)
        if need is not None:
            wanted.append(need)
    given = _shares(now, wanted, space, history.served.spent)
    changed = []
    for requirement in wanted:
        array, why = requirement.array, requirement.why
        share = given.get(array.array, Share(requirement.claim.need))
        if share.why:
            why += f"; {share.tasks} is the share of {array.user}, as users need more than there is: "
            why += share.why
        every = array.pending + len(array.running)
        if min(share.tasks, every) != min(array.throttle or every, every):
            changed.append(Throttle(array, share.tasks, why))
    return changed


def _of_deadline(now: float, array: ElasticArray, asked: int | None, current: int | None) -> _Wanted | None:
    """Return what an array with a deadline needs; None where nobody knows how long its tasks take."""
    task_s = array.task_s
    if task_s is None or array.deadline_s is None:
        return None
    due = (now if array.first is None else array.first) + array.deadline_s
    rests = tuple([max(task_s - (now - start), OVERDUE * task_s) for start in array.running])
    remaining, max_tasks = Array(array.pending, rests, task_s, due), _most(array, asked)
    need = at_once(remaining, now, max_tasks, current=current)
    kind = "measured" if array.measured else "predicted"
    why = f"{array.pending} tasks to start, {task_s:.3g} s each ({kind}), {max(due - now, 0):.0f} s to the deadline: "
    in_time = ends_in_time(remaining, now, max_tasks)
    claim = Claim(
        array.array,
        array.user,
        array.units,
        need,
        task_s,
        session_s([array]),
        due,
        work_s(remaining) * array.units,
        in_time,
    )
    return _Wanted(array, claim, why + _at_once(need, asked))


def _of_service(
    now: float, array: ElasticArray, rate: float, asked: int | None, history: ArrayHistory
) -> _Wanted | None:
    """Return what a service needs; None where nobody knows what an instance of it carries."""
    enough = instances(rate, len(array.running), array.carries, array.load)
    instance_rate = carried(array.carries, array.load)
    if enough is None or instance_rate is None:
        return None
    need = min(history.loads.held(array.array, enough, history.bounds.ours.get(array.array), now), _most(array, asked))
    if array.load is None:
        load = f"{rate:.3g} items/s by its hints"
    else:
        load = f"{array.load.each * len(array.running):.3g} items/s measured"
    why = f"{load}, {instance_rate:.3g} items/s of each instance: "
    if enough < need:
        why += f"{enough} are enough, more were needed in the last {HOLD_S:.0f} s: "
    claim = Claim(array.array, array.user, array.units, need, array.task_s or LOAD_S, session_s([array]))
    return _Wanted(array, claim, why + _at_once(need, asked))


def _most(array: ElasticArray, asked: int | None) -> int:
    """Return how many tasks may run at once: those that there are, and no more than the user allows."""
    every = array.pending + len(array.running)
    return every if asked is None else min(every, asked)


def _at_once(need: int, asked: int | None) -> str:
    text = f"{need} at once"
    return text if asked is None or need < asked else f"{text}, the limit set by its user"


def _shares(
    now: float, wanted: Sequence[_Wanted], space: FreeCapacity, served: Mapping[str, float]
) -> dict[int, Share]:
    """Return the tasks at once of the arrays that compete, by array; all others are left out."""
    pools: dict[frozenset[str], list[_Wanted]] = {}
    for requirement in wanted:
        pools.setdefault(requirement.array.pool, []).append(requirement)
    share_of: dict[int, Share] = {}
    for pool, members in pools.items():
        if len({requirement.array.user for requirement in members}) < 2:
            continue
        asked = sum(requirement.claim.need * requirement.array.units for requirement in members)
        idle = max(
            space.count(pool, requirement.array.profile, requirement.array.each, asked) * requirement.array.units
            for requirement in members
        )
        total = idle + sum(
            (len(requirement.array.running) + requirement.array.placed) * requirement.array.units
            for requirement in members
        )
        if asked > total:
            share_of.update(shares(now, [requirement.claim for requirement in members], total, served))
    return share_of


# -- what is known of it -----------------------------------------------------------------------------------------------


def known(array: ElasticArray, runs: Sequence[Task], rate: float | None, pool: frozenset[str]) -> ElasticArray:
    """Return the array with what the record, predictor and site know; `rate`: items a second of one slice."""
    task_rate = rate * array.each if rate else None
    predicted_s = array.items / task_rate if task_rate and array.items is not None else None
    return replace(array, runs=tuple(runs), predicted_s=predicted_s, carries=task_rate, pool=pool)


def in_use(jobs: Iterable[JobRow]) -> dict[int, tuple[str, int]]:
    """Return the user of each elastic array of a queue, and the compute slices of its tasks that run."""
    units_of: dict[int, tuple[str, int]] = {}
    for row in jobs:
        if row.array_job is None or GRES not in row.gres or elastic_hints(row.comment) is None:
            continue
        units = row.active * sum(profile.compute * n for profile, n in slices(row.gres).items()) * row.num_nodes
        units_of[row.array_job] = row.user, units + units_of.get(row.array_job, ("", 0))[1]
    return units_of


def instance_starts(jobs: Iterable[JobRow]) -> dict[int, dict[Run, float]]:
    """Return when the running instances of each service of a queue began (unix seconds)."""
    starts: dict[int, dict[Run, float]] = {}
    for row in jobs:
        hints = elastic_hints(row.comment) if row.array_job is not None and GRES in row.gres else None
        if hints is None or hints.rate is None or row.array_job is None:
            continue
        runs = starts.setdefault(row.array_job, {})
        if row.active and row.start is not None:
            runs[row.job_id, row.restarts] = row.start
    return starts


def session_s(arrays: Iterable[ElasticArray]) -> float:
    """Return the longest session of some arrays, at most `SESSION_S`; of a service that is `LOAD_S`."""
    return max((min(array.deadline_s or LOAD_S, SESSION_S) for array in arrays), default=0.0)


def had(array: ElasticArray, since: float, now: float) -> float:
    """Return the compute-slice seconds that an array had since that moment, by the record of its runs."""
    ends = ((run.started, now if run.ended is None else run.ended) for run in array.runs)
    return sum(max(end - max(start, since), 0.0) for start, end in ends) * array.units

"""Compute how many tasks of an elastic array may run at once, from its need and the available capacity.

An array is elastic by its hints. With `items=` and `deadline=` each task does `items`, and all of them must be done
`deadline` after the first of them started, unless they are a job of a pipeline, which then has the deadline. With
`role=serve` and `rate=` each task is an instance of a service, and all of them get `rate` items or requests a second.
Slurm starts the tasks; this module sets the ArrayTaskThrottle: the lowest with which the array meets its deadline
(`decide.dispatch.elasticity.at_once`), or serves the load (`decide.dispatch.instances`), after ElasticBatch: as few
instances as the load needs, more as soon as it grows. While no other job waits for capacity the number for a deadline
is lowered only with a reserve, so that it does not oscillate; while others wait it is lowered immediately. No task is
ever stopped: a lower number takes effect as tasks end.

If the arrays of several users need more than there is, `decide.dispatch.shares` decides: earliest deadlines first, if
they can be met, and the rest to the user who was served least (D-STACK).

A throttle set by the user (`--array=...%n`, or scontrol) is never exceeded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import fmean
from typing import Any, Final, NamedTuple

from slurm_migbatch.decide.capacity.comments import hints_of
from slurm_migbatch.decide.capacity.demand import slices
from slurm_migbatch.decide.capacity.free import FreeCapacity
from slurm_migbatch.decide.dispatch.elasticity import Array, at_once, ends_in_time, work_s
from slurm_migbatch.decide.dispatch.instances import HOLD_S, LOAD_S, InstanceLoad, LoadHistory, carried, instances
from slurm_migbatch.decide.dispatch.shares import Claim, ServedTime, Share, shares
from slurm_migbatch.decide.snapshot import Run
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm.client import JobRow
from slurm_migbatch.workload.hints import SERVE
from slurm_migbatch.workload.loans import GRES

HISTORY: Final = 10
"""Sessions (longest deadlines) over which the GPU time of users is compared."""
SESSION_S: Final = 86_400.0
"""The maximum session: longer deadlines count as this when users are compared."""
START_S: Final = 2.0
"""From the end of one task to the start of the next: Epilog, a scheduling cycle of Slurm, Prolog."""
MEASURED: Final = 32
"""Number of newest finished tasks whose mean duration predicts the next."""
OVERDUE: Final = 0.1
"""Remaining share of the mean duration assumed for a task that has exceeded it."""


@dataclass(frozen=True)
class Task:
    """One run of a task in the record: unix seconds, `ended` None while it runs, `done` if it completed."""

    started: float
    ended: float | None = None
    done: bool = False


@dataclass(frozen=True)
class ElasticArray:
    """An elastic array, from Slurm and the record.

    Attributes:
        array: its job id; `user` its owner.
        comment: of its tasks, with the marker.
        profile, each: requested profile, and number of slices of it for each task.
        pending: tasks that have not started; `running`: start of the others, unix seconds.
        throttle: Slurm's current one (None: none); for an array with one pending task Slurm does not show it, and
            `shown` is false.
        deadline_s, items: its hints, items per task; None: it is a service.
        runs: tasks in the record.
        predicted_s: conservative prediction of a task's duration; None: unknown.
        pool: nodes on which it may run.
        rate, limit_ms: hints of a service, items a second of all tasks, and the latency limit of a batch.
        carries: conservative prediction of items a second of one task; None: unknown.
        load: measured load of a service's instances.
        placed: pending tasks for which supply has planned capacity.
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
        """Start of its first task."""
        return min((*self.running, *(run.started for run in self.runs)), default=None)

    @property
    def task_s(self) -> float | None:
        """Duration of a task including its start; measured if tasks have ended."""
        durations = [run.ended - run.started for run in self.runs if run.done and run.ended is not None][-MEASURED:]
        mean_s = fmean(durations) if durations else self.predicted_s
        return None if mean_s is None else mean_s + START_S

    @property
    def units(self) -> int:
        """Compute slices of one task."""
        return self.profile.compute * self.each

    @property
    def measured(self) -> bool:
        """Whether one of its tasks has ended."""
        return any(run.done for run in self.runs)


def elastic_arrays(jobs: Iterable[JobRow]) -> list[ElasticArray]:
    """Return the elastic arrays of a queue with pending tasks, without the record's data."""
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
        requested = slices(waiting[0].gres)
        if len(requested) != 1 or waiting[0].num_nodes != 1:
            continue
        ((profile, slices_per_task),) = requested.items()
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
    """Parameters of an elastic array: `deadline_s` and `items`, or, for a service, `rate` (a second) and `limit_ms`."""

    deadline_s: int | None = None
    items: int | None = None
    rate: float | None = None
    limit_ms: float | None = None


@lru_cache(maxsize=1 << 14)
def elastic_hints(comment: str) -> ElasticHints | None:
    """Return the elastic parameters in a comment's hints; None if it is not elastic, or is for training."""
    hints = hints_of(comment)
    if hints is None:
        return None
    if hints.role == SERVE:
        limit_ms = None if hints.slo_us is None else hints.slo_us / 1000
        return None if hints.llm.rate is None else ElasticHints(rate=hints.llm.rate / 1000, limit_ms=limit_ms)
    if hints.deadline_s is None or hints.items is None or hints.role == "train" or hints.pipeline is not None:
        return None
    return ElasticHints(hints.deadline_s, hints.items)


# -- throttles of users ----------------------------------------------------------------------------------------------


@dataclass
class Bounds:
    """The throttle that each array's user has set (None: none), as distinct from those set here.

    A value shown by Slurm that was not set here was set by others. To survive a restart, a new throttle is recorded
    before Slurm is changed. Slurm may refuse it or not answer, so it counts as set only once Slurm shows it; until then
    the previous one set here still does.

    Attributes:
        asked: by users.
        ours: the last one set here that Slurm has shown.
        tried: a later one set here that Slurm has not shown yet.
    """

    asked: dict[int, int | None] = field(default_factory=dict)
    ours: dict[int, int] = field(default_factory=dict)
    tried: dict[int, int] = field(default_factory=dict)

    def replay(self, actions: Iterable[Mapping[str, Any]]) -> None:
        """Load from the record's actions of kind throttle, oldest first."""
        for action in actions:
            if action.get("kind") != "throttle" or action.get("dry_run") or action.get("outcome"):
                continue
            array, after = int(action["job_id"]), read_throttle(action.get("after"))
            self.of(array, read_throttle(action.get("before")))
            if after is not None:
                self.set(array, after)

    def of(self, array: int, now: int | None) -> int | None:
        """Return the throttle that its user allows, given the one that Slurm shows `now`."""
        if now is not None and self.tried.get(array) == now:
            self.ours[array] = self.tried.pop(array)
        elif array not in self.ours or self.ours[array] != now:
            if self.asked.get(array, now) != now:
                self.tried.pop(array, None)
            self.asked[array] = now
            self.ours.pop(array, None)
        return self.asked[array]

    def last(self, array: int) -> int | None:
        """Return the throttle of an array for which Slurm shows none, because only one of its tasks is pending."""
        return self.tried.get(array) or self.ours.get(array) or self.asked[array]

    def set(self, array: int, after: int) -> None:
        """Record the throttle that is about to be set."""
        self.tried[array] = after

    def forget_but(self, arrays: Iterable[int]) -> None:
        """Remove all arrays but these."""
        current = set(arrays)
        for by_array in (self.asked, self.ours, self.tried):
            for array in [array for array in by_array if array not in current]:
                del by_array[array]


def shown_throttle(throttle: int | None) -> str:
    """Return a throttle in the record's format."""
    return "none" if throttle is None else str(throttle)


def read_throttle(text: object) -> int | None:
    """Parse a throttle in the record's format; None for none."""
    return int(text) if isinstance(text, str) and text.isdigit() and int(text) > 0 else None


# -- concurrency -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ArrayHistory:
    """Memory about elastic arrays: users' limits, past service, and the load of services."""

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
    free_capacity: FreeCapacity,
    scarce: Callable[[ElasticArray], bool],
) -> list[Throttle]:
    """Return the throttles that should change.

    Arrays with tasks of unknown duration or throughput keep theirs.

    Args:
        now: unix seconds.
        scarce: whether others wait for capacity where this array's tasks could run.
    """
    requirements: list[_Wanted] = []
    for array in arrays:
        if not array.shown:
            if array.array not in history.bounds.asked:
                continue
            array = replace(array, throttle=history.bounds.last(array.array))
        user_limit = history.bounds.of(array.array, array.throttle)
        if not array.pending:
            continue
        if array.rate is None:
            new_requirement = _of_deadline(now, array, user_limit, None if scarce(array) else array.throttle)
        else:
            new_requirement = _of_service(now, array, array.rate, user_limit, history)
        if new_requirement is not None:
            requirements.append(new_requirement)
    shares_of = _shares(now, requirements, free_capacity, history.served.spent)
    changed = []
    for requirement in requirements:
        array, why = requirement.array, requirement.why
        share = shares_of.get(array.array, Share(requirement.claim.need))
        if share.why:
            why += f"; {share.tasks} is the share of {array.user}, as users need more than there is: "
            why += share.why
        task_count = array.pending + len(array.running)
        if min(share.tasks, task_count) != min(array.throttle or task_count, task_count):
            changed.append(Throttle(array, share.tasks, why))
    return changed


def _of_deadline(now: float, array: ElasticArray, asked: int | None, current: int | None) -> _Wanted | None:
    """Return the need of an array with a deadline; None if the duration of its tasks is unknown."""
    task_s = array.task_s
    if task_s is None or array.deadline_s is None:
        return None
    due = (now if array.first is None else array.first) + array.deadline_s
    remaining_s = tuple([max(task_s - (now - start), OVERDUE * task_s) for start in array.running])
    remaining, max_tasks = Array(array.pending, remaining_s, task_s, due), _most(array, asked)
    need = at_once(remaining, now, max_tasks, current=current)
    basis = "measured" if array.measured else "predicted"
    why = f"{array.pending} tasks to start, {task_s:.3g} s each ({basis}), {max(due - now, 0):.0f} s to the deadline: "
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
    """Return the need of a service; None if the throughput of an instance is unknown."""
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
    """Return how many tasks may run at once: all there are, but no more than the user allows."""
    task_count = array.pending + len(array.running)
    return task_count if asked is None else min(task_count, asked)


def _at_once(need: int, asked: int | None) -> str:
    text = f"{need} at once"
    return text if asked is None or need < asked else f"{text}, the limit set by its user"


def _shares(
    now: float, wanted: Sequence[_Wanted], free_capacity: FreeCapacity, served: Mapping[str, float]
) -> dict[int, Share]:
    """Return the concurrent tasks of the arrays that compete for capacity, by array; others are omitted."""
    pools: dict[frozenset[str], list[_Wanted]] = {}
    for requirement in wanted:
        pools.setdefault(requirement.array.pool, []).append(requirement)
    share_of: dict[int, Share] = {}
    for pool, members in pools.items():
        if len({requirement.array.user for requirement in members}) < 2:
            continue
        needed_units = sum(requirement.claim.need * requirement.array.units for requirement in members)
        idle = max(
            free_capacity.count(pool, requirement.array.profile, requirement.array.each, needed_units)
            * requirement.array.units
            for requirement in members
        )
        total = idle + sum(
            (len(requirement.array.running) + requirement.array.placed) * requirement.array.units
            for requirement in members
        )
        if needed_units > total:
            share_of.update(shares(now, [requirement.claim for requirement in members], total, served))
    return share_of


# -- data about arrays -------------------------------------------------------------------------------------------------


def known(array: ElasticArray, runs: Sequence[Task], rate: float | None, pool: frozenset[str]) -> ElasticArray:
    """Return the array with data of the record, predictor and site; `rate`: items a second of one slice."""
    task_rate = rate * array.each if rate else None
    predicted_s = array.items / task_rate if task_rate and array.items is not None else None
    return replace(array, runs=tuple(runs), predicted_s=predicted_s, carries=task_rate, pool=pool)


def in_use(jobs: Iterable[JobRow]) -> dict[int, tuple[str, int]]:
    """Return the user of each elastic array of a queue, and the compute slices of its running tasks."""
    units_of: dict[int, tuple[str, int]] = {}
    for row in jobs:
        if row.array_job is None or GRES not in row.gres or elastic_hints(row.comment) is None:
            continue
        units = row.active * sum(profile.compute * n for profile, n in slices(row.gres).items()) * row.num_nodes
        units_of[row.array_job] = row.user, units + units_of.get(row.array_job, ("", 0))[1]
    return units_of


def instance_starts(jobs: Iterable[JobRow]) -> dict[int, dict[Run, float]]:
    """Return the start of the running instances of each service of a queue (unix seconds)."""
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
    """Return the longest session of some arrays, at most `SESSION_S`; for a service `LOAD_S`."""
    return max((min(array.deadline_s or LOAD_S, SESSION_S) for array in arrays), default=0.0)


def had(array: ElasticArray, since: float, now: float) -> float:
    """Return the compute-slice seconds that an array used since that time, by the record of its runs."""
    ends = ((run.started, now if run.ended is None else run.ended) for run in array.runs)
    return sum(max(end - max(start, since), 0.0) for start, end in ends) * array.units

"""The dispatch stage: changes of pending jobs, another profile, or another throttle of an array.

`decide.dispatch.retype` chooses profiles and `decide.dispatch.arrays` throttles, both from capacity that supply's plan
leaves; `decide.dispatch.pipelines` chooses profiles of jobs with a common deadline, regardless of capacity. The
alternatives of a job come from the submit filter's decision in the record: an unknown decision is queried
(`Questions`), and the job is not changed until the answer comes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import chain
from typing import Any, Final

from slurm_migbatch.decide.capacity.comments import hints_of
from slurm_migbatch.decide.capacity.demand import demands
from slurm_migbatch.decide.capacity.free import FreeCapacity, LeftOnNode, of_counts, of_plan
from slurm_migbatch.decide.capacity.model import ClusterPlan, Demand
from slurm_migbatch.decide.capacity.queue import JobQueue
from slurm_migbatch.decide.dispatch.arrays import (
    HISTORY,
    ArrayHistory,
    Bounds,
    ElasticArray,
    Task,
    Throttle,
    elastic_arrays,
    had,
    in_use,
    instance_starts,
    known,
    session_s,
    shown_throttle,
    throttles,
)
from slurm_migbatch.decide.dispatch.instances import LoadHistory
from slurm_migbatch.decide.dispatch.pending import Pending, name_of, without_place
from slurm_migbatch.decide.dispatch.pipelines import KnownPipeline, PipelineKey, plan_pipelines
from slurm_migbatch.decide.dispatch.promises import REMEMBERED, Promise, PromiseBook, keep, promise_from_record
from slurm_migbatch.decide.dispatch.retype import Retype, RetypeHistory, marker_corrections, retypes, undone
from slurm_migbatch.decide.dispatch.shares import ServedTime
from slurm_migbatch.decide.snapshot import ClusterSnapshot, Predictions
from slurm_migbatch.decide.supply.stage import SupplyDecision
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm.client import JobRow

_ABSENT_S: Final = (1.0, 60.0)
"""A decision missing from the record may be on its way: it is queried again after this time, then less often."""
_LOOKED_AFTER_S: Final = 60.0
"""How long tasks of a re-typed array may turn out to have started at that moment."""
_CLOCKS_S: Final = 60.0
"""Largest difference between the clocks of slurmctld's and migbatchd's hosts."""
_COMPUTE_SLICES: Final = 7
"""Typical of GPUs with MIG."""
_AT_ONCE: Final = 256
"""Decisions queried at a time."""


@dataclass(frozen=True)
class DispatchSettings:
    """Settings of dispatch; see `config.schema.DispatchConfig`.

    Attributes:
        every_s: minimum seconds between two decisions.
        hold_s: seconds for which a job keeps its new profile.
        arrays: whether throttles of elastic arrays follow their deadlines.
        dry_run: changes are only reported, never made.
    """

    every_s: float = 5.0
    hold_s: float = 60.0
    arrays: bool = True
    dry_run: bool = False


@dataclass
class DispatchMemory:
    """Memory of dispatch from one decision to the next.

    Attributes:
        turns: when each job was last re-typed, and its excluded profiles.
        bounds: the throttles that users set.
        served: recent service of users of elastic arrays.
        loads: reports of services' instances, and recent numbers needed.
        promises: alternatives of jobs, by the name of the filter's decision.
        absent: decisions missing from the record: when to query again, and the current delay.
        runs: runs of tasks of elastic arrays.
        replayed: arrays whose former throttles are known.
        looked_after: re-typed arrays, and until when their tasks are checked.
        unsure: changes that Slurm did not confirm, with its message.
        pipelines: state of each pipeline that has jobs in the queue.
        refused: arrays whose new throttle Slurm refused, and until when it is not retried.
        last: time of the last decision.
        predicted_by: version of the predictions in `promises`.
    """

    turns: RetypeHistory
    bounds: Bounds = field(default_factory=Bounds)
    served: ServedTime = field(default_factory=ServedTime)
    loads: LoadHistory = field(default_factory=LoadHistory)
    promises: OrderedDict[str, Promise | None] = field(default_factory=OrderedDict)
    absent: dict[str, tuple[float, float]] = field(default_factory=dict)
    runs: Mapping[int, Sequence[Task]] = field(default_factory=dict)
    replayed: set[int] = field(default_factory=set)
    looked_after: dict[int, float] = field(default_factory=dict)
    unsure: list[tuple[Retype | Throttle, str]] = field(default_factory=list)
    refused: dict[int, float] = field(default_factory=dict)
    pipelines: dict[PipelineKey, KnownPipeline] = field(default_factory=dict)
    last: float | None = None
    predicted_by: str = ""
    #: caches; they change no decision
    #: a plan of supply and the version of the queue without a pending job that may be re-typed
    nothing_fits: tuple[ClusterPlan | None, int] = field(default=(None, 0), repr=False)
    left: dict[str, LeftOnNode] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class DispatchDecision:
    """Result for pending jobs.

    Attributes:
        retypes: jobs, or tasks of arrays, that get another profile.
        throttles: arrays that get another throttle; to be recorded before Slurm is changed.
        repairs: corrections of markers of tasks that started while their array was re-typed (name -> fields of an
            update).
        unknown: ids of the filter's decisions that are needed.
        settled: formerly unconfirmed changes, and their results (empty: applied).
    """

    retypes: tuple[Retype, ...] = ()
    throttles: tuple[Throttle, ...] = ()
    repairs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    settled: tuple[DispatchOutcome, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.retypes or self.throttles or self.repairs)


@dataclass(frozen=True)
class DispatchOutcome:
    """Result of a change.

    Attributes:
        at: unix seconds.
        error: Slurm's error; empty if none.
        applied: whether Slurm was called.
        unsure: Slurm did not confirm the change; the next snapshot shows it.
    """

    change: Retype | Throttle
    at: float
    error: str = ""
    applied: bool = True
    unsure: bool = False


@dataclass
class _View:
    """A snapshot prepared for dispatch.

    Attributes:
        jobs: by job id. `of_arrays`: rows of arrays; `of_pipelines`: rows that may name a pipeline; in Slurm's order.
        placed: how many tasks of a job have a place.
        members: job ids of the tasks of each array; `waiting`: a pending one of them.
    """

    now: float
    jobs: Mapping[int, JobRow]
    of_arrays: Sequence[JobRow]
    of_pipelines: Sequence[JobRow]
    demands: Sequence[Demand]
    placed: Mapping[int, int]
    free_capacity: FreeCapacity
    snapshot: ClusterSnapshot
    managed: Collection[str]
    members: dict[int, set[int]] = field(default_factory=dict)
    waiting: dict[int, JobRow] = field(default_factory=dict)

    @cached_property
    def crowded(self) -> Mapping[frozenset[str], set[int]]:
        """Pools in which jobs have no place, and these jobs."""
        crowded: dict[frozenset[str], set[int]] = {}
        for demand in self.demands:
            if demand.parts and self.placed.get(demand.job, 0) < demand.copies:
                crowded.setdefault(demand.pool, set()).add(demand.job)
        return crowded

    def scarce(self, array: ElasticArray) -> bool:
        """Return whether others wait for capacity where an array's tasks could run."""
        own_jobs = self.members[array.array]
        return any(jobs - own_jobs for pool, jobs in self.crowded.items() if not pool.isdisjoint(array.pool))


def needed_arrays(
    snapshot: ClusterSnapshot, queue: JobQueue, memory: DispatchMemory, settings: DispatchSettings
) -> frozenset[int]:
    """Return the elastic arrays whose task runs are needed from the record; `queue` is that of the snapshot."""
    if not settings.arrays or not _is_due(snapshot, memory, settings):
        return frozenset()
    return frozenset(array.array for array in elastic_arrays(queue.of_arrays()))


def _is_due(snapshot: ClusterSnapshot, memory: DispatchMemory, settings: DispatchSettings) -> bool:
    if memory.last is None or snapshot.answers.decisions:
        return True
    return not 0 <= snapshot.now - memory.last < settings.every_s


def plan_dispatch(
    snapshot: ClusterSnapshot,
    queue: JobQueue,
    supply: SupplyDecision | None,
    memory: DispatchMemory,
    settings: DispatchSettings,
) -> DispatchDecision:
    """Decide on pending jobs after supply has planned for this snapshot (None: use Slurm's counts).

    `queue` is updated to the snapshot, unless supply has done so.
    """
    queue.update(snapshot.jobs)
    due = _is_due(snapshot, memory, settings)
    _learn(snapshot, memory)
    if settings.arrays:
        _add_reports(snapshot, memory)
    if snapshot.predictions.version != memory.predicted_by:
        memory.predicted_by = snapshot.predictions.version
        memory.promises = OrderedDict((k, v) for k, v in memory.promises.items() if "@" not in k)
    if not due:
        return DispatchDecision()
    memory.last = snapshot.now
    view = _view(snapshot, queue, supply, memory)
    settled = _verify(view, memory)
    memory.turns.forget_but(snapshot.jobs)
    arrays, unknown_arrays = _elastic(view, memory) if settings.arrays else ([], set())
    promises = PromiseBook(memory.promises, memory.absent, snapshot.predictions, snapshot.now)
    placeable = _placeable(view, arrays, memory, snapshot.predictions)
    if settings.arrays:
        _count_served(view, placeable, memory)
    history = ArrayHistory(memory.bounds, memory.served, memory.loads)
    limits = throttles(view.now, placeable, history, view.free_capacity, view.scarce)
    memory.refused = {array: until for array, until in memory.refused.items() if until > view.now}
    limits = [limit for limit in limits if limit.array.array not in memory.refused]
    # throttles decide how many tasks of these arrays run: those without a place may not need one
    unsettled = {limit.array.array for limit in limits} | unknown_arrays
    placeless = _placeless(view, queue, supply, memory, throttled=bool(limits))
    waiting = (pending for pending in placeless if pending.row.array_job not in unsettled)
    changes = undone(snapshot.jobs, memory.turns)
    changes += _retypes(view, waiting, promises, changes, memory)
    if not settings.dry_run:
        changes = [change for change in changes if _note(change, memory, view.now)]
    repairs = _repairs(view, changes, limits, memory) if not settings.dry_run else {}
    unknown = tuple(list(promises.missing)[:_AT_ONCE])  # the first in Slurm's order
    return DispatchDecision(tuple(changes), tuple(limits), repairs, unknown, settled)


def _placeless(
    view: _View, queue: JobQueue, supply: SupplyDecision | None, memory: DispatchMemory, *, throttled: bool
) -> Iterable[Pending]:
    """Return the pending jobs that may be re-typed; if the same plan and queue had none, none without another search.

    `throttled`: arrays get other throttles, for which capacity has been taken.
    """
    plan, (full, version) = None if supply is None else supply.plan, memory.nothing_fits
    if not queue.any_decided() or (plan is not None and plan is full and version == queue.version):
        return ()
    found = without_place(view.demands, view.jobs, view.placed, view.free_capacity)
    first = next(found, None)
    if first is not None:
        return chain((first,), found)
    if not throttled:
        memory.nothing_fits = plan, queue.version
    return ()


def _retypes(
    view: _View, waiting: Iterable[Pending], promises: PromiseBook, before: Sequence[Retype], memory: DispatchMemory
) -> list[Retype]:
    """Return jobs that get another profile: those of pipelines first, and none twice in a round."""
    settled = {change.pending.row.job_id for change in before}
    queue = (row for row in view.of_pipelines if row.job_id not in settled)
    rates = view.snapshot.predictions.rates
    shares = _shares(view.snapshot)
    pipeline_plan = plan_pipelines(view.now, queue, promises.of, rates, memory.turns, memory.pipelines, shares)
    settled.update(change.pending.row.job_id for change in pipeline_plan.changes)

    def allowed(pending: Pending) -> Promise | None:
        promise, limit_s = promises.of(pending), pipeline_plan.limits.get(pending.row.job_id)
        return promise if promise is None or limit_s is None else promise.within(limit_s, pending.slice_count)

    rest = (pending for pending in waiting if pending.row.job_id not in settled)
    return [*pipeline_plan.changes, *retypes(view.now, rest, allowed, view.free_capacity, memory.turns)]


def _shares(snapshot: ClusterSnapshot) -> Callable[[Profile], float]:
    """Return the GPU equivalent of a slice, the maximum if GPU types differ; from its name if no GPU has it."""

    @cache
    def geometries() -> Collection[Geometry]:
        gpus = [gpu for facts in snapshot.inventory.values() for gpu in facts.gpus]
        return {id(gpu.geometry): gpu.geometry for gpu in gpus}.values()

    def share(profile: Profile) -> float:
        shares = [
            max(info.compute_slices / geometry.compute_slices, info.memory_slices / geometry.memory_slices)
            for geometry in geometries()
            if profile in geometry and (info := geometry.info(profile))
        ]
        return max(shares, default=profile.compute / _COMPUTE_SLICES)

    return share


def _note(change: Retype, memory: DispatchMemory, now: float) -> bool:
    """Record that a job is about to be re-typed; return False if its comment has no space for the marker."""
    if change.fields() is None:
        memory.turns.bar(change)
        return False
    memory.turns.note(change, now)
    if (array := change.pending.row.array_job) is not None:
        memory.looked_after[array] = now + _LOOKED_AFTER_S
    return True


def _repairs(
    view: _View, changes: Iterable[Retype], limits: Iterable[Throttle], memory: DispatchMemory
) -> dict[str, dict[str, str]]:
    memory.looked_after = {array: until for array, until in memory.looked_after.items() if until > view.now}
    changed = {name for change in changes for name in change.targets} | {str(limit.array.array) for limit in limits}
    repairs = marker_corrections(view.of_arrays, memory.looked_after)
    return {name: fields for name, fields in repairs.items() if name not in changed}


# -- capacity --------------------------------------------------------------------------------------------------------


def _view(snapshot: ClusterSnapshot, queue: JobQueue, supply: SupplyDecision | None, memory: DispatchMemory) -> _View:
    now, rows = snapshot.now, (queue.rows, queue.of_arrays(), queue.of_pipelines())
    if supply is not None:
        placed: Mapping[int, int] = {job: placement.copies for job, placement in supply.plan.placed.items()}
        free_capacity = of_plan(supply.nodes, supply.plan, memory.left)
        view = _View(now, *rows, supply.demands, placed, free_capacity, snapshot, supply.nodes.keys())
    else:
        names = {row.name for row in snapshot.nodes if row.open and row.gres}
        demand_list = demands(snapshot.jobs, snapshot.nodes, names, now)
        free_capacity, placed = of_counts(snapshot.nodes, demand_list)
        view = _View(now, *rows, demand_list, placed, free_capacity, snapshot, names)
    for row in view.of_arrays:
        assert row.array_job is not None
        view.members.setdefault(row.array_job, set()).add(row.job_id)
        if row.pending and (row.array_job not in view.waiting or row.tasks > 1):
            view.waiting[row.array_job] = row
    return view


# -- answers of the record -------------------------------------------------------------------------------------------


def _learn(snapshot: ClusterSnapshot, memory: DispatchMemory) -> None:
    """Process queried decisions and runs of arrays."""
    answers, now = snapshot.answers, snapshot.now
    for name, row in answers.decisions.items():
        if row is None:
            delay_s = min(2 * memory.absent[name][1], _ABSENT_S[1]) if name in memory.absent else _ABSENT_S[0]
            memory.absent[name] = now + delay_s, delay_s
        else:
            memory.absent.pop(name, None)
            keep(memory.promises, name, promise_from_record(row))
    if len(memory.absent) > REMEMBERED:
        memory.absent.clear()
    if answers.arrays is not None:
        memory.runs = {
            array: tuple(Task(run.started, run.ended, run.state == "COMPLETED") for run in listed)
            for array, listed in answers.arrays.items()
        }
        fresh = answers.asked.throttled - memory.replayed
        submitted = _submitted(snapshot.jobs, fresh) if fresh else {}
        memory.bounds.replay(
            action
            for action in answers.throttles
            if action["job_id"] in fresh and action.get("ts", now) >= submitted.get(action["job_id"], 0.0) - _CLOCKS_S
        )
        memory.replayed |= fresh


def _submitted(jobs: Iterable[JobRow], arrays: Collection[int]) -> dict[int, float]:
    """Return when these arrays were submitted, if known: Slurm may have reused the number of an earlier one.

    The submission time of a requeued task is that of its requeue.
    """
    times: dict[int, float] = {}
    for row in jobs:
        array = row.array_job
        if array is not None and array in arrays and not row.restarts:
            times[array] = min(row.submit, times.get(array, row.submit))
    return times


# -- arrays ------------------------------------------------------------------------------------------------------------


def _elastic(view: _View, memory: DispatchMemory) -> tuple[list[ElasticArray], set[int]]:
    """Return the elastic arrays whose former throttles are known, and the ids of the others."""
    arrays = elastic_arrays(view.of_arrays)
    present = {array.array for array in arrays}
    memory.bounds.forget_but(present)
    memory.replayed &= present
    memory.runs = {array: runs for array, runs in memory.runs.items() if array in present}
    return [array for array in arrays if array.array in memory.replayed], present - memory.replayed


def _placeable(
    view: _View, waiting_arrays: Sequence[ElasticArray], memory: DispatchMemory, predictions: Predictions
) -> list[ElasticArray]:
    """Return the arrays with the prediction and the nodes of their tasks, whatever prevents these from starting now."""
    rows = [replace(view.waiting[array.array], reason="", throttle=None) for array in waiting_arrays]
    found = demands(rows, view.snapshot.nodes, view.managed, view.now) if rows else ()
    pools = {demand.job: demand.pool for demand in found}
    starts = instance_starts(view.of_arrays)
    memory.loads.forget_but(starts)
    arrays = []
    for array, row in zip(waiting_arrays, rows, strict=True):
        hints = hints_of(array.comment)
        rate = None if hints is None else predictions.rates(hints, row.partition).get(array.profile)
        instances = starts.get(array.array, {})  # of a service; an array with a deadline has none
        arrays.append(
            replace(
                known(array, memory.runs.get(array.array, ()), rate, pools.get(row.job_id, frozenset())),
                placed=sum(view.placed.get(job, 0) for job in view.members[array.array]),
                load=memory.loads.load(array.array, instances, array.limit_ms, view.now),
            )
        )
    return arrays


def _add_reports(snapshot: ClusterSnapshot, memory: DispatchMemory) -> None:
    """Process reports of services' instances since the last snapshot."""
    if not snapshot.reports:
        return
    reporting = {run[0] for run, _ in snapshot.reports}
    running = instance_starts(row for row in snapshot.jobs if row.job_id in reporting)
    starts = {run: begun for runs in running.values() for run, begun in runs.items()}
    for run, report in snapshot.reports:
        if run in starts:
            memory.loads.add_report(run, starts[run], report, snapshot.now)


def _count_served(view: _View, arrays: Sequence[ElasticArray], memory: DispatchMemory) -> None:
    """Add the service that users got since the last decision, and for new arrays the service before it."""
    running, now = in_use(view.of_arrays), view.now
    window_s = HISTORY * session_s(arrays)
    memory.served.count(now, running, window_s)
    for array in arrays:
        memory.served.learn(array.array, array.user, had(array, now - window_s, now))
    for number, (user, _) in running.items():
        if number not in view.waiting:  # all of its tasks have started, so the record is not queried
            memory.served.learn(number, user, 0.0)


# -- results ---------------------------------------------------------------------------------------------------------


def settle_dispatch(outcomes: Iterable[DispatchOutcome], memory: DispatchMemory) -> tuple[DispatchOutcome, ...]:
    """Process the results of applied changes; return those that Slurm confirmed or refused."""
    confirmed = []
    for outcome in outcomes:
        change = outcome.change
        if not outcome.applied:
            continue
        if isinstance(change, Throttle):
            memory.bounds.set(change.array.array, change.after)
        if outcome.unsure:
            memory.unsure.append((change, outcome.error))
            memory.last = None  # decide on the next snapshot, which shows the result
            continue
        confirmed.append(outcome)
        if outcome.error:
            _refused(change, outcome.at, memory)
    return tuple(confirmed)


def _refused(change: Retype | Throttle, at: float, memory: DispatchMemory) -> None:
    if isinstance(change, Retype):
        memory.turns.bar(change)
    else:
        memory.refused[change.array.array] = at + memory.turns.hold_s


def _verify(view: _View, memory: DispatchMemory) -> tuple[DispatchOutcome, ...]:
    """Check the results of changes that Slurm did not confirm."""
    unsure, memory.unsure = memory.unsure, []
    present = {name_of(row): row for row in view.jobs.values()} if unsure else {}
    outcomes = []
    for change, error in unsure:
        if isinstance(change, Retype):
            row = next((present[name] for name in change.names if name in present), None)
            changed = row is not None and row.comment != change.pending.row.comment
        else:
            row = view.waiting.get(change.array.array)
            changed = row is None or row.tasks == 1 or row.throttle == change.after
        if not changed:
            _refused(change, view.now, memory)
        outcomes.append(DispatchOutcome(change, view.now, "" if changed else error))
    return tuple(outcomes)


def action_row(change: Retype | Throttle, at: float, outcome: str = "", *, dry_run: bool = False) -> dict[str, Any]:
    """Return a change and its result in the record's format."""
    row: dict[str, Any] = {"ts": at, "restart": 0, "why": change.why, "dry_run": dry_run, "outcome": outcome or None}
    if isinstance(change, Throttle):
        before, after = shown_throttle(change.array.throttle), shown_throttle(change.after)
        return {**row, "job_id": change.array.array, "kind": "throttle", "before": before, "after": after}
    pending = change.pending
    before, after = change.profile_text(pending.profile), change.profile_text(change.after)
    job, restart = pending.row.job_id, pending.row.restarts
    return {**row, "job_id": job, "restart": restart, "kind": "retype", "before": before, "after": after}

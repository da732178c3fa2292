"""Build the input of a lending round from the states of Slurm, the nodes and supply."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import inf
from typing import Final

from slurm_migbatch.decide.capacity.demand import DemandBook, begin_not_shown, unlocated, waits_for_begin
from slurm_migbatch.decide.capacity.facts import GpuFacts, NodeFacts
from slurm_migbatch.decide.capacity.model import ClusterPlan, Demand
from slurm_migbatch.decide.capacity.queue import JobQueue, holds_slices
from slurm_migbatch.decide.capacity.spare import by_size
from slurm_migbatch.decide.lending.allocation import RestartCosts
from slurm_migbatch.decide.lending.ledger import (
    EXPECTED_S,
    OTHER_SLICE,
    REQUEUE_DELAY_S,
    JobView,
    Ledger,
    LoanHistory,
    Place,
    State,
)
from slurm_migbatch.decide.lending.model import LendingView, PendingLoan, WaitingInference
from slurm_migbatch.decide.lending.values import ElasticJob, GpuCapacity, LentSlot, SlotReference
from slurm_migbatch.decide.snapshot import Run
from slurm_migbatch.mig.layout import LayoutError, Slot
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm.client import JobRow, NodeRow
from slurm_migbatch.workload.loans import forgets, loan_hints

_ANY: Final = "gres:mig:1g.10gb:1"
_NOBODY: Final = (0, 0)
_MOST_AWAY: Final = 1000
"""GPUs that are not reported now and remembered all the same."""


class PoolBook:
    """Demands of jobs as if they were pending for any slice; those of unchanged jobs are kept from round to round."""

    def __init__(self) -> None:
        self._queue, self._demands = JobQueue(), DemandBook()

    def of(self, rows: Sequence[JobRow], inputs: LendingInputs) -> list[Demand]:
        """Return the demands; an unchanged row is the same object as before."""
        self._queue.update(rows)
        return self._demands.of(self._queue, inputs.nodes, inputs.facts.keys(), inputs.now)


@dataclass
class PoolBooks:
    """The demands of pending jobs, and those of running ones that could grow."""

    pending: PoolBook = field(default_factory=PoolBook)
    growing: PoolBook = field(default_factory=PoolBook)


@dataclass(frozen=True)
class LendingInputs:
    """The parts of a snapshot that a lending round uses.

    Attributes:
        plan: supply's plan of this round; None if there is none (then nothing is lent).
        wanted: the demands that the plan was made for.
        training_only: partitions that run only elastic training.
        books: caches of earlier snapshots.
    """

    now: float
    rows: Sequence[JobRow]
    nodes: Sequence[NodeRow]
    facts: Mapping[str, NodeFacts]
    plan: ClusterPlan | None
    wanted: Sequence[Demand]
    training_only: frozenset[str] = frozenset()
    books: PoolBooks = field(default_factory=PoolBooks)


@dataclass(frozen=True)
class RunCosts:
    """Estimates of one run.

    Attributes:
        restart_s: cost of a restart in seconds. `unsaved_s`: work that it would lose, in seconds.
    """

    restart_s: float = 30.0
    unsaved_s: float = 0.0
    reported: bool = False


@dataclass(frozen=True)
class LendingKnowledge:
    """Estimates of training jobs.

    Attributes:
        speeds: of each profile that a job may have, its speed relative to the whole GPU; 0 if it does not fit.
        costs: of a job's current run.
        left_s: remaining seconds on the whole GPU; infinite if unknown.
        needs_s: the same, as the job itself states it; None: it does not.
    """

    speeds: Callable[[JobView], Mapping[Profile, float]]
    costs: Callable[[JobView], RunCosts] = lambda job_view: RunCosts()
    left_s: Callable[[JobView], float] = lambda job_view: inf
    needs_s: Callable[[JobView], float | None] = lambda job_view: None


@dataclass
class Idleness:
    """Since when all free space of each GPU (by UUID) has been free; loans count as free."""

    since: dict[str, float] = field(default_factory=dict)
    _taken: dict[str, int] = field(default_factory=dict)

    def update(self, uuid: str, taken: int, now: float) -> float:
        """Return since when (unix seconds) all free space of a GPU has been free.

        `taken`: bit mask of the memory slices in use by others than loans.
        """
        if self._taken.get(uuid, taken) & ~taken:
            self.since[uuid] = now
        self._taken[uuid] = taken
        return self.since.get(uuid, 0.0)

    def keep(self, uuids: Collection[str]) -> None:
        """Forget all other GPUs if many are stored: a node may report new UUIDs each time."""
        if len(self._taken) > 2 * len(uuids) + _MOST_AWAY:
            self.since = {uuid: at for uuid, at in self.since.items() if uuid in uuids}
            self._taken = {uuid: taken for uuid, taken in self._taken.items() if uuid in uuids}


def job_views_of(rows: Sequence[JobRow], partitions: Collection[str]) -> dict[int, JobView]:
    """Return every elastic training job, in Slurm's order."""
    job_views = {}
    for row in rows:
        hints = loan_hints(row.comment, row.partition, row.gres, partitions)
        if hints is not None:
            job_views[row.job_id] = JobView(row, hints)
    return job_views


def without_false_runs(facts: Mapping[str, NodeFacts], job_views: Mapping[int, JobView]) -> Mapping[str, NodeFacts]:
    """Return the nodes' reports without the runs of training jobs that Slurm has on other nodes.

    Their slices count as nobody's. root on a node can report any run; its job would be stopped for a slice that it does
    not hold.
    """
    rows = [job_view.row for job_view in job_views.values() if job_view.row.nodes]
    nodes_of_run = {(row.job_id, row.restarts): row.nodes for row in rows}

    def is_false(name: str, run: Run) -> bool:
        return name not in nodes_of_run.get(run, (name,))

    def without(name: str, gpu: GpuFacts) -> GpuFacts:
        leases = tuple([(slot, _NOBODY if is_false(name, run) else run) for slot, run in gpu.leases])
        return replace(gpu, leases=leases, guests=tuple([pair for pair in gpu.guests if not is_false(name, pair[1])]))

    corrected = {
        name: replace(node, gpus=tuple([without(name, gpu) for gpu in node.gpus]))
        for name, node in facts.items()
        if any(is_false(name, run) for gpu in node.gpus for _, run in (*gpu.leases, *gpu.guests))
    }
    return {**facts, **corrected} if corrected else facts


def places_of(facts: Mapping[str, NodeFacts]) -> dict[Run, Place]:
    """Return where each run has its slice."""
    return {
        run: (name, gpu.uuid, slot)
        for name, node in facts.items()
        for gpu in node.gpus
        for slot, run in (*gpu.leases, *gpu.guests)
    }


def view_of(
    inputs: LendingInputs,
    job_views: Mapping[int, JobView],
    ledger: Ledger,
    idle: Idleness,
    knowledge: LendingKnowledge,
    reserve: Mapping[Profile, int],
    *,
    blackout: bool = False,
    barred: Collection[int] = (),
) -> LendingView:
    """Return the input of a lending round.

    Args:
        ledger: updated by this snapshot.
        barred: jobs that are not to be released now (Slurm has just refused it).
    """
    capacities, about_to_be_free, places = _capacities(inputs, job_views, ledger, idle)
    pools = pools_of(inputs, job_views, ledger)
    growing = growth_nodes(inputs, job_views, ledger)
    regions = {job: pool.nodes for job, pool in pools.items()} | growing
    return LendingView(
        now=inputs.now,
        capacities=tuple(capacities),
        about_to_be_free=about_to_be_free,
        starts=tuple(_starts(inputs, job_views)),
        elastic_jobs=tuple(_elastic_jobs(job_views, ledger, knowledge, places, regions, barred)),
        promises=(
            *_promises(inputs, job_views, ledger, places),
            *_held_to_grow(ledger, pools.keys() - frozenset(barred)),
            *_held_to_return(ledger, job_views, knowledge, pools, inputs.now),
        ),
        loans=dict(ledger.open),
        ends_for=dict(ledger.ends_for),
        job_views=job_views,
        lent=_lent(ledger, job_views),
        reserve=reserve,
        blackout=blackout,
        away={job: pool.away for job, pool in pools.items() if pool.away},
        early=frozenset(job for job, pool in pools.items() if pool.early),
    )


# -- GPUs --------------------------------------------------------------------------------------------------------------


def _capacities(
    inputs: LendingInputs, job_views: Mapping[int, JobView], ledger: Ledger, idle: Idleness
) -> tuple[list[GpuCapacity], dict[tuple[str, int], int], dict[int, SlotReference]]:
    active_runs = {(row.job_id, row.restarts) for row in inputs.rows if row.active and row.state != "COMPLETING"}
    unread = {row.job_id for row in inputs.rows if row.unread}
    open_nodes = {row.name for row in inputs.nodes if row.open}
    training_nodes = {
        row.name for row in inputs.nodes if row.partitions and inputs.training_only.issuperset(row.partitions)
    }
    plan = inputs.plan
    promised = _promised(inputs, job_views, _starting(inputs, ledger))
    reserved_gpus = {
        place[1] for reservation in (plan.reservations if plan is not None else ()) for place in reservation.places
    }
    cpus = _free_cpus(inputs, job_views, ledger)
    idle.keep({gpu.uuid for node in inputs.facts.values() for gpu in node.gpus})
    capacities: list[GpuCapacity] = []
    about_to_be_free: dict[tuple[str, int], int] = {}
    places: dict[int, SlotReference] = {}
    for name, node in inputs.facts.items():
        closed = name not in open_nodes or not node.healthy or plan is None or name not in plan.nodes
        for number, gpu in enumerate(node.gpus):
            taken, lent = _split(gpu, ledger)
            idle_since = idle.update(gpu.uuid, sum(slot.placement.mask for slot in taken), inputs.now)
            if closed:
                continue
            assert plan is not None
            promised_slots = [
                slot for slot in promised.get(gpu.uuid, ()) if not any(_touch(slot, used) for used in taken)
            ]
            not_lendable = plan.nodes[name].fixed or gpu.uuid in reserved_gpus
            reclaimed = inf if not_lendable else ledger.reclaimed.get(gpu.uuid)
            capacity = GpuCapacity(
                name,
                number,
                gpu.geometry,
                (*taken, *promised_slots),
                tuple(lent),
                idle_since,
                reclaimed,
                own=name in training_nodes,
                cpus=cpus.get(name),
            )
            try:
                gpu.geometry.check(capacity.used)
            except LayoutError:  # the node's report and Slurm's state do not agree yet
                continue
            capacities.append(capacity)
            places.update(
                {run[0]: SlotReference(name, number, slot) for slot, run in gpu.leases if _is_open(run, ledger)}
            )
            guest_slots = {slot for slot, run in gpu.guests if run in active_runs or run[0] in unread}
            leaving = (slot for slot, run in gpu.leases if run not in active_runs and run[0] not in unread)
            leaving_mask = sum(slot.placement.mask for slot in leaving if slot not in guest_slots)
            if leaving_mask:
                about_to_be_free[name, number] = leaving_mask
    return capacities, about_to_be_free, places


def _free_cpus(inputs: LendingInputs, job_views: Mapping[int, JobView], ledger: Ledger) -> dict[str, int]:
    free = {row.name: row.cpus_free for row in inputs.nodes if row.cpus}
    for job, target in ledger.targets.items():
        if target.node in free and job in job_views and job_views[job].row.pending:
            free[target.node] -= job_views[job].row.cpus
    return free


def _split(gpu: GpuFacts, ledger: Ledger) -> tuple[list[Slot], list[LentSlot]]:
    """Return the slots of other holders, and those of loans, including ended loans that the node still reports."""
    taken = [*gpu.zombies, *(slot for slot, run in gpu.leases if run not in ledger.runs)]
    return taken, [LentSlot(slot, run[0]) for slot, run in gpu.leases if run in ledger.runs]


def _is_open(run: Run, ledger: Ledger) -> bool:
    loan = ledger.open.get(run[0])
    return loan is not None and loan.restart == run[1]


def _touch(slot: Slot, other: Slot) -> bool:
    return bool(slot.placement.mask & other.placement.mask)


def _starting(inputs: LendingInputs, ledger: Ledger) -> dict[str, Counter[Profile]]:
    """Count, by node, the slices of jobs other than loans that Slurm has started and the node does not report yet."""
    holders: dict[str, list[JobRow]] = {}
    for row in inputs.rows:
        if holds_slices(row) and row.job_id not in ledger.open:
            for name in row.nodes:
                holders.setdefault(name, []).append(row)
    return {
        name: unlocated(holders[name], {run for gpu in node.gpus for _, run in gpu.leases})
        for name, node in inputs.facts.items()
        if name in holders
    }


def _promised(
    inputs: LendingInputs, job_views: Mapping[int, JobView], starting: Mapping[str, Counter[Profile]]
) -> dict[str, list[Slot]]:
    """Return the slots of supply's plan, by GPU UUID, that are for pending inference or for jobs that are starting."""
    if inputs.plan is None:
        return {}
    need = {name: Counter(counts) for name, counts in starting.items()}
    for demand in inputs.wanted:
        placed = inputs.plan.placed.get(demand.job)
        if placed is None or demand.job in job_views:
            continue
        by_profile = Counter(demand.slices)
        count = placed.copies * demand.nodes
        for number, node in enumerate(placed.nodes):
            # supply names the nodes, not how many copies on each: assume that they are distributed evenly
            share = (count - number + len(placed.nodes) - 1) // len(placed.nodes)
            for profile, per_node in by_profile.items():
                need.setdefault(node, Counter())[profile] += per_node * share
    promised: dict[str, list[Slot]] = {}
    for node, counts in need.items():
        facts, layouts = inputs.facts.get(node), inputs.plan.nodes.get(node)
        for gpu in facts.gpus if facts is not None and layouts is not None else ():
            assert layouts is not None
            held_slots = [slot for slot, _ in gpu.leases] + list(gpu.zombies)
            for slot in layouts.layouts.get(gpu.uuid, ()):
                if counts[slot.profile] > 0 and not any(_touch(slot, used) for used in held_slots):
                    counts[slot.profile] -= 1
                    promised.setdefault(gpu.uuid, []).append(slot)
    return promised


# -- jobs --------------------------------------------------------------------------------------------------------------


def _starts(inputs: LendingInputs, job_views: Mapping[int, JobView]) -> list[WaitingInference]:
    if inputs.plan is None:
        return []
    waiting = frozenset(inputs.plan.waiting) - inputs.plan.unplaceable
    starts = []
    for demand in inputs.wanted:
        if demand.job in waiting and demand.job not in job_views and demand.parts:
            placed = inputs.plan.placed.get(demand.job)
            copies = demand.copies - (placed.copies if placed is not None else 0)
            starts.append(WaitingInference(demand.job, demand.slices, demand.pool, demand.nodes, max(1, copies)))
    return starts


@dataclass(frozen=True)
class LoanPool:
    """Where a pending job could run after a release.

    Attributes:
        away: where Slurm must not start it, see `pools_of`.
        early: whether it starts before Slurm's delay is over, on nodes where slurmd may still know its last run.
    """

    nodes: frozenset[str]
    away: frozenset[str] = frozenset()
    early: bool = False


def pools_of(inputs: LendingInputs, job_views: Mapping[int, JobView], ledger: Ledger) -> dict[int, LoanPool]:
    """Return where pending jobs could run after a release, if Slurm lets them run at all.

    Up to 23.02 slurmd often confuses the next run of a job with its last one, until the last run's credentials have
    expired: it starts no Prolog, so there is no slice, and the run ends at once. With these releases a job starts
    before Slurm's delay after a requeue is over on other nodes only. A job that may use no other node is tried there
    nevertheless, but only once; after that it waits until the delay is over.
    """
    demand_rows, early = [], set()
    for row in inputs.rows:
        job_view = job_views.get(row.job_id)
        if job_view is not None and row.pending and job_view.hints.waiting and row.job_id not in ledger.open:
            reason = row.reason
            if delayed(row, ledger.past.get(row.job_id), inputs.now):
                early.add(row.job_id)
                reason = "None"
            elif begin_not_shown(row, inputs.now):
                reason = "BeginTime"
            demand_rows.append(_for_any_slice(row, reason))
        elif row.active and row.array_job is not None:
            demand_rows.append(row)  # it counts towards the limit of its array
    pool_demands = inputs.books.pending.of(demand_rows, inputs)
    pools = {
        demand.job: _pool(job_views[demand.job].row, demand.pool, ledger, early=demand.job in early)
        for demand in pool_demands
        if demand.job in job_views
    }
    return {job: pool for job, pool in pools.items() if pool is not None}


def _pool(row: JobRow, nodes: frozenset[str], ledger: Ledger, *, early: bool) -> LoanPool | None:
    """Return the nodes for which a job may be released now; None if there are none."""
    if forgets(row.gres) or not row.restarts:
        return LoanPool(nodes)
    confusing_nodes = ledger.taken_for_last(row.job_id)
    known = not early or bool(ledger.past.get(row.job_id, LoanHistory()).node)
    if known and not confusing_nodes:
        return LoanPool(nodes)
    if known and nodes - confusing_nodes:
        return LoanPool(nodes - confusing_nodes, away=confusing_nodes)
    return LoanPool(nodes, early=True) if row.restarts == 1 else None


def growth_nodes(inputs: LendingInputs, job_views: Mapping[int, JobView], ledger: Ledger) -> dict[int, frozenset[str]]:
    """Return the nodes where each running loan may continue if stopped to grow; for its current node see `pools_of`."""
    rows = [
        _as_pending(job_views[job].row)
        for job, loan in ledger.open.items()
        if loan.state is State.RUNNING and job in job_views
    ]
    regions = {}
    for demand in inputs.books.growing.of(rows, inputs):
        row = job_views[demand.job].row
        others = demand.pool if forgets(row.gres) else demand.pool.difference(row.nodes)
        regions[demand.job] = others or (demand.pool if not row.restarts else others)
    return regions


@lru_cache(maxsize=1 << 14)
def _for_any_slice(row: JobRow, reason: str) -> JobRow:
    """Return a pending job as if it requested any slice, with this reason. Cached, because rounds repeat the query."""
    return replace(row, gres=_ANY, reason=reason)


@lru_cache(maxsize=1 << 14)
def _as_pending(row: JobRow) -> JobRow:
    """Return the job as if it were pending for any slice. Cached, because rounds repeat the query."""
    return replace(row, state="PENDING", reason="None", nodes=(), gres=_ANY, array_job=None)


def delayed(row: JobRow, past: LoanHistory | None, now: float) -> bool:
    """Return whether only Slurm's delay after a requeue keeps a job from starting."""
    if row.eligible is None or past is None or past.restart != row.restarts - 1:
        return False
    return waits_for_begin(row, now) and row.eligible <= now + REQUEUE_DELAY_S


def _elastic_jobs(
    job_views: Mapping[int, JobView],
    ledger: Ledger,
    knowledge: LendingKnowledge,
    places: Mapping[int, SlotReference],
    regions: Mapping[int, frozenset[str]],
    barred: Collection[int],
) -> list[ElasticJob]:
    elastic_jobs = []
    for job, job_view in job_views.items():
        loan, place = ledger.open.get(job), places.get(job)
        if loan is None and (job not in regions or job in barred):
            continue
        if loan is not None and (place is None or loan.state is State.RELEASED):
            continue
        costs, past = knowledge.costs(job_view), ledger.past.get(job, LoanHistory())
        restart = costs.restart_s + (costs.unsaved_s if not job_view.hints.signal else 0.0)
        elastic_jobs.append(
            ElasticJob(
                job,
                knowledge.speeds(job_view),
                account=job_view.row.account,
                nodes=regions.get(job),
                place=place,
                since=(loan.started or loan.decided) if loan is not None else 0.0,
                restarts=job_view.row.restarts,
                hits=past.hits,
                costs=RestartCosts(restart, restart),
                left_s=knowledge.left_s(job_view),
                needs_s=knowledge.needs_s(job_view),
                reported=costs.reported,
                target=ledger.targets.get(job),
                cpus=job_view.row.cpus,
                stopped=loan is None and _was_stopped(job_view.row, past),
            )
        )
    return elastic_jobs


def _promises(
    inputs: LendingInputs, job_views: Mapping[int, JobView], ledger: Ledger, places: Mapping[int, SlotReference]
) -> list[PendingLoan]:
    pools = {demand.job: demand.pool for demand in inputs.wanted}
    pending_loans = []
    for job, loan in ledger.open.items():
        if job in places or job not in job_views or loan.state in (State.WITHDRAWN, State.REQUEUED):
            continue
        if job_views[job].hints.guest:  # it shares another loan's slot
            continue
        nodes = frozenset(job_views[job].row.nodes) or pools.get(job)
        pending_loans.append(PendingLoan(job, loan.slice, nodes))
    return pending_loans


def _held_to_grow(ledger: Ledger, ready: Collection[int]) -> list[PendingLoan]:
    """Return the slices of jobs that were stopped for them and are not ready to be released yet."""
    return [
        PendingLoan(job, target.profile, frozenset([target.node]), target.gpu)
        for job, target in ledger.targets.items()
        if job not in ready
    ]


def _held_to_return(
    ledger: Ledger, job_views: Mapping[int, JobView], knowledge: LendingKnowledge, ready: Collection[int], now: float
) -> list[PendingLoan]:
    """Return the smallest useful slice of each stopped job whose target is unknown, as after a restart of migbatchd."""
    pending_loans = []
    for job, past in ledger.past.items():
        if now - past.ended >= EXPECTED_S or past.cause not in OTHER_SLICE or job not in job_views:
            continue
        job_view = job_views[job]
        handled = job in ledger.open or job in ledger.targets or job in ready
        if not handled and _was_stopped(job_view.row, past):
            useful = [profile for profile, speed in knowledge.speeds(job_view).items() if speed > 0]
            pending_loans += [PendingLoan(job, profile, None) for profile in sorted(useful, key=by_size)[:1]]
    return pending_loans


def _was_stopped(row: JobRow, past: LoanHistory) -> bool:
    """Return whether a job was stopped for another slice and has not been released since."""
    return row.pending and past.restart == row.restarts - 1 and past.cause in OTHER_SLICE


def _lent(ledger: Ledger, job_views: Mapping[int, JobView]) -> dict[str, int]:
    lent: Counter[str] = Counter()
    for loan in ledger.open.values():
        lent[loan.account] += loan.slice.compute
    for job, target in ledger.targets.items():
        current_compute = ledger.open[job].slice.compute if job in ledger.open else 0
        if job in job_views:
            lent[job_views[job].row.account] += max(0, target.profile.compute - current_compute)
    return dict(lent)

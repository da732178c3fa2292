"""Build the input of a lending round from the states of Slurm, the nodes and supply."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from math import inf
from operator import is_

from slurm_migbatch.decide.capacity.demand import unlocated
from slurm_migbatch.decide.capacity.facts import GpuFacts
from slurm_migbatch.decide.capacity.queue import holds_slices
from slurm_migbatch.decide.capacity.spare import by_size
from slurm_migbatch.decide.lending.elastic_jobs import ElasticJobs
from slurm_migbatch.decide.lending.idleness import Idleness
from slurm_migbatch.decide.lending.inputs import LendingInputs
from slurm_migbatch.decide.lending.ledger import EXPECTED_S, Ledger
from slurm_migbatch.decide.lending.loan import OTHER_SLICE, JobView, LoanHistory, State
from slurm_migbatch.decide.lending.model import LendingView, PendingLoan, WaitingInference
from slurm_migbatch.decide.lending.pools import growth_nodes, pools_of
from slurm_migbatch.decide.lending.shortages import coming_resources, resources_of, too_small
from slurm_migbatch.decide.lending.values import NOTHING, ElasticJob, GpuCapacity, LentSlot, Resources, SlotReference
from slurm_migbatch.decide.snapshot import Run
from slurm_migbatch.mig.layout import LayoutError, Slot
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm.client import WHOLE, JobRow


def view_of(
    inputs: LendingInputs,
    job_views: Mapping[int, JobView],
    ledger: Ledger,
    idle: Idleness,
    known: ElasticJobs,
    reserve: Mapping[Profile, int],
    *,
    blackout: bool = False,
    barred: Collection[int] = (),
) -> LendingView:
    """Return the input of a lending round.

    Args:
        ledger, known: updated by this snapshot.
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
        starts=tuple(_starts(inputs, job_views, ledger)),
        elastic_jobs=tuple(_elastic_jobs(inputs, job_views, ledger, known, places, regions, barred)),
        pending_loans=(
            *_without_slot(inputs, job_views, ledger, places),
            *_held_to_grow(ledger, pools.keys() - frozenset(barred)),
            *_held_to_return(ledger, job_views, known, pools, inputs.now),
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
    """Return the GPUs of open nodes, by GPU the mask of slots that are about to be free, and the places of loans."""
    active_runs = {(row.job_id, row.restarts) for row in inputs.rows if row.active and row.state != "COMPLETING"}
    unread = {row.job_id for row in inputs.rows if row.unread}
    open_nodes = {row.name for row in inputs.nodes if row.open}
    training_nodes = {
        row.name for row in inputs.nodes if row.partitions and inputs.training_only.issuperset(row.partitions)
    }
    plan = inputs.plan
    planned = _planned(inputs, job_views, _starting(inputs, ledger))
    reserved_gpus = {place[1] for reservation in plan.reservations for place in reservation.places}
    free = _free_resources(inputs, job_views, ledger)
    idle.keep({gpu.uuid for node in inputs.facts.values() for gpu in node.gpus})
    capacities: list[GpuCapacity] = []
    about_to_be_free: dict[tuple[str, int], int] = {}
    places: dict[int, SlotReference] = {}
    for name, node in inputs.facts.items():
        closed = name not in open_nodes or not node.healthy or name not in plan.nodes
        for number, gpu in enumerate(node.gpus):
            taken, lent = _split(gpu, ledger)
            idle_since = idle.update(gpu.uuid, sum(slot.placement.mask for slot in taken), inputs.now)
            if closed:
                continue
            not_lendable = plan.nodes[name].fixed or gpu.uuid in reserved_gpus
            reclaimed = inf if not_lendable else ledger.reclaimed.get(gpu.uuid)
            capacity = GpuCapacity(
                name,
                number,
                gpu.geometry,
                (*taken, *_clear_of(taken, planned.get(gpu.uuid, ()))),
                tuple(lent),
                idle_since,
                reclaimed,
                own=name in training_nodes,
                cpus=free[name][0] if name in free else inf,
                memory=free[name][1] if name in free else inf,
            )
            try:
                gpu.geometry.check(capacity.used)
            except LayoutError:  # the node's report and Slurm's state do not agree yet
                continue
            capacities.append(capacity)
            places.update(
                {run[0]: SlotReference(name, number, slot) for slot, run in gpu.leases if _is_open(run, ledger)}
            )
            if leaving_mask := _leaving_mask(gpu, active_runs, unread):
                about_to_be_free[name, number] = leaving_mask
    return capacities, about_to_be_free, places


def _clear_of(taken: Iterable[Slot], planned: Iterable[Slot]) -> Iterator[Slot]:
    """Yield the planned slots that overlap no taken one."""
    return (slot for slot in planned if not any(slot.placement.overlaps(used.placement) for used in taken))


def _leaving_mask(gpu: GpuFacts, active: Collection[tuple[int, int]], unread: Collection[int]) -> int:
    """Return the mask of leased slots that no active run has any more; those of unread jobs count as active."""
    guest_slots = {slot for slot, run in gpu.guests if run in active or run[0] in unread}
    leaving = (slot for slot, run in gpu.leases if run not in active and run[0] not in unread)
    return sum(slot.placement.mask for slot in leaving if slot not in guest_slots)


def _free_resources(
    inputs: LendingInputs, job_views: Mapping[int, JobView], ledger: Ledger
) -> dict[str, tuple[float, float]]:
    """Return the CPUs and MiB of each node that no job has, and that are kept for no stopped job; infinite: unknown."""
    free = {row.name: (row.cpus_free if row.cpus else inf, row.memory_free) for row in inputs.nodes}
    largest = _largest_memory(inputs)
    for job, target in ledger.targets.items():
        if target.node in free and job in job_views and job_views[job].row.pending:
            row, (cpus, memory) = job_views[job].row, free[target.node]
            free[target.node] = cpus - row.cpus, memory - _requested_memory(row, largest)
    return free


def _largest_memory(inputs: LendingInputs) -> int:
    """Return the MiB of the node with most memory."""
    return max((node.memory for node in inputs.nodes), default=0)


def _requested_memory(row: JobRow, largest: int) -> int:
    """Return the MiB that a pending job requests on a node; for a whole node `largest`, that of the largest one."""
    return largest if row.memory_each == WHOLE else row.memory_each


def _split(gpu: GpuFacts, ledger: Ledger) -> tuple[list[Slot], list[LentSlot]]:
    """Return the slots of other holders, and those of loans, including ended loans that the node still reports."""
    taken = [*gpu.zombies, *(slot for slot, run in gpu.leases if run not in ledger.runs)]
    return taken, [LentSlot(slot, run[0]) for slot, run in gpu.leases if run in ledger.runs]


def _is_open(run: Run, ledger: Ledger) -> bool:
    loan = ledger.open.get(run[0])
    return loan is not None and loan.restart == run[1]


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


def _planned(
    inputs: LendingInputs, job_views: Mapping[int, JobView], starting: Mapping[str, Counter[Profile]]
) -> dict[str, list[Slot]]:
    """Return the slots of supply's plan, by GPU UUID, that are for pending inference or for jobs that are starting."""
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
    planned: dict[str, list[Slot]] = {}
    for node, counts in need.items():
        facts, layouts = inputs.facts.get(node), inputs.plan.nodes.get(node)
        for gpu in facts.gpus if facts is not None and layouts is not None else ():
            assert layouts is not None
            held_slots = [*(slot for slot, _ in gpu.leases), *gpu.zombies]
            for slot in layouts.layouts.get(gpu.uuid, ()):
                if counts[slot.profile] > 0 and not any(slot.placement.overlaps(held.placement) for held in held_slots):
                    counts[slot.profile] -= 1
                    planned.setdefault(gpu.uuid, []).append(slot)
    return planned


# -- jobs --------------------------------------------------------------------------------------------------------------


def _starts(inputs: LendingInputs, job_views: Mapping[int, JobView], ledger: Ledger) -> list[WaitingInference]:
    """Return the jobs for which loans may end, each with the nodes where that could let it start."""
    waiting = frozenset(inputs.plan.waiting) - inputs.plan.unplaceable
    starts = []
    alone, obtainable = dict[int, JobRow](), dict[str, Resources]()
    if waiting and ledger.open:
        obtainable = coming_resources(inputs, ledger, of_every_loan=True)
        alone = {row.job_id: row for row in inputs.rows if row.num_nodes == 1 and row.job_id in waiting}
    pools: dict[tuple[object, ...], frozenset[str]] = {}  # few, while there may be very many jobs
    for demand in inputs.wanted:
        if demand.job in waiting and demand.job not in job_views and demand.parts:
            placed = inputs.plan.placed.get(demand.job)
            copies = demand.copies - (placed.copies if placed is not None else 0)
            row = alone.get(demand.job)
            key = demand.pool, row and (row.cpus, row.memory_per_node, row.memory_per_cpu)
            if key not in pools:
                pools[key] = demand.pool - (too_small(row, inputs.nodes, obtainable) if row else frozenset())
            starts.append(WaitingInference(demand.job, demand.slices, pools[key], demand.nodes, max(1, copies)))
    return starts


def _elastic_jobs(
    inputs: LendingInputs,
    job_views: Mapping[int, JobView],
    ledger: Ledger,
    known: ElasticJobs,
    places: Mapping[int, SlotReference],
    regions: Mapping[int, frozenset[str]],
    barred: Collection[int],
) -> list[ElasticJob]:
    """Return the pending training jobs that may get a loan, and those that run on one."""
    elastic_jobs = []
    now, nodes, largest = inputs.now, {row.name: row for row in inputs.nodes}, _largest_memory(inputs)
    before, known.waiting = known.waiting, {}
    for job, job_view in job_views.items():
        loan, place = ledger.open.get(job), places.get(job)
        if loan is None and (job not in regions or job in barred):
            continue
        if loan is not None and (place is None or loan.state is State.RELEASED):
            continue
        unseen = loan is None and job not in ledger.past and job not in ledger.targets and known.never_ran(job_view)
        by_profile, region = known.speeds(job_view), regions.get(job)
        basis = (job_view, by_profile, region, largest)
        if unseen and job in before and all(map(is_, before[job], basis)):
            known.waiting[job] = before[job]
            elastic_jobs.append(before[job][-1])
            continue
        past = ledger.past.get(job, LoanHistory())
        elastic_job = ElasticJob(
            job,
            by_profile,
            account=job_view.row.account,
            nodes=region,
            place=place,
            since=(loan.started or loan.decided) if loan is not None else 0.0,
            restarts=job_view.row.restarts,
            hits=past.hits,
            restart_s=known.restart_s(job_view, now),
            left_s=known.left_s(job_view, now),
            needs_s=known.needs_s(job_view),
            reported=(job, job_view.row.restarts) in known.reports,
            target=ledger.targets.get(job),
            cpus=job_view.row.cpus,
            memory=(
                resources_of(job_view.row, nodes[place.node]).memory
                if place is not None
                else _requested_memory(job_view.row, largest)
            ),
            stopped=loan is None and _was_stopped(job_view.row, past),
        )
        elastic_jobs.append(elastic_job)
        if unseen:
            known.waiting[job] = (*basis, elastic_job)
    return elastic_jobs


def _without_slot(
    inputs: LendingInputs, job_views: Mapping[int, JobView], ledger: Ledger, places: Mapping[int, SlotReference]
) -> list[PendingLoan]:
    pools, largest = {demand.job: demand.pool for demand in inputs.wanted}, _largest_memory(inputs)
    pending_loans = []
    for job, loan in ledger.open.items():
        if job in places or job not in job_views or loan.state in (State.WITHDRAWN, State.REQUEUED):
            continue
        if job_views[job].hints.guest:  # it shares another loan's slot
            continue
        row = job_views[job].row
        requested = Resources(row.cpus, _requested_memory(row, largest)) if row.pending else NOTHING
        pending_loans.append(PendingLoan(job, loan.slice, frozenset(row.nodes) or pools.get(job), requested=requested))
    return pending_loans


def _held_to_grow(ledger: Ledger, ready: Collection[int]) -> list[PendingLoan]:
    """Return the slices of jobs that were stopped for them and are not ready to be released yet."""
    return [
        PendingLoan(job, target.profile, frozenset([target.node]), target.gpu)
        for job, target in ledger.targets.items()
        if job not in ready
    ]


def _held_to_return(
    ledger: Ledger, job_views: Mapping[int, JobView], known: ElasticJobs, ready: Collection[int], now: float
) -> list[PendingLoan]:
    """Return the smallest useful slice of each stopped job whose target is unknown, as after a restart of migbatchd."""
    pending_loans = []
    for job, past in ledger.past.items():
        if now - past.ended >= EXPECTED_S or past.cause not in OTHER_SLICE or job not in job_views:
            continue
        job_view = job_views[job]
        handled = job in ledger.open or job in ledger.targets or job in ready
        if not handled and _was_stopped(job_view.row, past):
            useful = [profile for profile, speed in known.speeds(job_view).items() if speed > 0]
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

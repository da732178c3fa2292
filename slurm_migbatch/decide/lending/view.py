"""From what Slurm, the nodes and supply say to the view that a round decides on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Final

from slurm_migbatch.decide.capacity.demand import demands
from slurm_migbatch.decide.capacity.facts import GpuFacts, NodeFacts
from slurm_migbatch.decide.capacity.model import Demand, Plan
from slurm_migbatch.decide.lending.allocation import Elastic
from slurm_migbatch.decide.lending.ledger import JobView, Ledger, LoanHistory, Place, State
from slurm_migbatch.decide.lending.model import LendingView, PendingLoan, WaitingInference
from slurm_migbatch.decide.lending.values import ElasticJob, GpuCapacity, LentSlot, SlotReference
from slurm_migbatch.mig.layout import LayoutError, Slot
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm.client import JobRow, NodeRow
from slurm_migbatch.workload.loans import forgets, loan_hints

REQUEUE_DELAY_S: Final = 150.0
"""Slurm's own delay of a requeued job is about two minutes; a later begin is its user's wish."""
_ANY: Final = "gres:mig:1g.10gb:1"

Run = tuple[int, int]
"""A job and its restart count."""


@dataclass(frozen=True)
class LendingInputs:
    """What one look shows, before it is interpreted.

    Attributes:
        plan: supply's plan of this look; None where there is none (then nothing is lent).
        wanted: the demands that it was made for.
    """

    now: float
    rows: Sequence[JobRow]
    nodes: Sequence[NodeRow]
    facts: Mapping[str, NodeFacts]
    plan: Plan | None
    wanted: Sequence[Demand]


@dataclass(frozen=True)
class Costs:
    """What is known of one run: seconds that a restart costs it, and work that it would lose, in seconds."""

    restart_s: float = 30.0
    unsaved_s: float = 0.0


@dataclass(frozen=True)
class LendingKnowledge:
    """What others know of training jobs.

    Attributes:
        speeds: of each profile that a job may have, its speed relative to the whole GPU; 0 where it does not fit.
        costs: of a job's present run.
        left_s: seconds that it would still need on the whole GPU; infinite where that is not known.
        needs_s: the same by what it said of itself; None: it did not.
    """

    speeds: Callable[[JobView], Mapping[Profile, float]]
    costs: Callable[[JobView], Costs] = lambda job_view: Costs()
    left_s: Callable[[JobView], float] = lambda job_view: inf
    needs_s: Callable[[JobView], float | None] = lambda job_view: None


@dataclass
class Idleness:
    """Since when the free space of each GPU (by UUID) has been as large as it is; loans count as free."""

    since: dict[str, float] = field(default_factory=dict)
    _taken: dict[str, int] = field(default_factory=dict)

    def look(self, uuid: str, taken: int, now: float) -> float:
        """`taken`: memory slices (bits) that are in use by others than loans."""
        if self._taken.get(uuid, taken) & ~taken:
            self.since[uuid] = now
        self._taken[uuid] = taken
        return self.since.get(uuid, 0.0)


def job_views_of(rows: Sequence[JobRow], partitions: Collection[str]) -> dict[int, JobView]:
    """Every elastic training job, in Slurm's order."""
    found = {}
    for row in rows:
        hints = loan_hints(row.comment, row.partition, row.gres, partitions)
        if hints is not None:
            found[row.job_id] = JobView(row, hints)
    return found


def places_of(facts: Mapping[str, NodeFacts]) -> dict[Run, Place]:
    """Where each run has its slice."""
    return {
        run: (name, gpu.uuid, slot)
        for name, node in facts.items()
        for gpu in node.gpus
        for slot, run in (*gpu.leases, *gpu.guests)
    }


def view_of(
    scene: LendingInputs,
    job_views: Mapping[int, JobView],
    ledger: Ledger,
    idle: Idleness,
    knowledge: LendingKnowledge,
    reserve: Mapping[Profile, int],
    *,
    blackout: bool = False,
    barred: Collection[int] = (),
) -> LendingView:
    """Return what a round of lending decides on.

    Args:
        ledger: after it has followed this look.
        barred: jobs that are not to be released now (Slurm refused it a moment ago).
    """
    spaces, passing, seats = _spaces(scene, job_views, ledger, idle)
    return LendingView(
        now=scene.now,
        spaces=tuple(spaces),
        passing=passing,
        starts=tuple(_starts(scene, job_views)),
        elastic_jobs=tuple(_elastic_jobs(scene, job_views, ledger, knowledge, seats, barred)),
        promises=tuple(_promises(scene, job_views, ledger, seats)),
        loans=dict(ledger.open),
        job_views=job_views,
        lent=_lent(ledger),
        reserve=reserve,
        blackout=blackout,
    )


# -- GPUs --------------------------------------------------------------------------------------------------------------


def _spaces(
    scene: LendingInputs, job_views: Mapping[int, JobView], ledger: Ledger, idle: Idleness
) -> tuple[list[GpuCapacity], dict[tuple[str, int], int], dict[int, SlotReference]]:
    alive = {(row.job_id, row.restarts) for row in scene.rows if row.active and row.state != "COMPLETING"}
    unread = {row.job_id for row in scene.rows if row.unread}
    open_nodes = {row.name for row in scene.nodes if row.open}
    plan = scene.plan
    promised = _promised(scene, job_views)
    shut = {place[1] for one in (plan.reservations if plan is not None else ()) for place in one.places}
    spaces: list[GpuCapacity] = []
    passing: dict[tuple[str, int], int] = {}
    seats: dict[int, SlotReference] = {}
    for name, node in scene.facts.items():
        held = name not in open_nodes or not node.healthy or plan is None or name not in plan.nodes
        for number, gpu in enumerate(node.gpus):
            taken, lent = _split(gpu, ledger)
            since = idle.look(gpu.uuid, sum(slot.placement.mask for slot in taken), scene.now)
            if held:
                continue
            assert plan is not None
            extra = [slot for slot in promised.get(gpu.uuid, ()) if not any(_touch(slot, each) for each in taken)]
            still = plan.nodes[name].fixed or gpu.uuid in shut
            reclaimed = inf if still else ledger.reclaimed.get(gpu.uuid)
            space = GpuCapacity(name, number, gpu.geometry, (*taken, *extra), tuple(lent), since, reclaimed)
            try:
                gpu.geometry.check(space.used)
            except LayoutError:  # what the node says and what Slurm shows do not agree yet
                continue
            spaces.append(space)
            seats.update(
                {run[0]: SlotReference(name, number, slot) for slot, run in gpu.leases if _is_open(run, ledger)}
            )
            kept = {slot for slot, run in gpu.guests if run in alive or run[0] in unread}
            left = (slot for slot, run in gpu.leases if run not in alive and run[0] not in unread)
            gone = sum(slot.placement.mask for slot in left if slot not in kept)
            if gone:
                passing[name, number] = gone
    return spaces, passing, seats


def _split(gpu: GpuFacts, ledger: Ledger) -> tuple[list[Slot], list[LentSlot]]:
    """Slots of others than loans, and those of loans: of ones too that have ended unheard of by the node."""
    taken = [*gpu.zombies, *(slot for slot, run in gpu.leases if run not in ledger.runs)]
    return taken, [LentSlot(slot, run[0]) for slot, run in gpu.leases if run in ledger.runs]


def _is_open(run: Run, ledger: Ledger) -> bool:
    loan = ledger.open.get(run[0])
    return loan is not None and loan.restart == run[1]


def _touch(one: Slot, other: Slot) -> bool:
    return bool(one.placement.mask & other.placement.mask)


def _promised(scene: LendingInputs, job_views: Mapping[int, JobView]) -> dict[str, list[Slot]]:
    """Free slots of supply's plan, by GPU, that waiting inference is meant to have."""
    if scene.plan is None:
        return {}
    need: dict[str, Counter[Profile]] = {}
    for demand in scene.wanted:
        placed = scene.plan.placed.get(demand.job)
        if placed is None or demand.job in job_views:
            continue
        each = Counter(demand.slices)
        count = placed.copies * demand.nodes
        for number, node in enumerate(placed.nodes):
            # supply tells on which nodes, not how many on each: as evenly as can be
            share = (count - number + len(placed.nodes) - 1) // len(placed.nodes)
            for profile, slices in each.items():
                need.setdefault(node, Counter())[profile] += slices * share
    found: dict[str, list[Slot]] = {}
    for node, counts in need.items():
        facts, layouts = scene.facts.get(node), scene.plan.nodes.get(node)
        for gpu in facts.gpus if facts is not None and layouts is not None else ():
            assert layouts is not None
            held = [slot for slot, _ in gpu.leases] + list(gpu.zombies)
            for slot in layouts.layouts.get(gpu.uuid, ()):
                if counts[slot.profile] > 0 and not any(_touch(slot, each) for each in held):
                    counts[slot.profile] -= 1
                    found.setdefault(gpu.uuid, []).append(slot)
    return found


# -- jobs --------------------------------------------------------------------------------------------------------------


def _starts(scene: LendingInputs, job_views: Mapping[int, JobView]) -> list[WaitingInference]:
    if scene.plan is None:
        return []
    waiting = frozenset(scene.plan.waiting) - scene.plan.cramped
    found = []
    for demand in scene.wanted:
        if demand.job in waiting and demand.job not in job_views and demand.parts:
            placed = scene.plan.placed.get(demand.job)
            copies = demand.copies - (placed.copies if placed is not None else 0)
            found.append(WaitingInference(demand.job, demand.slices, demand.pool, demand.nodes, max(1, copies)))
    return found


def _pools(scene: LendingInputs, job_views: Mapping[int, JobView], ledger: Ledger) -> dict[int, frozenset[str]]:
    """Where those that wait for a release could run, as far as Slurm lets them run at all."""
    alike = []
    for row in scene.rows:
        job_view = job_views.get(row.job_id)
        if job_view is not None and row.pending and job_view.hints.waiting and row.job_id not in ledger.open:
            ready = delayed(row, ledger.past.get(row.job_id), scene.now)
            alike.append(replace(row, gres=_ANY, reason="None" if ready else row.reason))
        elif row.active and row.array_job is not None:
            alike.append(row)  # it counts against the limit of its array
    found = demands(alike, scene.nodes, scene.facts.keys(), scene.now)
    return {demand.job: demand.pool for demand in found if demand.job in job_views}


def delayed(row: JobRow, past: LoanHistory | None, now: float) -> bool:
    """Whether nothing but Slurm's delay after a requeue keeps a job from starting, and may be cut short.

    Up to 23.02 only that of a job's first return: there slurmd sometimes takes what comes back early for what has had
    its Prolog, the job is requeued once more, and in the same way again for as long as it is hurried.
    """
    if row.restarts > 1 and not forgets(row.gres):
        return False
    if row.reason.partition(",")[0].strip() != "BeginTime" or row.eligible is None or past is None:
        return False
    return past.restart == row.restarts - 1 and row.eligible <= now + REQUEUE_DELAY_S


def _elastic_jobs(
    scene: LendingInputs,
    job_views: Mapping[int, JobView],
    ledger: Ledger,
    knowledge: LendingKnowledge,
    seats: Mapping[int, SlotReference],
    barred: Collection[int],
) -> list[ElasticJob]:
    pools = _pools(scene, job_views, ledger)
    found = []
    for job, job_view in job_views.items():
        loan, seat = ledger.open.get(job), seats.get(job)
        if loan is None and (job not in pools or job in barred):
            continue
        if loan is not None and (seat is None or loan.state is State.RELEASED):
            continue
        costs = knowledge.costs(job_view)
        restart = costs.restart_s + (costs.unsaved_s if not job_view.hints.signal else 0.0)
        found.append(
            ElasticJob(
                job,
                knowledge.speeds(job_view),
                account=job_view.row.account,
                nodes=pools.get(job),
                seat=seat,
                since=(loan.started or loan.decided) if loan is not None else 0.0,
                restarts=job_view.row.restarts,
                hits=ledger.past.get(job, LoanHistory()).hits,
                costs=Elastic(restart, restart),
                left_s=knowledge.left_s(job_view),
                needs_s=knowledge.needs_s(job_view),
            )
        )
    return found


def _promises(
    scene: LendingInputs, job_views: Mapping[int, JobView], ledger: Ledger, seats: Mapping[int, SlotReference]
) -> list[PendingLoan]:
    pools = {demand.job: demand.pool for demand in scene.wanted}
    found = []
    for job, loan in ledger.open.items():
        if job in seats or job not in job_views or loan.state in (State.WITHDRAWN, State.REQUEUED):
            continue
        if job_views[job].hints.guest:  # it shares another loan's slot
            continue
        nodes = frozenset(job_views[job].row.nodes) or pools.get(job)
        found.append(PendingLoan(job, loan.slice, nodes))
    return found


def _lent(ledger: Ledger) -> dict[str, int]:
    lent: Counter[str] = Counter()
    for loan in ledger.open.values():
        lent[loan.account] += loan.slice.compute
    return dict(lent)

"""Decide which loans end so that inference fits, and what is due for those that are already ending. Pure.

Inference without room in supply's plan is handled in Slurm's order. Space that is free, or about to be (of jobs that
complete, of signalled loans), serves it first. Space of a loan that ends for one job serves another job only if no
other space does, so the next round reclaims no further loan for the first. If free space is not sufficient the loans
with the lowest loss end, one, or all that cover the place of a larger slice: first on GPUs that have other jobs than
loans, then on those that have none; protected ones last. So do those whose CPUs inference lacks. None ends for
inference that is only expected: in `bench lending` that cost training more than it saved inference.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import combinations
from typing import Final

from slurm_migbatch.decide.capacity.spare import loss
from slurm_migbatch.decide.lending.loan import Cause, Loan, State
from slurm_migbatch.decide.lending.model import (
    LendingRules,
    LendingView,
    LoanOrder,
    OrderKind,
    Shortage,
    WaitingInference,
    coming,
)
from slurm_migbatch.decide.lending.shortages import cheapest
from slurm_migbatch.decide.lending.values import ElasticJob, GpuCapacity, Resources, SlotReference
from slurm_migbatch.decide.snapshot import passed_s
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.layout import Layout, Slot
from slurm_migbatch.mig.planning import plan_free
from slurm_migbatch.mig.profile import Profile


def due_orders(view: LendingView, rules: LendingRules) -> list[LoanOrder]:
    """Return orders that are due regardless of other decisions: expired grace, orders without effect."""
    orders = []
    for job, loan in view.loans.items():
        job_view = view.job_views.get(job)
        if job_view is None:
            continue
        row = job_view.row
        if loan.state is State.SIGNALLED and row.active:
            order = _signalled(view, rules, loan)
            orders += [] if order is None else [order]
        elif loan.state is State.REQUEUED and row.running:
            if loan.requeued is None or passed_s(loan.requeued, view.now) >= rules.again_s:
                orders.append(LoanOrder(OrderKind.REQUEUE, job, loan.restart, loan.why_ended, loan.cause))
        elif loan.state in (State.RELEASED, State.WITHDRAWN) and row.pending and job_view.hints.slice is not None:
            late = loan.released is not None and passed_s(loan.released, view.now) >= rules.start_s
            if loan.state is State.WITHDRAWN or late:
                why = loan.why_ended or f"it has not started within {rules.start_s:g} s"
                orders.append(LoanOrder(OrderKind.WITHDRAW, job, loan.restart, why, loan.cause or Cause.LATE))
    for job, job_view in view.job_views.items():
        row, hints = job_view.row, job_view.hints
        if job not in view.loans and row.pending and not hints.guest and hints.slice is not None:
            why = "it is requeued and waits for another slice"
            orders.append(LoanOrder(OrderKind.RETYPE, job, row.restarts, why))
    return orders


def _signalled(view: LendingView, rules: LendingRules, loan: Loan) -> LoanOrder | None:
    """Return the order that is due for a job that was to be signalled."""
    signal = _signal(view, loan.job_id)
    if loan.signalled is None and signal:
        return LoanOrder(OrderKind.SIGNAL, loan.job_id, loan.restart, loan.why_ended, loan.cause, signal=signal)
    if loan.signalled is None:  # its hints have changed meanwhile
        return LoanOrder(OrderKind.REQUEUE, loan.job_id, loan.restart, loan.why_ended, loan.cause)
    if loan.checkpoint is None and passed_s(loan.signalled, view.now) < rules.grace_s:
        return None
    late = f"it reported no checkpoint within {rules.grace_s:g} s"
    why = late if loan.checkpoint is None else "its checkpoint is written"
    return LoanOrder(OrderKind.REQUEUE, loan.job_id, loan.restart, why, loan.cause)


def reclaim_loans(
    view: LendingView, rules: LendingRules
) -> tuple[list[LoanOrder], Mapping[tuple[str, int], GpuCapacity]]:
    """Return the orders that end loans for pending inference, and the GPUs as they will be when it has started."""
    planner = _ReclaimPlanner(view, rules)
    hopeless: set[tuple[frozenset[str], tuple[Profile, ...], int]] = set()
    for start in view.starts:
        key = start.pool, start.slices, start.nodes
        for _ in range(start.copies):
            if key in hopeless:
                break
            if not planner.serve(start):
                hopeless.add(key)
        planner.kept.pop(start.job, None)
    for shortage in view.shortages:
        planner.free_resources(shortage)
    return planner.orders, planner.capacities


_SPARED_S: Final = 1e6
"""Cost of a restart that should be avoided; no real one takes so long."""


@dataclass(frozen=True)
class _Candidate:
    """A loan that may end.

    Attributes:
        loss: seconds of work on the whole GPU that are lost if it ends.
        protected: whether it started so recently, for its number of reclaims, that other loans must end first.
    """

    job: int
    place: SlotReference
    loss: float
    protected: bool


@dataclass(frozen=True)
class _NodeRoom:
    """Room for the slices of a job on one node: the GPUs with these slices, and the loans that end for it."""

    capacities: Mapping[tuple[str, int], GpuCapacity]
    ended: tuple[int, ...]
    loss: float


class _ReclaimPlanner:
    """Loans that may be reclaimed, and the orders for those that are."""

    def __init__(self, view: LendingView, rules: LendingRules) -> None:
        self.view, self.rules, self.capacities = view, rules, coming(view)
        self.orders: list[LoanOrder] = []
        self._on_node: dict[str, list[tuple[str, int]]] = {}
        for key, capacity in self.capacities.items():
            self._on_node.setdefault(capacity.node, []).append(key)
        #: by inference job that is still to be served, the slots of loans that end for it, if there are any
        self.kept = _kept(view) if view.ends_for else {}

    @cached_property
    def loans(self) -> dict[int, _Candidate]:
        """Loans that may end, computed on demand, because most rounds end none."""
        view, rules = self.view, self.rules
        candidates: dict[int, _Candidate] = {}
        for elastic_job in view.elastic_jobs:
            loan = view.loans.get(elastic_job.job)
            if not rules.reclaim or elastic_job.place is None or loan is None or loan.state is not State.RUNNING:
                continue
            candidates[elastic_job.job] = _candidate(elastic_job, elastic_job.place, rules, view.now)
        return candidates

    @cached_property
    def _loans_at(self) -> dict[SlotReference, list[_Candidate]]:
        """By place, the loans that could end when this was first read."""
        loans_at: dict[SlotReference, list[_Candidate]] = {}
        for loan in self.loans.values():
            loans_at.setdefault(loan.place, []).append(loan)
        return loans_at

    def serve(self, start: WaitingInference) -> bool:
        """Find room for one copy, ending loans if necessary; False, without changes, if there is none."""
        kept_for_others = self._kept_for_others(start.job)
        if start.nodes == 1 and len(start.slices) == 1:
            on_any = {key: capacity for key, capacity in self.capacities.items() if capacity.node in start.pool}
            found = [self._place(start, on_any, kept_for_others)]
        else:
            found = [
                self._place(start, {key: self.capacities[key] for key in self._on_node.get(node, ())}, kept_for_others)
                for node in sorted(start.pool)
            ]
        places = sorted((place for place in found if place is not None), key=lambda place: place.loss)[: start.nodes]
        if len(places) < start.nodes:
            return False
        for place in places:
            self.capacities.update(place.capacities)
            for job in place.ended:
                del self.loans[job]
                needed = " + ".join(str(profile) for profile in sorted(start.slices, reverse=True))
                why = f"inference job {start.job} needs {needed}"
                self.orders.append(self._order(job, start.job, why))
        return True

    def free_resources(self, shortage: Shortage) -> None:
        """End loans so that nodes have the CPUs and the memory that a job lacks; none if that is impossible."""
        loans_of_node = {node: self._loans_for_resources(node, lacking) for node, lacking in shortage.lacks.items()}
        feasible = [jobs for jobs in loans_of_node.values() if jobs is not None]
        if not feasible or (shortage.every and len(feasible) < len(loans_of_node)):
            return
        ended = (
            feasible if shortage.every else [min(feasible, key=lambda jobs: sum(self.loans[job].loss for job in jobs))]
        )
        resources = Resources(*map(max, zip(*shortage.lacks.values(), strict=True)))
        for job in (job for jobs in ended for job in jobs):
            del self.loans[job]
            self.orders.append(self._order(job, shortage.job, f"inference job {shortage.job} needs its {resources}"))

    def _loans_for_resources(self, node: str, lacking: Resources) -> list[int] | None:
        """Return the loans to end on a node for what it lacks; what loans that end already have counts."""
        ending = {order.job for order in self.orders}
        jobs_there = [
            elastic_job
            for elastic_job in self.view.elastic_jobs
            if elastic_job.place is not None and elastic_job.place.node == node
        ]
        for elastic_job in jobs_there:
            if elastic_job.job in ending:
                lacking = lacking.without(Resources(elastic_job.cpus, elastic_job.memory))
        loans = [
            (self.loans[elastic_job.job].loss, Resources(elastic_job.cpus, elastic_job.memory), elastic_job.job)
            for elastic_job in jobs_there
            if elastic_job.job in self.loans
        ]
        return cheapest(lacking, loans)

    def _place(
        self,
        start: WaitingInference,
        capacity_at: dict[tuple[str, int], GpuCapacity],
        kept_for_others: Mapping[tuple[str, int], Sequence[Slot]],
    ) -> _NodeRoom | None:
        """Find room on these GPUs; changes `capacity_at`."""
        ended: list[int] = []
        lost = 0.0
        changed: dict[tuple[str, int], GpuCapacity] = {}
        for profile in start.slices:
            free = _free(profile, _with_taken(capacity_at.values(), kept_for_others)) if kept_for_others else None
            free = free or _free(profile, capacity_at.values())
            if free is None:
                reclaimed = self._cheapest(profile, capacity_at, ended)
                if not reclaimed:
                    return None
                lost += sum(loan.loss for loan in reclaimed)
                ended += [loan.job for loan in reclaimed]
                first = reclaimed[0].place
                capacity = capacity_at[first.node, first.gpu]
                slots = {loan.place.slot for loan in reclaimed}
                free = replace(capacity, lent=tuple(loan for loan in capacity.lent if loan.slot not in slots))
                capacity_at[free.node, free.gpu] = free
            placed = plan_free(free.geometry, free.used, (profile,)).slots
            capacity = capacity_at[free.node, free.gpu]
            capacity = replace(capacity, taken=(*capacity.taken, *placed))
            capacity_at[capacity.node, capacity.gpu] = changed[capacity.node, capacity.gpu] = capacity
        return _NodeRoom(changed, tuple(ended), lost)

    def _cheapest(
        self, profile: Profile, capacity_at: Mapping[tuple[str, int], GpuCapacity], ended: Collection[int]
    ) -> list[_Candidate]:
        """Return the loans with the lowest loss whose end makes room for a slice; none if there are no such loans.

        Sets with a protected one come last, and before them those on GPUs that training has alone: inference on parts
        of many GPUs would leave no room for a job that needs more of one.
        """
        lent_sets = lent_sets_for(profile, capacity_at.values())
        sets = [[self._loan_at(place, ended) for place in sorted(lent_set, key=str)] for lent_set in lent_sets]
        return min(
            ([loan for loan in loans if loan is not None] for loans in sets if None not in loans),
            key=lambda loans: (
                any(loan.protected for loan in loans),
                not capacity_at[loans[0].place.node, loans[0].place.gpu].taken,
                sum(loan.loss for loan in loans),
            ),
            default=[],
        )

    def _loan_at(self, place: SlotReference, ended: Collection[int]) -> _Candidate | None:
        """Return the loan at this place that may end, except for those of jobs that have `ended`."""
        for loan in reversed(self._loans_at.get(place, ())):
            if loan.job in self.loans and loan.job not in ended:
                return loan
        return None

    def _kept_for_others(self, job: int) -> dict[tuple[str, int], list[Slot]]:
        """Return, by GPU, the slots of loans that end for other jobs than this one."""
        kept: dict[tuple[str, int], list[Slot]] = {}
        for inference, places in self.kept.items():
            for place in places if inference != job else ():
                kept.setdefault((place.node, place.gpu), []).append(place.slot)
        return kept

    def _order(self, job: int, inference: int, why: str) -> LoanOrder:
        return replace(stop(self.view, self.rules, job, Cause.RECLAIM, why), inference=inference)


def stop(view: LendingView, rules: LendingRules, job: int, cause: Cause, why: str) -> LoanOrder:
    """Return the order that ends a loan: a signal if the job can write a checkpoint, else a requeue.

    A run that began a moment ago and has reported nothing has nothing to save yet, and often no signal handler,
    so the signal would be lost, or kill it.
    """
    signal = "" if view.starting(job, rules.starting_s) else _signal(view, job)
    kind = OrderKind.SIGNAL if signal else OrderKind.REQUEUE
    return LoanOrder(kind, job, view.loans[job].restart, why, cause, signal=signal)


def _kept(view: LendingView) -> dict[int, list[SlotReference]]:
    """Return by waiting inference job, in their order, the slots of loans that end for it."""
    kept: dict[int, list[SlotReference]] = {start.job: [] for start in view.starts}
    for capacity in view.capacities:
        for loan in capacity.lent:
            inference = view.ends_for.get(loan.job, 0)
            if inference in kept:
                kept[inference].append(SlotReference(capacity.node, capacity.gpu, loan.slot))
    return {job: places for job, places in kept.items() if places}


def _signal(view: LendingView, job: int) -> str:
    return (view.job_views[job].hints.signal or "").upper()


def _candidate(elastic_job: ElasticJob, place: SlotReference, rules: LendingRules, now: float) -> _Candidate:
    speed = elastic_job.speeds.get(place.slot.profile, 0.0)
    lacks_s = rules.hysteresis.loan_s
    if speed > 0:
        lacks_s = min(lacks_s, elastic_job.left_s / speed)
    since, restart_s = elastic_job.since, elastic_job.restart_s
    if elastic_job.restarts >= rules.max_restarts:
        # only if no other is sufficient, and of several such the least often restarted
        since, restart_s = now, _SPARED_S * (1 + elastic_job.restarts)
    protected = passed_s(since, now) < rules.protect_s * (1 + elastic_job.hits)
    return _Candidate(elastic_job.job, place, speed * lacks_s + restart_s * speed, protected)


def lent_sets_for(profile: Profile, capacities: Iterable[GpuCapacity]) -> list[frozenset[SlotReference]]:
    """Return the smallest sets of loans whose end makes room for a slice of this profile.

    One set for each placement that is covered by loans and free space only; it includes further loans if a count limit
    (compute slices, engines) requires more to end. No set contains another of the same GPU. GPUs that have room already
    yield none.
    """
    return [
        frozenset(SlotReference(capacity.node, capacity.gpu, slot) for slot in slots)
        for capacity in capacities
        if profile in capacity.geometry
        for slots in _lent_sets(capacity.geometry, capacity.taken, tuple(loan.slot for loan in capacity.lent), profile)
    ]


@lru_cache(maxsize=1 << 14)
def _lent_sets(
    geometry: Geometry, taken: tuple[Slot, ...], lent: tuple[Slot, ...], profile: Profile
) -> tuple[tuple[Slot, ...], ...]:
    used = Layout(taken)
    lent_sets: list[frozenset[Slot]] = []
    for slot in sorted(geometry.info(profile).slots):
        if not used.free_of(slot.placement):
            continue
        overlapping = [loan for loan in lent if loan.placement.overlaps(slot.placement)]
        optional = sorted(loan for loan in lent if not loan.placement.overlaps(slot.placement))
        for count in range(len(optional) + 1):
            fitting = [
                frozenset([*overlapping, *extra])
                for extra in combinations(optional, count)
                if geometry.fits(Layout(held for held in (*taken, *optional) if held not in extra), slot)
            ]
            lent_sets += fitting
            if fitting and not count:
                break
    minimal = [lent_set for lent_set in dict.fromkeys(lent_sets) if not any(other < lent_set for other in lent_sets)]
    return () if frozenset() in minimal else tuple(tuple(sorted(lent_set)) for lent_set in minimal)


def _free(profile: Profile, capacities: Iterable[GpuCapacity]) -> GpuCapacity | None:
    """Return the GPU that has room for the profile at the lowest loss."""
    best: tuple[tuple[int, int], GpuCapacity] | None = None
    for capacity in capacities:
        if profile in capacity.geometry:
            lost = loss(capacity.geometry, capacity.used, (), profile)
            if lost is not None and (best is None or lost < best[0]):
                best = lost, capacity
    return None if best is None else best[1]


def _with_taken(
    capacities: Iterable[GpuCapacity], kept: Mapping[tuple[str, int], Sequence[Slot]]
) -> Iterator[GpuCapacity]:
    """Yield the GPUs with these slots taken, as far as they are free."""
    for capacity in capacities:
        slots = [slot for slot in kept.get((capacity.node, capacity.gpu), ()) if capacity.used.free_of(slot.placement)]
        yield replace(capacity, taken=(*capacity.taken, *slots)) if slots else capacity

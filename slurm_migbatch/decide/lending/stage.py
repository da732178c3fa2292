"""Decide which idle slices are lent to training jobs and which loans end: the lending stage of a decision.

A round is made of pure parts: `decide.lending.ledger` follows Slurm's state, `decide.lending.round` decides,
`decide.lending.slice_sharing` adds jobs that share slices. `LendingMemory` is kept between rounds. An
order is an intention, recorded in the ledger when it is issued and confirmed or withdrawn when `settle` gets its
outcome.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from slurm_migbatch.decide.capacity.demand import slices
from slurm_migbatch.decide.lending.elastic_jobs import ElasticJobs
from slurm_migbatch.decide.lending.forecast import Expectation
from slurm_migbatch.decide.lending.idleness import Idleness
from slurm_migbatch.decide.lending.inputs import (
    LendingInputs,
    PoolBook,
    job_views_of,
    places_of,
    without_false_runs,
)
from slurm_migbatch.decide.lending.ledger import Ledger
from slurm_migbatch.decide.lending.loan import JobView, Loan, Place, State
from slurm_migbatch.decide.lending.model import GIVING, LendingRules, LoanOrder, OrderKind, Round
from slurm_migbatch.decide.lending.pair_slowdowns import PairKey
from slurm_migbatch.decide.lending.pairs import SharingRules
from slurm_migbatch.decide.lending.round import decide, not_started
from slurm_migbatch.decide.lending.shortages import lasting, shortages
from slurm_migbatch.decide.lending.slice_sharing import SliceSharing
from slurm_migbatch.decide.lending.values import Target
from slurm_migbatch.decide.lending.view import view_of
from slurm_migbatch.decide.snapshot import ClusterSnapshot, LendingPast, Report, Run, RunProgress, passed_s
from slurm_migbatch.decide.supply.moves import SOON_S, is_stuck
from slurm_migbatch.decide.supply.stage import SupplyDecision
from slurm_migbatch.mig.profile import Profile, ProfileError

_FIRST_S: Final = 2.0
_LONGEST_S: Final = 120.0
"""How long an order that Slurm refused is not repeated: twice as long each time."""


@dataclass(frozen=True)
class LendingSettings:
    """Settings of the administrator; see `config.schema.LendingConfig`. Times in seconds.

    Attributes:
        partitions: whose elastic training jobs may be lent slices.
        training_only: those of them that run nothing else.
        rules: when a slice is lent and reclaimed.
        horizon_s, sure: slices that are not reserved should stay idle for `horizon_s` with probability `sure`.
        forecast_days, day_s: how much history a forecast uses, and the length of a day.
        restart_s, checkpoint_s: defaults for a job without reports.
        share, pair_slowdowns: whether two training jobs may share a slice, and measured slowdowns of pairs.
        dry_run: orders are only logged, never carried out.
    """

    partitions: tuple[str, ...] = ()
    training_only: frozenset[str] = frozenset()
    rules: LendingRules = field(default_factory=LendingRules)
    horizon_s: float = 60.0
    sure: float = 0.8
    forecast_days: int = 14
    day_s: float = 86400.0
    restart_s: float = 30.0
    checkpoint_s: float = 30.0
    share: bool = False
    pair_slowdowns: Mapping[PairKey, float] = field(default_factory=dict)
    dry_run: bool = False


@dataclass
class Refusals:
    """Orders that Slurm refused recently, and until when they are not repeated (unix seconds)."""

    until: dict[tuple[OrderKind, int], tuple[float, float]] = field(default_factory=dict)

    def note(self, order: LoanOrder, now: float) -> None:
        """Record that Slurm has refused an order; each refusal doubles its wait."""
        wait = min(_LONGEST_S, 2 * self.until.get((order.kind, order.job), (0.0, _FIRST_S / 2))[1])
        self.until[order.kind, order.job] = now + wait, wait

    def clear(self, order: LoanOrder) -> None:
        """Record that Slurm has accepted an order."""
        self.until.pop((order.kind, order.job), None)

    def barred(self, kind: OrderKind, now: float) -> set[int]:
        """Return the jobs for which an order of this kind is not repeated yet."""
        return {
            job
            for (refused_kind, job), (until, wait) in self.until.items()
            if refused_kind is kind and passed_s(until - wait, now) < wait
        }

    def forget(self, listed: Collection[int]) -> None:
        """Drop the refusals of all jobs except these."""
        self.until = {key: value for key, value in self.until.items() if key[1] in listed}


class LendingMemory:
    """State of lending between decisions; nothing is lent before `load`."""

    def __init__(self, settings: LendingSettings) -> None:
        self.ledger = Ledger()
        self.elastic_jobs = ElasticJobs(settings.restart_s, settings.checkpoint_s)
        self.expected = Expectation(settings.forecast_days, settings.day_s)
        self.idle = Idleness()
        #: caches of demands
        self.waiting, self.growing = PoolBook(), PoolBook()
        self.refusals = Refusals()
        self.slice_sharing = SliceSharing(SharingRules(measured=settings.pair_slowdowns), enabled=settings.share)
        self.loaded = False
        #: inference that lacks only CPUs, and since when
        self.short_of_cpus: dict[int, float] = {}
        #: jobs whose earlier results were queried from the record
        self.asked: set[int] = set()
        self.job_views: Mapping[int, JobView] = {}
        self.round = Round()

    def load(self, past: LendingPast, now: float) -> None:
        """Start from the record: active loans, reclaims, and inference's past needs."""
        self.ledger.load(loan for row in past.loans if (loan := Loan.from_row(row)) is not None)
        self.expected.learn(past.uses, now)
        self.idle.since.update(past.freed)
        self.recall(past.runs)
        self.loaded = True

    def recall(self, runs: Iterable[RunProgress]) -> None:
        """Add the results of earlier runs."""
        for run in runs:
            report = Report(run.checkpoint, run.ckpt_s, run.items, None if run.shared else run.items_per_s)
            if run.shared:
                self.slice_sharing.shared.add((run.job, run.restart))
            try:
                self.elastic_jobs.recall((run.job, run.restart), Profile.parse(run.profile or ""), report)
            except ProfileError:  # the run had several slices, or none
                continue


@dataclass(frozen=True)
class LendingDecision:
    """Result for training jobs.

    Attributes:
        orders: what to do with them, each job at most once.
        job_views: the elastic training jobs as Slurm shows them.
        ended: loans that ended since the last decision.
        changed: loans to be recorded before the orders are carried out.
    """

    orders: tuple[LoanOrder, ...] = ()
    job_views: Mapping[int, JobView] = field(default_factory=dict)
    ended: tuple[Loan, ...] = ()
    changed: tuple[Loan, ...] = ()


def needed_progress(snapshot: ClusterSnapshot, memory: LendingMemory, settings: LendingSettings) -> frozenset[int]:
    """Return the jobs that have run before and whose results have not been queried yet."""
    job_views = job_views_of(snapshot.jobs, settings.partitions, memory.job_views)
    memory.asked &= job_views.keys()
    return frozenset(job for job, job_view in job_views.items() if job_view.row.restarts) - memory.asked


def plan_lending(
    snapshot: ClusterSnapshot, supply: SupplyDecision, memory: LendingMemory, settings: LendingSettings
) -> LendingDecision:
    """Decide on loans after supply has planned for this snapshot; updates `memory`."""
    now = snapshot.now
    note_reports(snapshot, memory)
    if not memory.loaded:
        return LendingDecision()
    job_views = job_views_of(snapshot.jobs, settings.partitions, memory.job_views)
    inputs = LendingInputs(
        now,
        snapshot.jobs,
        snapshot.nodes,
        without_false_runs(snapshot.inventory, job_views),
        supply.plan,
        supply.demands,
        settings.training_only,
        memory.waiting,
        memory.growing,
    )
    places = places_of(inputs.facts)
    memory.elastic_jobs.gpus(gpu.geometry for node in inputs.facts.values() for gpu in node.gpus)
    memory.slice_sharing.update(now, inputs.facts, places, job_views, memory.elastic_jobs.reports)
    unshared_profiles = {
        run: place[2].profile for run, place in places.items() if run not in memory.slice_sharing.shared
    }
    memory.elastic_jobs.update(job_views, unshared_profiles)
    unread = {row.job_id for row in inputs.rows if row.unread}
    ended = memory.ledger.follow(job_views, places, memory.elastic_jobs.reports, now, unread)
    memory.refusals.forget(job_views)
    memory.job_views = job_views
    memory.round = decided = _decide(snapshot, inputs, job_views, places, supply, memory, settings)
    orders = [order for order in decided.orders if order.job not in memory.refusals.barred(order.kind, now)]
    targets = decided.targets
    if not settings.dry_run:
        if not snapshot.recording:  # nothing can be released, so no job is stopped to be released again
            orders = [order for order in orders if not order.recorded]
            targets = {}
        for order in orders:
            _intend(memory.ledger, order, job_views[order.job], now)
        until = now + settings.rules.grace_s + 2 * settings.rules.start_s
        for job, (profile, node, gpu) in targets.items():
            memory.ledger.targets[job] = Target(profile, node, until, gpu)
    return LendingDecision(tuple(orders), job_views, tuple(ended), tuple(memory.ledger.unsaved()))


def ends_of(ledger: Ledger, settings: LendingSettings | None, now: float) -> dict[int, float]:
    """Return the loans that are ending, by job, and when their slices should be free at the latest."""
    grace_s = 0.0 if settings is None else settings.rules.grace_s
    ends: dict[int, float] = {}
    for job, loan in ledger.open.items():
        if loan.leaving and not is_stuck(loan.requeued, now):
            saving = loan.state is State.SIGNALLED and loan.checkpoint is None
            ends[job] = max(now, (loan.signalled or now) + grace_s if saving else now) + SOON_S
    return ends


def note_reports(snapshot: ClusterSnapshot, memory: LendingMemory) -> None:
    """Add reports and records, without deciding."""
    memory.elastic_jobs.use(snapshot.predictions)
    for run, report in snapshot.reports:
        memory.elastic_jobs.report(run, report)
    if snapshot.past is not None and not memory.loaded:
        memory.load(snapshot.past, snapshot.now)
    if snapshot.answers.progress is not None:
        memory.asked |= snapshot.answers.asked.progress
        memory.recall(snapshot.answers.progress)


def _decide(
    snapshot: ClusterSnapshot,
    inputs: LendingInputs,
    job_views: Mapping[int, JobView],
    places: Mapping[Run, Place],
    supply: SupplyDecision,
    memory: LendingMemory,
    settings: LendingSettings,
) -> Round:
    """Decide on the loans of one snapshot, and on the slices that two jobs share."""
    now = snapshot.now
    running, waiting = _inference(inputs, job_views, places, memory.ledger.runs)
    memory.expected.update(running, waiting, now, sum([len(node.gpus) for node in inputs.facts.values()]))
    reserve = memory.expected.reserve(now, settings.horizon_s, settings.sure)
    unstarted = memory.ledger.unstarted(job_views, settings.rules.start_s, now)
    view = view_of(
        inputs,
        job_views,
        memory.ledger,
        memory.idle,
        memory.elastic_jobs,
        reserve,
        blackout=snapshot.blackout,
        barred=memory.refusals.barred(OrderKind.RELEASE, now) | unstarted.keys(),
    )
    lasting_shortages = lasting(shortages(inputs, job_views, memory.ledger), memory.short_of_cpus, now)
    view = memory.slice_sharing.marked(replace(view, shortages=lasting_shortages))
    decided = memory.slice_sharing.add(view, decide(view, settings.rules), settings.rules, supply.shared)
    if not unstarted:
        return decided
    return replace(decided, lacking={**decided.lacking, **{job: not_started(n) for job, n in unstarted.items()}})


def _inference(
    inputs: LendingInputs, job_views: Mapping[int, JobView], places: Mapping[Run, Place], loans: Collection[Run]
) -> tuple[dict[Profile, frozenset[Run]], dict[Profile, int]]:
    """Return, by profile, the runs and the pending demand of jobs that are not loans.

    A run counts only with a profile of its job's GRES, because a node may report any profile.
    """
    running: dict[Profile, set[Run]] = {}
    granted = {row.job_id: row.gres for row in inputs.rows if row.active}
    for run, (_, _, slot) in places.items():
        if run not in loans and slot.profile in slices(granted.get(run[0], "")):
            running.setdefault(slot.profile, set()).add(run)
    waiting: dict[Profile, int] = {}
    for demand in inputs.wanted:
        if demand.job not in job_views:
            for profile, count in demand.parts:
                waiting[profile] = waiting.get(profile, 0) + count * demand.nodes * demand.copies
    return {profile: frozenset(runs) for profile, runs in running.items()}, waiting


# -- intentions and their outcome --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OrderOutcome:
    """Outcome of an order.

    Attributes:
        before, after: GRES or state of the job before it, and as intended.
        at: when Slurm was called, unix seconds.
        error: Slurm's error; empty if none.
        applied: whether Slurm was called at all; if not, `error` says why.
    """

    order: LoanOrder
    before: str
    after: str
    at: float
    error: str = ""
    applied: bool = True


def settle_lending(outcomes: Iterable[OrderOutcome], memory: LendingMemory) -> tuple[Loan, ...]:
    """Confirm or withdraw intentions; return the loans that changed and are to be recorded."""
    for outcome in outcomes:
        order = outcome.order
        if outcome.error:
            if outcome.applied:
                memory.refusals.note(order, outcome.at)
            if outcome.applied or order.kind in GIVING:
                memory.ledger.refused(order.job, outcome.error, outcome.at)
            elif order.recorded:
                memory.ledger.keep_running(order.job)
            continue
        memory.refusals.clear(order)
        if order.kind in (OrderKind.RELEASE, OrderKind.SHARE, OrderKind.SIGNAL, OrderKind.REQUEUE):
            memory.ledger.confirm(order.job, outcome.at)
    return tuple(memory.ledger.unsaved())


def _intend(ledger: Ledger, order: LoanOrder, job_view: JobView, now: float) -> None:
    if order.kind in GIVING and order.profile is not None:
        ledger.release(job_view.row, order.profile, order.why, now)
    elif order.kind is OrderKind.WITHDRAW:
        ledger.withdraw(order.job, order.cause, order.why)
    elif order.kind is OrderKind.SIGNAL:
        ledger.signal(order.job, order.cause, order.why, order.inference)
    elif order.kind is OrderKind.REQUEUE:
        ledger.requeue(order.job, order.cause, order.why, order.inference)


def action_row(outcome: OrderOutcome, *, dry_run: bool = False) -> dict[str, Any]:
    """Return an order and its outcome as a row of the record."""
    order = outcome.order
    return {
        "ts": outcome.at,
        "job_id": order.job,
        "restart": order.restart,
        "kind": order.kind.value,
        "before": outcome.before,
        "after": outcome.after,
        "why": order.why,
        "dry_run": dry_run,
        "outcome": outcome.error,
    }


# -- for users ---------------------------------------------------------------------------------------------------------


def why_not_lent(job: int, memory: LendingMemory, now: float) -> str | None:
    """Return why an elastic training job is pending; None if it is not one or not pending."""
    job_view = memory.job_views.get(job)
    if job_view is None or not job_view.row.pending:
        return None
    loan = memory.ledger.open.get(job)
    if loan is not None:
        return f"it has been released to start on {loan.profile} for {max(0, int(now - loan.decided))} s ({loan.why})"
    if not job_view.hints.waiting:
        return "its release is being withdrawn"
    return memory.round.lacking.get(job, "Slurm holds it, see its reason in squeue")

"""Run one round of migbatchd: observe the cluster, decide, record the intentions, apply them, and record the outcome.

Rounds run one after the other in one thread. Nothing is concluded from a failed observation: the round then changes
nothing and reports why. Changes to jobs are recorded before Slurm is called. If the record cannot be written, nothing
is lent, but slices that inference needs are still reclaimed, because that must not wait. Only moves are recorded after
the call: a move whose row is lost is decided again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from slurm_migbatch.daemon.actuator import apply_moves, apply_orders, name_of
from slurm_migbatch.daemon.advertiser import Advertised, Advertiser, OfferChange
from slurm_migbatch.daemon.begin_times import BeginTimes
from slurm_migbatch.daemon.dryrun import DryRun
from slurm_migbatch.daemon.flightrecorder import FlightRecorder
from slurm_migbatch.daemon.garbage import uncollected
from slurm_migbatch.daemon.observer import Observer
from slurm_migbatch.decide.capacity.by_kind import DemandQueue
from slurm_migbatch.decide.capacity.model import Reservation
from slurm_migbatch.decide.core import Decision, DecisionMemory, Outcomes, Settings, Settled, decide, needed, settle
from slurm_migbatch.decide.dispatch import stage as dispatching
from slurm_migbatch.decide.dispatch.arrays import Throttle
from slurm_migbatch.decide.dispatch.pipelines import why_pipeline
from slurm_migbatch.decide.dispatch.retype import Retype
from slurm_migbatch.decide.dispatch.stage import DispatchDecision, DispatchOutcome
from slurm_migbatch.decide.explain import why_not_started
from slurm_migbatch.decide.lending import stage as loans
from slurm_migbatch.decide.lending.loan import Loan
from slurm_migbatch.decide.lending.model import GIVING, LoanOrder
from slurm_migbatch.decide.lending.reasons import without_estimates
from slurm_migbatch.decide.lending.stage import LendingDecision, OrderOutcome, why_not_lent
from slurm_migbatch.decide.snapshot import Answers, ClusterSnapshot, Questions
from slurm_migbatch.decide.supply.moves import why_moved
from slurm_migbatch.decide.supply.stage import SupplyDecision
from slurm_migbatch.slurm.client import JobRow, NodeRow, SlurmClient, SlurmError, SlurmRefused

Rows = Sequence[Mapping[str, Any]]
Decide = Callable[[ClusterSnapshot, DecisionMemory, Settings, Callable[[], float]], Decision]


class Clock(Protocol):
    """Both clocks, so that tests and simulations can replace them."""

    def time(self) -> float:
        """Return unix seconds."""

    def monotonic(self) -> float:
        """Return seconds that never jump."""


class Record(Protocol):
    """The part of the record that a round reads and writes."""

    @property
    def available(self) -> bool:
        """False if the record is known to be unavailable."""

    def supply(self, node: str, at: float, version: int, counts: Mapping[str, int], why: str) -> None:
        """Store what `node` offers from now on."""

    def save(self, loans: Rows, actions: Rows) -> bool:
        """Write loans and actions; return whether they were written. Waits briefly."""

    def post(self, loans: Rows, actions: Rows) -> None:
        """Write loans and actions when possible."""

    def ask(self, questions: Questions) -> Answers:
        """Answer queries, or earlier ones. Waits briefly."""


@dataclass(frozen=True)
class RoundReport:
    """Observations and actions of one round.

    Attributes:
        changes: nodes with a new offer.
        reservations: slots that are kept free.
        notes: sentences for the log: nodes that need attention.
        error: why the round was abandoned, or which part of it failed.
        pending, waiting: number of pending jobs or array tasks that request slices, and of jobs without a planned slot.
        offers: free slices on offer by profile.
        unacknowledged: nodes that have not confirmed their new plan.
        dispatch: outcomes of changes to pending jobs; `orders`: to training jobs.
        ended: loans that ended.
        failed: error of each stage that could not decide.
        slurm_calls: number of calls of Slurm.
        seconds: duration of observe, plan (supply), dispatch, lending, and advertise (applying all decisions).
        again: whether another round should follow soon.
    """

    changes: tuple[OfferChange, ...] = ()
    reservations: tuple[Reservation, ...] = ()
    notes: tuple[str, ...] = ()
    error: str = ""
    pending: int = 0
    waiting: int = 0
    offers: Mapping[str, int] = field(default_factory=dict)
    unacknowledged: tuple[str, ...] = ()
    dispatch: tuple[DispatchOutcome, ...] = ()
    orders: tuple[OrderOutcome, ...] = ()
    ended: tuple[Loan, ...] = ()
    failed: Mapping[str, Exception] = field(default_factory=dict)
    slurm_calls: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    again: bool = False


class Controller:
    """Run rounds. `observer`: the sources of the snapshot other than Slurm; `decide` replaces `decide.core.decide`."""

    def __init__(
        self,
        settings: Settings,
        slurm: SlurmClient,
        observer: Observer,
        advertiser: Advertiser,
        record: Record,
        clock: Clock,
        decide: Decide = decide,
    ) -> None:
        self.settings, self.observer, self._decide = settings, observer, decide
        self._slurm, self._advertiser, self._record, self._clock = slurm, advertiser, record, clock
        self.memory = DecisionMemory(settings)
        self.decision: Decision | None = None
        self._jobs: Sequence[JobRow] = ()
        self._unanswered = Questions()
        self._begin_times = BeginTimes()
        self.dry_run = DryRun()
        #: set before the first round, if rounds are recorded
        self.recorder: FlightRecorder | None = None

    @uncollected()
    def round(self, jobs: Sequence[JobRow], rows: Sequence[NodeRow]) -> RoundReport:
        """Run one round on Slurm's queue and nodes, which the caller has just listed."""
        start = self._clock.monotonic()
        snapshot = self._observe(jobs, rows)
        observed = self._clock.monotonic()
        self._jobs = jobs
        self.decision = decision = self._decide(snapshot, self.memory, self.settings, self._clock.monotonic)
        self.memory = decision.memory
        decided = self._clock.monotonic()
        stages = {name: decision.seconds[name] for name in ("dispatch", "lending") if name in decision.seconds}
        applied = self._apply_supply(decision.supply, snapshot)
        dispatched = self._apply_dispatch(decision.dispatch, snapshot)
        lent, unsaved = self._apply_lending(decision.lending)
        moved = self._apply_moves(decision.supply)
        applied.notes += self._wake_scheduler(snapshot)
        outcomes = Outcomes(dispatched, lent, unsaved)
        settled = settle(outcomes, self.memory)
        if self.recorder is not None:
            self.recorder.round(snapshot, decision, outcomes)
        self._record_settled(decision, settled, lent)
        self._unanswered = decision.questions
        changed = moved or any(outcome.applied for outcome in dispatched) or any(outcome.applied for outcome in lent)
        seconds = {
            "observe": observed - start,
            "plan": decided - observed - sum(stages.values()),
            **stages,
            "advertise": self._clock.monotonic() - decided,
        }
        supply, advertised = decision.supply, applied.advertised
        report = RoundReport(
            changes=tuple(advertised.changes),
            notes=tuple(applied.notes),
            error=applied.error,
            unacknowledged=tuple(advertised.unacknowledged),
            dispatch=(*(decision.dispatch.settled if decision.dispatch else ()), *settled.dispatch),
            orders=tuple(lent),
            ended=decision.lending.ended if decision.lending is not None else (),
            failed=decision.failed,
            slurm_calls=applied.calls + advertised.calls,
            seconds=seconds,
            again=changed or bool(advertised.unacknowledged or applied.error or decision.questions),
        )
        if supply is None:
            return report
        return replace(
            report,
            reservations=supply.plan.reservations,
            notes=(*supply.notes, *report.notes),
            pending=sum(DemandQueue.of(demands).copies for demands in (supply.demands, supply.put_off)),
            waiting=supply.plan.waiting_count + len({demand.job for demand in supply.put_off}),
            offers={profile.name: n for profile, n in sorted(supply.plan.offers().items())},
        )

    # -- observe ---------------------------------------------------------------------------------------------------

    def _observe(self, jobs: Sequence[JobRow], rows: Sequence[NodeRow]) -> ClusterSnapshot:
        recording = self._record.available
        snapshot = self.observer.snapshot(self._clock.time(), jobs, rows, recording)
        questions = needed(snapshot, self.memory, self.settings)
        pending = Questions(questions.progress, questions.arrays, questions.throttled, self._unanswered.decisions)
        answers = self._record.ask(pending) if pending and recording else Answers()
        predictions = snapshot.predictions if self.recorder is None else self.recorder.predictions(snapshot.predictions)
        return replace(snapshot, answers=answers, predictions=predictions)

    # -- apply -----------------------------------------------------------------------------------------------------

    def _apply_supply(self, decided: SupplyDecision | None, snapshot: ClusterSnapshot) -> _Applied:
        if decided is None:
            return _Applied()
        applied, jobs = _Applied(), self.memory.supply.queue.rows
        for job in decided.start_now:
            applied.calls += 1
            try:
                self._slurm.shorten_requeue_delay(name_of(jobs[job]) if job in jobs else job)
            except SlurmError as error:
                applied.notes.append(f"job {job} keeps its requeue delay: {error}")
            else:
                self._begin_times.note([job], snapshot.now)
        rows = {row.name: row for row in snapshot.nodes}
        plans = [offer.plan for offer in decided.offers]
        try:
            advertised = self._advertiser.advertise(
                plans, decided.nodes, rows, jobs, self._clock.monotonic, decided.sharing
            )
        except SlurmError as failure:
            applied.error = f"cannot verify the new offers; retrying in the next round: {failure}"
            return applied
        applied.advertised = advertised
        applied.notes += [f"Slurm rejected an update; retrying in the next round: {text}" for text in advertised.errors]
        applied.notes += [
            f"{name}: the constant sum of mig counts is too small for some free slots; increase mig:none in "
            "slurm.conf and gres.conf"
            for name in advertised.cut
        ]
        reasons = {offer.plan.node: offer.why for offer in decided.offers} if advertised.changes else {}
        for change in advertised.changes:
            why = _RESET if change.reset else reasons[change.node]
            self._record.supply(change.node, snapshot.now, change.version, change.counts, why)
        return applied

    def _apply_dispatch(self, decided: DispatchDecision | None, snapshot: ClusterSnapshot) -> list[DispatchOutcome]:
        if decided is None:
            return []
        now = snapshot.now
        if self.settings.dispatch is not None and self.settings.dispatch.dry_run:
            self._record_actions(self.dry_run.changes([*decided.retypes, *decided.throttles], now))
            return []
        updates: dict[str, Mapping[str, str]] = {}
        changes: list[Retype | Throttle] = []
        outcomes: list[DispatchOutcome] = []
        for retype in decided.retypes:
            updates.update(dict.fromkeys(retype.targets, retype.fields() or {}))
            changes.append(retype)
        # record a throttle before sending it to Slurm: otherwise it would be taken for the user's own after a restart
        rows = [dispatching.action_row(throttle, now) for throttle in decided.throttles]
        recorded = not rows or self._record.save((), rows)
        for throttle in decided.throttles:
            if recorded:
                updates[str(throttle.array.array)] = {"ArrayTaskThrottle": str(throttle.after)}
                changes.append(throttle)
            else:
                outcomes.append(DispatchOutcome(throttle, now, "it cannot be recorded", applied=False))
        updates.update(decided.repairs)
        return outcomes + self._update(updates, changes, now) if updates else outcomes

    def _update(
        self, updates: Mapping[str, Mapping[str, str]], changes: Iterable[Retype | Throttle], now: float
    ) -> list[DispatchOutcome]:
        refused: Mapping[str, str] = {}
        try:
            self._slurm.update_jobs(updates)
        except SlurmRefused as error:
            refused = error.refused
        except SlurmError as error:  # unknown which updates were made
            return [DispatchOutcome(change, now, str(error), unsure=True) for change in changes]
        outcomes = []
        for change in changes:
            names = change.targets if isinstance(change, Retype) else (str(change.array.array),)
            why = next((refused[name] for name in names if name in refused), "")
            # Slurm reports tasks that have ended as errors, but accepts the new throttle of the array
            outcomes.append(DispatchOutcome(change, now, why, unsure=bool(why) and isinstance(change, Throttle)))
        return outcomes

    def _apply_lending(self, decided: LendingDecision | None) -> tuple[list[OrderOutcome], Sequence[Loan]]:
        """Apply the orders; return their outcomes, and the loans that could not be recorded."""
        if decided is None:
            return [], ()
        orders: Sequence[LoanOrder] = decided.orders
        if self.settings.lending is not None and self.settings.lending.dry_run:
            self._record.post([loan.row() for loan in decided.changed], ())
            self._record_actions(self.dry_run.orders(orders, decided.job_views, self._clock.time()))
            return [], ()
        rows = [loan.row() for loan in decided.changed]
        outcomes: list[OrderOutcome] = []
        unsaved: Sequence[Loan] = ()
        if not orders and rows:
            self._record.post(rows, ())
        elif rows and not (self._record.available and self._record.save(rows, ())):
            unsaved, now = decided.changed, self._clock.time()
            for order in orders:
                if order.recorded:
                    outcomes.append(OrderOutcome(order, "", "", now, "it cannot be recorded", applied=False))
            orders = [order for order in orders if not order.recorded]
        if orders:
            outcomes += apply_orders(orders, decided.job_views, self._slurm, self._clock.time)
            started = [o.order.job for o in outcomes if o.applied and o.order.kind in GIVING]
            self._begin_times.note(started, self._clock.time())
        return outcomes, unsaved

    def _apply_moves(self, decided: SupplyDecision | None) -> bool:
        """Signal training jobs that are to be moved; return whether any was signalled. The next snapshots show the
        effect.
        """
        if decided is None or not decided.moves:
            return False
        rows = self.memory.supply.queue.rows
        self._record_actions(apply_moves(decided.moves, rows, self._slurm, self._clock.time))
        return True

    def _wake_scheduler(self, snapshot: ClusterSnapshot) -> list[str]:
        """Have Slurm examine jobs whose start time it has overlooked; return notes on what failed."""
        overlooked = self._begin_times.overlooked(snapshot.jobs, snapshot.now)
        if not overlooked:
            return []
        try:
            self._slurm.update_jobs({name_of(row): {"StartTime": "now"} for row in overlooked})
        except SlurmError as error:
            return [f"Slurm examines some jobs late that may start now: {error}"]
        return []

    # -- record ----------------------------------------------------------------------------------------------------

    def _record_settled(self, decision: Decision, settled: Settled, lent: Sequence[OrderOutcome]) -> None:
        earlier = decision.dispatch.settled if decision.dispatch is not None else ()
        certain = [
            dispatching.action_row(outcome.change, outcome.at, outcome.error)
            for outcome in (*earlier, *settled.dispatch)
            if outcome.error or isinstance(outcome.change, Retype)
        ]
        rows = [loans.action_row(outcome) for outcome in lent if outcome.applied]
        if settled.loans or certain or rows:
            self._record.post([loan.row() for loan in settled.loans], [*certain, *rows])

    def _record_actions(self, rows: Rows) -> None:
        if rows:
            self._record.post((), rows)

    # -- reports --------------------------------------------------------------------------------------------------

    def expect_start(self, job: int) -> None:
        """Record that a job was requeued and given a start time outside of a round, see `BeginTimes`."""
        self._begin_times.note([job], self._clock.time())

    def why(self, job: int, *, in_full: bool = True) -> str:
        """Return why a job is pending; one sentence.

        Args:
            in_full: with what follows from the hints of the job's user.
        """
        now = self._clock.time()
        lending = why_not_lent(job, self.memory.lending, now) if self.settings.lending is not None else None
        if lending is not None:
            return lending if in_full else without_estimates(lending)
        row = next((row for row in self._jobs if row.job_id == job), None)
        if self.settings.supply is None:
            supply = "supply is disabled ([supply] enabled = false)"
        else:
            decided = self.decision.supply if self.decision is not None else None
            lends = None if self.settings.lending is None else self.settings.lending.partitions
            supply = why_not_started(job, row, decided, now, lends)
        tied = why_pipeline(row, self.memory.dispatch.pipelines) if in_full and row is not None else ""
        return "; ".join(text for text in (supply, why_moved(job, self.memory.supply.moves), tied) if text)

    def waiting_for_loans(self) -> dict[int, str]:
        """Return every pending elastic training job, and why it is pending."""
        memory, now = self.memory.lending, self._clock.time()
        reasons = {job: why_not_lent(job, memory, now) for job in list(memory.job_views)}
        return {job: why for job, why in reasons.items() if why is not None}


_RESET = "Slurm had other counts (a restart or scontrol reconfigure); the plan is unchanged"


@dataclass
class _Applied:
    """Outcome of applying supply's decision."""

    advertised: Advertised = field(default_factory=Advertised)
    notes: list[str] = field(default_factory=list)
    error: str = ""
    calls: int = 0


def explain(report: RoundReport) -> str:
    """Describe a round in one line, for the log."""
    if report.error:
        return report.error
    changed = f"{len(report.changes)} nodes changed" if report.changes else "no change"
    return (
        f"{report.pending} jobs need supply, {report.waiting} wait, {len(report.reservations)} reservations, "
        f"{changed}, {report.slurm_calls} Slurm calls in {sum(report.seconds.values()):.3f} s"
    )

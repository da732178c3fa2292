"""Run the controller inside the service: collect a round's input, start it, and write its log and metrics."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from slurm_migbatch.config import Config
from slurm_migbatch.daemon.advertiser import Advertiser
from slurm_migbatch.daemon.controller import Controller, RoundReport, explain
from slurm_migbatch.daemon.flightrecorder import DIRECTORY, FlightRecorder
from slurm_migbatch.daemon.log import FaultReporter, RateLimitedLog
from slurm_migbatch.daemon.metrics import Age, Metrics
from slurm_migbatch.daemon.observer import CompleteView, Observer
from slurm_migbatch.daemon.plans import NodePlans
from slurm_migbatch.daemon.poll import SlurmView
from slurm_migbatch.daemon.record import NodesPast, WriterRecord, lending_past, nodes_past
from slurm_migbatch.daemon.settings import blackout_of, settings_of
from slurm_migbatch.daemon.writer import StoreWriter
from slurm_migbatch.decide.capacity.demand import slices
from slurm_migbatch.decide.core import Settings
from slurm_migbatch.decide.dispatch.arrays import Throttle
from slurm_migbatch.decide.dispatch.retype import Retype
from slurm_migbatch.decide.dispatch.stage import DispatchOutcome
from slurm_migbatch.decide.dispatch.stage import action_row as change_row
from slurm_migbatch.decide.lending.stage import OrderOutcome
from slurm_migbatch.decide.snapshot import LendingPast, Predictions
from slurm_migbatch.slurm.client import SlurmClient

log = logging.getLogger(__name__)

_COUNT: Final = re.compile(r"\d+(?= x )")
_RETRY: Final = "running jobs are not affected; retrying in the next round"


def _recorder(config: Config, settings: Settings) -> FlightRecorder | None:
    if not config.daemon.record_hours:
        return None
    directory = Path(config.daemon.run_dir) / DIRECTORY
    return FlightRecorder(directory, settings, config.daemon.record_hours, config.daemon.record_mb)


# -- rounds ------------------------------------------------------------------------------------------------------------


class Rounds:
    """Runs a round after every query of Slurm."""

    def __init__(
        self,
        config: Config,
        slurm: SlurmClient,
        node_plans: NodePlans,
        writer: StoreWriter,
        metrics: Metrics,
        predictions: Predictions,
    ) -> None:
        self._config, self._writer = config, writer
        self.view = CompleteView()
        self._advertiser = advertiser = Advertiser(slurm, node_plans, config.supply.ack_wait_s)
        self.observer = Observer(
            self.view,
            node_plans,
            advertiser.total,
            silence_s=config.supply.node_silence_s,
            predictions=predictions,
            blackout=blackout_of(config.lending),
        )
        self.controller = Controller(settings_of(config), slurm, self.observer, advertiser, WriterRecord(writer), time)
        self.controller.recorder = self._recorder = _recorder(config, self.controller.settings)
        self.loaded = asyncio.Event()
        self._early: list[tuple[str, Sequence[Mapping[str, Any]]]] = []
        self._notes: frozenset[str] = frozenset()
        self._limited_log = RateLimitedLog(log)
        self.report: RoundReport | None = None
        self.faults = {name: FaultReporter(name, _RETRY, log) for name in ("supply", "dispatch", "lending")}
        self._metrics = _RoundMetrics(metrics, self)

    def close(self) -> None:
        """End the recording of decisions."""
        if self._recorder is not None:
            self._recorder.close()

    # -- input ---------------------------------------------------------------------------------------------------

    async def load_nodes(self) -> None:
        """Load from the record what the nodes held before this service started."""
        past: NodesPast = await self.read(nodes_past, "cannot read the leases", "supply is unchanged until then")
        self._advertiser.recall(past.offers)
        self.view.load(past.inventory, ())
        for node, events in past.events.items():
            # Slurm knows whether a node that had a fault is still drained
            self.view.apply(node, [event for event in events if event["kind"] != "fault"])
        self.view.load({}, past.leases, past.removed)
        for node, early in self._early:
            self.view.apply(node, early)
        self._early.clear()
        self.loaded.set()

    async def load_loans(self) -> None:
        """Load from the record current loans and moves, reclaims, and the demand of inference."""
        config = self._config.lending
        if config.enabled:
            now, history_s = time.time(), config.forecast_days * config.day_s
            past = await self.read(
                lambda store: lending_past(store, now, history_s),
                "cannot read the loans",
                "nothing is lent or reclaimed until then",
            )
            self.controller.dry_run.recall(past.actions)
            self.observer.remember(past)
        elif self._config.moves.enabled or self._config.moves.preempt:
            actions = await self.read(
                lambda store: store.actions(), "cannot read the moves", "none is started until then"
            )
            self.observer.remember(LendingPast(actions=actions))

    async def read(self, work: Callable[[Any], Any], subject: str, advice: str) -> Any:
        """Query the record until it answers; `subject` and `advice`: for the log."""
        fault = FaultReporter(subject, advice, log)
        while True:
            try:
                result = await self._writer.answer(work, subject)
            except Exception as error:
                await asyncio.sleep(fault.failed(error))
                continue
            fault.succeeded()
            return result

    def ingested(self, node: str, events: Sequence[Mapping[str, Any]], complete: bool) -> None:
        """Process a node's stored events; `complete`: its whole state is known."""
        for event in events:
            if event.get("kind") == "misfit" and isinstance(event.get("job"), int):
                self._limited_log.warning(node, f"misfit of job {event['job']} on {node}: {event.get('reason')}")
        if self.loaded.is_set():
            self.view.apply(node, events)
        else:
            self._early.append((node, events))
        self.view.set_complete(node, complete)
        self.observer.ingested(node, events, time.time())

    # -- rounds ----------------------------------------------------------------------------------------------------

    async def follow(self, snapshot: SlurmView) -> bool:
        """Run one round on a new view of Slurm; return whether another should follow soon."""
        if not self.loaded.is_set():
            return False
        self.observer.preemption = snapshot.preemption
        self.observer.backfill_window_s = snapshot.backfill_window_s
        report = await asyncio.to_thread(self.controller.round, snapshot.jobs, snapshot.nodes)
        self.report = report
        self._metrics.note(report, snapshot.at)
        self._log_report(report)
        return report.again

    def _log_report(self, report: RoundReport) -> None:
        for name, fault in self.faults.items():
            error = report.failed.get(name) or (report.error if name == "supply" else "")
            if not error:
                fault.succeeded()
                continue
            if isinstance(error, Exception) and not fault.open:
                log.error("a decision on %s failed", name, exc_info=error)
            fault.failed(error)
        if report.changes:
            log.info(explain(report))
            for change in report.changes:
                counts = ",".join(f"{kind}:{n}" for kind, n in change.counts.items())
                log.debug("offer", extra={"node": change.node, "version": change.version, "counts": counts})
        # nodes cause these notes: a note that differs only in its counts is written once a minute
        self._notes = frozenset(
            note
            for note in sorted(report.notes)
            if note in self._notes or self._limited_log.warning(_COUNT.sub("", note), note)
        )
        for loan in report.ended:
            log.info("loan over", extra={"job": loan.job_id, "profile": loan.profile, "why": loan.why_ended})
        for changed in report.dispatch:
            _log_change(changed)
        for order in report.orders:
            _log_order(order)

    # -- for users -------------------------------------------------------------------------------------------------

    def offers(self, gres: str) -> bool:
        """Return whether the last round left every slice of `gres` ("mig:1g.10gb:2") offered on some node."""
        report = self.report
        return report is not None and all(report.offers.get(p.name, 0) >= n for p, n in slices(gres).items())


def _log_change(outcome: DispatchOutcome) -> None:
    row = change_row(outcome.change, outcome.at)
    job = outcome.change.targets[0] if isinstance(outcome.change, Retype) else row["job_id"]
    fields = {"job": job, "before": row["before"], "after": row["after"], "why": row["why"]}
    if outcome.error:
        log.warning("Slurm refused to %s a job; it is unchanged", row["kind"], extra={**fields, "error": outcome.error})
    else:
        log.info("%s", row["kind"], extra=fields)


def _log_order(outcome: OrderOutcome) -> None:
    order = outcome.order
    fields = {"job": order.job, "before": outcome.before, "after": outcome.after, "why": order.why}
    if outcome.error and outcome.applied:
        text = "Slurm refused to %s a training job"
        log.warning(text, order.kind.value, extra={**fields, "error": outcome.error})
    elif outcome.applied:
        log.info("%s", order.kind.value, extra=fields)


class _RoundMetrics:
    """Metrics of rounds."""

    def __init__(self, metrics: Metrics, rounds: Rounds) -> None:
        self._rounds = rounds
        self._seconds = {
            "supply": metrics.histogram("migbatch_supply_round_seconds", "Duration of a supply round."),
            "dispatch": metrics.histogram("migbatch_dispatch_round_seconds", "Duration of a decision on pending jobs."),
            "lending": metrics.histogram("migbatch_lending_round_seconds", "Duration of a decision on loans."),
        }
        self._changes = metrics.counter("migbatch_supply_changes_total", "Changes of what a node offers.")
        self._changed = metrics.counter(
            "migbatch_dispatch_actions_total", "Changes of pending jobs, by kind.", "kind", "outcome"
        )
        self._ended = metrics.counter("migbatch_loans_ended_total", "Ended loans, by cause.", "cause")
        self._orders = metrics.counter(
            "migbatch_lending_actions_total", "Actions on training jobs, by kind.", "kind", "outcome"
        )
        self._age = Age()
        began = time.monotonic()
        metrics.gauge(
            "migbatch_supply_age_seconds",
            "Seconds since the Slurm query of the last round in which supply did not fail, and the maximum so far.",
            # before the first round the age is that of the service
            lambda: self._age.values() or {"now": time.monotonic() - began},
            "what",
        )
        metrics.gauge("migbatch_supply_offered", "Offered free slices, by profile.", self._offered, "profile")
        metrics.gauge("migbatch_supply", "Figures of the last round.", self._numbers, "what")
        metrics.gauge("migbatch_loans", "Current loans, by state.", self._states, "state")
        metrics.gauge("migbatch_loans_waiting", "Elastic training jobs that wait for a slice.", self._waiting)

    def note(self, report: RoundReport, at: float) -> None:
        """Update the metrics after a round; `at`: when Slurm was queried for it (monotonic seconds)."""
        decided = {name: report.seconds[name] for name in ("dispatch", "lending") if name in report.seconds}
        self._seconds["supply"].observe(sum(report.seconds.values()) - sum(decided.values()))
        for name, seconds in decided.items():
            self._seconds[name].observe(seconds)
        self._changes.inc(len(report.changes))
        if not report.error and "supply" not in report.failed:
            self._age.renewed(at)
        for outcome in report.dispatch:
            kind = "throttle" if isinstance(outcome.change, Throttle) else "retype"
            self._changed.labels(kind=kind, outcome="refused" if outcome.error else "done").inc()
        for order in report.orders:
            if order.applied:
                self._orders.labels(kind=order.order.kind.value, outcome="refused" if order.error else "done").inc()
        for loan in report.ended:
            self._ended.labels(cause=loan.cause.value).inc()

    def _offered(self) -> Mapping[str, int]:
        report = self._rounds.report
        return report.offers if report else {}

    def _numbers(self) -> Mapping[str, int]:
        report = self._rounds.report
        if report is None:
            return {}
        return {
            "pending_jobs": report.pending,
            "waiting_jobs": report.waiting,
            "reservations": len(report.reservations),
            "unacknowledged_nodes": len(report.unacknowledged),
            "slurm_calls": report.slurm_calls,
        }

    def _states(self) -> Mapping[str, int]:
        return self._rounds.controller.memory.lending.ledger.states()

    def _waiting(self) -> int:
        job_views = list(self._rounds.controller.memory.lending.job_views.values())
        return sum(1 for job_view in job_views if job_view.row.pending)

"""Collect migbatchd's state outside Slurm's queue and build snapshots: leases of nodes, reports, requeued jobs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from slurm_migbatch.daemon.nodesview import LiveView, NodesView
from slurm_migbatch.daemon.plans import Plans
from slurm_migbatch.daemon.run_reports import RunReport, confirm
from slurm_migbatch.decide.capacity.facts import NodeFacts
from slurm_migbatch.decide.lending.elastic_jobs import report_of
from slurm_migbatch.decide.snapshot import (
    ClusterSnapshot,
    LendingPast,
    NoPredictions,
    PlanStatus,
    Predictions,
    Run,
)
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm.client import JobRow, NodeRow
from slurm_migbatch.slurm.preemption import NO_PREEMPTION
from slurm_migbatch.slurm.settings import BACKFILL_WINDOW_S

#: reports to keep of one node between two snapshots; a node cannot have as many runs while slurmctld starts none
_REPORTS: Final = 1000


class CompleteView(LiveView):
    """`LiveView` of the nodes that have reported all their leases to this database and this service.

    The database's data of other nodes may be outdated. Nothing is planned for them; their counts in Slurm stay as set.
    """

    def __init__(self) -> None:
        super().__init__()
        self._complete: set[str] = set()

    def set_complete(self, node: str, complete: bool) -> None:
        """Record whether the known leases of a node are all that it has."""
        with self._lock:
            (self._complete.add if complete else self._complete.discard)(node)

    def facts(self) -> Mapping[str, NodeFacts]:
        """See NodesView."""
        found = super().facts()
        with self._lock:
            return {node: facts for node, facts in found.items() if node in self._complete}


class Observer:
    """Collect events between two snapshots; fed from the event loop, read from the controller's thread.

    Args:
        view: leases of the nodes.
        node_plans: offers of the nodes.
        total: the constant sum of a node's mig counts, by its row.
        silence_s: a node without a message for so many seconds is not changed.
        predictions: the predictor.
        blackout: whether nothing may be lent at a time (unix seconds).
    """

    def __init__(
        self,
        view: NodesView,
        node_plans: Plans,
        total: Callable[[NodeRow], int],
        *,
        silence_s: float = 90.0,
        predictions: Predictions | None = None,
        blackout: Callable[[float], bool] = lambda now: False,
    ) -> None:
        self.view, self._node_plans, self._total, self._silence_s = view, node_plans, total, silence_s
        self._predictions, self._blackout = predictions or NoPredictions(), blackout
        self._lock = threading.Lock()
        self._run_reports: dict[str, dict[tuple[Run, bool], RunReport]] = {}  # by node
        self._past: LendingPast | None = None
        #: row and plan of each node; if unchanged they are the same objects from round to round
        self._rows: dict[str, NodeRow] = {}
        self._statuses: dict[str, PlanStatus] = {}
        #: profiles to offer for empty space, by the history of requests
        self.preference: tuple[Profile, ...] = ()
        #: which jobs the site lets Slurm preempt, if migbatchd may preempt jobs by these rules
        self.preemption = NO_PREEMPTION
        #: how far ahead Slurm plans the starts of pending jobs
        self.backfill_window_s = BACKFILL_WINDOW_S

    def remember(self, past: LendingPast) -> None:
        """Set the record's data at the start of the service."""
        with self._lock:
            self._past = past

    def ingested(self, node: str, events: Sequence[Mapping[str, Any]], now: float) -> None:
        """Add a node's events about its runs, after they were stored: progress reports, and misfits."""
        messages = []
        for event in events:
            if event.get("kind") == "progress" and (report := report_of(event, now)) is not None:
                messages.append(RunReport(node, *report, now))
            elif event.get("kind") == "misfit" and isinstance(event.get("job"), int):
                messages.append(RunReport(node, (event["job"], int(event.get("restart") or 0)), None, now))
        with self._lock:
            self._add(messages)

    def _add(self, messages: Iterable[RunReport]) -> None:
        """Keep one report of each run, at most `_REPORTS` of a node, until the next snapshot.

        A field that a later report omits keeps its earlier value.
        """
        for message in messages:
            reports, key = self._run_reports.setdefault(message.node, {}), (message.run, message.report is None)
            before = reports.pop(key, None)
            if before is not None and before.report is not None and message.report is not None:
                news = {name: value for name, value in vars(message.report).items() if value is not None}
                message = message._replace(report=replace(before.report, **news))
            reports[key] = message
            if len(reports) > _REPORTS:
                del reports[next(iter(reports))]

    def _take(self) -> list[RunReport]:
        messages, self._run_reports = self._run_reports, {}
        return [message for reports in messages.values() for message in reports.values()]

    def snapshot(self, now: float, jobs: Sequence[JobRow], rows: Sequence[NodeRow], recording: bool) -> ClusterSnapshot:
        """Return the current cluster, without answers; one-time events are in this snapshot and in no later one."""
        inventory = dict(self.view.facts())
        for row in rows:
            if row.asleep and (emptied := self.view.emptied(row.name)) is not None:
                inventory[row.name] = emptied
        before, self._rows = self._rows, {}
        statuses, self._statuses = self._statuses, {}
        nodes = []
        for row in rows:
            earlier = before.get(row.name)
            latest = earlier if earlier is not None and (earlier is row or earlier == row) else row
            self._rows[row.name] = latest
            nodes.append(latest)
            if row.name in inventory and any(row.gres.values()):
                self._statuses[row.name] = self._status(latest, statuses.get(row.name))
        with self._lock:
            messages = self._take()
            past, self._past = self._past, None
        confirmed = confirm(messages, {row.job_id: row for row in jobs} if messages else {}, now)
        with self._lock:
            self._add([*confirmed.later, *self._take()])
        return ClusterSnapshot(
            now=now,
            jobs=tuple(jobs),
            nodes=tuple(nodes),
            inventory=inventory,
            plans=self._statuses,
            sent_back=tuple(sorted(set(confirmed.sent_back))),
            preference=self.preference,
            reports=tuple(confirmed.reports),
            past=past,
            recording=recording,
            blackout=self._blackout(now),
            preemption=self.preemption,
            backfill_window_s=self.backfill_window_s,
            predictions=self._predictions,
        )

    def _status(self, row: NodeRow, before: PlanStatus | None) -> PlanStatus:
        plan = self._node_plans.current(row.name)
        acknowledged = plan is None or self._node_plans.acked(row.name) >= plan.version or row.asleep
        reachable = self._node_plans.silence(row.name) <= self._silence_s or row.asleep
        state = (acknowledged, reachable, self._total(row))
        if (
            before is not None
            and before.plan is plan
            and (before.acknowledged, before.reachable, before.total) == state
        ):
            return before
        return PlanStatus(plan, *state)

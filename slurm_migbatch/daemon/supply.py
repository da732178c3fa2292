"""The supply loop inside the service: what it knows of the nodes, when it runs, and what becomes of its reports."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from slurm_migbatch.config import SupplyConfig
from slurm_migbatch.daemon.log import FaultReporter
from slurm_migbatch.daemon.metrics import Age, Labels, Metrics
from slurm_migbatch.daemon.plans import PlanBoard
from slurm_migbatch.daemon.poll import Snapshot
from slurm_migbatch.daemon.ports import Store
from slurm_migbatch.daemon.writer import StoreWriter
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm.client import JobRow, SlurmClient
from slurm_migbatch.supply.demand import slices
from slurm_migbatch.supply.loop import Report, Settings, SupplyLoop, explain
from slurm_migbatch.supply.view import LiveView, NodeFacts
from slurm_migbatch.workload.loans import is_marked

log = logging.getLogger(__name__)


class ToldView(LiveView):
    """`LiveView` of those nodes alone that have told everything that they hold, to this database and this service.

    What the database holds of others may be of any age. Nothing is planned for them, and what Slurm was told stays.
    """

    def __init__(self) -> None:
        super().__init__()
        self._told: set[str] = set()

    def believe(self, node: str, told: bool) -> None:
        """Note whether what is known of a node is all that it holds."""
        with self._lock:
            (self._told.add if told else self._told.discard)(node)

    def facts(self) -> Mapping[str, NodeFacts]:
        """See NodesView."""
        found = super().facts()
        with self._lock:
            return {node: facts for node, facts in found.items() if node in self._told}


class SupplyRoom:
    """Keeps a `LiveView` of the nodes, and lets the supply loop follow every look at Slurm."""

    def __init__(
        self,
        config: SupplyConfig,
        client: SlurmClient,
        board: PlanBoard,
        writer: StoreWriter,
        metrics: Metrics,
        lending: Collection[str] = (),
    ) -> None:
        """`lending`: partitions whose elastic training jobs get what others leave."""
        self._enabled = config.enabled
        self._writer = writer
        self.view = ToldView()
        settings = Settings(
            ack_wait_s=config.ack_wait_s,
            silence_s=config.node_silence_s,
            preference=tuple(Profile.parse(name) for name in config.preference),
        )
        self.loop = SupplyLoop(
            client, self.view, board, time, self._record, settings, loan=lambda row: _is_loan(row, lending)
        )
        self._loaded = asyncio.Event()
        self._early: list[tuple[str, Sequence[Mapping[str, Any]]]] = []
        self._notes: frozenset[str] = frozenset()
        self._fault = FaultReporter("supply", "nothing that runs is touched; the next round tries again", log)
        self.report: Report | None = None
        self._seconds = metrics.histogram("migbatch_supply_round_seconds", "Duration of a supply round.")
        self._changes = metrics.counter("migbatch_supply_changes_total", "Changes of what a node offers.")
        self._age = Age()
        metrics.gauge(
            "migbatch_supply_age_seconds",
            "Seconds since the look at Slurm that the last round without an error followed, and the most so far.",
            self._age.values,
            "what",
        )
        metrics.gauge("migbatch_supply_offered", "Free slices that are offered, by profile.", self._offered, "profile")
        metrics.gauge("migbatch_supply", "The last round in numbers.", self._numbers, "what")

    async def load(self) -> None:
        """Learn from the record what the nodes held before this service started."""
        fault = FaultReporter("cannot read the leases", "supply stays as it is until then", log)
        while not self._loaded.is_set():
            try:
                past = await asyncio.wrap_future(self._writer.call(_past, "leases"))
            except Exception as error:
                await asyncio.sleep(fault.failed(error))
                continue
            fault.succeeded()
            inventory, history, leases = past
            self.view.load(inventory, ())
            for node, events in history.items():
                self.view.apply(node, events)
            self.view.load({}, leases)
            for node, early in self._early:
                self.view.apply(node, early)
            self._early.clear()
            self._loaded.set()
        await asyncio.Event().wait()

    def ingested(self, node: str, events: Sequence[Mapping[str, Any]], told: bool) -> None:
        """Take in a node's events, after they were stored; `told`: they leave nothing unknown that it holds."""
        for event in events:
            if event.get("kind") == "misfit" and isinstance(event.get("job"), int):
                log.warning("misfit", extra={"node": node, "job": event["job"], "why": event.get("reason")})
                self.loop.hasten(event["job"])
        if self._loaded.is_set():
            self.view.apply(node, events)
        else:
            self._early.append((node, events))
        self.view.believe(node, told)

    async def follow(self, snapshot: Snapshot) -> bool:
        """One round on what Slurm just said; whether another should follow soon."""
        if not self._enabled or not self._loaded.is_set():
            return False
        report = await asyncio.to_thread(self.loop.round, snapshot.jobs, snapshot.nodes)
        self.report = report
        self._seconds.observe(sum(report.seconds.values()))
        self._changes.inc(len(report.changes))
        if report.error:
            self._fault.failed(report.error)
        else:
            self._fault.succeeded()
            self._age.renewed(snapshot.at)
        if report.changes:
            log.info(explain(report))
            for change in report.changes:
                counts = ",".join(f"{kind}:{n}" for kind, n in change.counts.items())
                log.debug("offer", extra={"node": change.node, "version": change.version, "counts": counts})
        self._say(report.notes)
        return report.unsettled

    def why(self, job: int) -> str:
        """Why a job waits, as far as supply goes."""
        return self.loop.why(job) if self._enabled else "supply is not managed ([supply] enabled = false)"

    def offers(self, gres: str) -> bool:
        """Whether the last round left every slice of `gres` ("mig:1g.10gb:2") on offer somewhere."""
        report = self.report
        return report is not None and all(report.offers.get(p.name, 0) >= n for p, n in slices(gres).items())

    @property
    def error(self) -> str:
        """What is wrong with supply, if anything."""
        return self._fault.error

    def _say(self, notes: Iterable[str]) -> None:
        now = frozenset(notes)
        for note in sorted(now - self._notes):
            log.warning("%s", note)
        self._notes = now

    def _record(self, node: str, ts: float, version: int, counts: Mapping[str, int], why: str) -> None:
        self._writer.post(lambda store: store.record_supply(node, ts, version, counts, why), "supply changes")

    def _offered(self) -> Mapping[Labels, float]:
        return {(name,): float(n) for name, n in (self.report.offers if self.report else {}).items()}

    def _numbers(self) -> Mapping[Labels, float]:
        report = self.report
        if report is None:
            return {}
        figures = {
            "pending_slices": report.pending,
            "waiting_jobs": report.waiting,
            "reservations": len(report.reservations),
            "unacknowledged_nodes": len(report.unacknowledged),
            "slurm_calls": report.slurm_calls,
        }
        return {(name,): float(value) for name, value in figures.items()}


Past = tuple[Mapping[str, Sequence[Mapping[str, Any]]], Mapping[str, Sequence[Mapping[str, Any]]], Sequence[Any]]


def _is_loan(row: JobRow, lending: Collection[str]) -> bool:
    """Whether a pending job is an elastic training job; asked for every one, so its hints are not read."""
    return is_marked(row.comment) and all(name in lending for name in row.partition.split(","))


def _past(store: Store) -> Past:
    return store.inventory(), store.instance_events(), store.leases()

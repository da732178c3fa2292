"""Run migbatchd between one start and the next reload: its concurrent components, and the order in which they stop.

The cluster works without it: jobs start and end, submissions are answered by the compiled table, nodes keep their
events. After a crash all state is read again from the database, from Slurm and from the nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from slurm_migbatch.config import Config
from slurm_migbatch.daemon import messages
from slurm_migbatch.daemon.actuator import name_of
from slurm_migbatch.daemon.addresses import NodeAddresses
from slurm_migbatch.daemon.api import NodeApi, WaitReason, anywhere
from slurm_migbatch.daemon.audit import Auditor, Excess, OrphanWatch
from slurm_migbatch.daemon.departed import DepartedJobs
from slurm_migbatch.daemon.ended import HistoryClient
from slurm_migbatch.daemon.facts import policy_of, slurm_uids
from slurm_migbatch.daemon.garbage import uncollected
from slurm_migbatch.daemon.gate import ApiLimits
from slurm_migbatch.daemon.gauges import slices_by_state, waits
from slurm_migbatch.daemon.learning import Learning
from slurm_migbatch.daemon.listening import Listening
from slurm_migbatch.daemon.metrics import Metrics
from slurm_migbatch.daemon.offer_tuner import OfferTuner
from slurm_migbatch.daemon.plans import NodePlans
from slurm_migbatch.daemon.poll import Poller, SlurmView, UnsavedJobs
from slurm_migbatch.daemon.privacy import Privacy
from slurm_migbatch.daemon.query_supervisor import QuerySupervisor
from slurm_migbatch.daemon.recurring import RecurringWatch
from slurm_migbatch.daemon.retention import Retention
from slurm_migbatch.daemon.retry_runner import RetryRunner
from slurm_migbatch.daemon.retrying import OomRetries
from slurm_migbatch.daemon.rounds import Rounds
from slurm_migbatch.daemon.scraping import Scraping
from slurm_migbatch.daemon.server import ApiServer, ConnectionBounds
from slurm_migbatch.daemon.silence import SilenceWatch
from slurm_migbatch.daemon.submit_supervisor import SubmitSupervisor
from slurm_migbatch.daemon.tasks import BackgroundTasks, cancel, run_forever
from slurm_migbatch.daemon.term import ActiveRole, AlwaysActive
from slurm_migbatch.daemon.writer import StoreWriter
from slurm_migbatch.decide.lending.reasons import without_estimates
from slurm_migbatch.node.auth import Signer
from slurm_migbatch.slurm.client import JobRow
from slurm_migbatch.slurm.nodelist import expand
from slurm_migbatch.store.db import Store
from slurm_migbatch.store.engines import sqlite_file
from slurm_migbatch.store.recurring import RecurringRun
from slurm_migbatch.store.sqlitefile import log_bytes

log = logging.getLogger(__name__)
_STOP_S = 5.0
#: seconds after an answer to slurmctld until it lists the submitted job
_SUBMISSION_S = 0.1


class Service:
    """All components of migbatchd for one configuration; `run` returns when `stop` is set."""

    def __init__(
        self,
        config: Config,
        *,
        client: HistoryClient,
        open_store: Callable[[], Store],
        signer: Signer,
        activity: ActiveRole | None = None,
        marks: Mapping[str, str] = MappingProxyType({}),
        scraping: Scraping | None = None,
    ) -> None:
        """Set up. `marks`: of the configuration, for another controller; `scraping`: who may read /metrics."""
        self._marks = marks
        self.config = config
        self._client = client
        self._activity = activity or AlwaysActive()
        self._began = time.monotonic()
        self.metrics = Metrics()
        self.node_plans = NodePlans()
        self.writer = StoreWriter(open_store, config.daemon.queue)
        self.poller = Poller(client, config.cluster.poll_s, self._seen, preempts=config.moves.preempt)
        self.submit = SubmitSupervisor(config, self.writer, self.metrics, self._decided)
        self.query = QuerySupervisor(config, self.metrics)
        self.learning = Learning(config, self.writer, self.metrics, self.submit.model_changed)
        self.rounds = Rounds(config, client, self.node_plans, self.writer, self.metrics, self.submit.facts)
        self._tasks = BackgroundTasks()
        self._departed = DepartedJobs(client, self.writer, self._tasks)
        self._retries = RetryRunner(
            OomRetries(client, lambda: self.submit.facts.catalog, policy_of(config).runs),
            self.writer,
            self._tasks,
            self.rounds.controller.expect_start,
            self.poller.nudge,
        )
        self.recurring = RecurringWatch(self.writer, self.submit.ran, self._retry_failed_runs)
        self.submit.follow(self.recurring.jobs.listed)
        self.retention = Retention(config, self.writer, self.metrics)
        self._auditor = Auditor()
        self._orphans = OrphanWatch()
        self._silent = SilenceWatch(config.supply.node_silence_s)
        self._unsaved = UnsavedJobs()
        self.stock = OfferTuner(self.rounds.observer, self.writer, lambda: self.poller.latest)
        self.privacy = Privacy(client, slurm_uids(config))
        self._node_api = self._node_api_of(signer, scraping or Scraping())
        bounds = ConnectionBounds(connections=config.node_api.max_connections)
        self.api = ApiServer(self._node_api.app(), config.node_api.port, bounds)
        self._listening = Listening(self.api, config.node_api.listen, client.settings, "nodes", "node_api")
        self._events = self.metrics.counter(
            "migbatch_node_events_total", "Events received from nodes, by kind.", "kind"
        )
        for kind in sorted(messages.KINDS):
            self._events.labels(kind)  # starts at zero, so that the first event of a kind counts as an increase
        self._audited = self.metrics.counter(
            "migbatch_audit_cancelled_total", "Jobs cancelled for holding more than allocated."
        )
        self._gauges()

    def _node_api_of(self, signer: Signer, scraping: Scraping) -> NodeApi:
        settings = self.config.node_api
        by_address = signer.scheme == "munge" and settings.check_addresses
        return NodeApi(
            signer=signer,
            scraping=scraping,
            node_plans=self.node_plans,
            writer=self.writer,
            metrics=self.metrics,
            health=self.health,
            ingested=self._ingested,
            why=self.why,
            waiting=self.waiting,
            administrators=slurm_uids(self.config),
            limits=ApiLimits(body_bytes=settings.max_body_kb * 1024),
            address=NodeAddresses(self._client.node_addresses).wrong if by_address else anywhere,
            activity=self._activity,
        )

    async def run(self, stop: asyncio.Event, ready: Callable[[], None] = lambda: None) -> None:
        """Serve until `stop` is set; `ready` is called when everything listens.

        Raises:
            OSError: a socket is not available.
        """
        self.writer.start()
        tasks = []
        try:
            self.api.listen_unix(Path(self.config.daemon.api_socket))
            self._listening.begin()
            loops: dict[str, Callable[[], Awaitable[None]]] = {
                "addresses": self._listening.follow,
                "poll": self.poller.run,
                "submit": self.submit.run,
                "files": self.submit.keep_files,
                "decisions": self.submit.keep_record,
                "leases": self.rounds.load_nodes,
                "loans": self.rounds.load_loans,
                "ends": partial(self._departed.recall, self.rounds),
                "learning": self.learning.run,
                "retention": self.retention.run,
            }
            if self.config.dispatch.enabled and self.config.supply.enabled and not self.config.supply.preference:
                loops["stock"] = self.stock.run
            if self.config.query.enabled:
                loops["query"] = self.query.run
            if self.config.recurring.enabled:
                loops["recurring"] = self._follow_recurring
            tasks = [asyncio.create_task(run_forever(name, loop), name=name) for name, loop in loops.items()]
            ready()
            await stop.wait()
        finally:
            await cancel(*tasks)
            self.node_plans.close()  # not before: nodes poll again at once, until the API stops
            await self.api.stop()
            self._node_api.close()
            await asyncio.to_thread(self.rounds.close)
            await self._tasks.finish(_STOP_S)  # what they did to jobs has to be recorded
            self._retries.close()
            unwritten = await asyncio.to_thread(self.writer.stop, _STOP_S)
            if unwritten:
                log.warning("stopped with %d unwritten records; nodes will send their events again", unwritten)

    def health(self) -> dict[str, Any]:
        """Return which components work, for /healthz; the reasons are in the log, because they may contain text of
        users.
        """
        checks = {
            "slurm": self.poller.fault.error,
            "database": self.writer.fault.error,
            "supply": self.rounds.faults["supply"].error,
            "submit": self.submit.error,
        }
        if self.config.lending.enabled:
            checks["lending"] = self.rounds.faults["lending"].error
        if self.config.dispatch.enabled:
            checks["dispatch"] = self.rounds.faults["dispatch"].error
        if self.config.query.enabled:
            checks["query"] = self.query.error
        if not self.poller.fault.open and self.poller.latest is None:
            checks["slurm"] = "not queried yet"
        states = {name: "failing" if text else "ok" for name, text in checks.items()}
        marks = {"marks": dict(self._marks)} if self._marks else {}
        return {"ok": not any(checks.values()), "checks": states, **marks}

    async def why(self, uid: int, job: int) -> WaitReason:
        """Return why a job waits, for a user who may see it."""
        rows = [row for row in self._queue() if row.job_id == job] or [JobRow(job)]
        if not await self.privacy.visible(uid, rows):
            return WaitReason(f"Slurm does not list job {job}")
        controller = self.rounds.controller
        return await self._reason(uid, rows[0], controller.why(job, in_full=False), controller.why(job))

    async def waiting(self, uid: int) -> Mapping[int, WaitReason]:
        """Return which training jobs wait for a loan, and why; those that a user may see."""
        reasons = self.rounds.controller.waiting_for_loans()
        visible = await self.privacy.visible(uid, [row for row in self._queue() if row.job_id in reasons])
        texts = {row.job_id: (without_estimates(reasons[row.job_id]), reasons[row.job_id]) for row in visible}
        return {row.job_id: await self._reason(uid, row, *texts[row.job_id]) for row in visible}

    async def _reason(self, uid: int, row: JobRow, why: str, in_full: str) -> WaitReason:
        """Return why a job waits, in full for a user who may see its hints."""
        shown = in_full != why and await self.privacy.in_full(uid, row)
        return WaitReason(why, in_full if shown else "")

    def _queue(self) -> Sequence[JobRow]:
        return self.poller.latest.jobs if self.poller.latest else ()

    def _decided(self, gres: str) -> None:
        """Query Slurm soon after accepting a job whose slices are not offered.

        Slurm lists it a moment later. If a slice of its type is offered, Slurm starts it without migbatchd.
        """
        if not self.rounds.offers(gres):
            asyncio.get_running_loop().call_later(_SUBMISSION_S, self.poller.nudge)

    def _ingested(self, node: str, events: Sequence[Mapping[str, Any]], complete: bool) -> None:
        for event in events:
            self._events.labels(kind if (kind := event.get("kind")) in messages.KINDS else "other").inc()
        if any(event.get("kind") == "stop" for event in events):
            self.recurring.nudge()
        # a job shorter than the pause between two queries was never seen in the queue
        stopped = (event.get("job") for event in events if event.get("kind") == "stop")
        self._departed.add({job for job in stopped if isinstance(job, int) and not self._unsaved.lists(job)})
        self.rounds.ingested(node, events, complete)
        self.poller.nudge()

    def _retry_failed_runs(self, rows: Sequence[RecurringRun]) -> None:
        """Requeue the jobs whose runs ran out of memory, if their users want it."""
        if self.config.recurring.retry:
            self._retries.retry(rows, self.recurring.jobs.past)

    async def _follow_recurring(self) -> None:
        """Find in the record the jobs that were held for their retry when an earlier service was killed; then follow
        the runs of recurring jobs.
        """
        subject = "cannot read which jobs are to be retried"
        self._retries.recall(
            await self.rounds.read(lambda store: store.actions(), subject, "they stay held until then")
        )
        await self.recurring.run()

    async def _seen(self, snapshot: SlurmView) -> bool:
        """Process a new view of Slurm; return whether to query it again immediately."""
        self.submit.facts.follow(self.rounds.view.geometries(), snapshot)
        if not self._activity.may_change_slurm():
            return False
        self._check(snapshot)
        return await self.rounds.follow(snapshot)

    @uncollected()
    def _check(self, snapshot: SlurmView) -> None:
        """Compare the queue with the record, with the nodes' reports and with the previous queue."""
        news, departed = self._unsaved.update(snapshot.jobs)
        if news:
            self.writer.replace(self._unsaved.save, "jobs")
        self._departed.follow(snapshot, departed)
        self._retries.release_held(snapshot.jobs)
        if self.config.daemon.audit:
            excesses = self._auditor.check(self.rounds.view.facts(), snapshot.jobs, snapshot.nodes)
            rows = {row.job_id: row for row in snapshot.jobs} if excesses else {}
            for excess in excesses:
                self._tasks.start(self._cancel(excess, name_of(rows[excess.job])))
        # a node that failed and that Slurm powered down or lost reports the ends of its runs only after its next boot
        up = {row.name for row in snapshot.nodes if not row.silenced}
        facts = {name: node for name, node in self.rounds.view.facts().items() if name in up}
        for orphan in self._orphans.check(facts, snapshot.jobs, time.monotonic()):
            log.warning("%s; run `migbatch node reconcile` there, and check that its agent runs", orphan)
        self._silent.check(self._silence(), time.monotonic())

    async def _cancel(self, excess: Excess, name: str) -> None:
        log.error("%s; cancelling it", excess)
        self._audited.inc()
        reason = f"migbatch: cancelled: {excess}"
        with contextlib.suppress(Exception):
            await asyncio.to_thread(self._client.update_jobs, {name: {"AdminComment": reason}})
        try:
            await asyncio.to_thread(self._client.cancel, name)
        except Exception as error:
            log.error("cannot cancel job %s, cancel it by hand: %s", name, error)

    def _gauges(self) -> None:
        started = time.time()
        gauge = self.metrics.gauge
        gauge("migbatch_start_time_seconds", "Start time of this service.", lambda: started)
        gauge("migbatch_store_queue", "Records waiting for the database.", lambda: len(self.writer))
        gauge("migbatch_store_dropped", "Dropped records, by kind.", lambda: dict(self.writer.dropped), "kind")
        gauge("migbatch_store_wal_bytes", "Size of the write-ahead log of a record in SQLite.", self._wal_bytes)
        gauge(
            "migbatch_healthy",
            "Whether a component works (1) or not (0).",
            lambda: {name: state == "ok" for name, state in self.health()["checks"].items()},
            "part",
        )
        gauge(
            "migbatch_node_silence_seconds",
            "Seconds since the last message of a node that is not down in Slurm.",
            self._silence,
            "node",
        )
        gauge(
            "migbatch_node_problems",
            "Problems found by the checks of a node that is not down in Slurm (migbatch doctor).",
            self._problems,
            "node",
        )
        gauge(
            "migbatch_orphan_runs",
            "Runs that hold slices on a node after Slurm has ended them.",
            lambda: Counter(orphan.node for orphan in self._orphans.present),
            "node",
        )
        gauge("migbatch_jobs", "Jobs in Slurm's queue, by state.", self._job_states, "state")
        gauge(
            "migbatch_slices",
            "Slices on nodes, by profile and state: held, shared (by two jobs), idle, zombie.",
            self._slices,
            "profile",
            "state",
        )
        gauge(
            "migbatch_wait_seconds",
            "Current wait of jobs that request slices, since they were eligible.",
            lambda: waits(self._queue(), time.time()),
            "what",
        )

    def _slices(self) -> Mapping[tuple[str, str], int]:
        facts = self.rounds.view.facts()
        if self.poller.latest and self.poller.latest.nodes:  # nodes that were removed from Slurm are still in the view
            facts = {row.name: facts[row.name] for row in self.poller.latest.nodes if row.name in facts}
        return slices_by_state(facts)

    def _silence(self) -> Mapping[str, float]:
        """Return the silence of each node; of a node with slices that never called this service, since its start."""
        rows = self.poller.latest.nodes if self.poller.latest else ()
        catalog, so_far = expand(self.config.cluster.catalog_nodes), time.monotonic() - self._began
        with_slices = {row.name for row in rows if row.gres and row.name not in catalog}
        silences = {row.name: self.node_plans.silence(row.name) for row in rows if not row.silenced}
        # the agent of a node that has sent nothing yet may have been down before this service began
        return {
            node: min(seconds, so_far)
            for node, seconds in silences.items()
            if math.isfinite(seconds) or node in with_slices
        }

    def _problems(self) -> Mapping[str, int]:
        rows = self.poller.latest.nodes if self.poller.latest else ()
        found = self._node_api.reports.problems()
        return {row.name: found[row.name] for row in rows if row.name in found and not row.silenced}

    def _wal_bytes(self) -> float | Mapping[str, float]:
        file = sqlite_file(self.config.store.url)
        return {} if file is None else log_bytes(file)

    def _job_states(self) -> Mapping[str, int]:
        states: Counter[str] = Counter()
        for job in self._queue():
            states[job.state] += job.tasks
        return states

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
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from slurm_migbatch.config import Config
from slurm_migbatch.daemon import messages
from slurm_migbatch.daemon.actuator import name_of
from slurm_migbatch.daemon.addresses import NodeAddresses
from slurm_migbatch.daemon.api import NodeApi, WaitReason, anywhere
from slurm_migbatch.daemon.audit import Auditor, Excess, OrphanWatch
from slurm_migbatch.daemon.ended import HistoryClient, StillHeld
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
from slurm_migbatch.daemon.retrying import HOLD, OomRetries, was_tried
from slurm_migbatch.daemon.rounds import Rounds
from slurm_migbatch.daemon.scraping import Scraping
from slurm_migbatch.daemon.server import ApiServer, ConnectionBounds
from slurm_migbatch.daemon.submit_supervisor import SubmitSupervisor
from slurm_migbatch.daemon.tasks import cancel, run_forever
from slurm_migbatch.daemon.term import ActiveRole, AlwaysActive
from slurm_migbatch.daemon.writer import StoreWriter
from slurm_migbatch.decide.capacity.demand import slices
from slurm_migbatch.decide.lending.reasons import without_estimates
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.node.auth import Signer
from slurm_migbatch.slurm.client import JobRow
from slurm_migbatch.slurm.nodelist import expand
from slurm_migbatch.store.db import Store
from slurm_migbatch.store.engines import sqlite_file
from slurm_migbatch.store.queries import unconfirmed_ends
from slurm_migbatch.store.recurring import RecurringRun
from slurm_migbatch.store.sqlitefile import log_bytes
from slurm_migbatch.workload.catalog import ProfileOffer

log = logging.getLogger(__name__)
_STOP_S = 5.0
#: maximum number of ended jobs to query Slurm about at a time; for others the record has only what nodes reported
_ENDED: Final = 100_000
#: seconds for which slurmctld may keep an ended job; 300 by default (MinJobAge)
_KEPT_S: Final = 3600.0
#: retries of jobs at a time; each makes several calls of Slurm, and rounds must not wait for a free thread
_RETRIES: Final = 4
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
        policy = policy_of(config).runs
        self._retry_threads = ThreadPoolExecutor(_RETRIES, thread_name_prefix="retry")
        self._retries = OomRetries(client, lambda: self.submit.facts.catalog, policy)
        self.recurring = RecurringWatch(self.writer, self.submit.ran, self._retry_failed_runs)
        self.submit.follow(self.recurring.jobs.listed)
        self.retention = Retention(config, self.writer, self.metrics)
        self._auditor = Auditor()
        self._orphans = OrphanWatch()
        self._unsaved = UnsavedJobs()
        self._ended: set[int] = set()
        self._asking = False
        self._previous: SlurmView | None = None
        #: of jobs whose ends are queried and that ran when they were last listed: when this was, and their rows
        self._last_running: dict[int, tuple[float, JobRow]] = {}
        self._background_tasks: set[asyncio.Task[None]] = set()
        self.rounds = Rounds(config, client, self.node_plans, self.writer, self.metrics, self.submit.facts)
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
            loops = {
                "addresses": self._listening.follow,
                "poll": self.poller.run,
                "submit": self.submit.run,
                "files": self.submit.keep_files,
                "decisions": self.submit.keep_record,
                "leases": self.rounds.load_nodes,
                "loans": self.rounds.load_loans,
                "ends": self._recall_ends,
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
            if self._background_tasks:  # what they did to jobs has to be recorded
                await asyncio.wait(self._background_tasks, timeout=_STOP_S)
            self._retry_threads.shutdown(wait=False)
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
        new = {job for job in stopped if isinstance(job, int) and not self._unsaved.lists(job)}
        if len(self._ended) + len(new) <= _ENDED:
            self._ended |= new
        self.rounds.ingested(node, events, complete)
        self.poller.nudge()

    def _retry_failed_runs(self, rows: Sequence[RecurringRun]) -> None:
        """Requeue the jobs whose runs ran out of memory, if their users want it."""
        if self.config.recurring.retry:
            for row, offer in self._retries.due(rows, self.recurring.jobs.past):
                self._in_background(self._retry(row, offer))

    async def _follow_recurring(self) -> None:
        """Find in the record the jobs that were held for their retry when an earlier service was killed; then follow
        the runs of recurring jobs.
        """
        subject = "cannot read which jobs are to be retried"
        self._retries.recall(
            await self.rounds.read(lambda store: store.actions(), subject, "they stay held until then")
        )
        await self.recurring.run()

    async def _retry(self, row: RecurringRun, offer: ProfileOffer) -> None:
        action = _retry_row(row.job, row.restart + 1, row.profile or "", offer.profile)
        hold = {**action, "kind": HOLD, "outcome": "not released yet"}
        try:
            if was_tried(row, await self.writer.answer(lambda store: store.actions([row.job]), "actions")):
                return
            await self.writer.answer(lambda store: store.save_loans((), [hold]), "actions")
        except Exception as error:
            log.warning(
                "job %d ran out of memory and is not retried, because it cannot be recorded: %s", row.job, error
            )
            return
        with contextlib.suppress(StillHeld):
            self._retried(action, await self._in_retry_thread(self._retries.send, row, offer))
        self.poller.nudge()

    async def _release(self, row: JobRow, profile: Profile) -> None:
        action = _retry_row(row.job_id, row.restarts, next(iter(map(str, slices(row.gres))), ""), profile)
        with contextlib.suppress(StillHeld):
            self._retried(action, await self._in_retry_thread(self._retries.release, row, profile))
            self.poller.nudge()

    async def _in_retry_thread(self, work: Callable[..., str], *args: object) -> str:
        return await asyncio.get_running_loop().run_in_executor(self._retry_threads, partial(work, *args))

    def _retried(self, action: Mapping[str, Any], trouble: str) -> None:
        if not trouble:
            self.rounds.controller.expect_start(action["job_id"])
        row = {**action, "ts": time.time(), "outcome": trouble or None}
        self.writer.post(lambda store: store.save_loans((), [row]), "actions")

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
        self._ended |= departed
        if departed and self._previous is not None:
            self._last_running |= {
                row.job_id: (self._previous.at, row)
                for row in self._previous.jobs
                if row.job_id in departed and row.active and row.state != "COMPLETING"
            }
        self._previous = snapshot
        if self._ended and not self._asking:
            self._asking = True
            self._in_background(self._ask_ends(frozenset(self._ended)))
        for row, profile in self._retries.left_held(snapshot.jobs):
            self._in_background(self._release(row, profile))
        if self.config.daemon.audit:
            excesses = self._auditor.check(self.rounds.view.facts(), snapshot.jobs, snapshot.nodes)
            rows = {row.job_id: row for row in snapshot.jobs} if excesses else {}
            for excess in excesses:
                self._in_background(self._cancel(excess, name_of(rows[excess.job])))
        # a node that failed and that Slurm powered down or lost reports the ends of its runs only after its next boot
        up = {row.name for row in snapshot.nodes if not row.silenced}
        facts = {name: node for name, node in self.rounds.view.facts().items() if name in up}
        for orphan in self._orphans.check(facts, snapshot.jobs, time.monotonic()):
            log.warning("%s; run `migbatch node reconcile` there, and check that its agent runs", orphan)

    async def _recall_ends(self) -> None:
        """Find in the record the jobs of which an earlier service could not ask Slurm any more how they ended."""
        subject = "cannot read whose ends Slurm has not told"
        since = time.time() - _KEPT_S
        self._ended |= await self.rounds.read(
            lambda store: store.read(unconfirmed_ends, since, _ENDED), subject, "they stay as nodes told them"
        )

    async def _ask_ends(self, jobs: frozenset[int]) -> None:
        """Record how jobs ended that Slurm no longer lists; those that slurmctld has lost count as cancelled."""
        try:
            rows = await asyncio.to_thread(self._client.ended, jobs)
            unknown = jobs.difference(row["job_id"] for row in rows)
            running = {job: self._last_running[job] for job in unknown if job in self._last_running}
            lost = await asyncio.to_thread(self._client.lost, {job: at for job, (at, _) in running.items()})
        except Exception as error:  # retried after the next query
            log.debug("cannot determine yet how jobs ended: %s", error)
        else:
            self._ended -= jobs
            for job in jobs:
                self._last_running.pop(job, None)
            if lost:
                log.warning(
                    "slurmctld has lost jobs that ran, they are recorded as cancelled: %s",
                    ", ".join(map(str, sorted(lost)[:20])),
                )
            # as slurmdbd has them; the exit code is that of the node
            rows += [{"job_id": job, "restarts": running[job][1].restarts, "state": "CANCELLED"} for job in lost]
            if rows:
                self.writer.post(lambda store: store.upsert_jobs(rows), "jobs")
        finally:
            self._asking = False

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

    def _in_background(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._background_tasks.add(task)  # the event loop itself has only weak references to tasks
        task.add_done_callback(self._background_tasks.discard)

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

    def _wal_bytes(self) -> float | Mapping[str, float]:
        file = sqlite_file(self.config.store.url)
        return {} if file is None else log_bytes(file)

    def _job_states(self) -> Mapping[str, int]:
        states: Counter[str] = Counter()
        for job in self._queue():
            states[job.state] += job.tasks
        return states


def _retry_row(job: int, restart: int, before: str, profile: Profile) -> dict[str, Any]:
    """Return the record's row of a retry of a job that ran out of memory."""
    return {
        "ts": time.time(), "job_id": job, "restart": restart, "kind": "retype", "before": before, "after": profile.name,
        "why": "it ran out of memory, and the job has the hint retry=oom", "dry_run": False, "outcome": None,
    }  # fmt: skip

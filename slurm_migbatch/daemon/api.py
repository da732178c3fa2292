"""HTTP service of migbatchd: for nodes, for the commands on this host, and for monitoring.

Nodes use TCP: signed headers give the length of the body and its digest, so that no body of an unauthenticated client
is read. Commands use a unix socket, where the kernel identifies the user. /healthz is for everyone who can connect,
/metrics for this host and holders of its token (see `scraping`); neither contains anything about jobs.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar
from weakref import WeakValueDictionary

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from slurm_migbatch.daemon import messages
from slurm_migbatch.daemon.credentials import CredentialThreads
from slurm_migbatch.daemon.gate import ApiLimits, Caller, Gate, Refused, as_json
from slurm_migbatch.daemon.log import RateLimitedLog
from slurm_migbatch.daemon.metrics import Metrics
from slurm_migbatch.daemon.plans import NodePlans
from slurm_migbatch.daemon.reports import NodeReports
from slurm_migbatch.daemon.scraping import Scraping
from slurm_migbatch.daemon.term import ActiveRole
from slurm_migbatch.daemon.writer import Overloaded, StoreWriter
from slurm_migbatch.node.auth import Signer
from slurm_migbatch.store.receipt import NodeReceipt
from slurm_migbatch.store.terms import TermOverError

log = logging.getLogger(__name__)

_Message = TypeVar("_Message")

MAX_WAIT = 25.0
_JOB = re.compile(r"[0-9]{1,10}")
_ADVICE = (
    "a node's message was rejected",
    "compare Auth, TokenFile or the munge key in that node's node.conf with [node_api] here",
)


@dataclass(frozen=True)
class WaitReason:
    """Why a job waits.

    The texts are separate because the query service asks for users who have fewer rights than itself.

    Attributes:
        why: for everyone who may see the job.
        in_full: the same with what follows from the hints of the job's user; empty if there is nothing more, or if the
            caller may not see it.
    """

    why: str
    in_full: str = ""


async def anywhere(_node: str, _address: str) -> str:
    """Accept nodes from any address: `NodeApi.address` if it is not checked."""
    return ""


@dataclass(frozen=True)
class NodeApi:
    """Components and callbacks that the endpoints use."""

    signer: Signer
    node_plans: NodePlans
    writer: StoreWriter
    metrics: Metrics
    #: whether everything works, and the state of each component
    health: Callable[[], Mapping[str, Any]]
    #: called in the event loop with (node, events, complete) after they were stored
    ingested: Callable[[str, Sequence[Mapping[str, Any]], bool], None]
    #: (uid, job): why the job waits, for the caller of the unix socket with that uid
    why: Callable[[int, int], Awaitable[WaitReason]]
    #: (uid): training jobs that wait for a loan, and why
    waiting: Callable[[int], Awaitable[Mapping[int, WaitReason]]]
    #: uids of users who may see findings of nodes, and may report which slurmctld is the primary
    administrators: frozenset[int]
    #: returns why an address cannot be a node's; empty if it can
    address: Callable[[str, str], Awaitable[str]]
    limits: ApiLimits
    activity: ActiveRole
    scraping: Scraping
    reports: NodeReports = field(default_factory=NodeReports)
    _threads: CredentialThreads = field(default_factory=lambda: CredentialThreads("node-auth"))
    #: not the event loop's own pool, in which rounds and queries of Slurm would wait for a free thread
    _readers: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, thread_name_prefix="node-read"))
    _limited_log: RateLimitedLog = field(default_factory=lambda: RateLimitedLog(log))
    _turns: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)

    def app(self) -> Starlette:
        """Return the ASGI application."""
        gate = Gate(self.signer, self.limits, self._threads, self._authorise, self._limited_log, _ADVICE)
        count = self.metrics.counter(
            "migbatch_node_requests_total", "Requests from nodes by path and status.", "path", "status"
        )

        def answered(path: str, status: int) -> None:
            count.labels(path, str(status)).inc()

        return Starlette(
            routes=[
                Route("/node/v1/events", gate.guard(self._events, answered), methods=["POST"]),
                Route("/node/v1/plan", gate.guard(self._plan, answered), methods=["POST"]),
                Route("/node/v1/findings", gate.guard(self._findings, answered), methods=["POST"]),
                Route("/healthz", self._healthz, methods=["GET"]),
                Route("/metrics", self._metrics, methods=["GET"]),
                Route("/v1/why/{job}", self._why, methods=["GET"]),
                Route("/v1/waiting", self._waiting, methods=["GET"]),
                Route("/v1/findings", self._reports, methods=["GET"]),
                Route("/v1/plans", self._plans, methods=["GET"]),
                primary_route(self.activity, self.administrators),
            ],
            exception_handlers=REFUSALS,
        )

    def close(self) -> None:
        """Stop the threads that check credentials and read messages."""
        self._threads.close()
        self._readers.shutdown(wait=False, cancel_futures=True)

    async def _read(self, read: Callable[[str, bytes], _Message], node: str, body: bytes) -> _Message:
        return await asyncio.get_running_loop().run_in_executor(self._readers, read, node, body)

    async def _authorise(self, caller: Caller) -> str:
        """Return the name to count a node's requests by; refuse a node with a wrong address."""
        mismatch = await self.address(caller.node, caller.address)
        if mismatch:
            raise Refused(403, mismatch)
        return caller.node

    async def _events(self, caller: Caller, body: bytes) -> Response:
        # one message per node at a time, so that no node has more than one in the database's queue
        async with self._turns.setdefault(caller.node, asyncio.Lock()):
            return await self._record(caller.node, body)

    async def _record(self, node: str, body: bytes) -> Response:
        # not in the event loop: a node may describe GPUs that take long to examine
        message = await self._read(messages.read_events, node, body)
        for refusal in message.refused:
            self._limited_log.warning(node, f"{node}: {refusal}; skipped, update that node if this persists")
        claim = NodeReceipt(message.database, message.acked, incomplete=messages.holding(message.events))
        events = [event.wire for event in message.events]
        self.node_plans.note_contact(node)
        try:
            future = self.writer.call(
                lambda store: store.ingest(node, message.journal, message.boot_id, events, claim), "node events"
            )
        except Overloaded as error:
            raise Refused(503, f"{error}; send again later", 5) from None
        try:
            receipt = await asyncio.wait_for(asyncio.wrap_future(future), self.limits.store_wait_s)
        except asyncio.TimeoutError:
            raise Refused(503, "the database does not answer; send again later", 5) from None
        except TermOverError as error:
            raise Refused(503, str(error)) from None
        except Exception as error:
            raise Refused(422, f"cannot record these events: {error}") from error
        self.ingested(node, events, receipt.complete)
        # agents of other releases read these keys too (`node/controller_sync.py`)
        return as_json({"acked": receipt.acked, "database": receipt.database, "told": receipt.complete})

    async def _plan(self, caller: Caller, body: bytes) -> Response:
        node = caller.node
        message = messages.read_plan(node, body)
        self.node_plans.confirm(node, message.have)
        plan = await self.node_plans.newer(node, message.have, min(message.wait, MAX_WAIT))
        self.node_plans.note_contact(node)
        return as_json(plan.to_wire() if plan else {"version": message.have})

    async def _findings(self, caller: Caller, body: bytes) -> Response:
        # not in the event loop: long texts take a while to parse
        message = await self._read(messages.read_findings, caller.node, body)
        self.node_plans.note_contact(caller.node)
        return as_json({"now": self.reports.keep(caller.node, message.sent, message.findings)})

    async def _healthz(self, _: Request) -> Response:
        state = self.health()
        return as_json(state, 200 if state.get("ok") else 503)

    async def _why(self, request: Request) -> Response:
        uid, job = _uid(request), str(request.path_params["job"])
        if not _JOB.fullmatch(job):
            raise Refused(404, "a job is named by its number")
        reason = await self.why(uid, int(job))
        return as_json({"why": reason.why, "in_full": reason.in_full})

    async def _waiting(self, request: Request) -> Response:
        reasons = await self.waiting(_uid(request))
        in_full = {str(job): reason.in_full for job, reason in reasons.items() if reason.in_full}
        return as_json({"waiting": {str(job): reason.why for job, reason in reasons.items()}, "in_full": in_full})

    async def _reports(self, request: Request) -> Response:
        self._require_administrator(request, "findings of nodes")
        return as_json({"nodes": self.reports.to_dict(), "age": self.reports.age()})

    async def _plans(self, request: Request) -> Response:
        self._require_administrator(request, "node plans")
        plans = {node: plan for node in self.node_plans.nodes() if (plan := self.node_plans.current(node)) is not None}
        return as_json({"plans": {node: plan.gpus for node, plan in plans.items()}})

    def _require_administrator(self, request: Request, subject: str) -> None:
        """Refuse callers who are not administrators."""
        if _uid(request) not in self.administrators:
            raise Refused(403, f"{subject} are shown to root and SlurmUser only")

    async def _metrics(self, request: Request) -> Response:
        local = isinstance(getattr(request.state, "uid", None), int)
        self.scraping.check(None if local else request.client.host if request.client else "", request.headers)
        return Response(generate_latest(self.metrics), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})


async def _refused(_: Request, refused: Exception) -> Response:
    assert isinstance(refused, Refused)
    return as_json({"error": str(refused)}, refused.status)


#: exception handlers for an application with these routes
REFUSALS: Final = {Refused: _refused}


def primary_route(activity: ActiveRole, admins: Collection[int]) -> Route:
    """Return the route on the unix socket by which slurmctld's programs report that it is primary or no longer."""

    async def set_primary(request: Request) -> Response:
        if _uid(request) not in admins:
            raise Refused(403, "only root and SlurmUser may report which slurmctld is the primary")
        activity.set_primary(request.path_params["state"] == "on")
        return as_json({})

    return Route("/v1/primary/{state}", set_primary, methods=["POST"])


def _uid(request: Request) -> int:
    """Return the caller's uid from the kernel; jobs and reservations are not shown to the whole network."""
    uid = getattr(request.state, "uid", None)
    if not isinstance(uid, int):
        raise Refused(403, "query on the controller host, through migbatchd's unix socket")
    return uid

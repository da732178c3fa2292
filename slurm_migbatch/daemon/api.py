"""The HTTP service of migbatchd: for nodes, for the commands on this host, and for monitoring.

Nodes reach it over TCP: signed headers, which say how long the body is and what its digest is, so that nothing of a
stranger is read. Commands reach it over a unix socket, where the kernel says whose they are. /healthz and /metrics are
for everybody who can connect, and tell nothing about jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from slurm_migbatch.daemon import messages
from slurm_migbatch.daemon.log import Seldom
from slurm_migbatch.daemon.messages import MessageError
from slurm_migbatch.daemon.metrics import Metrics
from slurm_migbatch.daemon.plans import PlanBoard
from slurm_migbatch.daemon.writer import Overloaded, StoreWriter
from slurm_migbatch.node.auth import (
    DIGEST_HEADER,
    NODE_HEADER,
    SCHEME,
    SIGNATURE_HEADER,
    AuthError,
    Signer,
    digest_of,
    request_payload,
    response_payload,
)
from slurm_migbatch.store.receipt import NodeReceipt

log = logging.getLogger(__name__)

MAX_WAIT = 25.0
#: requests of one node that are worked on at once; it needs two
NODE_REQUESTS = 8
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Refused(Exception):
    """A request that is answered with an error: HTTP status and a sentence for the caller's log."""

    def __init__(self, status: int, text: str, retry_after: int | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.retry_after = retry_after


@dataclass(frozen=True)
class ApiLimits:
    """How much a caller may ask for, and how long he may take to say it."""

    body_bytes: int = 4 * 1024 * 1024
    body_s: float = 30.0
    store_wait_s: float = 10.0


@dataclass(frozen=True)
class Asking:
    """What the commands may ask on the unix socket; `uid` is always that of who asks."""

    #: (uid, job): why the job waits
    why: Callable[[int, int], Awaitable[str]]
    #: (uid): training jobs that wait for a slice to be lent, and why
    waiting: Callable[[int], Awaitable[Mapping[int, str]]]


async def anywhere(_node: str, _address: str) -> str:
    """Let nodes speak from any address: `NodeApi.address` where it is not checked."""
    return ""


async def _no_reason(_uid: int, _job: int) -> str:
    return "supply is not managed here"


async def _nobody_waits(_uid: int) -> Mapping[int, str]:
    return {}


@dataclass(frozen=True)
class NodeApi:
    """What the endpoints act on."""

    signer: Signer
    board: PlanBoard
    writer: StoreWriter
    metrics: Metrics
    #: whether everything works, and the state of each part
    health: Callable[[], Mapping[str, Any]]
    #: called in the event loop with (node, events, told) after they were stored
    ingested: Callable[[str, Sequence[Mapping[str, Any]], bool], None]
    asking: Asking = Asking(_no_reason, _nobody_waits)
    #: why a node cannot be speaking from an address; empty: it can
    address: Callable[[str, str], Awaitable[str]] = anywhere
    limits: ApiLimits = ApiLimits()
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="node-auth"))
    _seldom: Seldom = field(default_factory=lambda: Seldom(log))

    def app(self) -> Starlette:
        """The ASGI application."""
        gate = _Gate(self.signer, self.limits, self._pool, self.metrics, self.address, self._seldom)
        return Starlette(
            routes=[
                Route("/node/v1/events", gate.guard(self._events), methods=["POST"]),
                Route("/node/v1/plan", gate.guard(self._plan), methods=["POST"]),
                Route("/healthz", self._healthz, methods=["GET"]),
                Route("/metrics", self._metrics, methods=["GET"]),
                Route("/v1/why/{job:int}", self._why, methods=["GET"]),
                Route("/v1/waiting", self._waiting, methods=["GET"]),
            ],
        )

    def close(self) -> None:
        """End the thread that checks credentials."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _events(self, node: str, body: bytes) -> dict[str, Any]:
        message = messages.read_events(node, body)
        for what in message.refused:
            self._seldom.warning(node, f"{node}: {what}; it is left out, update that node if this goes on")
        claim = NodeReceipt(message.database, message.acked, incomplete=messages.holding(message.events))
        events = [event.wire for event in message.events]
        self.board.heard(node)
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
        except Exception as error:
            raise Refused(422, f"these events cannot be recorded: {error}") from error
        self.ingested(node, events, receipt.told)
        return receipt._asdict()

    async def _plan(self, node: str, body: bytes) -> dict[str, Any]:
        message = messages.read_plan(node, body)
        self.board.confirm(node, message.have)
        plan = await self.board.newer(node, message.have, min(message.wait, MAX_WAIT))
        self.board.heard(node)
        return plan.to_wire() if plan else {"version": message.have}

    async def _healthz(self, _: Request) -> Response:
        state = self.health()
        return _json(state, 200 if state.get("ok") else 503)

    async def _why(self, request: Request) -> Response:
        try:
            return _json({"why": await self.asking.why(_uid(request), int(request.path_params["job"]))})
        except Refused as refused:
            return _json({"error": str(refused)}, refused.status)

    async def _waiting(self, request: Request) -> Response:
        try:
            found = await self.asking.waiting(_uid(request))
        except Refused as refused:
            return _json({"error": str(refused)}, refused.status)
        return _json({"waiting": {str(job): why for job, why in found.items()}})

    async def _metrics(self, _: Request) -> Response:
        return Response(generate_latest(self.metrics), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})


def _uid(request: Request) -> int:
    """Who asks, by the kernel's word; jobs and their reservations are not for the whole network."""
    uid = getattr(request.state, "uid", None)
    if not isinstance(uid, int):
        raise Refused(403, "ask on the controller host, through migbatchd's unix socket")
    return uid


Endpoint = Callable[[str, bytes], Awaitable[dict[str, Any]]]


@dataclass(frozen=True)
class _Said:
    """What the headers of a request say."""

    node: str
    credential: str
    digest: str
    length: int


class _Gate:
    """Believes headers whose credential verifies, then reads the body that they announced, and signs what goes back."""

    def __init__(
        self,
        signer: Signer,
        limits: ApiLimits,
        pool: ThreadPoolExecutor,
        metrics: Metrics,
        address: Callable[[str, str], Awaitable[str]],
        seldom: Seldom,
    ) -> None:
        self._signer, self._limits, self._pool, self._address, self._seldom = signer, limits, pool, address, seldom
        self._count = metrics.counter(
            "migbatch_node_requests_total", "Requests of nodes by path and status.", "path", "status"
        )
        self._working: Counter[str] = Counter()

    def guard(self, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        """The endpoint behind the gate."""

        async def handler(request: Request) -> Response:
            response = await self._handle(request, endpoint)
            self._count.labels(request.url.path, str(response.status_code)).inc()
            return response

        return handler

    async def _handle(self, request: Request, endpoint: Endpoint) -> Response:
        said: _Said | None = None
        try:
            said = await self._believed(request)
            with self._one_more(said.node):
                body = await self._body(request, said)
                response = _json(await endpoint(said.node, body))
        except MessageError as error:
            response = _json({"error": str(error)}, 400)
        except Refused as refused:
            response = _json({"error": str(refused)}, refused.status)
            # what is left of the body is not read, so nothing else can follow on this connection
            response.headers["Connection"] = "close"
            if refused.retry_after is not None:
                response.headers["Retry-After"] = str(refused.retry_after)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody is there to read it
        if response.status_code != 200:
            self._say(request, said, response)
        if said is not None:
            with contextlib.suppress(AuthError):
                signed = response_payload(said.credential, bytes(response.body))
                signature = await self._in_pool(self._signer.sign, signed, said.node)
                response.headers[SIGNATURE_HEADER] = signature
        return response

    async def _believed(self, request: Request) -> _Said:
        said = self._said(request)
        payload = request_payload(request.method, request.url.path, said.node, said.digest)
        try:
            await self._in_pool(self._signer.verify, said.credential, payload, said.node)
        except AuthError as error:
            raise Refused(401, str(error)) from None
        link = getattr(request.state, "link", None)
        wrong = await self._address(said.node, request.client.host if request.client else "")
        if wrong:
            raise Refused(403, wrong)
        if link is not None:
            link.believe()
        return said

    def _said(self, request: Request) -> _Said:
        scheme, _, rest = request.headers.get("authorization", "").partition(" ")
        credential = rest.partition(" ")[2].strip()
        if scheme != SCHEME or not credential:
            raise Refused(401, f"no {SCHEME} credential")
        node, digest = request.headers.get(NODE_HEADER, ""), request.headers.get(DIGEST_HEADER, "")
        if not messages.is_node(node) or not _DIGEST.fullmatch(digest):
            raise Refused(
                401,
                f"{NODE_HEADER} or {DIGEST_HEADER} is missing or malformed: node and controller must run one release",
            )
        length = request.headers.get("content-length", "")
        if "transfer-encoding" in request.headers or not re.fullmatch(r"[0-9]{1,12}", length):
            raise Refused(411, "a message says how long it is (Content-Length)")
        if int(length) > self._limits.body_bytes:
            raise Refused(413, f"the body is larger than {self._limits.body_bytes} bytes")
        return _Said(node, credential, digest, int(length))

    async def _body(self, request: Request, said: _Said) -> bytes:
        try:
            body = await asyncio.wait_for(_read(request, said.length), self._limits.body_s)
        except asyncio.TimeoutError:
            raise Refused(408, f"the body did not arrive within {self._limits.body_s:g} s") from None
        if not hmac.compare_digest(digest_of(body), said.digest):
            raise Refused(401, "the body is not the one that was signed")
        return body

    @contextlib.contextmanager
    def _one_more(self, node: str) -> Iterator[None]:
        if self._working[node] >= NODE_REQUESTS:
            raise Refused(429, f"{NODE_REQUESTS} requests of {node} are being worked on already", 5)
        self._working[node] += 1
        try:
            yield
        finally:
            self._working[node] -= 1
            if not self._working[node]:
                del self._working[node]

    async def _in_pool(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *arguments)

    def _say(self, request: Request, said: _Said | None, response: Response) -> None:
        address = request.client.host if request.client else "?"
        who = f"{said.node} ({address})" if said is not None else address
        self._seldom.warning(
            address,
            f"a node's message was refused: {request.url.path} from {who}: {response.status_code} "
            f"{bytes(response.body)[:300].decode(errors='replace')}; compare Auth, TokenFile or the munge key in that "
            "node's node.conf with [node_api] here",
        )


async def _read(request: Request, length: int) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > length:
            raise Refused(400, "the body is longer than announced")
    return bytes(body)


def _json(value: Any, status: int = 200) -> Response:
    return Response(json.dumps(value, separators=(",", ":")), status, media_type="application/json")

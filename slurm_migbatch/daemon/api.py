"""The node API: authenticated HTTP with JSON bodies, plus /healthz and /metrics for monitoring."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from slurm_migbatch.daemon.log import Trouble
from slurm_migbatch.daemon.metrics import Metrics
from slurm_migbatch.daemon.plans import PlanBoard
from slurm_migbatch.daemon.writer import Overloaded, StoreWriter
from slurm_migbatch.node.auth import SCHEME, SIGNATURE_HEADER, AuthError, Signer, request_payload, response_payload

log = logging.getLogger(__name__)

_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_HEX = re.compile(r"[0-9a-fA-F-]{1,64}")
MAX_EVENTS = 500
MAX_WAIT = 25.0


class Refused(Exception):
    """A request that is answered with an error: HTTP status and a sentence for the caller's log."""

    def __init__(self, status: int, text: str, retry_after: int | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.retry_after = retry_after


@dataclass(frozen=True)
class ApiLimits:
    """How much a caller may ask for."""

    body_bytes: int = 4 * 1024 * 1024
    store_wait_s: float = 10.0


@dataclass(frozen=True)
class NodeApi:
    """What the endpoints act on."""

    signer: Signer
    board: PlanBoard
    writer: StoreWriter
    metrics: Metrics
    health: Callable[[], Mapping[str, Any]]
    #: called in the event loop with (node, events) after they were stored
    ingested: Callable[[str, Sequence[Mapping[str, Any]]], None]
    #: why a job waits, as far as supply goes
    why: Callable[[int], str] = lambda job: "supply is not managed here"
    #: training jobs that wait for a slice to be lent, and why
    waiting: Callable[[], Mapping[int, str]] = dict
    limits: ApiLimits = ApiLimits()

    def app(self) -> Starlette:
        """The ASGI application."""
        auth = ThreadPoolExecutor(1, thread_name_prefix="node-auth")
        gate = _Gate(self.signer, self.limits.body_bytes, auth, self.metrics)
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

    async def _events(self, body: Mapping[str, Any]) -> dict[str, Any]:
        node = _word(body, "node", _NODE)
        journal, boot = _word(body, "journal", _HEX), _word(body, "boot_id", _HEX)
        events = body.get("events")
        if not isinstance(events, list) or not all(isinstance(e, dict) for e in events):
            raise Refused(400, "events must be a list of objects")
        if len(events) > MAX_EVENTS:
            raise Refused(400, f"{len(events)} events in one message, at most {MAX_EVENTS} are taken")
        if not all(isinstance(e.get("seq"), int) and e["seq"] > 0 and isinstance(e.get("kind"), str) for e in events):
            raise Refused(400, "each event needs seq (from 1) and kind")
        self.board.heard(node)
        try:
            future = self.writer.call(lambda store: store.ingest(node, journal, boot, events), "node events")
        except Overloaded as error:
            raise Refused(503, f"{error}; send again later", 5) from None
        try:
            acked = await asyncio.wait_for(asyncio.wrap_future(future), self.limits.store_wait_s)
        except asyncio.TimeoutError:
            raise Refused(503, "the database does not answer; send again later", 5) from None
        except Exception as error:
            raise Refused(422, f"these events cannot be recorded: {error}") from error
        self.ingested(node, events)
        return {"acked": acked}

    async def _plan(self, body: Mapping[str, Any]) -> dict[str, Any]:
        node = _word(body, "node", _NODE)
        have, wait = body.get("have", 0), body.get("wait", 0)
        if isinstance(have, bool) or not isinstance(have, int) or not 0 <= have < 2**62:
            raise Refused(400, "have must be a plan version")
        if isinstance(wait, bool) or not isinstance(wait, (int, float)) or not 0 <= wait <= 3600:
            raise Refused(400, "wait must be seconds")
        self.board.confirm(node, have)
        plan = await self.board.newer(node, have, min(float(wait), MAX_WAIT))
        self.board.heard(node)
        return plan.to_wire() if plan else {"version": have}

    async def _healthz(self, request: Request) -> Response:
        state = self.health()
        return _json(state, 200 if state.get("ok") else 503)

    async def _why(self, request: Request) -> Response:
        # jobs and their reservations are not for the whole network
        if request.client is None or not _is_loopback(request.client.host):
            return _json({"error": "ask on the controller host"}, 403)
        return _json({"why": self.why(int(request.path_params["job"]))})

    async def _waiting(self, request: Request) -> Response:
        if request.client is None or not _is_loopback(request.client.host):
            return _json({"error": "ask on the controller host"}, 403)
        return _json({"waiting": {str(job): why for job, why in self.waiting().items()}})

    async def _metrics(self, request: Request) -> Response:
        return PlainTextResponse(self.metrics.text(), media_type="text/plain; version=0.0.4")


Endpoint = Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]]


class _Gate:
    """Reads a bounded body, believes it only when its credential verifies, and signs what goes back."""

    def __init__(self, signer: Signer, limit: int, pool: ThreadPoolExecutor, metrics: Metrics) -> None:
        self._signer, self._limit, self._pool = signer, limit, pool
        self._count = metrics.counter("migbatch_node_requests_total", "Requests of nodes by path and status.")
        self._trouble = Trouble(
            "a node's message was refused",
            "compare Auth, TokenFile or the munge key in that node's node.conf with [node_api] here",
            log,
        )

    def guard(self, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        """The endpoint behind the gate."""

        async def handler(request: Request) -> Response:
            response = await self._handle(request, endpoint)
            self._count.add(path=request.url.path, status=str(response.status_code))
            return response

        return handler

    async def _handle(self, request: Request, endpoint: Endpoint) -> Response:
        loop = asyncio.get_running_loop()
        believed = False
        credential = ""
        try:
            credential = self._credential(request)
            body = await self._body(request)
            payload = request_payload(request.method, request.url.path, body)
            try:
                await loop.run_in_executor(self._pool, self._signer.verify, credential, payload)
            except AuthError as error:
                client = request.client.host if request.client else "?"
                self._trouble.failed(f"{request.url.path} from {client}: {error}")
                raise Refused(401, str(error)) from None
            self._trouble.succeeded()
            believed = True
            try:
                message = json.loads(body)
            except (ValueError, RecursionError):
                raise Refused(400, "the body is not JSON") from None
            if not isinstance(message, dict):
                raise Refused(400, "the body must be an object")
            response = _json(await endpoint(message))
        except Refused as refused:
            response = _json({"error": str(refused)}, refused.status)
            if refused.retry_after is not None:
                response.headers["Retry-After"] = str(refused.retry_after)
        if not believed:
            return response
        with contextlib.suppress(AuthError):
            signed = response_payload(credential, bytes(response.body))
            response.headers[SIGNATURE_HEADER] = await loop.run_in_executor(self._pool, self._signer.sign, signed)
        return response

    @staticmethod
    def _credential(request: Request) -> str:
        scheme, _, rest = request.headers.get("authorization", "").partition(" ")
        _, _, credential = rest.partition(" ")
        if scheme != SCHEME or not credential:
            raise Refused(401, f"no {SCHEME} credential")
        return credential.strip()

    async def _body(self, request: Request) -> bytes:
        chunks, size = [], 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > self._limit:
                raise Refused(413, f"the body is larger than {self._limit} bytes")
            chunks.append(chunk)
        return b"".join(chunks)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _word(body: Mapping[str, Any], key: str, pattern: re.Pattern[str]) -> str:
    value = body.get(key)
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise Refused(400, f"{key} is missing or malformed")
    return value


def _json(value: Any, status: int = 200) -> Response:
    return Response(json.dumps(value, separators=(",", ":")), status, media_type="application/json")

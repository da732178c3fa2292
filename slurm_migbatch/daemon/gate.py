"""Authenticate the caller of an endpoint by the request's headers, before any of the body is read.

Every request has signed headers with the length and digest of its body. The body is read, up to a size limit, only if
the headers verify. Answers are signed too.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from slurm_migbatch.daemon import messages
from slurm_migbatch.daemon.credentials import CredentialThreads
from slurm_migbatch.daemon.jsonfields import MessageError
from slurm_migbatch.daemon.log import RateLimitedLog
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

if TYPE_CHECKING:
    from slurm_migbatch.daemon.server import Link

#: concurrent requests of one caller; a node needs three
REQUESTS_PER_CALLER = 8
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Refused(Exception):
    """A request is answered with an error: HTTP status and a sentence for the caller's log."""

    def __init__(self, status: int, text: str, retry_after: int | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.retry_after = retry_after


@dataclass(frozen=True)
class ApiLimits:
    """Limits on the size of a request and the time to send it."""

    body_bytes: int = 4 * 1024 * 1024
    body_s: float = 30.0
    store_wait_s: float = 10.0


@dataclass(frozen=True)
class Caller:
    """The sender of a request: the host that it names, its address, and the uid of the credential."""

    node: str
    address: str
    uid: int
    link: Link | None


Endpoint = Callable[[Caller, bytes], Awaitable[Response]]


@dataclass
class _Headers:
    """The headers of a request; `proved`: whether a credential verifies them."""

    node: str
    credential: str
    digest: str
    length: int
    proved: bool = False


class Gate:
    """Verifies the credential in the headers, then reads the announced body, and signs the answer."""

    def __init__(
        self,
        signer: Signer,
        limits: ApiLimits,
        threads: CredentialThreads,
        authorise: Callable[[Caller], Awaitable[str]],
        limited_log: RateLimitedLog,
        advice: tuple[str, str],
    ) -> None:
        """Create a gate.

        Args:
            signer: checks credentials, and signs answers.
            limits: of requests.
            threads: where credentials are checked and created.
            authorise: returns the name under which the requests of a caller with a verified credential are counted;
                raises Refused.
            limited_log: where refusals are logged.
            advice: log text of a refusal, and what to do about a caller who is not authenticated.
        """
        self._signer, self._limits, self._threads = signer, limits, threads
        self._may, self._limited_log, self._advice = authorise, limited_log, advice
        self._working: Counter[str] = Counter()

    def guard(
        self, endpoint: Endpoint, answered: Callable[[str, int], None]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return the endpoint behind the gate; `answered` is called with path and status of each answer."""

        async def handler(request: Request) -> Response:
            response = await self._handle(request, endpoint)
            answered(request.scope["path"], response.status_code)
            return response

        return handler

    async def _handle(self, request: Request, endpoint: Endpoint) -> Response:
        """Authenticate a request, read its body, and answer it; refusals become error responses."""
        headers: _Headers | None = None
        try:
            headers = self._headers(request)
            caller, name = await self._authenticate(request, headers)
            headers.proved = True
            with self._request_slot(name):
                body = await self._body(request, headers)
                response = await endpoint(caller, body)
        except MessageError as error:
            response = as_json({"error": str(error)}, 400)
        except Refused as refused:
            response = as_json({"error": str(refused)}, refused.status)
            # the rest of the body is not read, so this connection cannot carry another request
            response.headers["Connection"] = "close"
            if refused.retry_after is not None:
                response.headers["Retry-After"] = str(refused.retry_after)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody will read it
        if response.status_code != 200:
            self._log_refusal(request, headers, response)
        if headers is not None and headers.proved:
            with contextlib.suppress(AuthError):
                signed = response_payload(headers.credential, bytes(response.body))
                signature = await self._threads.sign(partial(self._signer.sign, signed, headers.node))
                response.headers[SIGNATURE_HEADER] = signature
        return response

    async def _authenticate(self, request: Request, headers: _Headers) -> tuple[Caller, str]:
        # not request.url: starlette before 1.8 makes it of the Host header, so a client could choose the path
        payload = request_payload(request.method, request.scope["path"], headers.node, headers.digest)
        link = getattr(request.state, "link", None)
        verify = partial(self._signer.verify, headers.credential, payload, headers.node)
        try:
            identity = await self._threads.check(link, verify)
        except AuthError as error:
            raise Refused(401, str(error)) from None
        # not request.client: uvicorn takes that from X-Forwarded-For where a process of this host sends the request
        caller = Caller(headers.node, "" if link is None else link.address, identity.uid, link)
        name = await self._may(caller)
        if link is not None:
            link.mark_authenticated()
        return caller, name

    def _headers(self, request: Request) -> _Headers:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        credential = token.partition(" ")[2].strip()
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
            raise Refused(411, "Content-Length is required")
        if int(length) > self._limits.body_bytes:
            raise Refused(413, f"the body is larger than {self._limits.body_bytes} bytes")
        return _Headers(node, credential, digest, int(length))

    async def _body(self, request: Request, headers: _Headers) -> bytes:
        try:
            body = await asyncio.wait_for(_read(request, headers.length), self._limits.body_s)
        except asyncio.TimeoutError:
            raise Refused(408, f"the body did not arrive within {self._limits.body_s:g} s") from None
        if not hmac.compare_digest(digest_of(body), headers.digest):
            raise Refused(401, "the body does not match the signature")
        return body

    @contextlib.contextmanager
    def _request_slot(self, name: str) -> Iterator[None]:
        if self._working[name] >= REQUESTS_PER_CALLER:
            raise Refused(429, f"{REQUESTS_PER_CALLER} requests of {name} are already in progress", 5)
        self._working[name] += 1
        try:
            yield
        finally:
            self._working[name] -= 1
            if not self._working[name]:
                del self._working[name]

    def _log_refusal(self, request: Request, headers: _Headers | None, response: Response) -> None:
        address = request.client.host if request.client else "?"
        source = f"{headers.node} ({address})" if headers is not None and headers.proved else address
        advice = f"; {self._advice[1]}" if response.status_code in (401, 403) else ""
        self._limited_log.warning(
            address,
            f"{self._advice[0]}: {request.scope['path']} from {source}: {response.status_code} "
            f"{bytes(response.body)[:300].decode(errors='replace')}{advice}",
        )


async def _read(request: Request, length: int) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > length:
            raise Refused(400, "the body is longer than Content-Length")
    return bytes(body)


def as_json(value: Any, status: int = 200) -> Response:
    """Create an answer in JSON."""
    return Response(json.dumps(value, separators=(",", ":")), status, media_type="application/json")

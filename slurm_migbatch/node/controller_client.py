"""Send requests of a node to the controller: signed and bounded; answers must be signed too."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from urllib.parse import urlsplit

from slurm_migbatch.mig.text import printable
from slurm_migbatch.node.auth import SIGNATURE_HEADER, AuthError, Signer, headers, response_payload

MAX_ANSWER = 8 << 20
_SHOWN_CHARS = 200
"""Most characters of an unauthenticated answer at the controller's port that are passed on."""
CONNECT_S = 3.0
"""Timeout in seconds for one of several controllers."""
#: to detect a host that is switched off: idle seconds, seconds between probes, number of probes
KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 2))


class ControllerError(RuntimeError):
    """The controller cannot be reached, refuses, or cannot authenticate itself; try again later."""


class _Elsewhere(ControllerError):
    """This controller cannot be reached or is on standby."""


class ControllerClient:
    """Client of the node API for `node`, at one of `urls` (`http://host:port`): first the one that answered last.

    If one refuses, the others are tried too: on a host whose migbatchd is down, anybody may answer at its port.

    One connection per request; thread-safe. `moved` is called when another URL answers than before.
    """

    def __init__(
        self,
        urls: Sequence[str],
        signer: Signer,
        node: str,
        *,
        timeout: float = 10.0,
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        self._urls = tuple(urls)
        self._signer = signer
        self._node = node
        self._timeout = timeout
        self._moved = moved
        self._last = self._urls[0]
        self._links: set[socket.socket] = set()

    def interrupt(self) -> None:
        """Abort waiting requests; they raise ControllerError."""
        for link in list(self._links):
            _abort(link)

    def post(self, path: str, message: Mapping[str, object], *, patience: float = 0.0) -> bytes:
        """Post a message and return the answer's body; it may take `patience` seconds more. Raises ControllerError."""
        body = json.dumps(message, separators=(",", ":")).encode()
        last = self._last
        errors: list[str] = []
        refusal: ControllerError | None = None
        for url in (last, *(other for other in self._urls if other != last)):
            try:
                answer = self._post(url, path, body, patience)
            except _Elsewhere as error:
                errors.append(str(error))
                continue
            except ControllerError as error:
                refusal = refusal or error
                continue
            if url != self._last:
                self._last = url
                self._moved()
            return answer
        raise refusal or ControllerError("; ".join(errors))

    def _post(self, url: str, path: str, body: bytes, patience: float) -> bytes:
        """Post to one controller; return the body of its answer. Raises _Elsewhere if another one may answer."""
        parts = urlsplit(url)
        path = parts.path.rstrip("/") + path
        try:
            auth_headers, credential = headers(self._signer, "POST", path, self._node, body)
        except AuthError as error:
            raise ControllerError(str(error)) from error
        connection = self._connection(url)
        try:
            connection.connect()
            link = connection.sock  # `connection` forgets it before the end of an answer after which the server closes
            self._watch(link, self._timeout + patience)
            # its timeout begins anew with each byte
            limit = threading.Timer(2 * self._timeout + patience, _abort, (link,))
            limit.daemon = True
            limit.start()
            self._links.add(link)
            try:
                # a controller that refuses does not read the whole body first; its answer says why
                with suppress(BrokenPipeError, ConnectionResetError):
                    connection.request("POST", path, body, {**auth_headers, "Content-Type": "application/json"})
                with connection.getresponse() as answer:
                    text = answer.read(MAX_ANSWER + 1)
            finally:
                limit.cancel()
                self._links.discard(link)
            signature = answer.getheader(SIGNATURE_HEADER, "")
            status = answer.status
        except (OSError, http.client.HTTPException) as error:
            why = printable(str(error)[:_SHOWN_CHARS]) or type(error).__name__
            raise _Elsewhere(f"controller {parts.hostname}: {why}") from error
        finally:
            connection.close()
        if len(text) > MAX_ANSWER:
            raise ControllerError(f"controller {parts.hostname}: the answer is too long")
        if status != 200:
            error_class = _Elsewhere if status == http.HTTPStatus.SERVICE_UNAVAILABLE else ControllerError
            raise error_class(
                f"controller {parts.hostname}: {status} {printable(text[:_SHOWN_CHARS].decode('utf-8', 'replace'))}"
            )
        try:
            self._signer.verify(signature, response_payload(credential, text), self._node)
        except AuthError as error:
            raise ControllerError(f"the answer does not come from the controller: {error}") from error
        return text

    def _watch(self, link: socket.socket, timeout: float) -> None:
        """Set the timeout of the answer; with several controllers, detect a host that is down earlier."""
        link.settimeout(timeout)
        if len(self._urls) > 1:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in KEEPALIVE:
                link.setsockopt(socket.IPPROTO_TCP, option, value)

    def _connection(self, url: str) -> http.client.HTTPConnection:
        parts = urlsplit(url)
        timeout = min(self._timeout, CONNECT_S) if len(self._urls) > 1 else self._timeout
        if parts.scheme == "https":
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(parts.hostname or "", parts.port, timeout=timeout, context=context)
        return http.client.HTTPConnection(parts.hostname or "localhost", parts.port, timeout=timeout)


def _abort(link: socket.socket) -> None:
    """End a request that another thread waits for."""
    with suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)

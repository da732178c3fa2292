"""Serve the node API in the service's own event loop: listening sockets, and limits on connections.

Unauthenticated clients are limited before any of their data is used. A connection has a few seconds for its headers and
counts as pending until its credential is verified; the number of pending ones is limited per address and in total, and
the oldest is closed for the newest, so that holding many open does not block others. Descriptors are reserved for the
database, for commands, and for rejecting connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from slurm_migbatch.daemon.log import RateLimitedLog
from slurm_migbatch.values.peer import peer_uid

log = logging.getLogger(__name__)

#: descriptors that are never given to connections
RESERVED = 256
_BACKLOG = 1024
#: connections accepted in one step of the event loop, so that a flood of them does not block other work
_AT_ONCE = 64
#: kernel buffer of a connection; anything beyond waits on the client's side
_RECEIVE_BYTES = 65536
_HEADER_BYTES = 16384
_KEEP_ALIVE_S = 5
#: addresses of a proxy on this host, of which X-Forwarded-For is believed; the last is 127.0.0.1 on a socket for "::"
_PROXIES = ["127.0.0.1", "::1", "::ffff:127.0.0.1"]
_STOP_S = 2.0
_RETRY_S = 0.5
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(frozen=True)
class ConnectionBounds:
    """Limits: number of connections, and the time for headers."""

    connections: int = 4096
    pending: int = 512
    pending_per_source: int = 32
    header_s: float = 10.0


class Connections:
    """The open connections, and which of them are not authenticated yet."""

    def __init__(self, bounds: ConnectionBounds, section: str) -> None:
        self.bounds, self.section = bounds, section
        self.limited_log = RateLimitedLog(log)
        self.most = min(bounds.connections, _descriptors(bounds.connections + RESERVED) - RESERVED)
        self._all: set[Link] = set()
        self._pending: dict[Link, None] = {}  # in order of arrival
        self._by_source: dict[str, dict[Link, None]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, link: object) -> bool:
        return link in self._all

    def admit(self, link: Link) -> bool:
        """Add a new connection, in place of the oldest unauthenticated one; return whether there is room."""
        links = self._by_source.setdefault(link.source, {})
        if len(links) >= self.bounds.pending_per_source:
            self._drop(next(iter(links)), "it has too many unauthenticated connections")
        elif len(self._pending) >= self.bounds.pending or (len(self._all) >= self.most and self._pending):
            self._drop(next(iter(self._pending)), "there are too many unauthenticated connections")
        if len(self._all) >= self.most:
            self.limited_log.warning("", f"{len(self._all)} connections are open; see [{self.section}] max_connections")
            self.forget(link)
            return False
        self._all.add(link)
        self._pending[link] = None
        self._by_source.setdefault(link.source, {})[link] = None
        return True

    def mark_authenticated(self, link: Link) -> None:
        """Record that the caller of a connection is authenticated: it is no longer closed in favour of others."""
        self._pending.pop(link, None)
        links = self._by_source.get(link.source, {})
        links.pop(link, None)
        if not links:
            self._by_source.pop(link.source, None)

    def forget(self, link: Link) -> None:
        """Remove a closed connection."""
        self.mark_authenticated(link)
        self._all.discard(link)

    def _drop(self, link: Link, why: str) -> None:
        self.limited_log.warning(link.source, f"closing a connection from {link.source}: {why}")
        self.forget(link)
        link.abort()


def _descriptors(wanted: int) -> int:
    """Return the descriptor limit of this process, raised to `wanted` as far as root allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(soft, RESERVED + 16)


if TYPE_CHECKING:
    _LoggerAdapter = logging.LoggerAdapter[logging.Logger]
else:
    _LoggerAdapter = logging.LoggerAdapter  # generic from Python 3.11 on


class _ConnectionLogFilter(_LoggerAdapter):
    """Filters uvicorn's log lines about one connection, which clients could cause in any number."""

    #: uvicorn reads this before it writes trace messages
    level = logging.WARNING

    def __init__(self, connections: Connections) -> None:
        super().__init__(log, {})
        self._connections = connections

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Write warnings at a limited rate, and unexpected errors with their traceback."""
        error = kwargs.get("exc_info")
        if isinstance(error, asyncio.CancelledError):  # the server stops, and this request took too long for that
            return
        if error and self._connections.limited_log.warning("internal", f"internal error in a response: {error!r}"):
            log.error("internal error in a response", exc_info=error)
        elif level >= logging.WARNING and not error:
            self._connections.limited_log.warning("http", str(msg) % args if args else str(msg))


class Link(H11Protocol):
    """One connection: uvicorn's, with limits on silence."""

    def __init__(self, connections: Connections, config: uvicorn.Config, state: ServerState) -> None:
        super().__init__(config, state, {}, None)
        self._connections = connections
        self._late: asyncio.TimerHandle | None = None
        #: what to call when it is closed; a dictionary, for its order
        self._closed: dict[Callable[[], None], None] = {}
        self.source = ""
        #: the address of the other end, whatever headers say; "" on the unix socket
        self.address = ""
        self.logger = _ConnectionLogFilter(connections)  # type: ignore[assignment]  # uvicorn calls warning and error of it

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Record the peer's address, and start the timer."""
        super().connection_made(transport)  # type: ignore[arg-type]
        uid = _peer_uid(transport.get_extra_info("socket"))
        self.address = str(self.client[0]) if self.client and uid is None else ""
        self.source = (self.address or "?") if uid is None else f"uid {uid}"
        self.app_state = {"link": self, **({} if uid is None else {"uid": uid})}
        if not self._connections.admit(self):
            self.abort()
            return
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection, however it ended."""
        self._stop_waiting()
        self._connections.forget(self)
        closed, self._closed = self._closed, {}
        for callback in closed:
            callback()
        with contextlib.suppress(Exception):  # h11 may refuse to end a request that was invalid from the start
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Pass data to uvicorn; a connection with invalid data is closed."""
        before = self.cycle
        try:
            super().data_received(data)
        except Exception as error:
            self._connections.limited_log.warning(self.source, f"closing a connection from {self.source}: {error}")
            self.abort()
            return
        if self.cycle is not before:
            self._stop_waiting()

    def on_response_complete(self) -> None:
        """Give the next request on this connection as much time for its headers as the first."""
        super().on_response_complete()
        self._wait()  # also while closing: a client that does not read its last answer could keep it open

    def mark_authenticated(self) -> None:
        """Record that the credential of the request was verified."""
        self._connections.mark_authenticated(self)

    @property
    def is_open(self) -> bool:
        """Whether it is admitted and not closed."""
        return self in self._connections

    def when_closed(self, then: Callable[[], None]) -> Callable[[], None]:
        """Call `then` when the connection is closed, immediately if it already is; return what withdraws that."""
        if self.is_open:
            self._closed[then] = None
        else:
            then()
        return lambda: self._closed.pop(then, None)

    def abort(self) -> None:
        """Close now, discarding unsent data."""
        self._stop_waiting()
        self.transport.abort()

    def _wait(self) -> None:
        self._stop_waiting()
        self._late = self.loop.call_later(self._connections.bounds.header_s, self.abort)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


def _peer_uid(connection: Any) -> int | None:
    if connection is None or connection.family != socket.AF_UNIX:
        return None
    return peer_uid(connection)


class _Listener:
    """One listening socket. Unlike asyncio's it stops when descriptors run out, and then rejects waiting clients."""

    def __init__(self, listener: socket.socket, make: Callable[[], Link], limited_log: RateLimitedLog) -> None:
        self._listener, self._make, self._limited_log = listener, make, limited_log
        self._loop = asyncio.get_running_loop()
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._made: set[asyncio.Task[None]] = set()
        self._later: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._loop.add_reader(listener.fileno(), self._accept)

    def close(self) -> None:
        """Accept no more connections."""
        self._loop.remove_reader(self._listener.fileno())
        if self._later is not None:
            self._later.cancel()
        self._listener.close()
        if self._spare >= 0:
            os.close(self._spare)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._wait_for_resources(error)
                return
            connection.setblocking(False)
            task = self._loop.create_task(self._serve(connection))
            self._made.add(task)
            task.add_done_callback(self._made.discard)

    async def _serve(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make, connection)
        except OSError:  # the client has already disconnected
            connection.close()

    def _wait_for_resources(self, error: OSError) -> None:
        self._limited_log.warning(
            "accept", f"cannot accept connections: {error.strerror}; raise LimitNOFILE of migbatchd"
        )
        if error.errno in _EXHAUSTED and self._spare >= 0:
            # release one descriptor to reject waiting clients immediately instead of letting them time out
            os.close(self._spare)
            self._spare = -1
            with contextlib.suppress(OSError):
                self._listener.accept()[0].close()
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._loop.remove_reader(self._listener.fileno())
        self._later = self._loop.call_later(_RETRY_S, self._accept_again)

    def _accept_again(self) -> None:
        self._later = None
        if self._spare < 0:
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._loop.add_reader(self._listener.fileno(), self._accept)


class _Stoppable:
    """An application whose unfinished requests are answered with 503 when the server stops, not with 500."""

    def __init__(self, app: Starlette) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            answer = JSONResponse({"error": "this service stops; send again later"}, 503, {"Connection": "close"})
            with contextlib.suppress(RuntimeError):  # an answer has begun
                await answer(scope, receive, send)


class ApiServer:
    """The HTTP server, on any number of TCP addresses with one port and on a unix socket."""

    def __init__(
        self, app: Starlette, port: int, bounds: ConnectionBounds = ConnectionBounds(), section: str = "node_api"
    ) -> None:
        """Set up. `section`: the section of the configuration that has port and limits, for messages."""
        self._port = port
        self._section = section
        self._bounds = bounds
        self._config = uvicorn.Config(
            _Stoppable(app),
            log_config=None,
            access_log=False,
            http=H11Protocol,
            ws="none",
            lifespan="off",
            timeout_keep_alive=_KEEP_ALIVE_S,
            h11_max_incomplete_event_size=_HEADER_BYTES,
            forwarded_allow_ips=_PROXIES,
            server_header=False,
            date_header=False,
        )
        self._state = ServerState()
        self._listeners: dict[str, _Listener] = {}
        self.connections: Connections | None = None

    @property
    def port(self) -> int:
        """The port that it listens on, also if port 0 was requested."""
        return self._port

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses that it listens on."""
        return tuple(self._listeners)

    def listen(self, host: str) -> bool:
        """Serve on one more address of this host; False if it already listens there.

        Raises:
            OSError: the address or port is not available.
        """
        if host in self._listeners:
            return False
        listener: socket.socket | None = None
        try:
            info = socket.getaddrinfo(host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, address = info[0][0], info[0][4][:2]
            listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, host not in ("::", ""))
            listener.bind(address)
            listener.listen(_BACKLOG)
        except (OSError, UnicodeError) as error:  # UnicodeError: a name that no host can have
            if listener is not None:
                listener.close()
            code, why = (error.errno, error.strerror) if isinstance(error, OSError) else (errno.EINVAL, str(error))
            raise OSError(code, f"cannot listen on {host} port {self._port}: {why}; see [{self._section}]") from None
        self._port = listener.getsockname()[1]
        self._open(host, listener)
        return True

    def listen_unix(self, path: Path) -> None:
        """Serve on a unix socket that every user of this host may connect to; a leftover file is replaced.

        Raises:
            OSError: it cannot be created.
        """
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            listener.bind(str(path))
            path.chmod(0o666)
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise OSError(error.errno, f"cannot listen on {path}: {error.strerror}") from None
        self._open(str(path), listener)

    async def stop(self) -> None:
        """Answer requests in flight, for two seconds at most, then close."""
        for listener in self._listeners.values():
            listener.close()
        self._listeners.clear()
        for link in list(self._state.connections):
            link.shutdown()
        deadline = asyncio.get_running_loop().time() + _STOP_S
        while (self._state.connections or self._state.tasks) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        unfinished: Iterable[asyncio.Task[None]] = list(self._state.tasks)
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)
        for link in list(self._state.connections):
            link.transport.abort()

    def _open(self, name: str, listener: socket.socket) -> None:
        if self.connections is None:
            self.connections = Connections(self._bounds, self._section)
            if not self._config.loaded:
                self._config.load()
        connections = self.connections
        self._listeners[name] = _Listener(
            listener, lambda: Link(connections, self._config, self._state), connections.limited_log
        )

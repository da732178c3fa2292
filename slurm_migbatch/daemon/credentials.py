"""Check and create credentials in threads, so that the event loop does not wait for munged.

Anybody who reaches the port may send credentials. Of each source one is checked at a time, and none whose connection is
closed: a client who connects, sends headers and disconnects, again and again, delays no other source, and what waits is
bounded like the open connections. Answers are signed in another thread than requests are checked in.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol, TypeVar

from starlette.requests import ClientDisconnect

T = TypeVar("T")


class Peer(Protocol):
    """The connection of a request."""

    @property
    def source(self) -> str:
        """Address, or uid on a unix socket."""

    @property
    def is_open(self) -> bool:
        """Whether the client can still be answered."""

    def when_closed(self, then: Callable[[], None]) -> Callable[[], None]:
        """Call `then` when the connection is closed, immediately if it already is; return what withdraws that."""


class CredentialThreads:
    """The threads of one server, and whose turn it is."""

    def __init__(self, name: str, checking: int = 1) -> None:
        """Set up. `name`: of the threads; `checking`: how many of them check credentials."""
        self._checking = ThreadPoolExecutor(checking, thread_name_prefix=f"{name}-check")
        self._signing = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-sign")
        #: of each source with a credential that is being checked: who waits for that, in order of arrival
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def check(self, peer: Peer | None, work: Callable[[], T]) -> T:
        """Return what `work` returns, after the source's earlier credentials were checked.

        Raises:
            ClientDisconnect: the connection was closed before; `work` was not called.
        """
        if peer is None:
            return await asyncio.get_running_loop().run_in_executor(self._checking, work)
        await self._turn(peer)

        def unless_closed() -> T:
            if not peer.is_open:
                raise ClientDisconnect
            return work()

        checked = asyncio.get_running_loop().run_in_executor(self._checking, unless_closed)

        def ended(_: asyncio.Future[T]) -> None:
            if not checked.cancelled():
                checked.exception()  # the request may have ended, and nobody else looks at it
            self._admit_next(peer.source)

        # not when this request ends: the thread is busy until the check ends, and no other of the source may begin
        checked.add_done_callback(ended)
        return await asyncio.shield(checked)

    async def sign(self, work: Callable[[], T]) -> T:
        """Return what `work` returns."""
        return await asyncio.get_running_loop().run_in_executor(self._signing, work)

    def close(self) -> None:
        """Stop the threads."""
        for pool in (self._checking, self._signing):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _turn(self, peer: Peer) -> None:
        """Wait until no earlier credential of the source is being checked or waits for that."""
        line = self._waiting.get(peer.source)
        if line is None:
            self._waiting[peer.source] = deque()
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line.append(turn)

        def leave() -> None:
            if not turn.done():
                line.remove(turn)
                turn.set_exception(ClientDisconnect())

        withdraw = peer.when_closed(leave)
        try:
            await turn
        except asyncio.CancelledError:  # the server stops
            if turn.cancelled():
                with suppress(ValueError):
                    line.remove(turn)
            else:
                self._admit_next(peer.source)
            raise
        finally:
            withdraw()

    def _admit_next(self, source: str) -> None:
        line = self._waiting[source]
        while line:
            turn = line.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        del self._waiting[source]

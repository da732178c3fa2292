"""Serve the submit sockets from a dedicated thread, because every sbatch of the cluster waits for the answer.

slurmctld has its own socket, keeps its connection between submissions, and has priority: at most one
request of a user is answered between two polls of its connections. Ordinary users, who ask for advice at the common
socket, get one answer per connection, in turn, with a rate limit. A connection without a request stays open for a
limited time and delays no other. Deferred work is done between two answers, in small parts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from slurm_migbatch.submit import protocol
from slurm_migbatch.submit.service import IDLE_S, PER_USER, SubmitService, listen, reserved
from slurm_migbatch.values.peer import peer_uid

log = logging.getLogger(__name__)

KEPT: Final = 64
"""Connections of root and SlurmUser that stay open between requests."""
USERS: Final = 256
"""Connections of ordinary users, all together."""
PER_SECOND: Final = 50.0
"""Answers per second for one ordinary user after `BURST`; further connections are closed unread."""
BURST: Final = 200.0
ACCEPTED: Final = 32
"""Connections to accept before slurmctld's are polled again."""
LATER_S: Final = 0.1
"""Seconds from an answer to the idle tasks that it leaves."""
LAST_S: Final = 0.5
"""Seconds after the stop in which existing connections may still send their request."""
#: seconds without a new connection after which all that were being made when the socket's file was removed have come
_QUIET_S: Final = 0.02


@dataclass(eq=False)
class _Client:
    """An open connection; `until`: when it is closed (monotonic seconds), None for a permanent one; `queued`: it has
    a place in `_Turns`.
    """

    link: socket.socket
    uid: int
    until: float | None
    queued: bool = False


class _Turns:
    """Connections of users that may be readable: one of each user in turn."""

    def __init__(self) -> None:
        self._queues: dict[int, deque[_Client]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def add(self, client: _Client) -> None:
        """Queue a connection, unless it is queued."""
        if not client.queued:
            client.queued = True
            self._queues.setdefault(client.uid, deque()).append(client)

    def next(self) -> _Client | None:
        """Return the next connection in turn."""
        if not self._queues:
            return None
        uid, queue = next(iter(self._queues.items()))
        del self._queues[uid]
        client = queue.popleft()
        client.queued = False
        if queue:
            self._queues[uid] = queue  # at the end
        return client

    def drop(self, client: _Client) -> None:
        """Remove a connection."""
        if client.queued:
            client.queued = False
            queue = self._queues[client.uid]
            queue.remove(client)
            if not queue:
                del self._queues[client.uid]


class _Allowance:
    """Rate limit of each user: `BURST` requests, and then `PER_SECOND`."""

    def __init__(self) -> None:
        self._left: dict[int, tuple[float, float]] = {}  # by uid: requests left, and when

    def take(self, uid: int) -> bool:
        """Take one request from the user's allowance; return whether one was left."""
        now = time.monotonic()
        if len(self._left) > 4 * USERS:
            self._left = {known_uid: at for known_uid, at in self._left.items() if self._refilled(*at, now) < BURST}
        remaining = self._refilled(*self._left.get(uid, (BURST, now)), now)
        if remaining < 1.0:
            return False
        self._left[uid] = remaining - 1.0, now
        return True

    @staticmethod
    def _refilled(left: float, at: float, now: float) -> float:
        return min(BURST, left + PER_SECOND * (now - at))


class SubmitServer:
    """Answers connections with `service` from `start` to `stop`: slurmctld's at `reserved(path)`, all at `path`."""

    def __init__(self, path: Path, service: SubmitService, idle_task: Callable[[], float | None] | None = None) -> None:
        """Set up. `idle_task` does a small part (far below a millisecond) of the deferred work, in the serving thread.

        It is called `LATER_S` after an answer and returns the seconds until it has more to do, None if it has nothing
        to do before the next answer. The default records decisions.
        """
        self._path, self._service = path, service
        self._idle_task = idle_task or self._record
        self._poll = select.epoll()
        self._clients: dict[int, _Client] = {}
        self._silent = 0  # clients with a timeout
        self._open: Counter[int] = Counter()  # connections of each ordinary user
        self._turns, self._allowance = _Turns(), _Allowance()
        self._due: float | None = None
        self._wake, self._woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="submit-socket", daemon=True)
        self._listeners: dict[int, tuple[Path, socket.socket]] = {}  # slurmctld's is first
        self._files: list[tuple[Path, int]] = []  # the sockets' paths and inodes
        self._last: float | None = None  # when to end, set after a request to stop

    def start(self) -> None:
        """Start to listen, and serve in the background.

        Raises:
            OSError: a socket cannot be created.
        """
        own = reserved(self._path)
        for path, listener in ((own, listen(own, owners=self._service.proxy_uids)), (self._path, listen(self._path))):
            self._listeners[listener.fileno()] = path, listener
            self._files.append((path, path.stat().st_ino))
            self._poll.register(listener.fileno(), select.EPOLLIN)
        self._poll.register(self._wake, select.EPOLLIN)
        self._thread.start()

    def stop(self) -> None:
        """Answer existing connections, then stop; the sockets are removed unless another server has replaced them."""
        for path, inode in self._files:
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == inode:
                    path.unlink()
        os.write(self._woken, b"x")
        if self._thread.ident is not None:
            self._thread.join()
        for client in list(self._clients.values()):
            self._forget(client)
        for _, listener in self._listeners.values():
            listener.close()
        self._poll.close()
        os.close(self._wake)
        os.close(self._woken)

    def _run(self) -> None:
        while self._last is None or time.monotonic() < self._last:
            ready = self._poll.poll(0 if self._turns else self._patience())
            if self._last is not None and not ready and not self._turns and not self._silent:
                return
            self._handle_ready([number for number, _ in ready])
            if (client := self._turns.next()) is not None:
                self._speak(client)
            if self._silent:
                self._expire()
            if self._due is not None and time.monotonic() >= self._due:
                delay = self._idle_task()
                self._due = None if delay is None else time.monotonic() + delay

    def _handle_ready(self, ready: Sequence[int]) -> None:
        """Answer requests of root and SlurmUser, queue users' connections, then accept new ones or begin to stop."""
        for number in ready:
            client = self._clients.get(number)
            if client is None:
                continue
            if client.uid in self._service.proxy_uids:
                self._speak(client)
            else:
                self._turns.add(client)
        for number in ready:
            if number == self._wake:
                self._begin_to_stop()
            elif number in self._listeners:
                self._accept(*self._listeners[number])

    def _begin_to_stop(self) -> None:
        self._poll.unregister(self._wake)
        self._last = time.monotonic() + LAST_S
        for client in [client for client in self._clients.values() if client.until is None]:
            self._speak(client)  # it may have sent its request already
            if client.link.fileno() >= 0:
                self._forget(client)

    def _accept(self, path: Path, listener: socket.socket) -> None:
        """Accept waiting connections, at most `ACCEPTED`; close those of users who have too many."""
        for _ in range(ACCEPTED):
            try:
                link, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # out of descriptors, or the client has disconnected
                log.warning("submit socket: %s", error)
                time.sleep(0.05)
                return
            link.setblocking(False)
            try:
                uid = peer_uid(link)
            except OSError:
                link.close()
                continue
            is_proxy = uid in self._service.proxy_uids
            if not is_proxy and (path != self._path or not self._admits(uid)):
                link.close()
                continue
            client = _Client(link, uid, time.monotonic() + IDLE_S)
            self._clients[link.fileno()] = client
            self._silent += 1
            self._poll.register(link.fileno(), select.EPOLLIN)
            if is_proxy:
                self._speak(client)  # usually the request has already arrived
            else:
                self._open[uid] += 1
                self._turns.add(client)

    def _admits(self, uid: int) -> bool:
        return self._open[uid] < PER_USER and self._open.total() < USERS and self._allowance.take(uid)

    def _speak(self, client: _Client) -> None:
        """Answer a client that has sent its request; wait for one that has not yet."""
        try:
            request = client.link.recv(protocol.MAX_REQUEST + 1)
        except BlockingIOError:
            return
        except OSError:
            request = b""
        if not request:
            self._forget(client)
            return
        answer = self._service.handle(request, client.uid)
        # the answer fits an empty socket buffer; a disconnected client does not get it
        with contextlib.suppress(OSError):
            client.link.send(answer)
        self._service.prepare()
        if self._due is None:
            self._due = time.monotonic() + LATER_S
        if client.until is not None:
            self._keep(client)

    def _keep(self, client: _Client) -> None:
        """Keep the connection of a privileged client open for its next request."""
        may_stay = self._last is None and len(self._clients) - self._silent < KEPT
        if client.uid in self._service.proxy_uids and may_stay:
            client.until = None
            self._silent -= 1
        else:
            self._forget(client)

    def _forget(self, client: _Client) -> None:
        del self._clients[client.link.fileno()]
        self._poll.unregister(
            client.link.fileno()
        )  # closing does not remove it from epoll if a forked process has it open too
        self._silent -= client.until is not None
        self._turns.drop(client)
        if client.uid in self._open:
            self._open[client.uid] -= 1
            if not self._open[client.uid]:
                del self._open[client.uid]
        client.link.close()

    def _patience(self) -> float | None:
        """Return the seconds to wait for the next request."""
        times = [client.until for client in self._clients.values() if client.until] if self._silent else []
        if self._due is not None:
            times.append(self._due)
        if self._last is not None:
            times.append(min(self._last, time.monotonic() + _QUIET_S))
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _expire(self) -> None:
        now = time.monotonic()
        clients = self._clients.values()
        for client in [
            candidate for candidate in clients if candidate.until and candidate.until <= now and not candidate.queued
        ]:
            self._forget(client)

    def _record(self) -> float | None:
        return 0.0 if self._service.record() else None

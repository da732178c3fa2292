"""Serves the submit socket from a thread of its own: every sbatch of the cluster waits for this.

slurmctld keeps its connection from one submission to the next, so that an answer costs two system calls on either side
and no trip through an event loop, which may be busy with nodes and plans. Ordinary users, who ask for advice, get one
answer for each connection. Whoever connects and says nothing is kept aside for a while and holds nobody up. What can
wait is done between two answers, a little at a time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from slurm_migbatch.submit import protocol
from slurm_migbatch.submit.service import IDLE_S, PER_USER, SubmitService, listen, peer_uid

log = logging.getLogger(__name__)

KEPT: Final = 64
"""Connections of root and SlurmUser that stay open between requests."""
LATER_S: Final = 0.1
"""Seconds from an answer to the chores that it leaves."""


@dataclass
class _Client:
    """An open connection; `until`: when it is given up (monotonic seconds), None for one that is kept."""

    link: socket.socket
    uid: int
    until: float | None


class Doorman:
    """Answers connections at `path` with `service` from `start` to `stop`."""

    def __init__(self, path: Path, service: SubmitService, chore: Callable[[], float | None] | None = None) -> None:
        """`chore` does a little (far below a millisecond) of what answers leave to do, in the serving thread.

        It is called a while after an answer and returns the seconds after which it has more to do, None where that is
        only after the next answer. Without one, decisions are recorded.
        """
        self._path, self._service = path, service
        self._chore = chore or self._record
        self._poll = select.epoll()
        self._clients: dict[int, _Client] = {}
        self._silent = 0  # clients that will be given up
        self._open: Counter[int] = Counter()
        self._due: float | None = None
        self._wake, self._woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="submit-socket", daemon=True)
        self._listener: socket.socket | None = None

    def start(self) -> None:
        """Listen, then serve in the background.

        Raises:
            OSError: the socket cannot be had.
        """
        self._listener = listen(self._path)
        self._poll.register(self._listener.fileno(), select.EPOLLIN)
        self._poll.register(self._wake, select.EPOLLIN)
        self._thread.start()

    def stop(self) -> None:
        """Answer no more; the socket goes."""
        os.write(self._woken, b"x")
        if self._thread.ident is not None:
            self._thread.join()
        for client in list(self._clients.values()):
            self._forget(client)
        if self._listener is not None:
            self._path.unlink(missing_ok=True)
            self._listener.close()
        self._poll.close()
        os.close(self._wake)
        os.close(self._woken)

    def _run(self) -> None:
        assert self._listener is not None
        door = self._listener.fileno()
        while True:
            for number, _ in self._poll.poll(self._patience()):
                if number == door:
                    self._accept(self._listener)
                elif number == self._wake:
                    return
                else:
                    self._speak(self._clients[number])
            if self._silent:
                self._expire()
            if self._due is not None and time.monotonic() >= self._due:
                again = self._chore()
                self._due = None if again is None else time.monotonic() + again

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                link, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # out of descriptors, or the client has gone again
                log.warning("submit socket: %s", error)
                time.sleep(0.05)
                return
            link.setblocking(False)
            try:
                uid = peer_uid(link)
            except OSError:
                link.close()
                continue
            if uid not in self._service.speakers and self._open[uid] >= PER_USER:
                link.close()
                continue
            client = _Client(link, uid, time.monotonic() + IDLE_S)
            self._clients[link.fileno()] = client
            self._silent += 1
            self._open[uid] += 1
            self._poll.register(link.fileno(), select.EPOLLIN)
            self._speak(client)  # the request of most is there already

    def _speak(self, client: _Client) -> None:
        """Answer a client that has asked; wait for one that has not yet."""
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
        # the answer fits an empty socket buffer; whoever left does not get it
        with contextlib.suppress(OSError):
            client.link.send(answer)
        if self._due is None:
            self._due = time.monotonic() + LATER_S
        if client.until is not None:
            self._keep(client)

    def _keep(self, client: _Client) -> None:
        """Leave the connection open for the next request of those who submit for others."""
        if client.uid in self._service.speakers and len(self._clients) - self._silent < KEPT:
            client.until = None
            self._silent -= 1
        else:
            self._forget(client)

    def _forget(self, client: _Client) -> None:
        del self._clients[client.link.fileno()]
        self._silent -= client.until is not None
        self._open[client.uid] -= 1
        if not self._open[client.uid]:
            del self._open[client.uid]
        client.link.close()  # which takes it from the poll too

    def _patience(self) -> float | None:
        """Seconds to wait for the next request."""
        times = [client.until for client in self._clients.values() if client.until] if self._silent else []
        if self._due is not None:
            times.append(self._due)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _expire(self) -> None:
        now = time.monotonic()
        for client in [client for client in self._clients.values() if client.until and client.until <= now]:
            self._forget(client)

    def _record(self) -> float | None:
        return 0.0 if self._service.record() else None

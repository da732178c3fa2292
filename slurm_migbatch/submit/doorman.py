"""Serves the submit socket from a thread of its own: every sbatch of the cluster waits for this.

A request is a packet that is there when its connection is accepted, so nearly all are answered with four system calls
and without a trip through the event loop, which may be busy with nodes and plans. Connections that are silent at first
are kept aside for a while, so that nobody who opens one and says nothing holds up the others.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections import Counter
from pathlib import Path

from slurm_migbatch.submit import protocol
from slurm_migbatch.submit.service import IDLE_S, PER_USER, SubmitService, listen, peer_uid

log = logging.getLogger(__name__)


class Doorman:
    """Answers connections at `path` with `service` from `start` to `stop`."""

    def __init__(self, path: Path, service: SubmitService) -> None:
        self._path, self._service = path, service
        self._selector = selectors.DefaultSelector()
        self._waiting: dict[socket.socket, tuple[int, float]] = {}  # silent so far: uid, until when
        self._open: Counter[int] = Counter()
        self._wake, self._woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="submit-socket", daemon=True)
        self._listener: socket.socket | None = None

    def start(self) -> None:
        """Listen, then serve in the background.

        Raises:
            OSError: the socket cannot be had.
        """
        self._listener = listen(self._path)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread.start()

    def stop(self) -> None:
        """Answer no more; the socket goes."""
        os.write(self._woken, b"x")
        if self._thread.ident is not None:
            self._thread.join()
        for client in list(self._waiting):
            self._close(client)
        if self._listener is not None:
            self._path.unlink(missing_ok=True)
            self._listener.close()
        self._selector.close()
        os.close(self._wake)
        os.close(self._woken)

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select(self._patience()):
                if key.fileobj is self._listener:
                    self._accept(self._listener)
                elif isinstance(key.fileobj, socket.socket):
                    self._speak(key.fileobj, self._waiting[key.fileobj][0])
                else:
                    return
            self._expire()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # out of descriptors, or the client has gone again
                log.warning("submit socket: %s", error)
                time.sleep(0.05)
                return
            client.setblocking(False)
            try:
                uid = peer_uid(client)
            except OSError:
                client.close()
                continue
            if uid != 0 and self._open[uid] >= PER_USER:
                client.close()
            else:
                self._speak(client, uid)

    def _speak(self, client: socket.socket, uid: int) -> None:
        """Answer a client that has asked; keep one aside that has not yet."""
        try:
            request = client.recv(protocol.MAX_REQUEST + 1)
        except BlockingIOError:
            self._waiting[client] = uid, time.monotonic() + IDLE_S
            self._open[uid] += 1
            self._selector.register(client, selectors.EVENT_READ)
            return
        except OSError:
            request = b""
        if request:
            answer = self._service.handle(request, uid)
            # the answer fits an empty socket buffer; whoever left does not get it
            with contextlib.suppress(OSError):
                client.send(answer)
        self._close(client)

    def _close(self, client: socket.socket) -> None:
        if client in self._waiting:
            uid, _ = self._waiting.pop(client)
            self._open[uid] -= 1
            if not self._open[uid]:
                del self._open[uid]
            self._selector.unregister(client)
        client.close()

    def _patience(self) -> float | None:
        if not self._waiting:
            return None
        return max(0.0, min(until for _, until in self._waiting.values()) - time.monotonic())

    def _expire(self) -> None:
        now = time.monotonic()
        for client in [client for client, (_, until) in self._waiting.items() if until <= now]:
            self._close(client)

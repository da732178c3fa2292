"""A service that echoes requests, and clients of a unix socket."""

from __future__ import annotations

import socket
from pathlib import Path


class Echo:
    """A fake service: it answers with the peer's uid and the request."""

    proxy_uids = frozenset({0})

    def __init__(self) -> None:
        self.left = 0
        self.recorded = 0

    def handle(self, request: bytes, peer_uid: int = 0) -> bytes:
        self.left += 1
        return b"%d:%s" % (peer_uid, request)

    def prepare(self) -> None:
        """Do nothing."""

    def record(self) -> bool:
        self.recorded += 1
        return self.recorded < self.left


def connect(path: Path | str) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client.settimeout(120)
    client.connect(str(path))
    return client

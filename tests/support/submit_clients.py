"""An answering service, and clients of a unix socket."""

from __future__ import annotations

import socket
import time


def eventually(check, timeout=120.0):
    end = time.monotonic() + timeout
    while not (result := check()):
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.01)
    return result


class Echo:
    """Stands in for the service: says who asked what."""

    speakers = frozenset({0})

    def __init__(self):
        self.left = 0
        self.recorded = 0

    def handle(self, request, peer_uid=0):
        self.left += 1
        return b"%d:%s" % (peer_uid, request)

    def record(self):
        self.recorded += 1
        return self.recorded < self.left


def connect(path):
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client.settimeout(120)
    client.connect(str(path))
    return client

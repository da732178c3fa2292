"""Notifies systemd (Type=notify) that the service is ready, reloading, alive or stopping; silent without systemd."""

from __future__ import annotations

import contextlib
import os
import socket


def notify(state: str) -> None:
    """Send `state` ("READY=1", "STOPPING=1", "STATUS=...") to systemd's socket, if there is one."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    # failing to notify systemd is no reason to stop serving
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
        out.connect(address)
        out.send(state.encode())

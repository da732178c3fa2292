"""Report the service's state to systemd (sd_notify), if NOTIFY_SOCKET is set."""

from __future__ import annotations

import os
import socket
from contextlib import suppress


def notify(state: str) -> None:
    """Send one state, such as `READY=1`; nothing without NOTIFY_SOCKET."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path.startswith(("/", "@")):
        return
    address = "\0" + path[1:] if path.startswith("@") else path
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
        link.connect(address)
        link.sendall(state.encode())

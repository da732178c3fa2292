"""Tell which user is at the other end of a unix socket."""

from __future__ import annotations

import socket
import struct
from typing import Any, Final

_CREDENTIALS: Final = struct.Struct("iII")
"""Linux's `struct ucred`: pid, uid, gid; user numbers have no sign."""


def peer_uid(connection: Any) -> int:
    """Return the uid of the process at the other end of a unix socket, from the kernel. Raises OSError."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(packed)[1])

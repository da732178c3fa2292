"""Choose free TCP ports on loopback."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path

from .errors import TestbedError

# Below the kernel's range for outgoing connections, so that no client's source port takes one before the daemon does.
_FIRST, _LAST = 18000, 32000


class PortBook:
    """Choose ports and keep them from other starting test beds.

    The reservation is an abstract unix socket per port: it ends with the process that holds it, however that ends.
    """

    def __init__(self) -> None:
        self._held: list[socket.socket] = []

    def take(self) -> int:
        """Return a port that no process listens on and that no other test bed has chosen."""
        for _ in range(1000):
            port = random.randint(_FIRST, _LAST)  # noqa: S311 - spread, not secrecy
            claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                claim.bind(f"\0migbatch-testbed-port-{port}")
                with socket.socket() as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(("0.0.0.0", port))  # noqa: S104 - closed at once; asks whether any address is taken
            except OSError:
                claim.close()
                continue
            self._held.append(claim)
            return port
        raise TestbedError(f"no free TCP port between {_FIRST} and {_LAST}; see what listens with ss -ltnp")

    def release(self) -> None:
        """Release the reservations (the daemons listen now, or never will)."""
        for claim in self._held:
            with suppress(OSError):
                claim.close()
        self._held.clear()


def listening(port: int) -> bool:
    """Return whether a process listens on `port`, by the kernel's table (a daemon would log a connection)."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(FileNotFoundError):
            for line in Path(table).read_text().splitlines()[1:]:
                _, local, _, state, *_ = line.split()
                if state == "0A" and int(local.rpartition(":")[2], 16) == port:
                    return True
    return False


def answers(path: Path) -> bool:
    """Return whether a process accepts connections on a Unix socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0

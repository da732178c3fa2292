"""Check the addresses of nodes, so that a node cannot impersonate another: munge authenticates users, not hosts.

A munge credential names the host on which it was created, but every node has the key to write any name. The address of
the connection is harder to forge, and Slurm knows each node's addresses.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from slurm_migbatch.slurm.client import SlurmError

#: minimum seconds between two queries because of an unknown address
_ANEW_S = 10.0
#: most names that are resolved at a time: one that the name server does not answer takes many seconds
_LOOKUPS = 16
_LOOPBACK = frozenset({"127.0.0.1", "::1"})


class NodeAddresses:
    """The addresses of nodes, by their host names in Slurm. A node waits for its own names only."""

    def __init__(
        self, ask: Callable[[], Mapping[str, Iterable[str]]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Set up the cache. `ask` may raise SlurmError, and is called in a thread."""
        self._ask, self._clock = ask, clock
        self._names: Mapping[str, Iterable[str]] = {}
        self._hosts: dict[str, frozenset[str]] = {}
        self._known: dict[str, frozenset[str]] = {}
        self._lookups: dict[str, asyncio.Future[None]] = {}  # by node, since Slurm was asked
        self._due = 0.0
        self._error = ""
        self._lock = asyncio.Lock()
        self._pool = ThreadPoolExecutor(_LOOKUPS, thread_name_prefix="resolver")

    async def wrong(self, node: str, address: str) -> str:
        """Return why `address` cannot be `node`, as a sentence; empty if it can."""
        peer = _plain(address)
        if peer not in self._known.get(node, ()):
            await self._refresh(node)
        if peer in self._known.get(node, ()):
            return ""
        if self._error and node not in self._known:
            return f"cannot get the address of {node} from Slurm ({self._error}); send again later"
        names = ", ".join(sorted(self._known.get(node, ())))
        if not names:
            return f"Slurm has no node {node}, or no address for it"
        return (
            f"{node} connects from {peer}, but its address in Slurm is {names} (NodeAddr, NodeHostname): correct it, "
            "use auth = 'token' with a key for each node, or set [node_api] check_addresses = false"
        )

    async def _refresh(self, node: str) -> None:
        """Query Slurm and resolve the node's names, unless both were done recently."""
        async with self._lock:
            if self._clock() >= self._due:
                await asyncio.to_thread(self._list)
                self._lookups = {name: lookup for name, lookup in self._lookups.items() if not lookup.done()}
                self._due = self._clock() + _ANEW_S
        if node in self._names and node not in self._lookups:
            self._lookups[node] = asyncio.get_running_loop().run_in_executor(self._pool, self._resolve, node)
        if node in self._lookups:
            await asyncio.shield(self._lookups[node])  # others wait for it too

    def _list(self) -> None:
        try:
            self._names = self._ask()
        except SlurmError as error:
            self._error = str(error)[:200]
            return
        self._error = ""
        for node in list(self._known):
            if node not in self._names:
                self._known.pop(node, None)

    def _resolve(self, node: str) -> None:
        names = tuple(self._names.get(node, ()))
        for name in names:
            # a name that cannot be resolved now keeps its former addresses
            self._hosts[name] = resolved(name) or self._hosts.get(name, frozenset())
        places = frozenset(address for name in names for address in self._hosts[name])
        # processes on this host may connect through its loopback address
        self._known[node] = places | _LOOPBACK if any(is_local(address) for address in places) else places


def resolved(host: str) -> frozenset[str]:
    """Return the addresses of a host name, or of an address itself; none if it has none."""
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return frozenset()
    return frozenset(_plain(str(info[4][0])) for info in entries)


def is_local(address: str) -> bool:
    """Return whether an address is one of this host's."""
    with contextlib.suppress(ValueError, OSError):
        family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as probe:
            probe.bind((address, 0))
            return True
    return False


def is_loopback(address: str) -> bool:
    """Return whether an address can be reached from its own host only."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(_plain(address)).is_loopback
    return False


def _plain(address: str) -> str:
    """Return the canonical spelling of an address; an IPv4-mapped IPv6 address becomes IPv4."""
    with contextlib.suppress(ValueError):
        parsed = ipaddress.ip_address(address.partition("%")[0])
        mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
        return str(mapped or parsed)
    return address

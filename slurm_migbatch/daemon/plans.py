"""Keep the plans that nodes pull: one current version per node, acknowledged versions, and last contacts."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from slurm_migbatch.daemon.tasks import with_timeout
from slurm_migbatch.decide.capacity.sharing import Place
from slurm_migbatch.decide.snapshot import PublishedPlan

#: GPU uuid -> slots of its layout, used and free, each (profile, start, size in memory slices)
GpuSlots = Mapping[str, Sequence[tuple[str, int, int]]]
#: second job of a shared slot -> where and with whom
Guests = Mapping[int, Place]


#: maximum time by which a clock may have been ahead when a version was created: thirty years
_AHEAD_MS = 30 * 366 * 86400 * 1000


class NumberedPlan(PublishedPlan):
    """A node's layout, numbered; a higher version replaces a lower one."""

    def to_wire(self) -> dict[str, object]:
        """Return the JSON form that nodes read."""
        wire = {"version": self.version, "gpus": {uuid: [list(s) for s in slots] for uuid, slots in self.gpus.items()}}
        if self.guests:
            wire["guests"] = {str(job): list(place) for job, place in self.guests.items()}
        return wire


class Plans(Protocol):
    """Interface by which rounds publish plans and read which of them nodes have confirmed."""

    def current(self, node: str) -> PublishedPlan | None:
        """Return the newest plan of `node`; None until one was published."""

    def publish(self, node: str, gpus: GpuSlots, guests: Guests | None = None) -> int:
        """Publish this plan of `node` and return its version."""

    def acked(self, node: str) -> int:
        """Return the newest version that `node` has confirmed; 0 if none."""

    def wait_acked(self, node: str, version: int, timeout: float) -> bool:
        """Wait until `node` has confirmed `version` or a later one, at most `timeout` seconds."""

    def silence(self, node: str) -> float:
        """Return the seconds since the last contact with `node`; infinite if there was none."""


@dataclass
class _Node:
    plan: NumberedPlan | None = None
    have: int = 0
    last_contact: float = 0.0


class NodePlans:
    """Plans per node. Publishing and waiting for acknowledgements may happen in any thread, polling in one event loop.

    Versions are milliseconds of the wall clock, raised above every version that the node has shown, so they increase
    over restarts of the service without a file, also after the clock was set back. A version further in the future than
    any clock error is invalid, and counts as none.
    """

    def __init__(self, wall: Callable[[], float] = time.time, clock: Callable[[], float] = time.monotonic) -> None:
        self._wall, self._clock = wall, clock
        self._nodes: dict[str, _Node] = {}
        self._acked = threading.Condition()
        self._waiters: dict[str, set[tuple[asyncio.AbstractEventLoop, asyncio.Event]]] = {}
        self._closed = False

    def publish(self, node: str, gpus: GpuSlots, guests: Guests | None = None) -> int:
        """Make `gpus` the plan of `node`, with `guests` allowed to share a used slot.

        Returns:
            Its version; that of the current plan if nothing changed.
        """
        frozen = {uuid: tuple(slots) for uuid, slots in gpus.items()}
        shared = dict(guests or {})
        with self._acked:
            entry = self._nodes.setdefault(node, _Node())
            plan = entry.plan
            if plan is not None and (plan.gpus, plan.guests) == (frozen, shared) and plan.version >= entry.have:
                return plan.version
            entry.plan = NumberedPlan(self._next_version(entry), frozen, shared)
            version = entry.plan.version
            self._wake(node)
        return version

    # the next three read one value each, which needs no lock; a round calls them for every node

    def current(self, node: str) -> NumberedPlan | None:
        """Return the plan that `node` should have; None until one was published."""
        entry = self._nodes.get(node)
        return entry.plan if entry is not None else None

    def acked(self, node: str) -> int:
        """Return the newest version that `node` has confirmed; 0 if none."""
        entry = self._nodes.get(node)
        return entry.have if entry is not None else 0

    def silence(self, node: str) -> float:
        """Return seconds since `node` last polled or sent events; infinite if never."""
        entry = self._nodes.get(node)
        contact = entry.last_contact if entry is not None else 0.0
        return self._clock() - contact if contact else float("inf")

    def nodes(self) -> tuple[str, ...]:
        """Return every node that has reported or has a plan."""
        with self._acked:
            return tuple(sorted(self._nodes))

    def note_contact(self, node: str) -> None:
        """Record the time of a contact."""
        with self._acked:
            self._nodes.setdefault(node, _Node()).last_contact = self._clock()

    def confirm(self, node: str, have: int) -> None:
        """Record that `node` has version `have`; later versions are higher, also if it is from before a restart."""
        with self._acked:
            entry = self._nodes.setdefault(node, _Node())
            entry.last_contact = self._clock()
            if have > max(self._wall() * 1000 + _AHEAD_MS, entry.plan.version if entry.plan else 0):
                have = 0
            entry.have = have
            if entry.plan is not None and have > entry.plan.version:
                entry.plan = NumberedPlan(self._next_version(entry), entry.plan.gpus, entry.plan.guests)
            self._acked.notify_all()

    def wait_acked(self, node: str, version: int, timeout: float) -> bool:
        """Block the calling thread until `node` has confirmed `version` or a later one, at most `timeout` seconds."""
        with self._acked:
            return self._acked.wait_for(lambda: node in self._nodes and self._nodes[node].have >= version, timeout)

    async def newer(self, node: str, have: int, timeout: float) -> NumberedPlan | None:
        """Return the plan of `node` once it differs from version `have`; None after `timeout` seconds."""
        event = asyncio.Event()
        waiter = (asyncio.get_running_loop(), event)
        with self._acked:
            self._waiters.setdefault(node, set()).add(waiter)
        try:
            plan = self.current(node)
            if (plan is None or plan.version == have) and timeout > 0 and not self._closed:
                try:
                    await with_timeout(event.wait(), timeout)
                except asyncio.TimeoutError:
                    return None
                plan = self.current(node)
            return plan if plan is not None and plan.version != have else None
        finally:
            with self._acked:
                self._waiters[node].discard(waiter)

    def close(self) -> None:
        """Answer every poll at once from now on, because the service stops."""
        with self._acked:
            self._closed = True
            for node in self._waiters:
                self._wake(node)

    def _next_version(self, entry: _Node) -> int:
        version = entry.plan.version if entry.plan else 0
        return max(int(self._wall() * 1000), version + 1, entry.have + 1)

    def _wake(self, node: str) -> None:
        for loop, event in self._waiters.get(node, ()):
            loop.call_soon_threadsafe(event.set)

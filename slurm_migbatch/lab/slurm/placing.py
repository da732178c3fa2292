"""Find where and when a job could start: counts of GRES and CPUs by node, and the reservations of backfill."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from heapq import heapify, heappop, heappush
from math import inf

from slurm_migbatch.lab.slurm.records import NodeRecord, Shape
from slurm_migbatch.slurm.constraint import satisfier
from slurm_migbatch.slurm.nodelist import expand


class Placing:
    """Find nodes for shapes. `changed` must be called after every change of a node."""

    def __init__(self, machines: Mapping[str, NodeRecord]) -> None:
        self._machines = machines
        #: names of the open nodes that have a free GRES of a type, by type
        self._having: dict[str, set[str]] = {}
        self._pools: dict[tuple[str, str, str, str], tuple[tuple[NodeRecord, ...], frozenset[str]]] = {}
        self._offered: dict[Shape, bool] = {}
        self._listed: dict[Shape, bool] = {}
        self._ready: dict[tuple[str, tuple[tuple[str, int], ...], int, int], tuple[int, float]] = {}

    def changed(self, machine: NodeRecord) -> None:
        """Record that a node's offers, used counts or state has changed."""
        machine.version += 1
        startable = machine.open and not machine.completing
        for kind in {*machine.gres, *machine.used}:
            having = self._having.setdefault(kind, set())
            if startable and machine.free(kind) > 0:
                having.add(machine.name)
            else:
                having.discard(machine.name)

    def configured(self) -> None:
        """Record that the GRES that nodes list, or the states of nodes, have changed."""
        self._offered.clear()
        self._listed.clear()

    def regrouped(self) -> None:
        """Record that nodes were added, or that their partitions or features changed."""
        self._pools.clear()
        self.configured()

    def pool(self, shape: Shape) -> tuple[NodeRecord, ...]:
        """Return the nodes that a job may have by partition, features, -w and -x, in any state, in order."""
        return self._pool(shape)[0]

    def _pool(self, shape: Shape) -> tuple[tuple[NodeRecord, ...], frozenset[str]]:
        key = (shape.partition, shape.requested, shape.features, shape.excluded)
        pool = self._pools.get(key)
        if pool is None:
            partitions = set(shape.partition.split(","))
            requested = set(expand(shape.requested)) if shape.requested else None
            excluded, satisfies = set(expand(shape.excluded)), satisfier(shape.features)
            machines = tuple(
                machine
                for machine in self._machines.values()
                if partitions & set(machine.partitions)
                and machine.name not in excluded
                and (requested is None or machine.name in requested)
                and (satisfies is None or satisfies(machine.features))
            )
            pool = self._pools[key] = machines, frozenset(machine.name for machine in machines)
        return pool

    def listed(self, shape: Shape) -> bool:
        """Return whether enough nodes, DOWN ones included, list the job's request: otherwise Slurm refuses it."""
        cached = self._listed.get(shape)
        if cached is None:
            listing = [machine for machine in self.pool(shape) if _lists(machine, shape)]
            cached = self._listed[shape] = _are_enough(shape, listing)
        return cached

    def offered(self, shape: Shape) -> bool:
        """Return whether enough nodes that are up list the request: then the job waits for others (Resources)."""
        cached = self._offered.get(shape)
        if cached is None:
            listing = [machine for machine in self.pool(shape) if machine.open and _lists(machine, shape)]
            cached = self._offered[shape] = _are_enough(shape, listing)
        return cached

    def fit(
        self,
        shape: Shape,
        closed: Collection[str] = (),
        reservations: Reservations | None = None,
        limit_s: int | None = None,
    ) -> tuple[str, ...] | None:
        """Return the first nodes on which the job can start now; None if there are too few.

        Args:
            closed: nodes that are not considered.
            reservations: reservations that a job with the time limit `limit_s` must not overlap.
        """
        candidates: Sequence[NodeRecord]
        if shape.need:
            having = min((self._having.get(kind, set()) for kind, _ in shape.need), key=len)
            if len(having) < shape.nodes:
                return None
            names = having & self._pool(shape)[1]
            candidates = sorted((self._machines[name] for name in names), key=lambda machine: machine.index)
        else:
            candidates = self.pool(shape)
        chosen: list[str] = []
        for machine in candidates:
            if (
                machine.name not in closed
                and _fits(machine, shape)
                and (not reservations or reservations.allows(machine.name, limit_s))
            ):
                chosen.append(machine.name)
                if len(chosen) == shape.nodes:
                    return tuple(chosen)
        return None

    def fitting(self, shape: Shape) -> list[str]:
        """Return every node on which the job can start now."""
        if shape.need:
            having: Collection[str] = min((self._having.get(kind, set()) for kind, _ in shape.need), key=len)
            names = self._pool(shape)[1].intersection(having)
        else:
            names = self._pool(shape)[1]
        return [name for name in names if _fits(self._machines[name], shape)]

    def ready(self, machine: NodeRecord, shape: Shape) -> float:
        """Return when the limits of the node's jobs let such a job start if no other starts; infinite: unknown."""
        key = (machine.name, shape.need, shape.cpus, shape.memory)
        cached = self._ready.get(key)
        if cached is None or cached[0] != machine.version:
            cached = self._ready[key] = (machine.version, _ready(machine, shape))
        return cached[1]


class Reservations:
    """Whole nodes, each reserved from a time on for a pending job: conservative backfill, like Slurm's.

    A job may start now on a node only if its time limit ends it before the first reservation there.
    """

    def __init__(self, placing: Placing, now: float, window_s: float) -> None:
        self._placing, self._now, self._until = placing, now, now + window_s
        self._kept: dict[str, list[tuple[float, float]]] = {}
        self._first: dict[str, float] = {}
        self._times: dict[Shape, list[tuple[float, int, str]]] = {}

    def allows(self, name: str, limit_s: int | None) -> bool:
        """Return whether a job with this time limit that starts now ends before the first reservation of the node."""
        return self._now + (inf if limit_s is None else limit_s) <= self._first.get(name, inf)

    def longest_s(self, shape: Shape) -> float:
        """Return the longest time limit with which a job of this shape can start now.

        It is also an upper bound for all later jobs of the pass.
        """
        firsts = sorted((self._first.get(name, inf) for name in self._placing.fitting(shape)), reverse=True)
        return firsts[shape.nodes - 1] - self._now if len(firsts) >= shape.nodes else -inf

    def reserve(self, shape: Shape, limit_s: int | None) -> None:
        """Reserve nodes for one more job of this shape, as early as possible."""
        times = self._times.get(shape)
        if times is None:
            times = self._times[shape] = [
                (max(self._now, self._placing.ready(machine, shape)), machine.index, machine.name)
                for machine in self._placing.pool(shape)
                if machine.open and _lists(machine, shape)
            ]
            heapify(times)
        duration = inf if limit_s is None else limit_s
        chosen: list[tuple[float, int, str]] = []
        while times and len(chosen) < shape.nodes:
            at, index, name = heappop(times)
            if at >= self._until:
                continue
            blocked_until = next(
                (end for begin, end in self._kept.get(name, ()) if begin < at + duration and at < end), None
            )
            if blocked_until is not None:
                heappush(times, (blocked_until, index, name))
            else:
                chosen.append((at, index, name))
        if len(chosen) < shape.nodes:
            return
        begin = chosen[-1][0]
        for _, index, name in chosen:
            self._kept.setdefault(name, []).append((begin, begin + duration))
            self._first[name] = min(self._first.get(name, inf), begin)
            heappush(times, (begin + duration, index, name))


def _are_enough(shape: Shape, machines: Sequence[NodeRecord]) -> bool:
    return len(machines) >= shape.nodes


def _lists(machine: NodeRecord, shape: Shape) -> bool:
    return (
        machine.cpus >= shape.cpus
        and (not machine.memory or machine.memory >= shape.memory)
        and all(machine.gres.get(kind, 0) >= max(1, n) for kind, n in shape.need)
    )


def _fits(machine: NodeRecord, shape: Shape) -> bool:
    return (
        machine.open
        and not machine.completing
        and max(machine.lacks(shape)) <= 0
        and all(machine.free(kind) >= max(1, count) for kind, count in shape.need)
    )


def _ready(machine: NodeRecord, shape: Shape) -> float:
    lacking = {kind: lack for kind, count in shape.need if (lack := max(1, count) - machine.free(kind)) > 0}
    cpus, memory = machine.lacks(shape)
    if not lacking and cpus <= 0 and memory <= 0:
        return -inf
    for holding in sorted(machine.holdings.values(), key=lambda holding: holding.end):
        for kind in lacking:
            lacking[kind] -= holding.taken.get(kind, 0)
        cpus -= holding.cpus
        memory -= holding.memory
        if cpus <= 0 and memory <= 0 and all(lack <= 0 for lack in lacking.values()):
            return holding.end
    return inf

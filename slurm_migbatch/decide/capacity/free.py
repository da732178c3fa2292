"""Compute unassigned capacity for slices: what supply leaves for jobs without a place.

If supply is managed it is the empty space of GPUs outside leases, outside the slots planned for pending
jobs, and on GPUs without reservations; it can hold any profile. Otherwise (or if a node is not to be changed)
it is Slurm's counts of slices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Final, NamedTuple

from slurm_migbatch.decide.capacity.demand import profiles
from slurm_migbatch.decide.capacity.model import ClusterPlan, Demand, Mode, Node, NodePlan
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.layout import Layout, Slot, layout_of
from slurm_migbatch.mig.planning import capacity, choose
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm.client import NodeRow

_NOTHING: Final = Counter[Profile]()


@lru_cache(maxsize=1 << 15)
def _count_fitting(geometry: Geometry, used: Layout, profile: Profile) -> int:
    return capacity(geometry, used, profile) if profile in geometry else 0


@dataclass
class NodeCapacity:
    """One node: GPUs that may get new slices, with the used slots on each, and fixed slices."""

    gpus: list[tuple[Geometry, Layout]] = field(default_factory=list)
    fixed: Counter[Profile] = field(default_factory=Counter)

    def count(self, profile: Profile) -> int:
        """Return how many slices of this profile alone fit."""
        return self.fixed[profile] + sum([_count_fitting(geometry, used, profile) for geometry, used in self.gpus])

    def take(self, wanted: Sequence[Profile]) -> bool:
        """Take slices, all or none."""
        if any(not self.count(profile) for profile in wanted):
            return False
        before = list(self.gpus), Counter(self.fixed)
        if all(self._take(profile) for profile in wanted):
            return True
        self.gpus, self.fixed = before
        return False

    def _take(self, profile: Profile) -> bool:
        if self.fixed[profile] > 0:
            self.fixed[profile] -= 1
            return True
        for i, (geometry, used) in enumerate(self.gpus):
            slot = choose(geometry, used, profile) if _count_fitting(geometry, used, profile) else None
            if slot is not None:
                self.gpus[i] = (geometry, used.add(slot))
                return True
        return False


class FreeCapacity:
    """Free capacity by node, computed for each node when it is first needed.

    Args:
        kinds: which profiles each node can have at all, free or not.
        capacity_of: return the capacity of one of these nodes, for which it is called once; taking changes it.
    """

    def __init__(self, kinds: Mapping[str, frozenset[Profile]], capacity_of: Callable[[str], NodeCapacity]) -> None:
        self._kinds = kinds
        self._capacity_of = capacity_of
        self._capacities: dict[str, NodeCapacity] = {}
        #: position of each node that may have capacity
        self._position = {name: position for position, name in enumerate(kinds)}

    def kinds(self, pool: Collection[str]) -> frozenset[Profile]:
        """Return the profiles that some node of the pool can have."""
        return frozenset().union(*{self._kinds[name] for name in pool if name in self._kinds})

    def count(self, pool: Collection[str], profile: Profile, slice_count: int = 1, enough: int = 1 << 30) -> int:
        """Return how many jobs of `slice_count` slices of this profile fit, at most `enough`."""
        total = 0
        for name in self._in(pool):
            total += self._at(name).count(profile) // slice_count
            if total >= enough:
                return enough
        return total

    def take(self, pool: Collection[str], profile: Profile, slice_count: int = 1) -> str | None:
        """Take capacity for one job; return the node, or None if it fits nowhere."""
        return self.take_all(pool, [profile] * slice_count)

    def take_all(self, pool: Collection[str], wanted: Sequence[Profile]) -> str | None:
        """Take capacity for slices of several profiles on one node."""
        for name in self._in(pool):
            if self._at(name).take(wanted):
                return name
        return None

    def _in(self, pool: Collection[str]) -> list[str]:
        if len(pool) < len(self._position):
            return sorted([name for name in pool if name in self._position], key=self._position.__getitem__)
        return [name for name in self._position if name in pool]

    def _at(self, name: str) -> NodeCapacity:
        node_capacity = self._capacities.get(name)
        if node_capacity is None:
            node_capacity = self._capacities[name] = self._capacity_of(name)
            if not (node_capacity.gpus or node_capacity.fixed):
                del self._position[name]
        return node_capacity


class LeftOnNode(NamedTuple):
    """What a plan leaves on a node, and what that depends on: see `NodeCapacity`."""

    node: Node
    node_plan: NodePlan
    given: Mapping[Profile, int]
    reserved: frozenset[str]
    gpus: Sequence[tuple[Geometry, Layout]]
    fixed: Counter[Profile]


def of_plan(nodes: Mapping[str, Node], plan: ClusterPlan, known: dict[str, LeftOnNode] | None = None) -> FreeCapacity:
    """Return the capacity that a plan of supply leaves. `known`: results for nodes that have not changed; updated."""
    kinds = {
        name: node.kinds
        for name, node_plan in plan.nodes.items()
        if (node := nodes.get(name)) is not None and node_plan.open and node.mode not in (Mode.CLOSED, Mode.WITHDRAWN)
    }
    left = _LeftByPlan(nodes, plan, {} if known is None else known)
    return FreeCapacity(kinds, left.on)


class _LeftByPlan:
    """What a plan leaves on each node."""

    def __init__(self, nodes: Mapping[str, Node], plan: ClusterPlan, known: dict[str, LeftOnNode]) -> None:
        self._nodes, self._plan, self._known = nodes, plan, known

    @cached_property
    def _given(self) -> Mapping[str, Counter[Profile]]:
        return self._plan.given()

    @cached_property
    def _reserved(self) -> Mapping[str, Collection[str]]:
        reserved: dict[str, set[str]] = {}
        for reservation in self._plan.reservations:
            for node, gpu, _ in reservation.places:
                reserved.setdefault(node, set()).add(gpu)
        return reserved

    def on(self, name: str) -> NodeCapacity:
        """Return the capacity of a node of the plan."""
        node, node_plan = self._nodes[name], self._plan.nodes[name]
        given, reserved = self._given.get(name, _NOTHING), frozenset(self._reserved.get(name, ()))
        left = self._known.get(name)
        if (
            left is None
            or left.node is not node
            or left.node_plan is not node_plan
            or (left.given, left.reserved) != (given, reserved)
        ):
            found = self._found(node, node_plan, given, reserved)
            left = self._known[name] = LeftOnNode(node, node_plan, given, reserved, found.gpus, found.fixed)
        return NodeCapacity(list(left.gpus), left.fixed.copy())

    def _found(
        self, node: Node, node_plan: NodePlan, given: Counter[Profile], reserved: Collection[str]
    ) -> NodeCapacity:
        unplaced = given + node.unmatched
        node_capacity = NodeCapacity()
        frozen = node_plan.fixed or node.mode is not Mode.OPEN
        for gpu in node.gpus:
            used, planned = gpu.occupied, list[Slot]()
            for slot in node_plan.layouts.get(gpu.uuid, gpu.free).slots:
                if slot.placement.mask & used.mask:
                    continue
                if unplaced[slot.profile] > 0:
                    unplaced[slot.profile] -= 1
                    planned.append(slot)
                elif frozen:
                    node_capacity.fixed[slot.profile] += 1
            if planned:
                used = layout_of((*used.slots, *planned))
            if not frozen and gpu.uuid not in reserved and _any(gpu.geometry, used):
                node_capacity.gpus.append((gpu.geometry, used))
        return node_capacity


@lru_cache(maxsize=1 << 15)
def _any(geometry: Geometry, used: Layout) -> bool:
    return any(capacity(geometry, used, info.profile) for info in geometry.profiles)


def of_counts(rows: Iterable[NodeRow], demands: Iterable[Demand]) -> tuple[FreeCapacity, dict[int, int]]:
    """Return the capacity that Slurm's own counts leave if supply is not managed.

    Args:
        demands: pending work in Slurm's order.

    Returns:
        The capacity that remains when everything that fits has started, and the number of started copies of each job.
    """
    capacities: dict[str, NodeCapacity] = {}
    kinds: dict[str, frozenset[Profile]] = {}
    for row in rows:
        if row.open:
            offered = profiles(row.gres)
            kinds[row.name] = frozenset(offered)
            used = profiles(row.used)
            free = Counter({profile: n - used.get(profile, 0) for profile, n in offered.items()})
            capacities[row.name] = NodeCapacity(fixed=+free)
    free_capacity = FreeCapacity(kinds, capacities.__getitem__)
    placed: dict[int, int] = {}
    hopeless: set[tuple[frozenset[str], tuple[tuple[Profile, int], ...], int]] = set()
    for demand in demands:
        key = (demand.pool, demand.parts, demand.nodes)
        wanted = list(demand.slices)
        for _ in range(demand.copies if wanted else 0):
            if key in hopeless:
                break
            if _take_nodes(free_capacity, demand.pool, wanted, demand.nodes):
                placed[demand.job] = placed.get(demand.job, 0) + 1
            else:
                hopeless.add(key)
    return free_capacity, placed


def _take_nodes(free_capacity: FreeCapacity, pool: frozenset[str], wanted: list[Profile], nodes: int) -> bool:
    """Take the slices of one copy on each of so many nodes; return whether there were enough.

    If not, those taken stay taken: Slurm starts the job there when others have ended.
    """
    for _ in range(nodes):
        node = free_capacity.take_all(pool, wanted)
        if node is None:
            return False
        pool -= {node}
    return True

"""Track the GPUs of a lending round: what fits next to earlier decisions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from typing import TypeAlias

from slurm_migbatch.decide.capacity.spare import by_size, fits, loss, ordered, without
from slurm_migbatch.decide.lending.allocation import Hysteresis
from slurm_migbatch.decide.lending.values import ElasticJob, GpuCapacity, Reason, SlotReference, Target
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.layout import Layout
from slurm_migbatch.mig.planning import plan_free
from slurm_migbatch.mig.profile import Profile


class _PlannedGpu:
    """A GPU: its used slots, and the profiles to place next to them (reserve and loans of this round)."""

    __slots__ = ("capacity", "geometry", "group", "lendable", "planned", "reserve", "used", "version")

    def __init__(self, capacity: GpuCapacity, used: Layout, lendable: bool, group: int) -> None:
        self.capacity, self.geometry, self.used = capacity, capacity.geometry, used
        self.lendable, self.group = lendable, group
        self.planned: tuple[Profile, ...] = ()
        self.reserve: tuple[Profile, ...] = ()
        self.version = 0


class LendingCapacity:
    """The GPUs of the cluster during one round.

    A heap for each profile and group of GPUs gives the GPU with the lowest loss.
    """

    def __init__(
        self, capacities: Sequence[GpuCapacity], elastic_jobs: Sequence[ElasticJob], now: float, hysteresis: Hysteresis
    ) -> None:
        self.now, self.hysteresis = now, hysteresis
        self.free = {capacity.node: (capacity.cpus, capacity.memory) for capacity in capacities}
        self.with_resources = _with_resources(self.free, elastic_jobs)
        self.regions, groups = _groups(capacities, elastic_jobs, self.with_resources.values())
        self.reserve_in = {group for group, capacity in zip(groups, capacities, strict=True) if not capacity.own}
        layouts: dict[Layout, Layout] = {}  # equal layouts share one object: faster lookups
        self.gpus = []
        for capacity, group in zip(capacities, groups, strict=True):
            used = capacity.used
            lendable = hysteresis.may_lend(now, capacity.idle_since, capacity.reclaimed)
            lendable = lendable or (capacity.own and capacity.reclaimed != math.inf)
            self.gpus.append(_PlannedGpu(capacity, layouts.setdefault(used, used), lendable, group))
        self.place_of = {(capacity.node, capacity.gpu): index for index, capacity in enumerate(capacities)}
        self.on_node: dict[str, list[int]] = {}
        for index, capacity in enumerate(capacities):
            self.on_node.setdefault(capacity.node, []).append(index)
        self.geometries: dict[int, dict[Geometry, None]] = {}
        for gpu in self.gpus:
            self.geometries.setdefault(gpu.group, {})[gpu.geometry] = None
        training = [gpu for gpu in self.gpus if gpu.lendable or gpu.capacity.lent]
        slices = sum(gpu.geometry.compute_slices for gpu in training)
        taken = sum(gpu.geometry.info(slot.profile).compute_slices for gpu in training for slot in gpu.capacity.taken)
        self.share = max(1.0, (slices - taken) / max(1, len(elastic_jobs)))
        self._profiles: dict[frozenset[str] | None, set[Profile]] = {}
        self._useful: dict[tuple[int, frozenset[str] | None], tuple[Profile, ...]] = {}
        self.heaps: dict[tuple[int, bool, Profile], list[_Entry]] = {}
        self.by_group: dict[tuple[int, bool], list[int]] = {}
        for index, gpu in enumerate(self.gpus):
            self.by_group.setdefault((gpu.group, gpu.lendable), []).append(index)

    # -- queries ----------------------------------------------------------------------------------------------------

    def place_reserve(self, reserve: Mapping[Profile, int]) -> dict[Profile, int]:
        """Place the reserve into free space, first on GPUs without lending; return the part that does not fit."""
        not_placed: dict[Profile, int] = {}
        for profile in sorted(reserve, key=by_size, reverse=True):
            for count in range(reserve[profile], 0, -1):
                index = self.best(profile, self.reserve_in, False)
                if index is None:
                    index = self.best(profile, self.reserve_in, True)
                if index is None:
                    not_placed[profile] = count
                    break
                self.gpus[index].reserve += (profile,)
                self.put(index, profile)
        return not_placed

    def release_reserve(self) -> None:
        """Make the space free again that `place_reserve` has taken."""
        for index, gpu in enumerate(self.gpus):
            for profile in gpu.reserve:
                self.drop(index, profile)
            gpu.reserve = ()

    def useful(self, elastic_job: ElasticJob) -> tuple[Profile, ...]:
        """Return the profiles that a job can use and that its GPUs have, from small to large."""
        key = id(elastic_job.speeds), elastic_job.nodes
        if key not in self._useful:
            available = self._profiles.get(elastic_job.nodes)
            if available is None:
                groups = self.regions[elastic_job.nodes]
                geometries = {geometry for group in groups for geometry in self.geometries[group]}
                available = {info.profile for geometry in geometries for info in geometry.profiles}
                self._profiles[elastic_job.nodes] = available
            profiles = [profile for profile, speed in elastic_job.speeds.items() if speed > 0 and profile in available]
            self._useful[key] = tuple(sorted(profiles, key=by_size))
        return self._useful[key]

    def smallest(self, elastic_job: ElasticJob, useful: Sequence[Profile]) -> tuple[int, Profile] | None:
        """Return the smallest profile that fits, and the GPU."""
        for profile in useful:
            index = self.best_for(elastic_job, profile)
            if index is not None:
                return index, profile
        return None

    def vacated(self, target: Target) -> bool:
        """Return whether nothing may be lent on the GPU of a target now, mostly because jobs are still leaving it."""
        index = self.place_of.get((target.node, target.gpu))
        return index is not None and self.gpus[index].capacity.reclaimed == math.inf

    def gpu_of(self, elastic_job: ElasticJob, target: Target) -> int | None:
        """Return the GPU of a target if the slice fits there."""
        index = self.place_of.get((target.node, target.gpu))
        if index is None or self.gpus[index].group not in self.regions[elastic_job.nodes]:
            return None
        return index if self.gpus[index].lendable and self._entry(index, target.profile) is not None else None

    def reason(self, elastic_job: ElasticJob, useful: Sequence[Profile]) -> Reason:
        """Return why a job does not fit."""
        if not useful:
            return "profile"
        groups = self.regions[self.with_resources[_key(elastic_job)]]
        for gpu in self.gpus:
            if gpu.reserve and gpu.group in groups and gpu.lendable:
                lent = gpu.planned
                for profile in gpu.reserve:
                    lent = without(lent, profile)
                if any(fits(gpu.geometry, gpu.used, ordered((*lent, profile))) for profile in useful):
                    return "reserve"
        if any(self.best(profile, groups, False) is not None for profile in useful):
            return "idle"
        if any(self.best(profile, self.regions[elastic_job.nodes], True) is not None for profile in useful):
            return "resources"
        return "capacity"

    def best(
        self, profile: Profile, groups: Iterable[int], lendable: bool, elastic_job: ElasticJob | None = None
    ) -> int | None:
        """Return the GPU that loses the least if a slice of this profile is added; None if it fits nowhere.

        GPUs of training-only nodes come first.

        Args:
            elastic_job: a job for which its node must have CPUs and memory.
        """
        best: _Entry | None = None
        for group in groups:
            top = self._top(group, lendable, profile, elastic_job)
            if top is not None and (best is None or top < best):
                best = top
        return None if best is None else best[3]

    def best_for(self, elastic_job: ElasticJob, profile: Profile) -> int | None:
        """Return the GPU that loses the least if it lends a slice of this profile to a job; None if none can."""
        return self.best(profile, self.regions[self.with_resources[_key(elastic_job)]], True, elastic_job)

    def has_resources(self, elastic_job: ElasticJob, node: str) -> bool:
        """Return whether a node has CPUs and memory for a job beside those of this round, as far as they are known."""
        cpus, memory = self.free[node]
        return _has_resources_of(elastic_job, node) or (elastic_job.cpus <= cpus and elastic_job.memory <= memory)

    def take(self, elastic_job: ElasticJob, index: int, sign: int = 1) -> None:
        """Take a job's CPUs and memory from the node of a GPU; with sign -1 give them back."""
        node = self.gpus[index].capacity.node
        if not _has_resources_of(elastic_job, node):
            cpus, memory = self.free[node]
            self.free[node] = cpus - sign * elastic_job.cpus, memory - sign * elastic_job.memory

    def put(self, index: int, profile: Profile) -> None:
        """Add one slice to a GPU."""
        self.replan(index, ordered((*self.gpus[index].planned, profile)))

    def drop(self, index: int, profile: Profile) -> None:
        """Remove one slice from a GPU."""
        self.replan(index, without(self.gpus[index].planned, profile))

    def without_reserve(self, capacity: GpuCapacity) -> GpuCapacity:
        """Return a GPU on which the slots of its reserve are taken."""
        gpu = self.gpus[self.place_of[capacity.node, capacity.gpu]]
        if not gpu.reserve:
            return capacity
        reserved = list(plan_free(gpu.geometry, gpu.used, gpu.planned).slots)
        return replace(capacity, taken=(*capacity.taken, *(slot for slot in reserved if slot.profile in gpu.reserve)))

    def fair(self, elastic_job: ElasticJob, useful: Sequence[Profile]) -> float:
        """Return a job's speed on its fair share: the largest of its profiles within an equal share."""
        fair_profile = useful[0]
        for profile in useful:
            if profile.compute <= self.share:
                fair_profile = profile
        return elastic_job.speeds[fair_profile]

    def best_on_node(self, elastic_job: ElasticJob, place: SlotReference, profile: Profile) -> int | None:
        """Return the best GPU of a job's own node, whose CPUs and memory the job has already; None if there is none."""
        if elastic_job.nodes is not None and place.node not in elastic_job.nodes:
            return None
        on_node = self.on_node.get(place.node, ())
        entries = (self._entry(index, profile) for index in on_node if self.gpus[index].lendable)
        best = min((entry for entry in entries if entry is not None), default=None)
        return None if best is None else best[3]

    def replan(self, index: int, planned: tuple[Profile, ...]) -> None:
        """Place these profiles on a GPU next to its used slots, in place of those planned so far."""
        gpu = self.gpus[index]
        gpu.planned = planned
        gpu.version += 1
        for (group, lendable, profile), heap in self.heaps.items():
            if group == gpu.group and lendable == gpu.lendable:
                entry = self._entry(index, profile)
                if entry is not None:
                    heappush(heap, entry)

    def _top(self, group: int, lendable: bool, profile: Profile, elastic_job: ElasticJob | None) -> _Entry | None:
        key = group, lendable, profile
        heap = self.heaps.get(key)
        if heap is None:
            entries = (self._entry(index, profile) for index in self.by_group.get((group, lendable), ()))
            heap = self.heaps[key] = [entry for entry in entries if entry is not None]
            heapify(heap)
        lacking: list[_Entry] = []  # few: a job's groups are of nodes that had enough when the round began
        while heap:
            gpu = self.gpus[heap[0][3]]
            if gpu.version != heap[0][4]:
                heappop(heap)
            elif elastic_job is not None and not self.has_resources(elastic_job, gpu.capacity.node):
                lacking.append(heappop(heap))
            else:
                break
        top = heap[0] if heap else None
        for entry in lacking:
            heappush(heap, entry)
        return top

    def _entry(self, index: int, profile: Profile) -> _Entry | None:
        gpu = self.gpus[index]
        if profile not in gpu.geometry:
            return None
        losses = loss(gpu.geometry, gpu.used, gpu.planned, profile)
        return None if losses is None else (not gpu.capacity.own, *losses, index, gpu.version)


_Entry: TypeAlias = tuple[bool, int, int, int, int]
"""Whether it is a loan, the GPU's loss, its free space, its index, and the version for which this is valid."""
_Request: TypeAlias = tuple[frozenset[str] | None, int, int]
"""The nodes that a job may use (None: any), and the CPUs and MiB that it requests on one."""


def _has_resources_of(elastic_job: ElasticJob, node: str) -> bool:
    """Return whether a job has CPUs and memory of a node already: it runs there, or they are kept for it."""
    return node in [at.node for at in (elastic_job.place, elastic_job.target) if at is not None]


def _key(elastic_job: ElasticJob) -> _Request:
    return elastic_job.nodes, elastic_job.cpus, elastic_job.memory


def _with_resources(
    free: Mapping[str, tuple[float, float]], elastic_jobs: Sequence[ElasticJob]
) -> dict[_Request, frozenset[str] | None]:
    """Return for each request the nodes that have the CPUs and the memory for it; None: all.

    Args:
        free: CPUs and MiB of each node.
    """
    least_cpus = min((cpus for cpus, _ in free.values()), default=math.inf)
    least_memory = min((memory for _, memory in free.values()), default=math.inf)
    found: dict[_Request, frozenset[str] | None] = {}
    for nodes, needed_cpus, needed_memory in dict.fromkeys(map(_key, elastic_jobs)):
        enough = nodes
        if needed_cpus > least_cpus or needed_memory > least_memory:
            enough = frozenset(
                node
                for node in (free if nodes is None else nodes & free.keys())
                if needed_cpus <= free[node][0] and needed_memory <= free[node][1]
            )
        found[nodes, needed_cpus, needed_memory] = enough
    return found


def _groups(
    capacities: Sequence[GpuCapacity],
    elastic_jobs: Sequence[ElasticJob],
    with_resources: Iterable[frozenset[str] | None],
) -> tuple[dict[frozenset[str] | None, set[int]], list[int]]:
    """Group GPUs that the same jobs may use; return the groups of each set of nodes, and the group of each GPU."""
    named = (*(elastic_job.nodes for elastic_job in elastic_jobs), *with_resources)
    regions = list(dict.fromkeys(nodes for nodes in named if nodes is not None))
    regions_of = {
        node: tuple(number for number, region in enumerate(regions) if node in region)
        for node in dict.fromkeys(capacity.node for capacity in capacities)
    }
    numbers: dict[tuple[bool, tuple[int, ...]], int] = {}
    groups = [numbers.setdefault((capacity.own, regions_of[capacity.node]), len(numbers)) for capacity in capacities]
    members: dict[frozenset[str] | None, set[int]] = {None: set(groups)}
    for number, region in enumerate(regions):
        members[region] = {group for (_, region_numbers), group in numbers.items() if number in region_numbers}
    return members, groups

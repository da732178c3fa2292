"""Track the GPUs while a plan is being made, and find the cheapest place for a claim.

GPUs in the same condition are one bucket of their class (nodes that belong to the same pools), and each class keeps one
heap per profile of the costs of adding it, so a claim is found in logarithmic time for any number of GPUs. The
state of a node at the beginning of a plan is kept from round to round (`Admission`); the object of a single GPU
(`GpuClaims`) is created when the plan examines it.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, count

from slurm_migbatch.decide.capacity.model import Gpu, Node
from slurm_migbatch.decide.supply.admission import Admission, Busy
from slurm_migbatch.decide.supply.gpu_state import Cost, GpuState, GpuStates
from slurm_migbatch.decide.supply.node_classes import NodeClasses
from slurm_migbatch.mig.layout import Layout, Slot
from slurm_migbatch.mig.profile import Profile

#: A claim on a GPU: index of the demand, its copy, the profile. Lower means more important.
Claim = tuple[int, int, Profile]

_MAX_STEPS = 200
_MOST_BUNDLES = 64
"""Number of bundles of slices for which failures are cached."""


@dataclass(slots=True, eq=False)
class GpuClaims:
    """One GPU: its contents and its claims.

    Attributes:
        until: slots in use or claimed before a reservation, and when they should be free (None: unknown).
        settled: claims whose slots can no longer change, because a reservation depends on them.
        hidden: profiles of which only claimed slots are offered.
        held_back: profiles of slots in use that no other job should get before the one with a reservation there.
    """

    index: int
    node: str
    gpu: Gpu
    shape: GpuState
    until: Busy
    claims: Sequence[Claim] = ()
    settled: Sequence[Claim] = ()
    reserved: Sequence[Slot] = ()
    hidden: frozenset[Profile] = frozenset()
    held_back: Sequence[Profile] = ()


class FleetMemory:
    """Caches that fleets share from round to round; they change no result.

    Attributes:
        classes: classes of nodes by pools.
    """

    def __init__(self) -> None:
        self.book = GpuStates()
        self.classes = NodeClasses((), ())
        self._admissions: dict[str, Admission] = {}
        #: by slices, the nodes that may have room for them as they are: all except those where a search failed
        self._candidate_nodes: dict[tuple[Profile, ...], set[str]] = {}

    def trim(self) -> None:
        """Drop conditions once there are many; to be called between plans."""
        if len(self._candidate_nodes) > _MOST_BUNDLES:
            self._candidate_nodes.clear()
        if self.book.trim():
            self._admissions.clear()

    def admit(self, nodes: Sequence[Node], clearing: Mapping[str, Collection[str]]) -> list[Admission]:
        """Return all nodes prepared for planning; see `Fleet` for `clearing`."""
        before, admissions = self._admissions, dict[str, Admission]()
        for node in nodes:
            admission = before.get(node.name)
            admissions[node.name] = (
                admission if admission is not None and admission.node is node else Admission(node, self.book, admission)
            )
        fresh = [name for name, admission in admissions.items() if before.get(name) is not admission]
        for names in self._candidate_nodes.values():
            names.update(fresh)
        self._admissions = admissions
        return [
            admission.clearing(clearing[name], self.book) if name in clearing else admission
            for name, admission in admissions.items()
        ]

    def candidate_nodes(self, slices: tuple[Profile, ...]) -> set[str]:
        """Return the nodes that may have room for these slices as they are; the caller removes those without."""
        names = self._candidate_nodes.get(slices)
        if names is None:
            names = self._candidate_nodes[slices] = set(self._admissions)
        return names


class _ClassGpus:
    """The GPUs of a class of nodes whose slots may be changed, by state, and its free fixed slots.

    Attributes:
        open_nodes: the nodes, with the index of their first GPU.
        fixed: by profile, nodes that may have such a fixed slot.
    """

    def __init__(self, examined: Mapping[int, GpuClaims], ticks: Iterator[int]) -> None:
        """Start empty. `examined`: GPUs with an object of their own, `ticks`: the order in which states are found."""
        self.open_nodes: list[tuple[Admission, int]] = []
        self.fixed: dict[Profile, list[str]] = defaultdict(list)
        self.gpu_count = 0
        self._examined, self._ticks = examined, ticks
        self._heaps: dict[Profile, list[tuple[Cost, int, GpuState]]] = {}
        self._heaped: dict[Profile, set[GpuState]] = {}

    def add_node(self, admission: Admission, first: int) -> None:
        """Add a node, whose GPUs have the next indexes."""
        self.gpu_count += len(admission.shapes)
        self.open_nodes.append((admission, first))

    @cached_property
    def _buckets(self) -> dict[GpuState, list[int]]:
        """The GPUs by state, in order; many plans claim nothing and need none."""
        buckets: dict[GpuState, list[int]] = defaultdict(list)
        for admission, first in self.open_nodes:
            for index, shape in enumerate(admission.shapes, first):
                buckets[shape].append(index)
        return buckets

    def put(self, index: int, shape: GpuState) -> None:
        """Put a GPU into the bucket of its new state; that of its former one drops it when it comes first there."""
        bucket = self._buckets[shape]
        if not bucket:  # otherwise the shape is in every heap: it leaves one only when its bucket is found empty
            for profile in self._heaps:
                self._enter(profile, shape)
        heapq.heappush(bucket, index)

    def cheapest(self, profile: Profile) -> tuple[Cost, int, GpuState] | None:
        """Return the state in which one more slice costs least, with the cost; None if none has room for it."""
        heap = self._heaps.get(profile)
        if heap is None:
            heap = self._heaps[profile] = []
            self._heaped[profile] = set()
            for shape in list(self._buckets):
                self._enter(profile, shape)
        while heap:
            shape = heap[0][2]
            bucket = self._buckets.get(shape, [])
            while bucket and (claims := self._examined.get(bucket[0])) is not None and claims.shape is not shape:
                heapq.heappop(bucket)
            if bucket:
                return heap[0]
            heapq.heappop(heap)
            self._heaped[profile].discard(shape)
        return None

    def first(self, shape: GpuState) -> int:
        """Return the first GPU in a state that `cheapest` has returned."""
        return self._buckets[shape][0]

    def _enter(self, profile: Profile, shape: GpuState) -> None:
        heaped = self._heaped[profile]
        if shape in heaped:
            return
        step = shape.add(profile)
        if step is None:
            return
        heaped.add(shape)
        heapq.heappush(self._heaps[profile], (step[0], next(self._ticks), shape))


class Fleet:
    """All nodes that are planned or that may serve with their offers.

    Args:
        pools: the node sets that demands name.
        clearing: by node, uuids of GPUs that were being cleared for another job; new slots are placed there last.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        pools: Iterable[frozenset[str]],
        memory: FleetMemory,
        clearing: Mapping[str, Collection[str]],
    ) -> None:
        self.book, self._memory = memory.book, memory
        self.nodes = {node.name: node for node in nodes}
        memory.classes = classes = NodeClasses(list(self.nodes), dict.fromkeys(pools).keys(), memory.classes)
        admitted = memory.admit(nodes, clearing)
        self.admissions = dict(zip(self.nodes, admitted, strict=True))
        self.unexplained: dict[str, Counter[Profile]] = {}
        #: claims on fixed slots
        self.on_fixed: list[tuple[str, Claim]] = []
        #: index of the first GPU of each node
        self.first_index: dict[str, int] = {}
        #: how to undo the steps since the last commit
        self._trail: list[Callable[[], None]] = []
        #: GPUs that were examined individually, by index and by node, and of them those with claims
        self._gpus: dict[int, GpuClaims] = {}
        self._by_node: dict[str, list[GpuClaims]] = {}
        self._claimed: set[int] = set()
        #: results of `as_admitted`, as long as the node's GPUs do not change
        self._as_admitted: dict[str, bool] = {}
        #: pinned slots that may still be claimed, of nodes that have any
        self._fixed: dict[str, Counter[Profile]] = {}
        #: the nodes in order, and the index of the first GPU of each
        self._names = list(self.nodes)
        self._firsts: list[int] = []
        ticks = count(1)
        numbered = [_ClassGpus(self._gpus, ticks) for _ in range(classes.count)]
        self._class_of = dict(zip(self.nodes, map(numbered.__getitem__, classes.of_node), strict=True))
        self._classes_of = {pool: [numbered[number] for number in of] for pool, of in classes.of_pool.items()}
        index = 0
        for admission in admitted:
            self._add(admission, index)
            index += len(admission.shapes)

    def _add(self, admission: Admission, first: int) -> None:
        name = admission.node.name
        self._firsts.append(first)
        self.first_index[name] = first
        if admission.short:
            self.unexplained[name] = admission.short
        if admission.fixed:
            self._fixed[name] = Counter(admission.fixed)
            for profile in admission.fixed:
                self._class_of[name].fixed[profile].append(name)
        if admission.open:
            self._class_of[name].add_node(admission, first)

    def plannable(self, node: str) -> bool:
        """Return whether slots of the node may be changed."""
        return self.admissions[node].open

    def plannable_gpus(self, pool: frozenset[str]) -> int:
        """Return the number of GPUs of the pool whose slots may be changed."""
        return sum(gpus.gpu_count for gpus in self._classes_of[pool])

    def open_nodes(self, pool: frozenset[str]) -> Iterable[tuple[Admission, int]]:
        """Return the nodes of the pool whose slots may be changed, each with the index of its first GPU."""
        return chain.from_iterable(gpus.open_nodes for gpus in self._classes_of[pool])

    def on(self, node: str) -> list[GpuClaims]:
        """Return the GPUs of a node."""
        all_claims = self._by_node.get(node)
        if all_claims is None:
            admission, first = self.admissions[node], self.first_index[node]
            all_claims = self._by_node[node] = [
                GpuClaims(i, node, gpu, shape, until)
                for i, (gpu, shape, until) in enumerate(
                    zip(admission.node.gpus, admission.shapes, admission.until, strict=True), first
                )
            ]
            self._gpus.update((gpu_claims.index, gpu_claims) for gpu_claims in all_claims)
        return all_claims

    def gpu(self, index: int) -> GpuClaims:
        """Return the GPU with this index."""
        if index not in self._gpus:
            self.on(self._names[bisect_right(self._firsts, index) - 1])
        return self._gpus[index]

    def claimed(self) -> Iterator[GpuClaims]:
        """Return the GPUs on which anything is claimed now, in order."""
        return map(self._gpus.__getitem__, sorted(self._claimed))

    def touched(self) -> set[str]:
        """Return the nodes whose GPUs have changed since the beginning of the plan."""
        return {name for name in self._by_node if not self.as_admitted(name)}

    def as_admitted(self, node: str) -> bool:
        """Return whether the node's GPUs are unchanged since the beginning of the plan."""
        all_claims = self._by_node.get(node)
        if all_claims is None:
            return True
        known = self._as_admitted.get(node)
        if known is None:
            known = self._as_admitted[node] = all(map(_is_untouched, all_claims, self.admissions[node].shapes))
        return known

    # -- single slices -----------------------------------------------------------------------------------------

    def find(self, pool: frozenset[str], profile: Profile) -> str | GpuClaims | None:
        """Return the cheapest place for one more slice: a node with a fixed slot for it, or a GPU; None: nowhere."""
        best: tuple[Cost, int, GpuState] | None = None
        best_class: _ClassGpus | None = None
        for gpus in self._classes_of[pool]:
            names = gpus.fixed.get(profile)
            while names:
                if self._fixed[names[-1]][profile] > 0:
                    return names[-1]
                names.pop()
            cheapest = gpus.cheapest(profile)
            if cheapest is not None and (best is None or cheapest[:2] < best[:2]):
                best, best_class = cheapest, gpus
        return None if best is None or best_class is None else self.gpu(best_class.first(best[2]))

    def claim(self, at: str | GpuClaims, claim: Claim) -> None:
        """Put the claim at the place that `find` returned."""
        profile = claim[2]
        if isinstance(at, str):
            self._fixed[at][profile] -= 1
            self.on_fixed.append((at, claim))
            self._trail.append(self._give_back)
            return
        step = at.shape.add(profile)
        assert step is not None
        self.change(at, step[1], (*at.claims, claim))

    def hide(self, node: str, profiles: Iterable[Profile]) -> None:
        """Offer only claimed slots of these profiles on the node. Not undone by `roll_back`."""
        if not self.plannable(node):
            return
        for gpu_claims in self.on(node):
            gpu_claims.hidden = gpu_claims.hidden.union(profiles)
            self._as_admitted.pop(node, None)
            shape = gpu_claims.shape
            spare = {slot for slot in shape.rest.slots if slot.profile in gpu_claims.hidden}
            if spare:
                keep = Layout(slot for slot in shape.keep.slots if slot not in spare)
                reduced = self.book.start(shape.condition._replace(keep=keep))
                self.change(gpu_claims, reduced, gpu_claims.claims)

    def change(self, gpu_claims: GpuClaims, shape: GpuState, claims: Sequence[Claim]) -> None:
        """Change a GPU's condition and its claims, and update the index."""
        old_shape, old_claims = gpu_claims.shape, gpu_claims.claims
        self._trail.append(lambda: self._set(gpu_claims, old_shape, old_claims))
        self._set(gpu_claims, shape, claims)

    def commit(self) -> None:
        """Discard the undo information."""
        self._trail.clear()

    def mark(self) -> int:
        """Return a point to `roll_back` to."""
        return len(self._trail)

    def roll_back(self, mark: int) -> None:
        """Undo everything since `mark`."""
        while len(self._trail) > mark:
            self._trail.pop()()

    def _give_back(self) -> None:
        node, claim = self.on_fixed.pop()
        self._fixed[node][claim[2]] += 1
        self._class_of[node].fixed[claim[2]].append(node)

    def _set(self, gpu_claims: GpuClaims, shape: GpuState, claims: Sequence[Claim]) -> None:
        gpu_claims.shape, gpu_claims.claims = shape, claims
        self._as_admitted.pop(gpu_claims.node, None)
        (self._claimed.add if claims or gpu_claims.settled else self._claimed.discard)(gpu_claims.index)
        self._class_of[gpu_claims.node].put(gpu_claims.index, shape)

    # -- several slices on one node ----------------------------------------------------------------------------

    def candidate_nodes(self, pool: frozenset[str], slices: tuple[Profile, ...]) -> set[str]:
        """Return the nodes of the pool that may have room for these slices; claims never add nodes to them."""
        return {name for name in self._memory.candidate_nodes(slices) & pool if name in self.nodes}

    def spare(self, node: str) -> Mapping[Profile, int]:
        """Return by profile the unclaimed offers of the node."""
        if self._is_fresh(node):
            return self.admissions[node].spare
        counts = Counter(self._fixed.get(node, ()))
        for gpu_claims in self.on(node):
            for slot in gpu_claims.shape.rest.slots:
                counts[slot.profile] += 1
        return counts

    def _is_fresh(self, node: str) -> bool:
        return node not in self._fixed and self.as_admitted(node)

    def place_on(self, node: str, slices: tuple[Profile, ...]) -> list[tuple[Profile, str | GpuClaims]] | None:
        """Return places for all of `slices` (largest first) on one node; None if they do not all fit."""
        search = _PlaceSearch(self._shapes(node), dict(self._fixed.get(node, ())), slices)
        if search.run():
            first = self.first_index[node]
            return [(profile, node if i is None else self.gpu(first + i)) for profile, i in search.chosen]
        if not search.cut_short and self._is_fresh(node):
            self._memory.candidate_nodes(slices).discard(node)
        return None

    def _shapes(self, node: str) -> list[GpuState]:
        """Return the states of the GPUs whose slots may be changed."""
        admission, examined = self.admissions[node], self._by_node.get(node)
        if not admission.open:
            return []
        return list(admission.shapes) if examined is None else [gpu_claims.shape for gpu_claims in examined]


class _PlaceSearch:
    """Find places for slices on one node, the largest first.

    Attributes:
        chosen: for each slice the number of the GPU; None for a pinned slot.
    """

    def __init__(self, shapes: list[GpuState], fixed: dict[Profile, int], slices: Sequence[Profile]) -> None:
        self._shapes, self._fixed, self._slices = shapes, fixed, slices
        self.chosen: list[tuple[Profile, int | None]] = []
        self._steps = 0

    @property
    def cut_short(self) -> bool:
        """Whether the search ended at its limit of steps."""
        return self._steps > _MAX_STEPS

    def run(self) -> bool:
        """Return whether all slices fit; `chosen` then has their places."""
        if len(self.chosen) == len(self._slices):
            return True
        self._steps += 1
        profile = self._slices[len(self.chosen)]
        if self._fixed.get(profile, 0) > 0:
            self._fixed[profile] -= 1
            self.chosen.append((profile, None))
            if self.run():
                return True
            self.chosen.pop()
            self._fixed[profile] += 1
            return False
        for i in _cheapest_first(self._shapes, profile):
            if self.cut_short:
                return False
            before = self._shapes[i]
            step = before.add(profile)
            assert step is not None
            self._shapes[i] = step[1]
            self.chosen.append((profile, i))
            if self.run():
                return True
            self.chosen.pop()
            self._shapes[i] = before
        return False


def _cheapest_first(shapes: Sequence[GpuState], profile: Profile) -> list[int]:
    """Return positions of GPU states with space for one more slice, cheapest first; of equal states the first."""
    options: dict[GpuState, tuple[Cost, int]] = {}
    for i, shape in enumerate(shapes):
        if shape not in options:
            step = shape.add(profile)
            if step is not None:
                options[shape] = (step[0], i)
    return [i for _, i in sorted(options.values())]


def _is_untouched(gpu_claims: GpuClaims, shape: GpuState) -> bool:
    return gpu_claims.shape is shape and not (
        gpu_claims.claims or gpu_claims.settled or gpu_claims.reserved or gpu_claims.hidden
    )

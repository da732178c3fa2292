"""The GPUs while a plan is being made, and where on them a claim costs least.

GPUs in the same condition are one bucket of their class (nodes that belong to the same pools), and each class keeps one
heap per profile of the costs of adding it, so a claim is found in logarithmic time whatever the number of GPUs.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Sequence

from slurm_migbatch.decide.capacity.model import Gpu, Mode, Node
from slurm_migbatch.decide.supply.gpu_state import Cost, GpuState, GpuStates
from slurm_migbatch.mig.layout import EMPTY, Layout, Slot
from slurm_migbatch.mig.profile import Profile

#: A claim on a GPU: index of the demand, its copy, the profile. Lower means more important.
Claim = tuple[int, int, Profile]

_MAX_STEPS = 200


class GpuClaims:
    """One GPU: what it holds and what was claimed on it."""

    __slots__ = (
        "claims",
        "gpu",
        "hidden",
        "index",
        "node",
        "reserved",
        "settled",
        "shape",
        "until",
    )

    def __init__(self, index: int, node: str, gpu: Gpu, shape: GpuState) -> None:
        self.index, self.node, self.gpu, self.shape = index, node, gpu, shape
        self.claims: Sequence[Claim] = ()
        #: claims whose slots can no longer change, because a reservation relies on them
        self.settled: Sequence[Claim] = ()
        self.reserved: Sequence[Slot] = ()
        #: profiles of which nothing is offered that nobody claims
        self.hidden: frozenset[Profile] = frozenset()
        #: slots in use or claimed before a reservation, and when they should be free (None: nobody knows)
        self.until: Sequence[tuple[Slot, float | None]] = gpu.busy


class Fleet:
    """All nodes that are to be planned or may serve with what they offer.

    Slots that cannot be moved, because a job that just started or ended may be on any of them, are `fixed`: they count
    as used where space is concerned, and `fixed[node]` of them can still be claimed as they are.

    Args:
        nodes: all nodes.
        pools: the node sets that demands name.
        book: remembers conditions between rounds.
        last_choice: uuids of GPUs that were being cleared for someone; new slots go there last.
    """

    def __init__(
        self, nodes: Sequence[Node], pools: Iterable[frozenset[str]], book: GpuStates, last_choice: Container[str] = ()
    ) -> None:
        self.book = book
        self._last_choice = last_choice
        self.nodes = {node.name: node for node in nodes}
        self.all_claims: list[GpuClaims] = []
        self.by_node: dict[str, list[GpuClaims]] = {}
        self.fixed: dict[str, Counter[Profile]] = {}
        self.unexplained: dict[str, Counter[Profile]] = {}
        self._pools = tuple(dict.fromkeys(pools))
        self._class: dict[str, int] = {}
        self._classes_of: dict[frozenset[str], list[int]] = {pool: [] for pool in self._pools}
        signatures: dict[frozenset[int], int] = {}
        members: dict[str, list[int]] = {node.name: [] for node in nodes}
        for number, pool in enumerate(self._pools):
            for name in pool:
                if name in members:
                    members[name].append(number)
        for node in nodes:
            signature = frozenset(members[node.name])
            if signature not in signatures:
                signatures[signature] = len(signatures)
                for number in signature:
                    self._classes_of[self._pools[number]].append(signatures[signature])
            self._class[node.name] = signatures[signature]
        self._buckets: list[dict[GpuState, list[int]]] = [defaultdict(list) for _ in signatures]
        self._heaps: list[dict[Profile, list[tuple[Cost, int, GpuState]]]] = [{} for _ in signatures]
        self._heaped: list[dict[Profile, set[GpuState]]] = [{} for _ in signatures]
        self._fixed_at: list[dict[Profile, list[str]]] = [defaultdict(list) for _ in signatures]
        self._tick = 0
        #: claims on fixed slots, and how to undo what was done since the last commit
        self.on_fixed: list[tuple[str, Claim]] = []
        self._trail: list[Callable[[], None]] = []
        for node in nodes:
            self._admit(node)

    def _admit(self, node: Node) -> None:
        held = node.unmatched()
        fixed: Counter[Profile] = Counter()
        self.by_node[node.name] = all_claims = []
        short: Counter[Profile] = Counter()
        if held:
            have = Counter(slot.profile for gpu in node.gpus for slot in gpu.free.slots)
            short = held - have
            # A lease that lies across planned slots may be over without our having heard so, and one of these in use.
            for gpu in node.gpus:
                if gpu.offered is not gpu.free:
                    hidden = gpu.offered.minus(gpu.free)
                    short |= Counter({slot.profile: held[slot.profile] for slot in hidden.slots})
            short = +short
        if short:
            self.unexplained[node.name] = short
        still = node.mode is Mode.FROZEN or bool(short)
        for gpu in node.gpus:
            present = EMPTY if node.mode in (Mode.WITHDRAWN, Mode.CLOSED) else gpu.free
            pinned = present if still else _only(present, held)
            if pinned:
                fixed.update(slot.profile for slot in pinned.slots)
            shape = self.book.start(
                gpu.geometry,
                gpu.occupied.union(pinned) if pinned else gpu.occupied,
                present.minus(pinned) if pinned else present,
                gpu.warm,
                last_choice=gpu.uuid in self._last_choice,
            )
            gpu_claims = GpuClaims(len(self.all_claims), node.name, gpu, shape)
            if pinned:
                gpu_claims.until = (*gpu_claims.until, *((slot, None) for slot in pinned.slots))
            self.all_claims.append(gpu_claims)
            all_claims.append(gpu_claims)
            if node.mode is Mode.OPEN and not still:
                self._buckets[self._class[node.name]][shape].append(gpu_claims.index)
        fixed.subtract(held)
        self.fixed[node.name] = +fixed
        for profile in self.fixed[node.name]:
            self._fixed_at[self._class[node.name]][profile].append(node.name)

    def plannable(self, node: str) -> bool:
        """Return whether slots of the node may be changed."""
        return self.nodes[node].mode is Mode.OPEN and node not in self.unexplained

    # -- single slices -----------------------------------------------------------------------------------------

    def find(self, pool: frozenset[str], profile: Profile) -> str | GpuClaims | None:
        """Return where one more slice costs least: a node with a fixed slot for it, or a GPU; None: nowhere."""
        best: tuple[Cost, int, GpuState] | None = None
        where = -1
        for kind in self._classes_of[pool]:
            names = self._fixed_at[kind].get(profile)
            while names:
                if self.fixed[names[-1]][profile] > 0:
                    return names[-1]
                names.pop()
            top = self._top(kind, profile)
            if top is not None and (best is None or top[:2] < best[:2]):
                best, where = top, kind
        if best is None:
            return None
        bucket = self._buckets[where][best[2]]
        return self.all_claims[bucket[0]]

    def claim(self, at: str | GpuClaims, claim: Claim) -> None:
        """Put the claim where `find` said."""
        profile = claim[2]
        if isinstance(at, str):
            self.fixed[at][profile] -= 1
            self.on_fixed.append((at, claim))
            self._trail.append(self._give_back)
            return
        step = at.shape.add(profile)
        assert step is not None
        self.change(at, step[1], (*at.claims, claim))

    def hide(self, node: str, profiles: Iterable[Profile]) -> None:
        """Offer nothing of these profiles on the node but what is claimed. Not undone by `roll_back`."""
        if not self.plannable(node):
            return
        for gpu_claims in self.by_node[node]:
            gpu_claims.hidden = gpu_claims.hidden.union(profiles)
            shape = gpu_claims.shape
            spare = {slot for slot in shape.rest.slots if slot.profile in gpu_claims.hidden}
            if spare:
                keep = Layout(slot for slot in shape.keep.slots if slot not in spare)
                less = self.book.shape(
                    shape.geometry, shape.used, keep, shape.warm, shape.future, shape.claims, shape.last_choice
                )
                assert less is not None
                self.change(gpu_claims, less, gpu_claims.claims)

    def change(self, gpu_claims: GpuClaims, shape: GpuState, claims: Sequence[Claim]) -> None:
        """Change a GPU's condition and its claims, and keep the index right."""
        old_shape, old_claims = gpu_claims.shape, gpu_claims.claims
        self._trail.append(lambda: self._set(gpu_claims, old_shape, old_claims))
        self._set(gpu_claims, shape, claims)

    def commit(self) -> None:
        """Forget how to undo what was done so far."""
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
        self.fixed[node][claim[2]] += 1
        self._fixed_at[self._class[node]][claim[2]].append(node)

    def _set(self, gpu_claims: GpuClaims, shape: GpuState, claims: Sequence[Claim]) -> None:
        kind = self._class[gpu_claims.node]
        gpu_claims.shape, gpu_claims.claims = shape, claims
        bucket = self._buckets[kind][shape]
        if not bucket:  # else the shape is in every heap: it leaves one only when its bucket is found empty
            for profile in self._heaps[kind]:
                self._enter(kind, profile, shape)
        heapq.heappush(bucket, gpu_claims.index)

    def _top(self, kind: int, profile: Profile) -> tuple[Cost, int, GpuState] | None:
        heap = self._heaps[kind].get(profile)
        if heap is None:
            heap = self._heaps[kind][profile] = []
            self._heaped[kind][profile] = set()
            for shape in list(self._buckets[kind]):
                self._enter(kind, profile, shape)
        while heap:
            shape = heap[0][2]
            bucket = self._buckets[kind].get(shape, [])
            while bucket and self.all_claims[bucket[0]].shape is not shape:
                heapq.heappop(bucket)
            if bucket:
                return heap[0]
            heapq.heappop(heap)
            self._heaped[kind][profile].discard(shape)
        return None

    def _enter(self, kind: int, profile: Profile, shape: GpuState) -> None:
        heaped = self._heaped[kind][profile]
        if shape in heaped:
            return
        step = shape.add(profile)
        if step is None:
            return
        heaped.add(shape)
        self._tick += 1
        heapq.heappush(self._heaps[kind][profile], (step[0], self._tick, shape))

    # -- several slices on one node ----------------------------------------------------------------------------

    def place_on(self, node: str, slices: Sequence[Profile]) -> list[tuple[Profile, str | GpuClaims]] | None:
        """Return places for all of `slices` (largest first) on one node; None where they do not all fit."""
        fixed = Counter(self.fixed[node])
        all_claims = self.by_node[node] if self.plannable(node) else []
        shapes = [gpu_claims.shape for gpu_claims in all_claims]
        chosen: list[tuple[Profile, str | GpuClaims]] = []
        steps = 0

        def search(index: int) -> bool:
            nonlocal steps
            if index == len(slices):
                return True
            steps += 1
            profile = slices[index]
            if fixed[profile] > 0:
                fixed[profile] -= 1
                chosen.append((profile, node))
                if search(index + 1):
                    return True
                chosen.pop()
                fixed[profile] += 1
                return False
            for i in _cheapest_first(shapes, profile):
                if steps > _MAX_STEPS:
                    return False
                before = shapes[i]
                step = before.add(profile)
                assert step is not None
                shapes[i] = step[1]
                chosen.append((profile, all_claims[i]))
                if search(index + 1):
                    return True
                chosen.pop()
                shapes[i] = before
            return False

        return chosen if search(0) else None


def _cheapest_first(shapes: Sequence[GpuState], profile: Profile) -> list[int]:
    """Return positions of the shapes with space for one more slice, cheapest first, of equal ones the first."""
    options: dict[GpuState, tuple[Cost, int]] = {}
    for i, shape in enumerate(shapes):
        if shape not in options:
            step = shape.add(profile)
            if step is not None:
                options[shape] = (step[0], i)
    return [i for _, i in sorted(options.values())]


def _only(layout: Layout, profiles: Counter[Profile]) -> Layout:
    return Layout(s for s in layout.slots if profiles[s.profile] > 0) if profiles else EMPTY

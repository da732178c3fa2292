"""Search the places where slices should be free soonest, on few of the GPUs.

Results are kept for one plan: later claims and reservations only make a GPU worse.
"""

from __future__ import annotations

import heapq
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

from slurm_migbatch.decide.capacity.model import Demand
from slurm_migbatch.decide.supply.admission import Busy, When, in_order
from slurm_migbatch.decide.supply.fleet import Claim, Fleet, GpuClaims
from slurm_migbatch.decide.supply.het_jobs import assign
from slurm_migbatch.decide.supply.openings import BEFORE, first_fit, first_of, latest_end, openings, when_free
from slurm_migbatch.mig.layout import Slot
from slurm_migbatch.mig.profile import Profile

_MAX_NODES = 64
#: Sets of slices for which a node keeps its result from round to round.
_MOST_TOGETHER = 64

_Held = tuple[Slot, float | None]
#: Lower bound of the time, index of the GPU, and ""; for all GPUs of a node: index of its first GPU, and its name.
_Ranked = tuple[When, int, str]
Places = list[tuple[GpuClaims, Slot]]
#: places on one node by the number of the GPU
_OnNode = Sequence[tuple[int, Slot]]
#: for each GPU of a node, the objects that determine when slices fit there; they are never changed in place
_Stamp = list[tuple[object, ...]]


class SoonestPlaces:
    """Searches places for the reservations of one plan."""

    def __init__(self, fleet: Fleet, now: float, ends: Callable[[Claim], float | None]) -> None:
        """Set up; `ends`: when a claim that starts now should be over."""
        self._fleet, self._now, self._ends = fleet, now, ends
        self._ranked: dict[tuple[frozenset[str], Profile], list[_Ranked]] = {}
        self._emptiest: dict[frozenset[str], list[tuple[int, str]]] = {}
        #: by node and slices: the inputs and the result of the earliest time at which they fit
        self._soonest_on: dict[tuple[str, tuple[Profile, ...]], tuple[_Stamp, tuple[float, _OnNode] | None]] = {}
        #: nodes with reservations
        self.blocked: set[str] = set()
        #: by index of a GPU with claims: stamp and result of `busy`
        self._busy_at: dict[int, tuple[tuple[object, ...], Busy]] = {}
        #: by index of a GPU: stamp and result of `_by_end`
        self._ends_at: dict[int, tuple[tuple[object, ...], Sequence[tuple[float, int]]]] = {}
        #: minimum time limit of the claims made so far
        self.least_limit_s = math.inf

    # -- one slice ---------------------------------------------------------------------------------------------

    def first(self, pool: frozenset[str], profile: Profile) -> tuple[When, GpuClaims, Slot] | None:
        """Return the GPU that could hold the profile soonest.

        GPUs are ranked once per pool and profile. Later claims and reservations only make a GPU worse, so it is
        sufficient to check the first one again. Unchanged GPUs of a node share one entry until that comes first; then
        entries of the single GPUs replace it.
        """
        ranked = self._ranked.get((pool, profile))
        if ranked is None:
            ranked = self._ranked[pool, profile] = self._rank(pool, profile)
            heapq.heapify(ranked)
        while ranked:
            bound, index, node = ranked[0]
            if node:
                heapq.heappop(ranked)
                for entry in self._ranks_on(node, profile):
                    heapq.heappush(ranked, entry)
                continue
            gpu_claims = self._fleet.gpu(index)
            soonest = self.soonest(gpu_claims, profile)
            if soonest is None:
                heapq.heappop(ranked)
            elif (rank := self.rank_of(soonest[0])) > bound:
                heapq.heapreplace(ranked, (rank, index, ""))
            else:
                return soonest[0], gpu_claims, soonest[1]
        return None

    def _ranks_on(self, node: str, profile: Profile) -> Iterator[_Ranked]:
        """Yield the ranks of the GPUs of a node, or a tighter lower bound for the whole node."""
        admission, first = self._fleet.admissions[node], self._fleet.first_index[node]
        if profile in admission.first:
            for i, when_of in enumerate(admission.soonest, first):
                if (when := when_of[profile]) is not None:
                    yield when, i, ""
        elif self._fleet.as_admitted(node):
            if (soonest := first_of(admission, profile)) is not None:
                yield soonest[0], first + soonest[1], node
        else:
            for gpu_claims in self._fleet.on(node):
                yield self._at_best(gpu_claims, profile), gpu_claims.index, ""

    def _rank(self, pool: frozenset[str], profile: Profile) -> list[_Ranked]:
        """Return lower bounds of when the GPUs of the pool have room."""
        fleet, ranked = self._fleet, list[_Ranked]()
        # If no GPU has room now, at least one slot or claim has to end first.
        full = fleet.find(pool, profile) is None
        for admission, first in fleet.open_nodes(pool):
            name, next_end = admission.node.name, admission.next_end
            if next_end <= self._now:
                ranked += [(self._at_best(gpu_claims, profile), gpu_claims.index, "") for gpu_claims in fleet.on(name)]
            elif profile in admission.first:
                if (soonest := admission.first[profile]) is not None:
                    ranked.append((soonest[0], first + soonest[1], name))
            elif not full or name in self.blocked:
                ranked.append(((0, BEFORE, 0), first, name))
            else:
                earliest = next_end if fleet.as_admitted(name) else min(next_end, self._now + self.least_limit_s)
                ranked.append((self.rank_of((0, earliest, 0)), first, name))
        return ranked

    def _at_best(self, gpu_claims: GpuClaims, profile: Profile) -> When:
        """Return a lower bound of the rank of a GPU: when enough memory slices are free, wherever they lie."""
        shape = gpu_claims.shape
        if shape.future is not None or shape.add(profile) is not None:
            return (0, BEFORE, 0)
        if profile not in shape.geometry:
            return (0, math.inf, 0)
        missing = max(1, shape.geometry.info(profile).memory_slices - shape.idle)
        for end, memory_slices in self._by_end(gpu_claims):
            missing -= memory_slices
            if missing <= 0:
                return self.rank_of((0, end, 0))
        return (0, math.inf, 0)

    def _by_end(self, gpu_claims: GpuClaims) -> Sequence[tuple[float, int]]:
        """Return the end and the memory slices of each slot and claim on a GPU, the soonest end first."""
        stamp = (gpu_claims.claims, gpu_claims.until)
        cached = self._ends_at.get(gpu_claims.index)
        if cached is not None and _same(cached[0], stamp):
            return cached[1]
        info = gpu_claims.shape.geometry.info
        sizes_by_end = [(math.inf if end is None else end, slot.placement.size) for slot, end in gpu_claims.until]
        for claim in gpu_claims.claims:
            end = self._ends(claim)
            sizes_by_end.append((math.inf if end is None else end, info(claim[2]).memory_slices))
        sizes_by_end.sort()
        self._ends_at[gpu_claims.index] = stamp, sizes_by_end
        return sizes_by_end

    def rank_of(self, when: When) -> When:
        """Return `when` in a form comparable with results of earlier rounds: all that is free now is `BEFORE`."""
        return when if when[1] > self._now else (when[0], BEFORE, when[2])

    def soonest(self, gpu_claims: GpuClaims, profile: Profile) -> tuple[When, Slot] | None:
        """Return when a GPU should have room for the profile, and where; None: never."""
        geometry = gpu_claims.gpu.geometry
        if profile not in geometry:
            return None
        busy = self.busy(gpu_claims)
        if gpu_claims.reserved:
            options = [
                (when, slot)
                for slot in geometry.info(profile).slots
                if (when := when_free(geometry, gpu_claims.reserved, busy, slot, self._now)) is not None
            ]
        else:
            found = openings(geometry, gpu_claims.shape.taken, profile)
            options = [(latest_end(busy, inside, blocked, self._now), slot) for slot, inside, blocked in found]
        return min(options, default=None)

    # -- several slices or nodes -------------------------------------------------------------------------------

    def several(self, demands: Sequence[Demand]) -> tuple[When, list[Places]] | None:
        """Return places for each demand on nodes of its own, so that the last is free as soon as possible."""
        most = sum(demand.nodes for demand in demands)
        options = [self._node_options(demand, most) for demand in demands]
        best = _soonest_apart(demands, options)
        if best is None:
            return None
        latest, chosen = best
        when = (1, self._now, 0) if latest == math.inf else (0, latest, 0)
        return when, [
            [(self._fleet.on(name)[i], slot) for name in names for i, slot in by_node[name][1]]
            for by_node, names in zip(options, chosen, strict=True)
        ]

    def _node_options(self, demand: Demand, most: int) -> dict[str, tuple[float, _OnNode]]:
        """Return when and where nodes could hold the slices, the soonest first; of those with most idle space only."""
        options: dict[str, tuple[float, _OnNode]] = {}
        for name in self._most_idle(demand.pool, _MAX_NODES + most):
            soonest = self._node_soonest(name, demand.slices)
            if soonest is not None:
                options[name] = soonest
        return dict(sorted(options.items(), key=lambda item: (item[1][0], item[0])))

    def _most_idle(self, pool: frozenset[str], most: int) -> list[str]:
        """Return nodes of the pool, those with most idle space first; in any order if these are all."""
        fleet = self._fleet
        ranked = self._emptiest.get(pool)
        if ranked is None:
            members = [name for name in pool if name in fleet.admissions and fleet.plannable(name)]
            ranked = self._emptiest[pool] = sorted([(-fleet.admissions[name].idle, name) for name in members])
        if len(ranked) <= most:
            return [name for _, name in ranked]
        touched = {name for name in fleet.touched() if name in pool and fleet.plannable(name)}
        touched_ranked = sorted([(-self._idle(name), name) for name in touched])
        untouched = (entry for entry in ranked if entry[1] not in touched)
        return [name for _, name in islice(heapq.merge(touched_ranked, untouched), most)]

    def _idle(self, name: str) -> int:
        return sum([gpu_claims.shape.idle for gpu_claims in self._fleet.on(name)])

    def _node_soonest(self, name: str, slices: tuple[Profile, ...]) -> tuple[float, _OnNode] | None:
        """Return when all slices should fit on the node (infinite: unknown), and where; None: never.

        That is the earliest time at which enough of the slots on it have ended. Cached while its GPUs are unchanged,
        from round to round if this plan has changed none of them.
        """
        if self._fleet.as_admitted(name):
            together = self._fleet.admissions[name].together
            if slices not in together:
                if len(together) >= _MOST_TOGETHER:
                    together.clear()
                together[slices] = self._node_first(self._fleet.on(name), slices)
            known = together[slices]
            return known and (max(self._now, known[0]), known[1])
        all_claims = self._fleet.on(name)
        stamp: _Stamp = [
            (gpu_claims.shape, gpu_claims.claims, gpu_claims.reserved, gpu_claims.until) for gpu_claims in all_claims
        ]
        cached = self._soonest_on.get((name, slices))
        if cached is not None and all(map(_same, cached[0], stamp)):
            return cached[1]
        found = self._node_first(all_claims, slices)
        soonest = found and (max(self._now, found[0]), found[1])
        self._soonest_on[name, slices] = stamp, soonest
        return soonest

    def _node_first(self, all_claims: Sequence[GpuClaims], slices: tuple[Profile, ...]) -> tuple[float, _OnNode] | None:
        """Return the end of the last slot that has to end before, and the places; it does not depend on the time."""
        busy = {gpu_claims.index: list(self.busy(gpu_claims)) for gpu_claims in all_claims}
        times = sorted({_order(until) for slots in busy.values() for _, until in slots})
        low, high = 0, len(times)
        answer: tuple[int, _OnNode] | None = None
        while low <= high:
            middle = (low + high) // 2
            ended = times[middle - 1] if middle else -math.inf
            places = self._fit_after(all_claims, busy, ended, slices)
            if places is None:
                low = middle + 1
            else:
                answer, high = (middle, places), middle - 1
        if answer is None:
            return None
        return times[answer[0] - 1] if answer[0] else -math.inf, answer[1]

    def _fit_after(
        self,
        all_claims: Sequence[GpuClaims],
        busy: dict[int, list[_Held]],
        ended: float,
        slices: tuple[Profile, ...],
    ) -> _OnNode | None:
        places: list[tuple[int, Slot]] = []
        for i, gpu_claims in enumerate(all_claims):
            held = tuple([slot for slot, until in busy[gpu_claims.index] if _order(until) > ended])
            slots, slices = first_fit(gpu_claims.gpu.geometry, held, gpu_claims.reserved, slices)
            places += [(i, slot) for slot in slots]
            if not slices:
                return places
        return None

    # -- slots in use ------------------------------------------------------------------------------------------

    def busy(self, gpu_claims: GpuClaims) -> Busy:
        """Return the slots in use or claimed in their order, each with its end.

        Claims of one profile are assigned to its slots in their order.
        """
        if not gpu_claims.claims:
            return gpu_claims.until
        stamp = (gpu_claims.shape, gpu_claims.claims, gpu_claims.until)
        cached = self._busy_at.get(gpu_claims.index)
        if cached is not None and _same(cached[0], stamp):
            return cached[1]
        ends_of: dict[Profile, list[float | None]] = {}
        for claim in gpu_claims.claims:
            ends_of.setdefault(claim[2], []).append(self._ends(claim))
        claimed = [(slot, ends_of[slot.profile].pop(0)) for slot in gpu_claims.shape.slots.slots]
        busy = in_order([*gpu_claims.until, *claimed])
        self._busy_at[gpu_claims.index] = stamp, busy
        return busy


def _soonest_apart(
    demands: Sequence[Demand], options: Sequence[Mapping[str, tuple[float, _OnNode]]]
) -> tuple[float, list[list[str]]] | None:
    """Return nodes for each demand, no two the same, and when the last is free; None if there are none."""
    most = sum(demand.nodes for demand in demands)
    best: tuple[float, list[list[str]]] | None = None
    whens = sorted({when for by_node in options for when, _ in by_node.values()})
    low, high = 0, len(whens) - 1
    while low <= high:
        middle = (low + high) // 2
        in_time = [list(islice((n for n, o in by_node.items() if o[0] <= whens[middle]), most)) for by_node in options]
        chosen = assign([(demand.nodes, names) for demand, names in zip(demands, in_time, strict=True)])
        if chosen is None:
            low = middle + 1
        else:
            best, high = (whens[middle], chosen), middle - 1
    return best


def _same(before: tuple[object, ...], after: tuple[object, ...]) -> bool:
    return all(map(operator.is_, before, after))


def _order(until: float | None) -> float:
    return math.inf if until is None else until

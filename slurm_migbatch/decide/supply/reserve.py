"""Reserve the slots that should be free soonest for a demand that fits nowhere now.

The free ones of several reserved slots are offered until all are free if Slurm counts enough slices there: then it
plans the start itself, and lets only jobs take them that end before it (backfill). If it does not, because a GPU is to
be divided anew, they are not offered, since the next job that takes one may be a long one.

Slots in use that overlap reserved ones are counted like all others at first, so when they end Slurm gives them to the
next job for the same slice at once: few GPUs are divided anew, and most jobs wait less. From `Reservation.held_from` on
they are held back, so that jobs of one size cannot starve those of others.
"""

from __future__ import annotations

import heapq
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

from slurm_migbatch.decide.capacity.model import Demand, Reservation
from slurm_migbatch.decide.supply.admission import Busy, When, in_order
from slurm_migbatch.decide.supply.fleet import Claim, Fleet, GpuClaims
from slurm_migbatch.decide.supply.gpu_state import fitting_slots
from slurm_migbatch.decide.supply.het_jobs import assign
from slurm_migbatch.decide.supply.openings import BEFORE, first_fit, first_of, latest_end, openings, when_free
from slurm_migbatch.mig.layout import Layout, Slot
from slurm_migbatch.mig.profile import Profile

#: A reservation moves only if that gains more than this, and more than a tenth of the remaining wait.
_GAIN_S = 60.0
_MAX_NODES = 64
#: Sets of slices for which a node keeps its result from round to round.
_MOST_TOGETHER = 64
#: Slots in use are held back for a job after so many of its time limits (the second is that of a job without one), or
#: after so many times the time in which its slots should have been free.
_PATIENCE = 16.0
_UNLIMITED_S = 900.0
_DELAY = 2.0

_Held = tuple[Slot, float | None]
#: Lower bound of the time, index of the GPU, and ""; for all GPUs of a node: index of its first GPU, and its name.
_Ranked = tuple[When, int, str]
_Places = list[tuple[GpuClaims, Slot]]
#: for each GPU of a node, the objects that determine when slices fit there; they are never changed in place
_Stamp = list[tuple[object, ...]]


class Reserver:
    """Makes the reservations of one plan."""

    def __init__(
        self,
        fleet: Fleet,
        now: float,
        ends: Callable[[Claim], float | None],
        previous: Sequence[Reservation],
        share: float,
        most: int,
    ) -> None:
        """Set up; `ends`: when a claim that starts now should be over."""
        self._fleet, self._now, self._ends = fleet, now, ends
        self._previous = {(r.job, r.copy): r for r in previous}
        self._share, self._most = share, most
        self._count: dict[frozenset[str], int] = {}
        self._bound: dict[frozenset[str], int] = {}
        self._ranked: dict[tuple[frozenset[str], Profile], list[_Ranked]] = {}
        self._emptiest: dict[frozenset[str], list[tuple[int, str]]] = {}
        #: by node and slices: the inputs and the result of the earliest time at which they fit
        self._soonest_on: dict[tuple[str, tuple[Profile, ...]], tuple[_Stamp, tuple[When, _Places] | None]] = {}
        #: nodes with reservations
        self._blocked: set[str] = set()
        #: by index of a GPU with claims: stamp and result of `_busy`
        self._busy_at: dict[int, tuple[tuple[object, ...], Busy]] = {}
        #: by index of a GPU: stamp and result of `_by_end`
        self._ends_at: dict[int, tuple[tuple[object, ...], Sequence[tuple[float, int]]]] = {}
        #: whether slots in use are held back: for the first of the late reservations only, as each may divide a GPU
        self._holds_back = False
        self.made: list[Reservation] = []
        #: minimum time limit of the claims made so far
        self.least_limit_s = math.inf

    def is_full(self, pool: frozenset[str]) -> bool:
        """Return whether the pool has reached its limit of reservations; this does not change back."""
        return len(self.made) >= self._most or self._count.get(pool, 0) >= self._limit(pool)

    def reserve(self, demands: Sequence[Demand], copy: int) -> bool:
        """Reserve for one copy of a demand, or for all of several that need separate nodes.

        False if the limit is reached or no place can ever hold it.
        """
        pools = {demand.pool for demand in demands}
        if any(self.is_full(pool) for pool in pools):
            return False
        first = demands[0]
        if len(demands) == 1 and first.kind.single:
            best = self._first(first.pool, first.slices[0])
            soonest = None if best is None else (best[0], [[best[1:]]])
        else:
            soonest = self._several(demands)
        if soonest is None:
            return False
        kept = self._previous_places(demands, copy)
        when, places = soonest if kept is None or self._is_sooner(soonest[0], kept[0]) else kept
        by_gpu: dict[int, list[Slot]] = {}
        for gpu_claims, slot in (place for demand_places in places for place in demand_places):
            by_gpu.setdefault(gpu_claims.index, []).append(slot)
        for index in by_gpu:
            self._freeze(self._fleet.gpu(index))
        offered = len(demands) == 1 and self._plannable_by_slurm(when, by_gpu)
        for index, slots in by_gpu.items():
            self._block(self._fleet.gpu(index), slots, offered=offered)
        free_at = None if when[0] else when[1]
        held_from = self._held_from(demands, copy, free_at)
        if held_from <= self._now and not offered and not self._holds_back:
            self._holds_back = self._hold_back(by_gpu)
        for pool in pools:
            self._count[pool] = self._count.get(pool, 0) + len(by_gpu)
        self.made.extend(
            Reservation(
                demand.job,
                copy,
                tuple((gpu_claims.node, gpu_claims.gpu.uuid, slot) for gpu_claims, slot in demand_places),
                free_at,
                held_from,
            )
            for demand, demand_places in zip(demands, places, strict=True)
            if demand_places
        )
        return True

    def _limit(self, pool: frozenset[str]) -> int:
        limit = self._bound.get(pool)
        if limit is None:
            gpus = self._fleet.plannable_gpus(pool)
            limit = self._bound[pool] = max(1, int(gpus * self._share)) if gpus else 0
        return limit

    # -- one slice ---------------------------------------------------------------------------------------------

    def _first(self, pool: frozenset[str], profile: Profile) -> tuple[When, GpuClaims, Slot] | None:
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
            soonest = self._soonest(gpu_claims, profile)
            if soonest is None:
                heapq.heappop(ranked)
            elif (rank := self._rank_of(soonest[0])) > bound:
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
            elif not full or name in self._blocked:
                ranked.append(((0, BEFORE, 0), first, name))
            else:
                earliest = next_end if fleet.as_admitted(name) else min(next_end, self._now + self.least_limit_s)
                ranked.append((self._rank_of((0, earliest, 0)), first, name))
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
                return self._rank_of((0, end, 0))
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

    def _rank_of(self, when: When) -> When:
        """Return `when` in a form comparable with results of earlier rounds: all that is free now is `BEFORE`."""
        return when if when[1] > self._now else (when[0], BEFORE, when[2])

    def _soonest(self, gpu_claims: GpuClaims, profile: Profile) -> tuple[When, Slot] | None:
        geometry = gpu_claims.gpu.geometry
        if profile not in geometry:
            return None
        busy = self._busy(gpu_claims)
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

    # -- places of the previous round --------------------------------------------------------------------------

    def _previous_places(self, demands: Sequence[Demand], copy: int) -> tuple[When, list[_Places]] | None:
        """Return the previous round's places, if all of them are still available together."""
        whens = []
        kept: list[_Places] = []
        by_gpu: dict[int, list[Slot]] = {}
        taken: set[str] = set()
        for demand in demands:
            if not demand.parts:
                kept.append([])
                continue
            previous = self._previous.get((demand.job, copy))
            if previous is None:
                return None
            by_node: dict[str, list[Profile]] = {}
            places = []
            for place in previous.places:
                same_place = self._place_again(place, demand.pool)
                if same_place is None:
                    return None
                when, gpu_claims, slot = same_place
                whens.append(when)
                places.append((gpu_claims, slot))
                by_node.setdefault(gpu_claims.node, []).append(slot.profile)
                by_gpu.setdefault(gpu_claims.index, []).append(slot)
            slices = list(demand.slices)
            if len(by_node) != demand.nodes or any(
                sorted(profiles_on_node, reverse=True) != slices for profiles_on_node in by_node.values()
            ):
                return None
            if not taken.isdisjoint(by_node):
                return None
            taken.update(by_node)
            kept.append(places)
        for index, slots in by_gpu.items():
            gpu_claims = self._fleet.gpu(index)
            together = Layout(slots)
            others = [s.profile for s, _ in self._busy(gpu_claims) if not s.placement.mask & together.mask]
            reserved = [s.profile for s in gpu_claims.reserved]
            if not gpu_claims.gpu.geometry.admits((*others, *reserved, *together.profiles)):
                return None
        return max(whens), kept

    def _place_again(self, place: tuple[str, str, Slot], pool: frozenset[str]) -> tuple[When, GpuClaims, Slot] | None:
        """Return the previous round's place and when it should be free; None if it is no longer available."""
        name, uuid, slot = place
        if name not in pool or name not in self._fleet.nodes or not self._fleet.plannable(name):
            return None
        for gpu_claims in self._fleet.on(name):
            if gpu_claims.gpu.uuid == uuid and slot in gpu_claims.gpu.geometry.slots:
                busy = self._busy(gpu_claims)
                when = when_free(gpu_claims.gpu.geometry, gpu_claims.reserved, busy, slot, self._now)
                return None if when is None else (when, gpu_claims, slot)
        return None

    def _is_sooner(self, new: When, old: When) -> bool:
        if new[0] != old[0]:
            return new[0] < old[0]
        return new[1] + max(_GAIN_S, 0.1 * (old[1] - self._now)) < old[1]

    # -- several slices or nodes -------------------------------------------------------------------------------

    def _several(self, demands: Sequence[Demand]) -> tuple[When, list[_Places]] | None:
        """Return places for each demand on nodes of its own, so that the last is free as soon as possible."""
        most = sum(demand.nodes for demand in demands)
        options = [self._node_options(demand, most) for demand in demands]
        best = _soonest_apart(demands, options)
        if best is None:
            return None
        latest, chosen = best
        return latest, [
            [place for name in names for place in by_node[name][1]]
            for by_node, names in zip(options, chosen, strict=True)
        ]

    def _node_options(self, demand: Demand, most: int) -> dict[str, tuple[When, _Places]]:
        """Return when and where nodes could hold the slices, the soonest first; of those with most idle space only."""
        options: dict[str, tuple[When, _Places]] = {}
        for name in self._most_idle(demand.pool, _MAX_NODES + most):
            soonest = self._node_soonest(name, demand.slices)
            if soonest is not None:
                options[name] = soonest
        return dict(sorted(options.items(), key=lambda item: (item[1][0], item[0])))

    def _most_idle(self, pool: frozenset[str], most: int) -> list[str]:
        """Return nodes of the pool, those with most idle space first."""
        fleet = self._fleet
        ranked = self._emptiest.get(pool)
        if ranked is None:
            members = [name for name in pool if name in fleet.admissions and fleet.plannable(name)]
            ranked = self._emptiest[pool] = sorted([(-fleet.admissions[name].idle, name) for name in members])
        touched = {name for name in fleet.touched() if name in pool and fleet.plannable(name)}
        touched_ranked = sorted([(-self._idle(name), name) for name in touched])
        untouched = (entry for entry in ranked if entry[1] not in touched)
        return [name for _, name in islice(heapq.merge(touched_ranked, untouched), most)]

    def _idle(self, name: str) -> int:
        return sum([gpu_claims.shape.idle for gpu_claims in self._fleet.on(name)])

    def _node_soonest(self, name: str, slices: tuple[Profile, ...]) -> tuple[When, _Places] | None:
        """Return when all slices should fit on the node, and where; None: never.

        That is the earliest time at which enough of the slots on it have ended. Cached while its GPUs are unchanged,
        from round to round if this plan has changed none of them.
        """
        all_claims = self._fleet.on(name)
        if self._fleet.as_admitted(name):
            together, first = self._fleet.admissions[name].together, self._fleet.first_index[name]
            if slices not in together:
                if len(together) >= _MOST_TOGETHER:
                    together.clear()
                found = self._node_first(all_claims, slices)
                together[slices] = found and (found[0], [(place[0].index - first, place[1]) for place in found[1]])
            known = together[slices]
            return known and (self._when(known[0]), [(all_claims[i], slot) for i, slot in known[1]])
        stamp: _Stamp = [
            (gpu_claims.shape, gpu_claims.claims, gpu_claims.reserved, gpu_claims.until) for gpu_claims in all_claims
        ]
        cached = self._soonest_on.get((name, slices))
        if cached is not None and all(map(_same, cached[0], stamp)):
            return cached[1]
        found = self._node_first(all_claims, slices)
        soonest = found and (self._when(found[0]), found[1])
        self._soonest_on[name, slices] = stamp, soonest
        return soonest

    def _when(self, free_at: float) -> When:
        return (1, self._now, 0) if free_at == math.inf else (0, max(self._now, free_at), 0)

    def _node_first(self, all_claims: Sequence[GpuClaims], slices: tuple[Profile, ...]) -> tuple[float, _Places] | None:
        """Return the end of the last slot that has to end before, and the places; it does not depend on the time."""
        busy = {gpu_claims.index: list(self._busy(gpu_claims)) for gpu_claims in all_claims}
        times = sorted({_order(until) for slots in busy.values() for _, until in slots})
        low, high = 0, len(times)
        answer: tuple[int, list[tuple[GpuClaims, Slot]]] | None = None
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
    ) -> list[tuple[GpuClaims, Slot]] | None:
        places: list[tuple[GpuClaims, Slot]] = []
        for gpu_claims in all_claims:
            held = tuple([slot for slot, until in busy[gpu_claims.index] if _order(until) > ended])
            slots, slices = first_fit(gpu_claims.gpu.geometry, held, gpu_claims.reserved, slices)
            places += [(gpu_claims, slot) for slot in slots]
            if not slices:
                return places
        return None

    # -- effect ------------------------------------------------------------------------------------------------

    def _busy(self, gpu_claims: GpuClaims) -> Busy:
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

    def _freeze(self, gpu_claims: GpuClaims) -> None:
        """Fix the claims on this GPU in their slots, because the reserved slots depend on it."""
        if not gpu_claims.claims:
            return
        gpu_claims.until = self._busy(gpu_claims)
        gpu_claims.settled = (*gpu_claims.settled, *gpu_claims.claims)
        shape = gpu_claims.shape
        frozen = self._fleet.book.start(shape.condition._replace(used=shape.taken, keep=shape.rest, claims=()))
        self._fleet.change(gpu_claims, frozen, ())

    def _plannable_by_slurm(self, when: When, by_gpu: Mapping[int, list[Slot]]) -> bool:
        """Return whether Slurm plans the start at these places itself, if all free slots of them are offered.

        For that it must count enough slices on each node, in use or free, and know when those in use will be free: at
        the end of their jobs' time limits, or now, because the jobs have ended and only their leases have not. It does
        not know of jobs that are being stopped.
        """
        unlimited, at, _ = when
        if unlimited or self._any_being_stopped(by_gpu):
            return False
        wanted: dict[str, Counter[Profile]] = {}
        for index, slots in by_gpu.items():
            wanted.setdefault(self._fleet.gpu(index).node, Counter()).update(slot.profile for slot in slots)
        counted = self._counted if at > self._now else self._released
        return all(counts <= counted(name, by_gpu) for name, counts in wanted.items())

    def _any_being_stopped(self, by_gpu: Mapping[int, list[Slot]]) -> bool:
        """Return whether a job that is being stopped uses any of these slots."""
        return any(
            lease.stopping and lease.slot.placement.mask & Layout(slots).mask
            for index, slots in by_gpu.items()
            for lease in self._fleet.gpu(index).gpu.leases
        )

    def _counted(self, node: str, by_gpu: Mapping[int, list[Slot]]) -> Counter[Profile]:
        """Return the slices that Slurm counts on a node, in use or offered, if the free ones of these are offered."""
        counted = +Counter(self._fleet.nodes[node].used)
        for gpu_claims in self._fleet.on(node):
            counted.update(claim[2] for claim in (*gpu_claims.settled, *gpu_claims.claims))
        return counted + self._free(node, by_gpu)

    def _released(self, node: str, by_gpu: Mapping[int, list[Slot]]) -> Counter[Profile]:
        """Return the slices of a node that no job of Slurm has: the free ones of these, and those still leased."""
        found = self._fleet.nodes[node]
        return found.leased - Counter(found.used) + self._free(node, by_gpu)

    def _free(self, node: str, by_gpu: Mapping[int, list[Slot]]) -> Counter[Profile]:
        """Return by profile these slots of a node as far as they are free."""
        free: Counter[Profile] = Counter()
        for gpu_claims in self._fleet.on(node):
            slots = Layout(by_gpu.get(gpu_claims.index, ())).clear_of(gpu_claims.shape.taken.mask)
            free.update(slot.profile for slot in slots)
        return free

    def _block(self, gpu_claims: GpuClaims, slots: list[Slot], *, offered: bool) -> None:
        self._blocked.add(gpu_claims.node)
        gpu_claims.reserved = (*gpu_claims.reserved, *slots)
        reserved = Layout(gpu_claims.reserved)
        staying = Layout(s for s, _ in gpu_claims.until if not s.placement.mask & reserved.mask)
        geometry = gpu_claims.gpu.geometry
        future = reserved.union(fitting_slots(geometry, reserved, staying))
        shape = gpu_claims.shape
        keep = shape.keep.clear_of(reserved.mask)
        keep = fitting_slots(geometry, future, keep.clear_of(future.mask))
        if offered:
            keep = keep.union(Layout(slots).clear_of(shape.used.mask))
        blocked = self._fleet.book.start(shape.condition._replace(keep=keep, future=future, claims=()))
        self._fleet.change(gpu_claims, blocked, gpu_claims.claims)

    def _held_from(self, demands: Sequence[Demand], copy: int, free_at: float | None) -> float:
        """Return when slots in use are held back: see `Reservation.held_from`."""
        longest = max([_UNLIMITED_S if demand.limit_s is None else demand.limit_s for demand in demands])
        previous = [self._previous.get((demand.job, copy)) for demand in demands]
        known = [found.held_from for found in previous if found is not None and found.held_from is not None]
        expected = [] if free_at is None else [self._now + _DELAY * (free_at - self._now)]
        return min(self._now + _PATIENCE * longest, *(known or expected or [math.inf]))

    def _hold_back(self, by_gpu: Mapping[int, list[Slot]]) -> bool:
        """Note the slots in use that overlap reserved ones, if any: no other job should get them when they end.

        A single reserved slot that is in use as it is needs no care: Slurm gives it to the first job in its order.
        """
        single = sum(map(len, by_gpu.values())) == 1
        for index, slots in by_gpu.items():
            gpu_claims, mask = self._fleet.gpu(index), Layout(slots).mask
            in_use = [lease.slot for lease in gpu_claims.gpu.leases if lease.job is not None and not lease.guest]
            overlapping = [slot for slot in in_use if slot.placement.mask & mask]
            if not (single and overlapping == slots):
                gpu_claims.held_back = [slot.profile for slot in overlapping]
        return any(self._fleet.gpu(index).held_back for index in by_gpu)


def _soonest_apart(
    demands: Sequence[Demand], options: Sequence[Mapping[str, tuple[When, _Places]]]
) -> tuple[When, list[list[str]]] | None:
    """Return nodes for each demand, no two the same, and when the last is free; None if there are none."""
    most = sum(demand.nodes for demand in demands)
    best: tuple[When, list[list[str]]] | None = None
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

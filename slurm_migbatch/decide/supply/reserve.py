"""Reserve the slots that should be free soonest for a demand that fits nowhere now.

The free ones of several reserved slots are offered until all are free if Slurm counts enough slices there: then it
plans the start itself, and lets only jobs take them that end before it (backfill). If it does not, because a GPU is to
be divided anew, they are not offered, since the next job that takes one may be a long one (`decide.supply.backfill` has
the exception).

Slots in use that overlap reserved ones are counted like all others at first, so when they end Slurm gives them to the
next job for the same slice at once: few GPUs are divided anew, and most jobs wait less. From `Reservation.held_from` on
they are held back, so that jobs of one size cannot starve those of others.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from slurm_migbatch.decide.capacity.model import Demand, Reservation
from slurm_migbatch.decide.supply.admission import When
from slurm_migbatch.decide.supply.fleet import Claim, Fleet, GpuClaims
from slurm_migbatch.decide.supply.gpu_state import fitting_slots
from slurm_migbatch.decide.supply.openings import when_free
from slurm_migbatch.decide.supply.soonest import Places, SoonestPlaces
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.layout import Layout, Slot, layout_of
from slurm_migbatch.mig.profile import Profile

#: A reservation moves only if that gains more than this, and more than a tenth of the remaining wait.
_GAIN_S = 60.0
#: Slots in use are held back for a job after so many of its time limits (the second is that of a job without one), or
#: after so many times the time in which its slots should have been free.
_PATIENCE = 16.0
_UNLIMITED_S = 900.0
_DELAY = 2.0


@dataclass
class ReservedGpu:
    """The reservations on one GPU.

    Attributes:
        until: when the first of them should start; -inf if that is unknown, or it has waited for too long.
        jobs: those with the reservations.
        offered: free reserved slots that are offered, so that Slurm plans the start.
        together: GPUs that have reservations in common with it, directly or through others, and itself, by index.
    """

    until: float = math.inf
    jobs: frozenset[int] = frozenset()
    offered: Sequence[Slot] = ()
    together: frozenset[int] = frozenset()


class Reserver:
    """Makes the reservations of one plan.

    Attributes:
        search: the search for the places.
        made: the reservations.
        reserved_at: GPUs with reserved slots, by index.
    """

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
        self._fleet, self._now = fleet, now
        self.search = SoonestPlaces(fleet, now, ends)
        self._previous = {(r.job, r.copy): r for r in previous}
        self._share, self._most = share, most
        self._count: dict[frozenset[str], int] = {}
        self._bound: dict[frozenset[str], int] = {}
        #: whether slots in use are held back: for the first of the late reservations only, as each may divide a GPU
        self._holds_back = False
        self.made: list[Reservation] = []
        self.reserved_at: dict[int, ReservedGpu] = {}
        #: until when the same places are chosen, and the same slots held back, if nothing but the time changes
        self.lasts_until = math.inf

    @property
    def blocked(self) -> Set[str]:
        """The nodes with reserved slots."""
        return self.search.blocked

    def reserve(self, demands: Sequence[Demand], copy: int) -> bool:
        """Reserve for one copy of a demand, or for all of several that need separate nodes.

        False if the limit is reached or no place can ever hold it; neither changes back.
        """
        pools = {demand.pool for demand in demands}
        if len(self.made) >= self._most or any(self._count.get(pool, 0) >= self._limit(pool) for pool in pools):
            return False
        first = demands[0]
        if len(demands) == 1 and first.kind.single:
            best = self.search.first(first.pool, first.slices[0])
            soonest = None if best is None else (best[0], [[best[1:]]])
        else:
            soonest = self.search.several(demands)
        if soonest is None:
            return False
        when, places = self._chosen(demands, copy, soonest)
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
        self._note(demands, by_gpu, free_at if held_from > self._now else None, offered=offered)
        if held_from > self._now:
            self.lasts_until = min(self.lasts_until, held_from)
        elif not offered and not self._holds_back:
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

    def _note(
        self, demands: Sequence[Demand], by_gpu: Mapping[int, list[Slot]], free_at: float | None, *, offered: bool
    ) -> None:
        """Record the reserved slots by GPU; `free_at`: None if nothing else may use them until the start."""
        jobs = frozenset(demand.job for demand in demands)
        for index, slots in by_gpu.items():
            reserved = self.reserved_at.setdefault(index, ReservedGpu())
            reserved.until = min(reserved.until, -math.inf if free_at is None else free_at)
            reserved.jobs |= jobs
            if offered:
                used = self._fleet.gpu(index).shape.used
                reserved.offered = (*reserved.offered, *Layout(slots).clear_of(used.mask))
        together = frozenset(by_gpu).union(*{self.reserved_at[index].together for index in by_gpu})
        for index in together:
            self.reserved_at[index].together = together

    def free_at(self, gpus: Set[int]) -> dict[Profile, dict[str, list[float]]]:
        """Return by profile and node when the slots reserved on these GPUs should be free, in order; -inf: offered."""
        free_at: dict[Profile, dict[str, list[float]]] = {}
        for index in gpus:
            gpu_claims, offered = self._fleet.gpu(index), self.reserved_at[index].offered
            for slot in gpu_claims.reserved:
                at = max([self._now, *(end for _, end in self._in_use(gpu_claims, slot))])
                times = free_at.setdefault(slot.profile, {}).setdefault(gpu_claims.node, [])
                insort(times, -math.inf if slot in offered else at)
        return free_at

    def undivided_from(self, gpus: Set[int]) -> float:
        """Return when all that divides the slots reserved on these GPUs should have ended; infinite: too late.

        From then on Slurm can plan the starts.
        """
        at = -math.inf
        for index in gpus:
            gpu_claims, until = self._fleet.gpu(index), self.reserved_at[index].until
            for slot in gpu_claims.reserved:
                ends = [end for other, end in self._in_use(gpu_claims, slot) if other != slot]
                if any(end >= until for end in ends):
                    return math.inf
                at = max([at, *ends])
        return at

    def _in_use(self, gpu_claims: GpuClaims, slot: Slot) -> Iterator[tuple[Slot, float]]:
        """Yield the slots in use or claimed that overlap this one, and when they should be free."""
        for other, end in self.search.busy(gpu_claims):
            if other.placement.mask & slot.placement.mask:
                yield other, math.inf if end is None else end

    def offered_with(self, index: int) -> Iterator[Slot]:
        """Yield the reserved slots that are offered on the GPUs that have reservations in common with this one."""
        return chain.from_iterable(self.reserved_at[other].offered for other in self.reserved_at[index].together)

    def withdraw(self, index: int) -> None:
        """Do not offer the free reserved slots on these GPUs, because Slurm no longer plans the starts."""
        for other in self.reserved_at[index].together:
            gpu_claims, reserved = self._fleet.gpu(other), self.reserved_at[other]
            if reserved.offered:
                shape = gpu_claims.shape
                keep = Layout(slot for slot in shape.keep if slot not in reserved.offered)
                reserved.offered = ()
                changed = self._fleet.book.start(shape.condition._replace(keep=keep))
                self._fleet.change(gpu_claims, changed, gpu_claims.claims)

    def _limit(self, pool: frozenset[str]) -> int:
        limit = self._bound.get(pool)
        if limit is None:
            gpus = self._fleet.plannable_gpus(pool)
            limit = self._bound[pool] = max(1, int(gpus * self._share)) if gpus else 0
        return limit

    # -- places of the previous round --------------------------------------------------------------------------

    def _chosen(
        self, demands: Sequence[Demand], copy: int, soonest: tuple[When, list[Places]]
    ) -> tuple[When, list[Places]]:
        """Return the previous round's places unless the soonest ones are considerably sooner."""
        kept = self._previous_places(demands, copy)
        if kept is None:
            return soonest
        self.lasts_until = min(self.lasts_until, _sooner_from(soonest[0], kept[0]))
        return soonest if self._is_sooner(soonest[0], kept[0]) else kept

    def _previous_places(self, demands: Sequence[Demand], copy: int) -> tuple[When, list[Places]] | None:
        """Return the previous round's places, if all of them are still available together."""
        whens = []
        kept: list[Places] = []
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
            together = layout_of(tuple(slots))
            others = [s.profile for s, _ in self.search.busy(gpu_claims) if not s.placement.mask & together.mask]
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
                busy = self.search.busy(gpu_claims)
                when = when_free(gpu_claims.gpu.geometry, gpu_claims.reserved, busy, slot, self._now)
                return None if when is None else (when, gpu_claims, slot)
        return None

    def _is_sooner(self, new: When, old: When) -> bool:
        if new[0] != old[0]:
            return new[0] < old[0]
        return new[1] + max(_GAIN_S, 0.1 * (old[1] - self._now)) < old[1]

    # -- effect ------------------------------------------------------------------------------------------------

    def _freeze(self, gpu_claims: GpuClaims) -> None:
        """Fix the claims on this GPU in their slots, because the reserved slots depend on it."""
        if not gpu_claims.claims:
            return
        gpu_claims.until = self.search.busy(gpu_claims)
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
            lease.stopping and lease.slot.placement.mask & layout_of(tuple(slots)).mask
            for index, slots in by_gpu.items()
            for lease in self._fleet.gpu(index).gpu.leases
        )

    def _counted(self, node: str, by_gpu: Mapping[int, list[Slot]]) -> Counter[Profile]:
        """Return the slices that Slurm counts on a node, in use or offered, if the free ones of these are offered."""
        counted = +Counter(self._fleet.nodes[node].used)
        claims = [claim[2] for gpu in self._fleet.on(node) for claim in (*gpu.settled, *gpu.claims)]
        counted.update([*claims, *self._free(node, by_gpu)])
        return counted

    def _released(self, node: str, by_gpu: Mapping[int, list[Slot]]) -> Counter[Profile]:
        """Return the slices of a node that no job of Slurm has: the free ones of these, and those still leased."""
        found = self._fleet.nodes[node]
        released = found.leased - Counter(found.used) - Counter(found.uncounted)
        released.update(self._free(node, by_gpu))
        return released

    def _free(self, node: str, by_gpu: Mapping[int, list[Slot]]) -> list[Profile]:
        """Return the profile of each of these slots of a node that is free."""
        gpus = [(self._fleet.gpu(index), slots) for index, slots in by_gpu.items()]
        return [
            slot.profile
            for gpu_claims, slots in gpus
            if gpu_claims.node == node
            for slot in slots
            if not slot.placement.mask & gpu_claims.shape.taken.mask
        ]

    def _block(self, gpu_claims: GpuClaims, slots: list[Slot], *, offered: bool) -> None:
        self.search.blocked.add(gpu_claims.node)
        gpu_claims.reserved = (*gpu_claims.reserved, *slots)
        reserved, busy = layout_of(tuple(gpu_claims.reserved)), tuple([slot for slot, _ in gpu_claims.until])
        shape = gpu_claims.shape
        keep, future = _blocked(gpu_claims.gpu.geometry, reserved, busy, shape.keep)
        if offered:
            keep = keep.union(layout_of(tuple(slots)).clear_of(shape.used.mask))
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
            gpu_claims, mask = self._fleet.gpu(index), layout_of(tuple(slots)).mask
            in_use = [lease.slot for lease in gpu_claims.gpu.leases if lease.job is not None and not lease.guest]
            overlapping = [slot for slot in in_use if slot.placement.mask & mask]
            if not (single and overlapping == slots):
                gpu_claims.held_back = [slot.profile for slot in overlapping]
        return any(self._fleet.gpu(index).held_back for index in by_gpu)


def _sooner_from(new: When, old: When) -> float:
    """Return a lower bound of the time from which another place counts as considerably sooner (`_is_sooner`)."""
    gain = old[1] - new[1]
    return math.inf if new[0] != old[0] or gain <= _GAIN_S else old[1] - 10 * gain - 1


@lru_cache(maxsize=1 << 16)
def _blocked(geometry: Geometry, reserved: Layout, busy: tuple[Slot, ...], keep: Layout) -> tuple[Layout, Layout]:
    """Return which of the slots to keep may remain next to reserved ones, and the slots once those in use have ended.

    Slots in use (`busy`) that overlap no reserved one count as staying.
    """
    staying = layout_of(tuple([slot for slot in busy if not slot.placement.mask & reserved.mask]))
    future = reserved.union(fitting_slots(geometry, reserved, staying))
    keep = keep.clear_of(reserved.mask)
    return fitting_slots(geometry, future, keep.clear_of(future.mask)), future

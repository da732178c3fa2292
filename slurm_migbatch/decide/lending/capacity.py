"""Track the GPUs of a lending round: what fits next to earlier decisions, and which sizes are worth most."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import combinations, islice
from typing import Final, NamedTuple, TypeAlias

from slurm_migbatch.decide.capacity.spare import by_size, fits, left, loss, ordered, without
from slurm_migbatch.decide.lending.allocation import Hysteresis, paid_worth
from slurm_migbatch.decide.lending.values import ElasticJob, GpuCapacity, Grow, Reason, Release, SlotReference, Target
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.layout import Layout, Slot
from slurm_migbatch.mig.planning import plan_free
from slurm_migbatch.mig.profile import Profile

_GAIN: Final = 1e-9
_PASSES: Final = 3
_PAIRS: Final = 1500
"""Pairs of jobs tried at a time; enough for those on 70 GPUs of seven jobs each."""


@dataclass
class Given:
    """A pending job, the value of each useful profile (from small to large), its current choice, and its GPU.

    `reserved`: see `Release`.
    """

    elastic_job: ElasticJob
    worths: Mapping[Profile, float]
    profile: Profile
    room: int
    reserved: bool = False


class Grown(NamedTuple):
    """A running job, its larger slice, on which GPU, and the figures of `Grow`."""

    elastic_job: ElasticJob
    profile: Profile
    room: int
    faster: float
    gain: float
    stay_s: float


class _Room:
    """A GPU: its used slots, and the profiles to place next to them (reserve and loans of this round)."""

    __slots__ = ("geometry", "group", "held", "lendable", "space", "used", "version", "wishes")

    def __init__(self, space: GpuCapacity, used: Layout, lendable: bool, group: int) -> None:
        self.space, self.geometry, self.used = space, space.geometry, used
        self.lendable, self.group = lendable, group
        self.wishes: tuple[Profile, ...] = ()
        self.held: tuple[Profile, ...] = ()
        self.version = 0


class LendingCapacity:
    """The cluster during one round. For each profile and group of GPUs a heap has the GPU with the lowest loss."""

    def __init__(
        self, spaces: Sequence[GpuCapacity], elastic_jobs: Sequence[ElasticJob], now: float, calm: Hysteresis
    ) -> None:
        self.now, self.calm = now, calm
        self.regions, groups = _groups(spaces, elastic_jobs)
        self.reserve_in = {group for group, space in zip(groups, spaces, strict=True) if not space.own}
        known: dict[Layout, Layout] = {}  # equal ones as one object: faster lookups
        self.rooms = []
        for space, group in zip(spaces, groups, strict=True):
            used = space.used
            lendable = calm.may_lend(now, space.idle_since, space.reclaimed)
            lendable = lendable or (space.own and space.reclaimed != math.inf)
            self.rooms.append(_Room(space, known.setdefault(used, used), lendable, group))
        self.place_of = {(space.node, space.gpu): index for index, space in enumerate(spaces)}
        self.geometries: dict[int, dict[Geometry, None]] = {}
        for room in self.rooms:
            self.geometries.setdefault(room.group, {})[room.geometry] = None
        slices = sum(room.geometry.compute_slices for room in self.rooms if room.lendable or room.space.lent)
        taken = sum(
            room.geometry.info(slot.profile).compute_slices
            for room in self.rooms
            if room.lendable or room.space.lent
            for slot in room.space.taken
        )
        self.share = max(1.0, (slices - taken) / max(1, len(elastic_jobs)))
        self._profiles: dict[frozenset[str] | None, set[Profile]] = {}
        self._useful: dict[tuple[int, frozenset[str] | None], tuple[Profile, ...]] = {}
        self.heaps: dict[tuple[int, bool, Profile], list[_Entry]] = {}
        self.by_group: dict[tuple[int, bool], list[int]] = {}
        for index, room in enumerate(self.rooms):
            self.by_group.setdefault((room.group, room.lendable), []).append(index)

    # -- queries ----------------------------------------------------------------------------------------------------

    def hold(self, reserve: Mapping[Profile, int]) -> dict[Profile, int]:
        """Place the reserve into free space, first on GPUs without lending; return the part that does not fit."""
        short: dict[Profile, int] = {}
        for profile in sorted(reserve, key=by_size, reverse=True):
            for count in range(reserve[profile], 0, -1):
                room = self.best(profile, self.reserve_in, False)
                if room is None:
                    room = self.best(profile, self.reserve_in, True)
                if room is None:
                    short[profile] = count
                    break
                self.rooms[room].held += (profile,)
                self.put(room, profile)
        return short

    def release_reserve(self) -> None:
        """Make the space free again that `hold` has taken."""
        for index, room in enumerate(self.rooms):
            for profile in room.held:
                self.drop(index, profile)
            room.held = ()

    def useful(self, elastic_job: ElasticJob) -> tuple[Profile, ...]:
        """Return the profiles that a job can use and that its GPUs have, from small to large."""
        key = id(elastic_job.speeds), elastic_job.nodes
        if key not in self._useful:
            known = self._profiles.get(elastic_job.nodes)
            if known is None:
                models = {geometry for group in self.regions[elastic_job.nodes] for geometry in self.geometries[group]}
                known = self._profiles[elastic_job.nodes] = {
                    info.profile for model in models for info in model.profiles
                }
            profiles = [profile for profile, speed in elastic_job.speeds.items() if speed > 0 and profile in known]
            self._useful[key] = tuple(sorted(profiles, key=by_size))
        return self._useful[key]

    def smallest(self, elastic_job: ElasticJob, useful: Sequence[Profile]) -> tuple[int, Profile] | None:
        """Return the smallest profile that fits, and the GPU."""
        for profile in useful:
            room = self.best(profile, self.regions[elastic_job.nodes], True)
            if room is not None:
                return room, profile
        return None

    def vacated(self, target: Target) -> bool:
        """Return whether nothing may be lent on the GPU of a target now, mostly because jobs are still leaving it."""
        index = self.place_of.get((target.node, target.gpu))
        return index is not None and self.rooms[index].space.reclaimed == math.inf

    def there(self, elastic_job: ElasticJob, target: Target) -> int | None:
        """Return the GPU of a target if the slice fits there."""
        index = self.place_of.get((target.node, target.gpu))
        if index is None or self.rooms[index].group not in self.regions[elastic_job.nodes]:
            return None
        return index if self.rooms[index].lendable and self._entry(index, target.profile) is not None else None

    def reason(self, elastic_job: ElasticJob, useful: Sequence[Profile]) -> Reason:
        """Return why a job does not fit."""
        if not useful:
            return "profile"
        groups = self.regions[elastic_job.nodes]
        for room in self.rooms:
            if room.held and room.group in groups and room.lendable:
                lent = room.wishes
                for profile in room.held:
                    lent = without(lent, profile)
                if any(fits(room.geometry, room.used, ordered((*lent, profile))) for profile in useful):
                    return "reserve"
        if any(self.best(profile, groups, False) is not None for profile in useful):
            return "idle"
        return "room"

    def best(self, profile: Profile, groups: Iterable[int], lendable: bool) -> int | None:
        """Return the GPU with the lowest loss from one more such slice; None if it fits nowhere.

        GPUs of training-only nodes come first.
        """
        best: _Entry | None = None
        for group in groups:
            top = self._top(group, lendable, profile)
            if top is not None and (best is None or top < best):
                best = top
        return None if best is None else best[3]

    def put(self, index: int, profile: Profile) -> None:
        """Add one slice to a GPU."""
        self._become(index, ordered((*self.rooms[index].wishes, profile)))

    def drop(self, index: int, profile: Profile) -> None:
        """Take one slice from a GPU."""
        self._become(index, without(self.rooms[index].wishes, profile))

    def beside_reserve(self, space: GpuCapacity) -> GpuCapacity:
        """Return a GPU on which what is reserved there is taken."""
        room = self.rooms[self.place_of[space.node, space.gpu]]
        if not room.held:
            return space
        reserved = list(plan_free(room.geometry, room.used, room.wishes).slots)
        return replace(space, taken=(*space.taken, *(slot for slot in reserved if slot.profile in room.held)))

    # -- sizes -------------------------------------------------------------------------------------------------------

    def fair(self, elastic_job: ElasticJob, useful: Sequence[Profile]) -> float:
        """Return a job's speed on its fair share: the largest of its profiles within an equal division."""
        fair = useful[0]
        for profile in useful:
            if profile.compute <= self.share:
                fair = profile
        return elastic_job.speeds[fair]

    def give(self, elastic_job: ElasticJob, index: int, profile: Profile, *, reserved: bool = False) -> Given:
        """Give a job a slice of a GPU; the value of a profile is its speed over that on the fair share."""
        useful = self.useful(elastic_job)
        fair = self.fair(elastic_job, useful)
        self.put(index, profile)
        worths = {choice: elastic_job.speeds[choice] / fair for choice in useful}
        return Given(elastic_job, worths, profile, index, reserved)

    def raise_sizes(self, given: Sequence[Given], move: bool) -> None:
        """Enlarge slices while there is room, first where one more slice is worth most; `move`: on other GPUs too."""
        for _ in range(_PASSES):
            heap = [step for number, grant in enumerate(given) for step in _steps(number, grant)]
            heapify(heap)
            moved = False
            while heap:
                _, _, number, before, after = heappop(heap)
                grant = given[number]
                room = grant.room
                if grant.profile == before and self._raised(grant, after, move):
                    moved |= grant.room != room
                    for step in _steps(number, grant):
                        heappush(heap, step)
            if not moved:  # no slice was freed
                return

    def _raised(self, grant: Given, after: Profile, move: bool) -> bool:
        """Give a job a larger slice, on its GPU or elsewhere, if it fits."""
        room = self.rooms[grant.room]
        wishes: tuple[Profile, ...] | None = None
        if after in room.geometry:
            more = room.geometry.info(after).memory_slices - room.geometry.info(grant.profile).memory_slices
            if more <= left(room.geometry, room.used, room.wishes)[1]:
                wishes = ordered((*without(room.wishes, grant.profile), after))
        if wishes is not None and fits(room.geometry, room.used, wishes):
            self._become(grant.room, wishes)
        else:
            target = self.best(after, self.regions[grant.elastic_job.nodes], True) if move else None
            if target is None:
                return False
            self.drop(grant.room, grant.profile)
            self.put(target, after)
            grant.room = target
        grant.profile = after
        return True

    def exchange(self, given: Sequence[Given], move: bool) -> None:
        """Redistribute the space of pairs on one GPU, and swap pairs on two GPUs, if the sum of values rises."""
        for _ in range(_PASSES):
            on: dict[int, list[Given]] = {}
            for grant in given:
                on.setdefault(grant.room, []).append(grant)
            together = (pair for some in on.values() for pair in combinations(some, 2))
            gained = [self._divide(a, b) for a, b in islice(together, _PAIRS)]
            gained += [self._swap(a, b) for a, b in islice(combinations(given, 2), _PAIRS)]
            if not any(gained):
                return
            self.raise_sizes(given, move)

    def _divide(self, a: Given, b: Given) -> bool:
        if a.room != b.room:
            return False
        of_a, of_b = a.worths, b.worths
        have = of_a[a.profile] + of_b[b.profile] + _GAIN
        better = sorted(
            ((of_a[p] + of_b[q], p, q) for p in of_a for q in of_b if of_a[p] + of_b[q] > have), reverse=True
        )
        if not better:
            return False
        room = self.rooms[a.room]
        rest = without(without(room.wishes, a.profile), b.profile)
        for _, p, q in better:
            wishes = ordered((*rest, p, q))
            if fits(room.geometry, room.used, wishes):
                self._become(a.room, wishes)
                a.profile, b.profile = p, q
                return True
        return False

    def _swap(self, a: Given, b: Given) -> bool:
        of_a, of_b = a.worths, b.worths
        if a.room == b.room or a.profile not in of_b or b.profile not in of_a:
            return False
        if of_a[b.profile] + of_b[a.profile] <= of_a[a.profile] + of_b[b.profile] + _GAIN:
            return False
        rooms = self.rooms
        if (
            rooms[b.room].group not in self.regions[a.elastic_job.nodes]
            or rooms[a.room].group not in self.regions[b.elastic_job.nodes]
        ):
            return False
        a.profile, b.profile, a.room, b.room = b.profile, a.profile, b.room, a.room
        return True

    def grow(self, elastic_jobs: Sequence[ElasticJob], max_count: int) -> list[Grown]:
        """Return the running jobs for which a larger slice pays off, the largest gain first."""
        offers: list[tuple[float, int, float, Profile, float]] = []
        for number, elastic_job in enumerate(elastic_jobs):
            if elastic_job.place is None or elastic_job.shares:
                continue
            if not self.calm.may_change(self.now, elastic_job.since, elastic_job.restarts):
                continue
            useful = self.useful(elastic_job)
            before, fair = (
                elastic_job.speeds.get(elastic_job.place.slot.profile, 0.0),
                self.fair(elastic_job, useful) if useful else 0.0,
            )
            for profile in useful:
                speed = elastic_job.speeds[profile]
                if profile.compute <= elastic_job.place.slot.profile.compute or speed < self.calm.gain * before:
                    continue
                stay = min(self.calm.loan_s, elastic_job.ends_s / speed)
                pay = paid_worth(speed, fair, restart_s=elastic_job.costs.seconds(1, 1, kept=False), stay_s=stay)
                if pay > before / fair + _GAIN:
                    offers.append((before / fair - pay, number, stay, profile, before))
        grown: dict[int, Grown] = {}
        for less, number, stay, profile, before in sorted(offers):
            if len(grown) >= max_count:
                break
            elastic_job = elastic_jobs[number]
            room = None if number in grown else self._grown(elastic_job, profile)
            if room is not None:
                faster = elastic_job.speeds[profile] / before if before else math.inf
                grown[number] = Grown(elastic_job, profile, room, faster, -less, stay)
        return list(grown.values())

    def _grown(self, elastic_job: ElasticJob, profile: Profile) -> int | None:
        """Return the GPU with room for the larger slice, which on its own GPU may replace its slice."""
        assert elastic_job.place is not None
        own_gpu = self.place_of.get((elastic_job.place.node, elastic_job.place.gpu))
        if own_gpu is not None and elastic_job.place.slot in self.rooms[own_gpu].used:
            room = self.rooms[own_gpu]
            used = room.used.remove(elastic_job.place.slot)
            wishes = ordered((*room.wishes, profile))
            if room.lendable and profile in room.geometry and fits(room.geometry, used, wishes):
                room.used = used
                self._become(own_gpu, wishes)
                return own_gpu
        gpu = self.best(profile, self.regions[elastic_job.nodes], True)
        if gpu is not None:
            self.put(gpu, profile)
        return gpu

    # -- placement ------------------------------------------------------------------------------------------------

    def placed(self, given: Sequence[Given], grown: Sequence[Grown]) -> tuple[tuple[Release, ...], tuple[Grow, ...]]:
        """Return the decisions, each with its expected place."""
        free_slots: dict[int, list[Slot]] = {}

        def place(index: int, profile: Profile) -> SlotReference:
            room = self.rooms[index]
            if index not in free_slots:
                free_slots[index] = sorted(plan_free(room.geometry, room.used, room.wishes).slots)
            slot = next(slot for slot in free_slots[index] if slot.profile == profile)
            free_slots[index].remove(slot)
            return SlotReference(room.space.node, room.space.gpu, slot)

        grants = tuple(
            Release(
                grant.elastic_job.job,
                grant.profile,
                place(grant.room, grant.profile),
                grant.worths[grant.profile],
                grant.reserved,
            )
            for grant in given
        )
        grows = tuple(
            Grow(
                growth.elastic_job.job,
                growth.elastic_job.place.slot.profile,
                growth.profile,
                place(growth.room, growth.profile),
                growth.faster,
                growth.gain,
                growth.stay_s,
            )
            for growth in grown
            if growth.elastic_job.place is not None
        )
        return grants, grows

    def _become(self, index: int, wishes: tuple[Profile, ...]) -> None:
        room = self.rooms[index]
        room.wishes = wishes
        room.version += 1
        for (group, lendable, profile), heap in self.heaps.items():
            if group == room.group and lendable == room.lendable:
                entry = self._entry(index, profile)
                if entry is not None:
                    heappush(heap, entry)

    def _top(self, group: int, lendable: bool, profile: Profile) -> _Entry | None:
        key = group, lendable, profile
        heap = self.heaps.get(key)
        if heap is None:
            entries = (self._entry(index, profile) for index in self.by_group.get((group, lendable), ()))
            heap = self.heaps[key] = [entry for entry in entries if entry is not None]
            heapify(heap)
        while heap and self.rooms[heap[0][3]].version != heap[0][4]:
            heappop(heap)
        return heap[0] if heap else None

    def _entry(self, index: int, profile: Profile) -> _Entry | None:
        room = self.rooms[index]
        if profile not in room.geometry:
            return None
        lost = loss(room.geometry, room.used, room.wishes, profile)
        return None if lost is None else (not room.space.own, *lost, index, room.version)


_Entry: TypeAlias = tuple[bool, int, int, int, int]
"""Whether it is a loan, the GPU's loss, its free space, its index, and the version for which this is valid."""
_Step: TypeAlias = tuple[float, int, int, Profile, Profile]


def _steps(number: int, grant: Given) -> Iterable[_Step]:
    """Yield larger slices than a job has, by the value gained per slice (compute and memory alike)."""
    have, worths = grant.profile, grant.worths
    for profile, worth in worths.items():
        gain = worth - worths[have]
        if gain > _GAIN and by_size(profile) > by_size(have):
            more = profile.compute - have.compute + (profile.memory_gb - have.memory_gb) / max(1, have.memory_gb)
            yield -gain / max(more, _GAIN), profile.compute, number, have, profile


def _groups(
    spaces: Sequence[GpuCapacity], elastic_jobs: Sequence[ElasticJob]
) -> tuple[dict[frozenset[str] | None, set[int]], list[int]]:
    """Group GPUs that the same jobs may use: return the groups of each set of nodes, and that of each GPU."""
    regions = list(dict.fromkeys(elastic_job.nodes for elastic_job in elastic_jobs if elastic_job.nodes is not None))
    inside = {
        node: tuple(number for number, region in enumerate(regions) if node in region)
        for node in dict.fromkeys(space.node for space in spaces)
    }
    numbers: dict[tuple[bool, tuple[int, ...]], int] = {}
    groups = [numbers.setdefault((space.own, inside[space.node]), len(numbers)) for space in spaces]
    members: dict[frozenset[str] | None, set[int]] = {None: set(groups)}
    for number, region in enumerate(regions):
        members[region] = {group for (_, some), group in numbers.items() if number in some}
    return members, groups

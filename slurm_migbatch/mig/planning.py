"""Plan where to put slices on one GPU: pure and exact.

A GPU has at most 8 (or 12) memory slices, so everything here is an exhaustive search over the bit masks of occupied
memory slices. What can still be added to a GPU depends only on that mask and on how many slots each profile has, so
results are cached under that pair; repeated queries cost microseconds.

**Useful free space.** Of two ways to use a GPU the better one has the greater `prospects`: the largest
footprint (memory slices, then compute slices) that can still be placed, then the largest after the best placement of
that one, and so on until nothing fits. Ties go to the one with more choices for a single slot, then to the
higher start. Equal prospects cover the same space, so the number of stranded slices never differs within a tie.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import TypeAlias

from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.layout import EMPTY, Layout, Slot
from slurm_migbatch.mig.profile import Profile

Footprint: TypeAlias = tuple[int, int]  # memory slices, compute slices
Counts: TypeAlias = tuple[int, ...]  # slots of each profile, in the order of `_SlotTable.profiles`

MOST_STEPS = 100_000
"""Most steps of a search for every way to use a GPU; today's GPUs need 9,000 at most, one with seven slices and all of
nvml.h's profiles without graphics 65,000."""


class _SlotTable:
    """A geometry in the form that the searches need, with cached results.

    The memory it can take is bounded by the number of legal (mask, counts) pairs, a few thousand.
    """

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.profiles = [info.profile for info in geometry.profiles]
        self.index = {profile: i for i, profile in enumerate(self.profiles)}
        self.footprints: list[Footprint] = [(info.memory_slices, info.compute_slices) for info in geometry.profiles]
        self.places = [[(slot.placement.mask, slot) for slot in sorted(info.slots)] for info in geometry.profiles]
        self._allowed: dict[Counts, bool] = {}
        self._prospects: dict[tuple[int, Counts], tuple[Footprint, ...]] = {}
        self._capacity: dict[tuple[int, Counts, int], int] = {}

    def counts(self, layout: Layout) -> Counts:
        """Return how many slots of each profile the layout has; raises UnknownProfile."""
        counts = [0] * len(self.profiles)
        for slot in layout.slots:
            self.geometry.info(slot.profile)
            counts[self.index[slot.profile]] += 1
        return tuple(counts)

    def more(self, counts: Counts, i: int) -> Counts | None:
        """Return the counts with one more of profile i; None if the GPU's count limits forbid it."""
        grown = (*counts[:i], counts[i] + 1, *counts[i + 1 :])
        allowed = self._allowed.get(grown)
        if allowed is None:
            listed = [profile for profile, count in zip(self.profiles, grown, strict=True) for _ in range(count)]
            allowed = self._allowed[grown] = self.geometry.admits(listed)
        return grown if allowed else None

    def prospects(self, mask: int, counts: Counts) -> tuple[Footprint, ...]:
        """Return the lexicographically greatest descending sequence of footprints that can still be added."""
        key = (mask, counts)
        known = self._prospects.get(key)
        if known is not None:
            return known
        best: tuple[Footprint, ...] = ()
        for i, footprint in enumerate(self.footprints):
            if best and footprint < best[0]:
                break
            grown = self.more(counts, i)
            if grown is None:
                continue
            for bits, _ in self.places[i]:
                if not mask & bits:
                    best = max(best, (footprint, *self.prospects(mask | bits, grown)))
        self._prospects[key] = best
        return best

    def freedom(self, mask: int, counts: Counts) -> int:
        """Return how many single slots could be added next."""
        return sum(
            not mask & bits
            for i in range(len(self.profiles))
            if self.more(counts, i) is not None
            for bits, _ in self.places[i]
        )

    def capacity(self, mask: int, counts: Counts, i: int) -> int:
        """Return the most slots of profile i alone that can still be added."""
        key = (mask, counts, i)
        known = self._capacity.get(key)
        if known is None:
            known = 0
            grown = self.more(counts, i)
            if grown is not None:
                for bits, _ in self.places[i]:
                    if not mask & bits:
                        known = max(known, 1 + self.capacity(mask | bits, grown, i))
            self._capacity[key] = known
        return known


@lru_cache(maxsize=256)
def is_searchable(geometry: Geometry) -> bool:
    """Return whether the searches over a GPU are small enough; a node may describe a GPU for which they are not."""
    profiles = [
        (info.max_instances, info.compute_slices, [p.mask for p in info.placements], info.profile.suffix)
        for info in geometry.profiles
    ]
    first = (0, (0,) * len(profiles), geometry.compute_slices)
    seen, pending, steps = {first}, [first], 0
    while pending:
        mask, counts, free = pending.pop()
        steps += len(profiles)
        if steps > MOST_STEPS:
            return False
        used = {suffix for count, (*_, suffix) in zip(counts, profiles, strict=True) if count}
        for i, (max_count, compute, places, suffix) in enumerate(profiles):
            if compute > free or counts[i] >= max_count:
                continue
            # of the rules for engines only this one, for speed: it leaves half of the ways
            if (suffix == "+me.all" and used - {"-me"}) or ("+me.all" in used and suffix != "-me"):
                continue
            grown = (*counts[:i], counts[i] + 1, *counts[i + 1 :])
            new_states = {(mask | bits, grown, free - compute) for bits in places if not mask & bits} - seen
            seen |= new_states
            pending += new_states
            steps += len(new_states)
    return True


@lru_cache(maxsize=256)
def _slot_table(geometry: Geometry) -> _SlotTable:
    return _SlotTable(geometry)


def choose(geometry: Geometry, used: Layout, profile: Profile) -> Slot | None:
    """Choose the slot for one more `profile` that keeps the largest useful free space; None if none is left.

    Raises UnknownProfile if the GPU has no such profile.
    """
    geometry.info(profile)
    table = _slot_table(geometry)
    i = table.index[profile]
    counts = table.more(table.counts(used), i)
    if counts is None:
        return None
    free = [(used.mask | bits, slot) for bits, slot in table.places[i] if not used.mask & bits]
    return max(
        free,
        key=lambda at: (table.prospects(at[0], counts), table.freedom(at[0], counts), at[1].placement),
        default=(0, None),
    )[1]


def plan_free(geometry: Geometry, used: Layout, requested: Sequence[Profile], keep: Layout = EMPTY) -> Layout:
    """Plan the free slots to offer next to `used`, so that the requested profiles are met in order as far as they fit.

    A requested profile is met exactly if some placement of it and of all met before it exists; one that cannot be met
    is skipped and the next is tried. (The caller must ensure that a large one is not skipped forever.)
    Among the arrangements that meet them, the one with the largest useful free space is taken, then the one that shares
    the most slots with `keep`, the slots offered so far. Profiles that this GPU does not have do not fit.

    The result holds the new slots only; together with `used` it is legal.
    """
    return _plan_free(geometry, used, _relevant(geometry, used, requested), keep)


def capacity(geometry: Geometry, used: Layout, profile: Profile) -> int:
    """Return the most slots of `profile` that can be added to `used`; raises UnknownProfile."""
    geometry.info(profile)
    table = _slot_table(geometry)
    return table.capacity(used.mask, table.counts(used), table.index[profile])


def _relevant(geometry: Geometry, used: Layout, requested: Iterable[Profile]) -> tuple[Profile, ...]:
    """Return the profiles without those that no arrangement can meet: unknown ones and more than `max_instances`."""

    def sift() -> Iterator[Profile]:
        remaining = {info.profile: info.max_instances for info in geometry.profiles}
        for slot in used.slots:
            remaining[slot.profile] = remaining.get(slot.profile, 0) - 1
        for profile in requested:
            count = remaining.get(profile, 0)
            if count > 0:
                remaining[profile] = count - 1
                yield profile

    return tuple(sift())


@lru_cache(maxsize=1 << 15)
def _plan_free(geometry: Geometry, used: Layout, requested: tuple[Profile, ...], keep: Layout) -> Layout:
    """Return slots for the requested profiles, as far as they fit in order, with as many as possible of `keep`."""
    table = _slot_table(geometry)
    counts = table.counts(used)
    kept = set(keep.slots)
    # All arrangements of the profiles met so far have the same counts, so what else fits depends on the mask alone: one
    # arrangement for each mask is enough, the one that keeps the most.
    frontier: dict[int, tuple[int, tuple[Slot, ...]]] = {used.mask: (0, ())}
    unplaceable: set[Profile] = set()  # limits only tighten, so a profile that did not fit never fits later
    for profile in requested:
        if profile in unplaceable:
            continue
        i = table.index[profile]
        grown = table.more(counts, i)
        next_frontier: dict[int, tuple[int, tuple[Slot, ...]]] = {}
        if grown is not None:
            for mask, (score, slots) in frontier.items():
                for bits, slot in table.places[i]:
                    if mask & bits:
                        continue
                    new_score = score + (slot in kept)
                    known = next_frontier.get(mask | bits)
                    if known is None or new_score > known[0]:
                        next_frontier[mask | bits] = (new_score, (*slots, slot))
        if grown is None or not next_frontier:
            unplaceable.add(profile)
            continue
        counts, frontier = grown, next_frontier
    mask = max(frontier, key=lambda m: (table.prospects(m, counts), frontier[m][0], table.freedom(m, counts), m))
    return Layout(frontier[mask][1])

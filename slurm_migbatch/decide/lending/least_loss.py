"""Find the sets of loans that make room for one slice when they end: all that cover one placement."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import combinations

from slurm_migbatch.decide.lending.values import GpuCapacity, SlotReference
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.layout import Layout, Slot
from slurm_migbatch.mig.profile import Profile


def rooms_for(profile: Profile, spaces: Iterable[GpuCapacity]) -> list[frozenset[SlotReference]]:
    """Return the smallest sets of loans whose end makes room for a slice of this profile; for `allocation.reclaim`.

    One set for each placement that is covered by loans and free space only; it includes further loans if a count limit
    (compute slices, engines) requires more to end. No set contains another of the same GPU. GPUs that have room already
    yield none.
    """
    return [
        frozenset(SlotReference(space.node, space.gpu, slot) for slot in slots)
        for space in spaces
        if profile in space.geometry
        for slots in _rooms(space.geometry, space.taken, tuple(loan.slot for loan in space.lent), profile)
    ]


@lru_cache(maxsize=1 << 14)
def _rooms(
    geometry: Geometry, taken: tuple[Slot, ...], lent: tuple[Slot, ...], profile: Profile
) -> tuple[tuple[Slot, ...], ...]:
    used = Layout(taken)
    rooms: list[frozenset[Slot]] = []
    for slot in sorted(geometry.info(profile).slots):
        if not used.free_of(slot.placement):
            continue
        overlapping = [loan for loan in lent if loan.placement.overlaps(slot.placement)]
        optional = sorted(loan for loan in lent if not loan.placement.overlaps(slot.placement))
        for count in range(len(optional) + 1):
            fitting = [
                frozenset([*overlapping, *extra])
                for extra in combinations(optional, count)
                if geometry.fits(Layout(held for held in (*taken, *optional) if held not in extra), slot)
            ]
            rooms += fitting
            if fitting and not count:
                break
    minimal = [room for room in dict.fromkeys(rooms) if not any(other < room for other in rooms)]
    return () if frozenset() in minimal else tuple(tuple(sorted(room)) for room in minimal)

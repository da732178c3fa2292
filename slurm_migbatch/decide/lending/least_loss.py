"""Which sets of loans of slices make room for one slice when they end: all that cover one place."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import combinations

from slurm_migbatch.decide.lending.values import GpuCapacity, SlotReference
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.layout import Layout, Slot
from slurm_migbatch.mig.profile import Profile


def rooms_for(profile: Profile, spaces: Iterable[GpuCapacity]) -> list[frozenset[SlotReference]]:
    """The smallest sets of loans by whose end a slice of this profile would have room; for `allocation.reclaim`.

    One set for each place that only loans and free space cover, beside others where a limit on counts (compute slices,
    engines) asks for more to go. No set holds another of the same GPU. GPUs that have room already offer none.
    """
    return [
        frozenset(SlotReference(space.node, space.gpu, slot) for slot in slots)
        for space in spaces
        if profile in space.geometry
        for slots in _rooms(space.geometry, space.taken, tuple(one.slot for one in space.lent), profile)
    ]


@lru_cache(maxsize=1 << 14)
def _rooms(
    geometry: Geometry, taken: tuple[Slot, ...], lent: tuple[Slot, ...], profile: Profile
) -> tuple[tuple[Slot, ...], ...]:
    beside = Layout(taken)
    found: list[frozenset[Slot]] = []
    for slot in sorted(geometry.info(profile).slots):
        if not beside.free_of(slot.placement):
            continue
        must = [one for one in lent if one.placement.overlaps(slot.placement)]
        may = sorted(one for one in lent if not one.placement.overlaps(slot.placement))
        for count in range(len(may) + 1):
            some = [
                frozenset([*must, *more])
                for more in combinations(may, count)
                if geometry.fits(Layout(one for one in (*taken, *may) if one not in more), slot)
            ]
            found += some
            if some and not count:
                break
    least = [one for one in dict.fromkeys(found) if not any(other < one for other in found)]
    return () if frozenset() in least else tuple(tuple(sorted(one)) for one in least)

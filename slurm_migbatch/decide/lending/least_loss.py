"""Find the sets of loans that make room for one slice when they end: all that cover one placement."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import combinations

from slurm_migbatch.decide.lending.values import GpuCapacity, SlotReference
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.layout import Layout, Slot
from slurm_migbatch.mig.profile import Profile


def lent_sets_for(profile: Profile, capacities: Iterable[GpuCapacity]) -> list[frozenset[SlotReference]]:
    """Return the smallest sets of loans whose end makes room for a slice of this profile.

    One set for each placement that is covered by loans and free space only; it includes further loans if a count limit
    (compute slices, engines) requires more to end. No set contains another of the same GPU. GPUs that have room already
    yield none.
    """
    return [
        frozenset(SlotReference(capacity.node, capacity.gpu, slot) for slot in slots)
        for capacity in capacities
        if profile in capacity.geometry
        for slots in _lent_sets(capacity.geometry, capacity.taken, tuple(loan.slot for loan in capacity.lent), profile)
    ]


@lru_cache(maxsize=1 << 14)
def _lent_sets(
    geometry: Geometry, taken: tuple[Slot, ...], lent: tuple[Slot, ...], profile: Profile
) -> tuple[tuple[Slot, ...], ...]:
    used = Layout(taken)
    lent_sets: list[frozenset[Slot]] = []
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
            lent_sets += fitting
            if fitting and not count:
                break
    minimal = [lent_set for lent_set in dict.fromkeys(lent_sets) if not any(other < lent_set for other in lent_sets)]
    return () if frozenset() in minimal else tuple(tuple(sorted(lent_set)) for lent_set in minimal)

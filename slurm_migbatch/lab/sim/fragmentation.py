"""Compute how much of a GPU's free space its used slots waste."""

from __future__ import annotations

from functools import lru_cache

from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.layout import Layout, Slot
from slurm_migbatch.mig.planning import capacity
from slurm_migbatch.mig.profile import Profile


@lru_cache(maxsize=1 << 14)
def fragmentation(geometry: Geometry, used: Layout) -> float:
    """Return the share of possible further slots that is lost by the placements of the used slots, from 0 to 1.

    1 - sum(m[p] * n[p]) / sum(m[p] * best[p]) over all profiles p, where m[p] is the memory slices of p, n[p] the most
    slots of p that can be added, and best[p] the same for the best rearrangement of the same used slots. It is 0 for
    every GPU whose used slots could not be placed better, including an empty and a full one. Raises UnknownProfile.
    """
    arranged = _arrangements(geometry, used.profiles)
    actual = possible = 0
    for info in geometry.profiles:
        actual += info.memory_slices * capacity(geometry, used, info.profile)
        possible += info.memory_slices * max(capacity(geometry, layout, info.profile) for layout in arranged)
    return 1 - actual / possible if possible else 0.0


@lru_cache(maxsize=1 << 12)
def _arrangements(geometry: Geometry, profiles: tuple[Profile, ...]) -> list[Layout]:
    """Return one layout of these profiles for each set of memory slices that they can occupy."""
    slots_by_mask: dict[int, tuple[Slot, ...]] = {0: ()}
    for profile in profiles:
        slots_by_mask = {
            mask | slot.placement.mask: (*slots, slot)
            for mask, slots in slots_by_mask.items()
            for slot in geometry.info(profile).slots
            if not mask & slot.placement.mask
        }
    return [Layout(slots) for slots in slots_by_mask.values()]

"""Compute what fits on one GPU next to its used slots, and the free space lost by it; caches `mig.planning`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.layout import Layout
from slurm_migbatch.mig.planning import capacity, plan_free
from slurm_migbatch.mig.profile import Profile


def by_size(profile: Profile) -> tuple[int, int, str]:
    """Return the key that sorts profiles from small to large; memory first, because it covers placements."""
    return profile.memory_gb, profile.compute, profile.suffix


def ordered(profiles: Iterable[Profile]) -> tuple[Profile, ...]:
    """Return the profiles sorted, so that the same profiles in any order are one cache key."""
    return tuple(sorted(profiles, reverse=True))


def without(profiles: tuple[Profile, ...], profile: Profile) -> tuple[Profile, ...]:
    """Return the profiles without one slice of this profile."""
    index = profiles.index(profile)
    return profiles[:index] + profiles[index + 1 :]


@lru_cache(maxsize=1 << 17)
def fits(geometry: Geometry, used: Layout, profiles: tuple[Profile, ...]) -> bool:
    """Return whether the profiles (`ordered`) have legal places all together next to the used slots."""
    return len(plan_free(geometry, used, profiles)) == len(profiles)


@lru_cache(maxsize=1 << 17)
def loss(geometry: Geometry, used: Layout, profiles: tuple[Profile, ...], profile: Profile) -> tuple[int, int] | None:
    """Return the loss of a GPU by one more slice (see `left`), and its free space; None if it does not fit."""
    grown = ordered((*profiles, profile))
    if not fits(geometry, used, grown):
        return None
    left_before, free = left(geometry, used, profiles)
    return left_before - left(geometry, used, grown)[0], free


@lru_cache(maxsize=1 << 17)
def left(geometry: Geometry, used: Layout, profiles: tuple[Profile, ...]) -> tuple[int, int]:
    """Return the memory slices that each profile alone could still get, summed over profiles, and the free ones."""
    full = used.union(plan_free(geometry, used, profiles))
    remaining = sum(
        info.memory_slices * capacity(geometry, full, info.profile)
        for info in geometry.profiles
        if not info.profile.suffix
    )
    return remaining, geometry.memory_slices - full.mask.bit_count()

"""What fits on one GPU beside what is used there, and what is lost by it: `mig.planning`, remembered."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.layout import Layout
from slurm_migbatch.mig.planning import capacity, plan_free
from slurm_migbatch.mig.profile import Profile


def by_size(profile: Profile) -> tuple[int, int, str]:
    """Return the key that sorts profiles from small to large; memory first, as it covers places of a GPU."""
    return profile.memory_gb, profile.compute, profile.suffix


def ordered(profiles: Iterable[Profile]) -> tuple[Profile, ...]:
    """Return the wishes sorted, so that equal ones are the same key."""
    return tuple(sorted(profiles, reverse=True))


def without(profiles: tuple[Profile, ...], profile: Profile) -> tuple[Profile, ...]:
    """Return the profiles without one of this kind."""
    at = profiles.index(profile)
    return profiles[:at] + profiles[at + 1 :]


@lru_cache(maxsize=1 << 17)
def fits(geometry: Geometry, used: Layout, wishes: tuple[Profile, ...]) -> bool:
    """Return whether the wishes (`ordered`) have legal places all together beside what is used."""
    return len(plan_free(geometry, used, wishes)) == len(wishes)


@lru_cache(maxsize=1 << 17)
def loss(geometry: Geometry, used: Layout, wishes: tuple[Profile, ...], profile: Profile) -> tuple[int, int] | None:
    """Return what a GPU loses by one more slice (see `left`), and how much it has free; None where it has no room."""
    more = ordered((*wishes, profile))
    if not fits(geometry, used, more):
        return None
    before, free = left(geometry, used, wishes)
    return before - left(geometry, used, more)[0], free


@lru_cache(maxsize=1 << 17)
def left(geometry: Geometry, used: Layout, wishes: tuple[Profile, ...]) -> tuple[int, int]:
    """Return the memory slices that each profile alone could still get, summed over profiles, and the free ones."""
    full = used.union(plan_free(geometry, used, wishes))
    left = sum(
        info.memory_slices * capacity(geometry, full, info.profile)
        for info in geometry.profiles
        if not info.profile.suffix
    )
    return left, geometry.memory_slices - full.mask.bit_count()

"""What fits on one GPU beside what is used there, and what is lost by it: `mig.planning`, remembered."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.layout import Layout
from slurm_migbatch.mig.planning import capacity, plan_free
from slurm_migbatch.mig.profile import Profile


def by_size(profile: Profile) -> tuple[int, int, str]:
    """What to sort by, from small to large: memory counts first, as it covers a GPU's places."""
    return profile.memory_gb, profile.compute, profile.suffix


def ordered(profiles: Iterable[Profile]) -> tuple[Profile, ...]:
    """Wishes in the order in which equal ones are the same key."""
    return tuple(sorted(profiles, reverse=True))


def without(profiles: tuple[Profile, ...], profile: Profile) -> tuple[Profile, ...]:
    """One of these less."""
    at = profiles.index(profile)
    return profiles[:at] + profiles[at + 1 :]


@lru_cache(maxsize=1 << 17)
def fits(geometry: Geometry, used: Layout, wishes: tuple[Profile, ...]) -> bool:
    """Whether the wishes (`ordered`) have legal places all together beside what is used."""
    return len(plan_free(geometry, used, wishes)) == len(wishes)


@lru_cache(maxsize=1 << 17)
def loss(geometry: Geometry, used: Layout, wishes: tuple[Profile, ...], profile: Profile) -> tuple[int, int] | None:
    """What a GPU loses by one more slice (see `left`), and how much it has free; None where it has no room."""
    more = ordered((*wishes, profile))
    if not fits(geometry, used, more):
        return None
    before, free = left(geometry, used, wishes)
    return before - left(geometry, used, more)[0], free


@lru_cache(maxsize=1 << 17)
def left(geometry: Geometry, used: Layout, wishes: tuple[Profile, ...]) -> tuple[int, int]:
    """Memory slices that each profile alone could still have, summed over profiles; and those that are free."""
    full = used.union(plan_free(geometry, used, wishes))
    left = sum(
        info.memory_slices * capacity(geometry, full, info.profile)
        for info in geometry.profiles
        if not info.profile.suffix
    )
    return left, geometry.memory_slices - full.mask.bit_count()

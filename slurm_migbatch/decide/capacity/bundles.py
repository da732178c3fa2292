"""Compute which slices a GPU can hold together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.layout import EMPTY
from slurm_migbatch.mig.planning import plan_free
from slurm_migbatch.mig.profile import Profile


def holds(geometry: Geometry, profiles: Sequence[Profile]) -> bool:
    """Return whether one GPU has legal places for all these slices."""
    return len(plan_free(geometry, EMPTY, profiles)) == len(profiles)


@lru_cache(maxsize=1024)
def bundles(geometry: Geometry, profiles: tuple[Profile, ...]) -> tuple[tuple[int, ...], ...]:
    """Return every way to fill one GPU with slices of these profiles.

    A way is a tuple of counts in the order of `profiles`, none of which could be increased by one. Any set of slices
    that the GPU can hold is part of one of them.
    """

    def listed(counts: Sequence[int]) -> list[Profile]:
        return [profile for profile, count in zip(profiles, counts, strict=True) for _ in range(count)]

    fitting: set[tuple[int, ...]] = set()
    maximal: set[tuple[int, ...]] = set()
    frontier = [(0,) * len(profiles)]
    while frontier:
        counts = frontier.pop()
        can_grow = False
        for i in range(len(profiles)):
            grown = (*counts[:i], counts[i] + 1, *counts[i + 1 :])
            if grown in fitting:
                can_grow = True
            elif holds(geometry, listed(grown)):
                fitting.add(grown)
                frontier.append(grown)
                can_grow = True
        if not can_grow:
            maximal.add(counts)
    return tuple(sorted(maximal, reverse=True))

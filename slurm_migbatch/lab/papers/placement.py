"""Place slices so that as much of the future demand as possible still fits.

A placement is judged by its effect on future demand. The share of a mix of profiles, with known weights, that a GPU
cannot hold grows with each slice that is placed; how much it grows depends on the place. `LeastLoss` takes the place
with the least growth. It is a generalisation (a reconstruction) of FGD (fragmentation gradient descent, Weng et al.,
USENIX ATC'23), which minimises the growth of the free share of GPUs that tasks of a known mix cannot use. On MIG, not
only the amount of free space matters but also its places, so capacities come from the geometry. `Fgd` is that original
measure over compute slices. `FirstFit` and `BestFit` are the usual baselines.

All rules are pure functions: they distinguish GPUs by their layout alone, so only the distinct layouts in a cluster, of
which there are few, are examined, each with the first GPU that has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.layout import EMPTY, Layout, Slot
from slurm_migbatch.mig.planning import capacity, choose
from slurm_migbatch.mig.profile import Profile

Mix = tuple[tuple[Profile, float], ...]
"""Frequency of requests for each profile: weights of any scale, sorted by profile."""


def mix(asked: Mapping[Profile, float]) -> Mix:
    """Return the mix of requests, with weights that sum to 1; raises ValueError if there are no requests."""
    total = float(sum(asked.values()))
    if total <= 0 or any(weight < 0 for weight in asked.values()):
        raise ValueError("a mix needs weights of 0 or more, not all of them 0")
    return tuple(sorted((profile, weight / total) for profile, weight in asked.items() if weight))


class PlacementRule(Protocol):
    """A rule to choose a place."""

    def place(self, geometry: Geometry, layouts: Mapping[Layout, int], profile: Profile) -> tuple[Layout, Slot] | None:
        """Return the GPU's layout and the new slot; None if no GPU has room.

        `layouts` are the distinct layouts in the cluster, each with the index of the first GPU that has it.
        """
        ...


class FirstFit:
    """The first GPU with room, and on it the place with the lowest start."""

    def place(self, geometry: Geometry, layouts: Mapping[Layout, int], profile: Profile) -> tuple[Layout, Slot] | None:
        """See `PlacementRule`."""
        for layout in sorted(layouts, key=lambda layout: layouts[layout]):
            slots = places(geometry, layout, profile)
            if slots:
                return layout, slots[0]
        return None


@dataclass(frozen=True)
class BestFit:
    """The GPU with the fewest free compute slices that has room.

    On it, the place with the lowest start or, with `careful`, the one that keeps the largest useful space
    (`mig.planning`).
    """

    careful: bool = False

    def place(self, geometry: Geometry, layouts: Mapping[Layout, int], profile: Profile) -> tuple[Layout, Slot] | None:
        """See `PlacementRule`."""
        for layout in sorted(layouts, key=lambda layout: (free_slices(geometry, layout), layouts[layout])):
            slots = places(geometry, layout, profile)
            if slots:
                slot = choose(geometry, layout, profile) if self.careful else slots[0]
                assert slot is not None
                return layout, slot
        return None


class _Least:
    """The place at which a measure of a GPU grows least; of equal ones the best fit. Results are cached by layout."""

    measure: Callable[[Geometry, Layout, Mix], float]

    def __init__(self, asked: Mix) -> None:
        self.mix = asked
        self._known: dict[tuple[Geometry, Layout, Profile], tuple[float, int, Slot] | None] = {}

    def place(self, geometry: Geometry, layouts: Mapping[Layout, int], profile: Profile) -> tuple[Layout, Slot] | None:
        """See `PlacementRule`."""
        best: tuple[tuple[float, int, int], Layout, Slot] | None = None
        for layout, gpu in layouts.items():
            ranked = self._on(geometry, layout, profile)
            if ranked is not None:
                key = (ranked[0], ranked[1], gpu)
                if best is None or key < best[0]:
                    best = (key, layout, ranked[2])
        return None if best is None else (best[1], best[2])

    def _on(self, geometry: Geometry, layout: Layout, profile: Profile) -> tuple[float, int, Slot] | None:
        """Return growth of the measure, free slices, and the best place on GPUs of this layout; None without room."""
        key = (geometry, layout, profile)
        if key not in self._known:
            before, measure = type(self).measure(geometry, layout, self.mix), type(self).measure
            grown = [
                (round(measure(geometry, layout.add(slot), self.mix) - before, 9), slot)
                for slot in places(geometry, layout, profile)
            ]
            least = min(grown, default=None)
            self._known[key] = least and (least[0], free_slices(geometry, layout), least[1])
        return self._known[key]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{profile}: {weight:.3g}' for profile, weight in self.mix)})"


@lru_cache(maxsize=1 << 16)
def places(geometry: Geometry, layout: Layout, profile: Profile) -> tuple[Slot, ...]:
    """Return every place for one more slice on a GPU, in order of the start; raises UnknownProfile."""
    return tuple(slot for slot in sorted(geometry.info(profile).slots) if geometry.fits(layout, slot))


@lru_cache(maxsize=1 << 16)
def free_slices(geometry: Geometry, layout: Layout) -> int:
    """Return the number of compute slices that no slot has."""
    return geometry.compute_slices - sum(geometry.info(profile).compute_slices for profile in layout.profiles)


@lru_cache(maxsize=1 << 16)
def wasted(geometry: Geometry, layout: Layout, asked: Mix) -> float:
    """Return FGD's measure: the expected number of free compute slices that the next request of the mix cannot use."""
    free = free_slices(geometry, layout)
    return sum(weight * free for profile, weight in asked if not capacity(geometry, layout, profile))


@lru_cache(maxsize=1 << 16)
def unplaceable(geometry: Geometry, layout: Layout, asked: Mix) -> float:
    """Return the share of the mix that the GPU cannot hold, 0 (empty) to 1 (nothing of it fits).

    sum(w[p] * c[p] * (n[p](empty) - n[p](layout))) / sum(w[p] * c[p] * n[p](empty)), with the weight w, the compute
    slices c, and n[p], the largest number of slices of profile p that fit.
    """
    lost = possible = 0.0
    for profile, weight in asked:
        worth = weight * geometry.info(profile).compute_slices
        empty_count = capacity(geometry, EMPTY, profile)
        lost += worth * (empty_count - capacity(geometry, layout, profile))
        possible += worth * empty_count
    return lost / possible


class Fgd(_Least):
    """The place with the least growth of the free slices that the mix cannot use (`wasted`)."""

    measure = staticmethod(wasted)


class LeastLoss(_Least):
    """The place with the least growth of the demand that cannot be placed (`unplaceable`)."""

    measure = staticmethod(unplaceable)

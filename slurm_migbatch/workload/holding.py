"""Check whether the GPUs of one node can ever hold the slices that a job requests together.

Layouts of a GPU are described by footprints: profiles with the same placements and compute slices are interchangeable.
Ignored details (media engines shared by variants of a profile) make the answer too generous, never too strict. A search
over several GPUs stops after `STEPS` and then assumes that they fit: the job pends, as without the check.
`gres_templates/migbatch_core.lua.j2` has the same search, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from slurm_migbatch.mig.geometry import Geometry, ProfileInfo

STEPS: Final = 50
"""Maximum number of GPUs in one search."""

Need = tuple[tuple[str, int], ...]
"""GRES types and their counts, in the order of the request."""


@dataclass(frozen=True)
class Footprint:
    """The resources of one profile: the number of its footprint, compute and memory slices, and its limit."""

    number: int
    compute: int
    memory: int
    most: int


@dataclass(frozen=True)
class GpuLayouts:
    """What one GPU can hold: its profiles by GRES type, and the footprints of its maximal layouts."""

    footprints: Mapping[str, Footprint]
    layouts: tuple[tuple[int, ...], ...]
    compute: int
    memory: int

    def without(self, layout: Sequence[int], need: Need) -> Need:
        """Return the rest of `need` after this GPU, in this layout, has taken what it can."""
        free_counts, remaining = list(layout), dict(need)
        candidates = [
            (self.footprints[kind].most, place, kind) for place, (kind, _) in enumerate(need) if self.has(kind)
        ]
        for most, _, kind in sorted(candidates):  # profiles with the lowest limit per GPU first
            number = self.footprints[kind].number
            taken = min(free_counts[number], remaining[kind], most)
            free_counts[number] -= taken
            remaining[kind] -= taken
        return tuple((kind, count) for kind, count in remaining.items() if count)

    def has(self, kind: str) -> bool:
        """Return whether the GPU has a profile of this GRES type."""
        return kind in self.footprints


@lru_cache(maxsize=256)
def layouts_of(geometry: Geometry) -> GpuLayouts:
    """Return what a GPU of this geometry can hold."""
    numbers: dict[tuple[object, ...], int] = {}
    footprints: dict[str, Footprint] = {}
    for info in geometry.profiles:
        number = numbers.setdefault((info.placements, info.compute_slices), len(numbers))
        footprints[info.profile.gres_type] = Footprint(
            number, info.compute_slices, info.memory_slices, info.max_instances
        )
    first = {footprints[info.profile.gres_type].number: info for info in reversed(geometry.profiles)}
    most = [
        max(footprint.most for footprint in footprints.values() if footprint.number == number)
        for number in range(len(numbers))
    ]
    possible = set(_layouts([first[number] for number in range(len(numbers))], geometry.compute_slices, most))
    fullest = [
        layout
        for layout in possible
        if not any(other != layout and all(a <= b for a, b in zip(layout, other, strict=True)) for other in possible)
    ]
    layouts = tuple(sorted(fullest, reverse=True))
    return GpuLayouts(footprints, layouts, geometry.compute_slices, geometry.memory_slices)


def _layouts(infos: Sequence[ProfileInfo], compute: int, most: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the counts by footprint of every possible layout of a GPU."""
    slots = [(number, place.mask) for number, info in enumerate(infos) for place in info.placements]
    seen: set[tuple[tuple[int, ...], int, int]] = set()
    stack = [((0,) * len(infos), 0, compute, 0)]
    while stack:
        counts, mask, free, start = stack.pop()
        yield counts
        for at in range(start, len(slots)):
            number, bits = slots[at]
            if mask & bits or infos[number].compute_slices > free or counts[number] >= most[number]:
                continue
            extended = (*counts[:number], counts[number] + 1, *counts[number + 1 :])
            state = (extended, mask | bits, at + 1)
            if state not in seen:
                seen.add(state)
                stack.append((extended, mask | bits, free - infos[number].compute_slices, at + 1))


def can_hold(gpus: Sequence[GpuLayouts], need: Mapping[str, int]) -> bool:
    """Return whether these GPUs, all empty, could hold so many slices of each GRES type at once."""
    return _HoldingSearch(gpus).holds(0, tuple(need.items()))


class _HoldingSearch:
    def __init__(self, gpus: Sequence[GpuLayouts]) -> None:
        self._gpus, self._steps = gpus, 0

    def holds(self, at: int, need: Need) -> bool:
        if not need:
            return True
        if at == len(self._gpus) or not self._sums_allow(self._gpus[at:], need):
            return False
        self._steps += 1
        if self._steps > STEPS:
            return True
        gpu, tried = self._gpus[at], {need}
        for layout in gpu.layouts:
            remaining = gpu.without(layout, need)
            if remaining not in tried:
                tried.add(remaining)
                if self.holds(at + 1, remaining):
                    return True
        return len(tried) == 1 and self.holds(at + 1, need)

    @staticmethod
    def _sums_allow(gpus: Sequence[GpuLayouts], need: Need) -> bool:
        """Return whether the sums of slices over all GPUs allow it."""
        compute = memory = 0
        for kind, count in need:
            able = [gpu.footprints[kind] for gpu in gpus if gpu.has(kind)]
            if count > sum(footprint.most for footprint in able):
                return False
            compute += count * min(footprint.compute for footprint in able)
            memory += count * min(footprint.memory for footprint in able)
        return compute <= sum(gpu.compute for gpu in gpus) and memory <= sum(gpu.memory for gpu in gpus)

"""Enumerate the layouts of a GPU."""

from __future__ import annotations

from collections.abc import Iterator

from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.layout import EMPTY, Layout
from slurm_migbatch.mig.profile import Profile


def layouts(geometry: Geometry) -> Iterator[Layout]:
    """Yield every legal layout of the GPU once, the empty one first.

    Slots are added in order of their start, so no layout is built twice. Every part of a legal layout is legal, so none
    is missed. An A100 has a few thousand layouts.
    """
    slots = sorted(geometry.slots, key=lambda s: (s.placement, s.profile))

    def extend(layout: Layout, index: int) -> Iterator[Layout]:
        yield layout
        for i in range(index, len(slots)):
            if geometry.fits(layout, slots[i]):
                yield from extend(layout.add(slots[i]), i + 1)

    return extend(EMPTY, 0)


def partitions(geometry: Geometry) -> Iterator[Layout]:
    """Yield every layout to which nothing can be added, one for each set of profiles.

    These are the candidates for a static partition. Profiles with a suffix (media engines) are not used.
    """
    seen: set[tuple[Profile, ...]] = set()
    plain = [slot for slot in geometry.slots if not slot.profile.suffix]
    for layout in layouts(geometry):
        profiles = layout.profiles
        if profiles in seen or any(profile.suffix for profile in profiles):
            continue
        if not any(geometry.fits(layout, slot) for slot in plain):
            seen.add(profiles)
            yield layout

"""Enumerate the layouts of a GPU."""

from __future__ import annotations

from collections.abc import Iterator

from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.layout import EMPTY, Layout


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

"""Represent the place of an instance on a GPU: an interval of memory slices."""

from __future__ import annotations

from typing import NamedTuple


class Placement(NamedTuple):
    """`size` memory slices from `start` on; written `start:size`, as in nvidia-smi.

    The unit is that of the GPU's placements: 8 memory slices on an A100, 12 placement units on an RTX PRO 6000.
    """

    start: int
    size: int

    @property
    def end(self) -> int:
        """The first memory slice after it."""
        return self.start + self.size

    @property
    def mask(self) -> int:
        """The occupied memory slices as bits, slice 0 the lowest."""
        return ((1 << self.size) - 1) << self.start

    def overlaps(self, other: Placement) -> bool:
        """Return whether the two share a memory slice."""
        return self.start < other.start + other.size and other.start < self.start + self.size

    def __str__(self) -> str:
        return f"{self.start}:{self.size}"

"""Represent the place of an instance on a GPU: an interval of memory slices."""

from __future__ import annotations

import re
from typing import NamedTuple

_TEXT = re.compile(r"([0-9]{1,3}):([1-9][0-9]{0,2})")


class PlacementError(ValueError):
    """A text that is not `start:size`."""


class Placement(NamedTuple):
    """`size` memory slices from `start` on; written `start:size`, as in nvidia-smi.

    The unit is that of the GPU's placements: 8 memory slices on an A100, 12 placement units on an RTX PRO 6000.
    """

    start: int
    size: int

    @classmethod
    def parse(cls, text: str) -> Placement:
        """Read `4:4`; raises PlacementError."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise PlacementError(
                f"{text[:40]!a} is not a placement: write start:size in memory slices, for example 4:4"
            )
        return cls(int(match[1]), int(match[2]))

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

    def contains(self, other: Placement) -> bool:
        """Return whether `other` lies entirely inside this one."""
        return self.start <= other.start and other.start + other.size <= self.start + self.size

    def __str__(self) -> str:
        return f"{self.start}:{self.size}"

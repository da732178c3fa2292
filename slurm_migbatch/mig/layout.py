"""Represent slots and layouts: the placement of profiles on one GPU.

A layout is a finite set of slots that do not overlap. Its `Geometry` decides whether a GPU allows it; every limit
there is an upper bound, so each part of a legal layout is legal too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from slurm_migbatch.mig._frozen import Frozen
from slurm_migbatch.mig.placement import Placement
from slurm_migbatch.mig.profile import Profile


class LayoutError(ValueError):
    """Slots that are not possible together, or not on this GPU; the message says which and why."""


class Slot(NamedTuple):
    """A profile at a placement; written `2g.20gb@4:2`."""

    profile: Profile
    placement: Placement

    @classmethod
    def of(cls, profile: str, start: int, size: int) -> Slot:
        """Build a slot from plain values, as the wire form `["2g.20gb", 4, 2]` holds them; raises LayoutError."""
        if not (type(start) is int and type(size) is int and 0 <= start < 1000 and 1 <= size < 1000):
            raise LayoutError(f"{start!r}:{size!r} is not a placement: start must be 0 or more and size 1 or more")
        return _slot(profile, start, size)

    def __str__(self) -> str:
        return f"{self.profile}@{self.placement}"


@lru_cache(maxsize=4096)
def _slot(profile: str, start: int, size: int) -> Slot:
    """Return a slot. Equal slots get the same object, which makes comparisons fast."""
    return Slot(Profile.parse(profile), Placement(start, size))


class Layout(Frozen):
    """A set of slots on one GPU, no two of which overlap.

    Equal sets are equal layouts, in any order. `slots` is sorted. Operations return new
    layouts and raise LayoutError if the result would overlap.
    """

    __slots__ = ("_hash", "mask", "slots")
    _hash: int

    slots: tuple[Slot, ...]
    mask: int  # occupied memory slices as bits, slice 0 the lowest

    def __init__(self, slots: Iterable[Slot] = ()) -> None:
        ordered = tuple(sorted(set(slots)))
        mask = 0
        for slot in ordered:
            bits = slot.placement.mask
            if mask & bits:
                other = next(s for s in ordered if s is not slot and s.placement.overlaps(slot.placement))
                raise LayoutError(f"{slot} and {other} overlap")
            mask |= bits
        self._init(slots=ordered, mask=mask, _hash=hash(ordered))

    def add(self, slot: Slot) -> Layout:
        """Return the layout with one more slot; adding an existing one changes nothing."""
        return self if slot in self.slots else Layout((*self.slots, slot))

    def remove(self, slot: Slot) -> Layout:
        """Return the layout without this slot; raises LayoutError if it is not part of it."""
        if slot not in self.slots:
            raise LayoutError(f"{slot} is not in the layout {self}")
        return self._part([s for s in self.slots if s != slot])

    def union(self, other: Layout) -> Layout:
        """Return the layout with the slots of both."""
        if not other.slots:
            return self
        return Layout((*self.slots, *other.slots)) if self.slots else other

    def minus(self, other: Layout) -> Layout:
        """Return the layout without the slots of `other`."""
        return self._part([s for s in self.slots if s not in other.slots]) if self.mask & other.mask else self

    def clear_of(self, mask: int) -> Layout:
        """Return the layout of the slots that touch none of these memory slices."""
        return self._part([s for s in self.slots if not s.placement.mask & mask]) if self.mask & mask else self

    def _part(self, slots: list[Slot]) -> Layout:
        """Return the layout of some of these slots, in their order: no check is needed."""
        if len(slots) == len(self.slots):
            return self
        mask = 0
        for slot in slots:
            mask |= slot.placement.mask
        part, ordered = Layout.__new__(Layout), tuple(slots)
        part._init(slots=ordered, mask=mask, _hash=hash(ordered))
        return part

    def free_of(self, placement: Placement) -> bool:
        """Return whether no slot touches the placement."""
        return not self.mask & placement.mask

    def counts(self) -> Counter[Profile]:
        """Return how many slots each profile has."""
        return Counter(slot.profile for slot in self.slots)

    @property
    def profiles(self) -> tuple[Profile, ...]:
        """The profile of every slot, sorted, with repetitions."""
        return tuple([slot.profile for slot in self.slots])

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.slots)

    def __len__(self) -> int:
        return len(self.slots)

    def __contains__(self, slot: object) -> bool:
        return slot in self.slots

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        return self is other or (self._hash == other._hash and self.slots == other.slots)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[Layout], tuple[tuple[Slot, ...]]]:
        return (Layout, (self.slots,))

    def __repr__(self) -> str:
        return f"Layout({str(self)!r})"

    def __str__(self) -> str:
        return " ".join(str(s) for s in sorted(self.slots, key=lambda s: s.placement)) or "(empty)"


EMPTY = Layout()


@lru_cache(maxsize=1 << 15)
def layout_of(slots: tuple[Slot, ...]) -> Layout:
    """Return the layout of these slots. Equal tuples get the same object."""
    return Layout(slots)

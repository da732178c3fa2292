"""Compute how one sequence became the next: which stretches remain, and what came between them.

Of a queue of some hundred thousand rows a few hundred change between two listings. Unchanged rows are compared by
identity only.
"""

from __future__ import annotations

from operator import indexOf, is_
from typing import Final, Generic, NamedTuple, TypeVar

T = TypeVar("T")

_STRETCH: Final = 1024
"""Number of objects compared at once."""
_NEAR: Final = 64
"""First search distance for the continuation of a stretch."""


class Edit(NamedTuple, Generic[T]):
    """From `start` to `end` the previous sequence remains; then the `new` ones follow."""

    start: int
    end: int
    new: tuple[T, ...]


def edits(before: tuple[T, ...], now: tuple[T, ...]) -> list[Edit[T]]:
    """Return the edits from `before` to `now`.

    A different object is new, even if it is equal; one that has moved is removed, and new elsewhere.
    """
    if not before:
        return [Edit(0, 0, now)] if now else []
    found: list[Edit[T]] = []
    i = j = 0
    while i < len(before) or j < len(now):
        start, alike = i, _alike(before, i, now, j)
        i, j = i + alike, j + alike
        left_out, came = _gap(before, i, now, j)
        found.append(Edit(start, i, now[j : j + came]))
        i, j = i + left_out, j + came
    return found


def _alike(before: tuple[T, ...], i: int, now: tuple[T, ...], j: int) -> int:
    """Return how many objects are the same from `i` and `j` on."""
    most, alike = min(len(before) - i, len(now) - j), 0
    while alike < most:
        size = min(_STRETCH, most - alike)
        earlier, later = before[i + alike : i + alike + size], now[j + alike : j + alike + size]
        if not all(map(is_, earlier, later)):
            return alike + indexOf(map(is_, earlier, later), False)
        alike += size
    return alike


def _gap(before: tuple[T, ...], i: int, now: tuple[T, ...], j: int) -> tuple[int, int]:
    """Return how many of the next objects were removed, and how many added, before one that remains."""
    near = _NEAR
    while True:
        places = {id(row): place for place, row in enumerate(before[i : i + near])}
        for came, row in enumerate(now[j : j + near]):
            if (place_before := places.get(id(row))) is not None:
                return place_before, came
        if near >= max(len(before) - i, len(now) - j):
            return len(before) - i, len(now) - j
        near *= 4

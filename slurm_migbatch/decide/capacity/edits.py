"""Compute the edits from one sequence to the next: which stretches remain, and what was inserted between them.

Of a queue of some hundred thousand rows a few hundred change between two listings. Unchanged rows are compared by
identity only.
"""

from __future__ import annotations

from operator import indexOf, is_
from typing import Any, Final, NamedTuple, TypeVar

T = TypeVar("T")

_STRETCH: Final = 1024
"""Number of objects compared at once."""
_NEAR: Final = 64
"""First search distance for the continuation of a stretch."""


class Edit(NamedTuple):
    """From `start` to `end` the previous sequence remains; then the `new` ones follow."""

    start: int
    end: int
    new: tuple[Any, ...]


def edits(before: tuple[T, ...], now: tuple[T, ...]) -> list[Edit]:
    """Return the edits from `before` to `now`.

    A different object is new, even if it is equal; one that has moved is removed, and new elsewhere.
    """
    if not before:
        return [Edit(0, 0, now)] if now else []
    result: list[Edit] = []
    i = j = 0
    while i < len(before) or j < len(now):
        start, length = i, _common_length(before, i, now, j)
        i, j = i + length, j + length
        removed, inserted = _gap(before, i, now, j)
        result.append(Edit(start, i, now[j : j + inserted]))
        i, j = i + removed, j + inserted
    return result


def _common_length(before: tuple[T, ...], i: int, now: tuple[T, ...], j: int) -> int:
    """Return how many objects are the same from `i` and `j` on."""
    max_length, length = min(len(before) - i, len(now) - j), 0
    while length < max_length:
        size = min(_STRETCH, max_length - length)
        earlier, later = before[i + length : i + length + size], now[j + length : j + length + size]
        if not all(map(is_, earlier, later)):
            return length + indexOf(map(is_, earlier, later), False)
        length += size
    return length


def _gap(before: tuple[T, ...], i: int, now: tuple[T, ...], j: int) -> tuple[int, int]:
    """Return how many of the next objects were removed, and how many added, before one that remains."""
    distance = _NEAR
    while True:
        positions = {id(row): position for position, row in enumerate(before[i : i + distance])}
        for inserted, row in enumerate(now[j : j + distance]):
            if (removed := positions.get(id(row))) is not None:
                return removed, inserted
        if distance >= max(len(before) - i, len(now) - j):
            return len(before) - i, len(now) - j
        distance *= 4

"""How one sequence became the next: which stretches of it stay, and what came between them.

Of a queue of some hundred thousand rows a few hundred differ from one look to the next. Stretches are compared as a
whole, which looks at no more than the identity of what stays.
"""

from __future__ import annotations

import operator
from typing import Final, Generic, NamedTuple, TypeVar

T = TypeVar("T")

_NEAR: Final = 64
"""How many objects are compared at first, and how far ahead it is looked for where a stretch goes on."""


class Edit(NamedTuple, Generic[T]):
    """From `start` to `end` the sequence before stays; then come the `new` ones."""

    start: int
    end: int
    new: tuple[T, ...]


def edits(before: tuple[T, ...], now: tuple[T, ...]) -> list[Edit[T]]:
    """Return how `now` is made of `before`, up to equality; what has moved is gone from its place and new elsewhere."""
    found: list[Edit[T]] = []
    i = j = 0
    while i < len(before) or j < len(now):
        start, alike = i, _alike(before, i, now, j)
        i, j = i + alike, j + alike
        gone, came = _gap(before[i : i + _NEAR], now[j : j + _NEAR])
        found.append(Edit(start, i, now[j : j + came]))
        i, j = i + gone, j + came
    return found


def _alike(before: tuple[T, ...], i: int, now: tuple[T, ...], j: int) -> int:
    """Return how many objects are the same from `i` and `j` on."""
    begun, size = i, _NEAR
    while (most := min(size, len(before) - i, len(now) - j)) > 0 and before[i : i + most] == now[j : j + most]:
        i, j, size = i + most, j + most, 2 * size
    while most > _NEAR:  # two of the next so many differ
        most = (most + 1) // 2
        if before[i : i + most] == now[j : j + most]:
            i, j = i + most, j + most
    differ = map(operator.is_not, before[i : i + most], now[j : j + most])
    return i - begun + next((place for place, others in enumerate(differ) if others), most)


def _gap(before: tuple[T, ...], now: tuple[T, ...]) -> tuple[int, int]:
    """Return how many of the next objects are gone, and how many came, before one that stays."""
    places = {id(one): place for place, one in enumerate(before)}
    for came, one in enumerate(now):
        if (gone := places.get(id(one))) is not None:
            return gone, came
    return len(before), len(now)

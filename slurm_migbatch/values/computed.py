"""Compute the values of a mapping when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

V = TypeVar("V")


class Computed(Mapping[str, V]):
    """A mapping whose keys are known, and whose values are computed once, each when it is first read."""

    def __init__(self, keys: Iterable[str], compute: Callable[[str], V]) -> None:
        """`compute` returns the value of a key, always the same one: threads may call it at the same time."""
        self._keys, self._compute = dict.fromkeys(keys), compute
        self._values: dict[str, V] = {}

    def __getitem__(self, key: str) -> V:
        if key not in self._values:
            if key not in self._keys:
                raise KeyError(key)
            self._values[key] = self._compute(key)
        return self._values[key]

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

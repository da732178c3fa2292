"""What changed of an ordered mapping, as JSON, and the mapping again: for rows of jobs and nodes from round to round.

A delta is `{"gone": keys, "new": [[key, value]], "changed": [[key, fields]], "at": [[index, key]]}`, each only where
there is any: what is left of the old order is kept, and every other key stands where `at` says.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from slurm_migbatch.decide.recording.codec import Codec, CodecError, Json

K = TypeVar("K", int, str)


class Delta(Generic[K]):
    """Writes and reads what changed of a mapping; keeps the mapping as it was last.

    Args:
        codec: writes values.
        kind: their type.
        by_field: whether of a value that changed only the fields are written that did.
    """

    def __init__(self, codec: Codec, kind: Any, *, by_field: bool = False) -> None:
        self._codes = codec.codes(kind)
        self._fields = codec.fields(kind) if by_field else None
        self._last: dict[K, Any] = {}

    @property
    def current(self) -> Mapping[K, Any]:
        """The mapping as it was last written or read."""
        return self._last

    def write(self, now: Mapping[K, Any]) -> Json:
        """Return the changes since the last call; empty if there are none."""
        before, self._last = self._last, dict(now)
        found: dict[str, Any] = {}
        if removed := [key for key in before if key not in now]:
            found["gone"] = removed
        new, changed = [], []
        for key, value in now.items():
            old = before.get(key)
            if old is None:
                new.append([key, self._codes.encode(value)])
            elif value is not old and value != old:
                changed.append([key, self._change(old, value)])
        if new:
            found["new"] = new
        if changed:
            found["changed"] = changed
        if moved := _moved(list(before), list(now)):
            found["at"] = moved
        return found

    def _change(self, old: Any, value: Any) -> Json:
        if self._fields is None:
            return self._codes.encode(value)
        return {
            name: field.encode(getattr(value, name))
            for name, field in self._fields.items()
            if getattr(value, name) != getattr(old, name)
        }

    def read(self, delta: Json) -> Mapping[K, Any]:
        """Return the mapping after a delta.

        Raises:
            CodecError: it does not apply to the previous mapping.
        """
        if not delta:
            return self._last
        try:
            self._last = self._read(delta)
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise CodecError(f"cannot apply a change: {error}") from error
        return self._last

    def _read(self, delta: Mapping[str, Any]) -> dict[K, Any]:
        values = dict(self._last)
        for key in delta.get("gone", ()):
            del values[key]
        for key, fields in delta.get("changed", ()):
            values[key] = self._changed(values[key], fields)
        values.update({key: self._codes.decode(value) for key, value in delta.get("new", ())})
        moved = delta.get("at", ())
        away = {key for _, key in moved}
        order = [key for key in values if key not in away]
        for index, key in moved:
            order.insert(index, key)
        return {key: values[key] for key in order}

    def _changed(self, old: Any, fields: Json) -> Any:
        if self._fields is None:
            return self._codes.decode(fields)
        return dataclasses.replace(old, **{name: self._fields[name].decode(value) for name, value in fields.items()})


def _moved(before: Sequence[K], now: Sequence[K]) -> list[list[Any]]:
    """Return the keys that do not stand where the old order has them, with their new index, ascending."""
    if before == now:
        return []
    place = {key: index for index, key in enumerate(before)}
    kept = _longest_rising([place.get(key) for key in now])
    return [[index, key] for index, key in enumerate(now) if index not in kept]


def _longest_rising(numbers: Sequence[int | None]) -> set[int]:
    """Return indices of a longest rising subsequence; None is no part of any."""
    ends: list[int] = []  # of the rising subsequences of each length, the least number that one ends in
    last: list[int] = []  # and its index
    previous: dict[int, int] = {}
    for index, number in enumerate(numbers):
        if number is None:
            continue
        length = bisect_left(ends, number)
        if length:
            previous[index] = last[length - 1]
        ends[length : length + 1] = [number]
        last[length : length + 1] = [index]
    found: set[int] = set()
    at = last[-1] if last else None
    while at is not None:
        found.add(at)
        at = previous.get(at)
    return found

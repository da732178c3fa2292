"""Encode changes of an ordered mapping as JSON and apply them: for rows of jobs and nodes from round to round.

A delta is `{"gone": keys, "new": [[key, value]], "changed": [[key, fields]], "at": [[index, key]]}`; empty parts are
omitted. Keys in `at` are placed at that index. The others keep their old order, and new ones follow in the order of
`new`.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Generic, TypeVar

from slurm_migbatch.decide.capacity.edits import Edit, edits
from slurm_migbatch.decide.recording.codec import Codec, CodecError, Json

K = TypeVar("K", int, str)


class RowDelta(Generic[K]):
    """Write and read changes of a sequence of rows; unchanged stretches are recognised by their objects' identity.

    Of a changed row only the changed fields are written.

    Args:
        kind: their type, a dataclass.
    """

    def __init__(self, codec: Codec, kind: Any, key: Callable[[Any], K]) -> None:
        self._codes = codec.codes(kind)
        self._fields = codec.fields(kind) if type(kind) is type and dataclasses.is_dataclass(kind) else {}
        self._key: Callable[[Any], K] = key
        self._rows: tuple[Any, ...] = ()
        self._keys: set[K] = set()
        #: the mapping as it was last read
        self._values: dict[K, Any] = {}

    def write_rows(self, now: tuple[Any, ...]) -> Json:
        """Return the changes since the last call; empty if there are none.

        Raises:
            CodecError: two rows have the same key.
        """
        key, before = self._key, self._rows
        row_edits: list[Edit] = edits(before, now)
        ends = [*[edit.start for edit in row_edits[1:]], len(before)]
        gaps = [range(edit.end, end) for edit, end in zip(row_edits, ends, strict=False)]
        old = {key(before[place]): place for gap in gaps for place in gap}
        new_rows = {key(row): row for edit in row_edits for row in edit.new}
        self._rows = now
        self._keys.difference_update(old)
        self._keys.update(new_rows)
        if len(self._keys) != len(now):
            raise CodecError("a job or a node is listed twice")
        in_both = [(name, before[old[name]], row) for name, row in new_rows.items() if name in old]
        changes = {
            "gone": [name for name in old if name not in new_rows],
            "new": [[name, self._encoded(row)] for name, row in new_rows.items() if name not in old],
            "changed": [[name, self._change(was, row)] for name, was, row in in_both if row != was],
            "at": self._moved_rows(row_edits, gaps, old) if before else [],
        }
        return {name: listed for name, listed in changes.items() if listed}

    def read(self, delta: Json) -> Mapping[K, Any]:
        """Return the mapping of keys to rows after a delta.

        Raises:
            CodecError: it does not apply to the previous mapping.
        """
        if not delta:
            return self._values
        try:
            self._values = self._read(delta)
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise CodecError(f"cannot apply a change: {error}") from error
        return self._values

    def _read(self, delta: Mapping[str, Any]) -> dict[K, Any]:
        values = dict(self._values)
        for key in delta.get("gone", ()):
            del values[key]
        for key, fields in delta.get("changed", ()):
            values[key] = self._changed(values[key], fields)
        values.update({key: self._codes.decode(value) for key, value in delta.get("new", ())})
        moved = delta.get("at", ())
        moved_keys = {key for _, key in moved}
        order = [key for key in values if key not in moved_keys]
        for index, key in moved:
            order.insert(index, key)
        return {key: values[key] for key in order}

    def _encoded(self, row: Any) -> Json:
        return self._codes.encode(row)

    def _change(self, was: Any, row: Any) -> Json:
        return {
            name: field.encode(getattr(row, name))
            for name, field in self._fields.items()
            if getattr(row, name) != getattr(was, name)
        }

    def _changed(self, old: Any, data: Json) -> Any:
        return dataclasses.replace(old, **{name: self._fields[name].decode(value) for name, value in data.items()})

    def _moved_rows(self, found: Sequence[Edit], gaps: Sequence[range], old: Mapping[K, int]) -> list[list[Any]]:
        """Return the keys of new rows and of rows that moved to another stretch, with their new index."""
        moved: list[list[Any]] = []
        index = 0
        for edit, gap in zip(found, gaps, strict=True):
            index += edit.end - edit.start
            names = [self._key(row) for row in edit.new]
            places = [old.get(name) for name in names]
            kept = _longest_rising([place if place is not None and place in gap else None for place in places])
            moved += [[index + i, name] for i, name in enumerate(names) if i not in kept]
            index += len(names)
        return moved


class Delta(RowDelta[K]):
    """Write and read changes of a mapping: its items are the rows, and a changed value is written as a whole."""

    def __init__(self, codec: Codec, kind: Any) -> None:
        super().__init__(codec, kind, itemgetter(0))
        self._items: dict[K, tuple[K, Any]] = {}

    def write(self, now: Mapping[K, Any]) -> Json:
        """Return the changes since the last call; empty if there are none."""
        last = self._items
        self._items = {
            key: item if (item := last.get(key)) is not None and item[1] is value else (key, value)
            for key, value in now.items()
        }
        return self.write_rows(tuple(self._items.values()))

    def _encoded(self, row: Any) -> Json:
        return self._codes.encode(row[1])

    def _change(self, _was: Any, row: Any) -> Json:
        return self._codes.encode(row[1])

    def _changed(self, _old: Any, data: Json) -> Any:
        return self._codes.decode(data)


def _longest_rising(numbers: Sequence[int | None]) -> set[int]:
    """Return the indices of a longest rising subsequence, which has no None."""
    ends: list[int] = []  # for each length the least number in which a rising subsequence of that length ends
    last: list[int] = []  # and the index of that number
    previous: dict[int, int] = {}
    for index, number in enumerate(numbers):
        if number is None:
            continue
        length = bisect_left(ends, number)
        if length:
            previous[index] = last[length - 1]
        ends[length : length + 1] = [number]
        last[length : length + 1] = [index]
    chosen: set[int] = set()
    position = last[-1] if last else None
    while position is not None:
        chosen.add(position)
        position = previous.get(position)
    return chosen

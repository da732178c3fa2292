"""Compare the unit that a row states in a column of its own with those that its columns have by their names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

_SIZES: Final = {
    **{unit: ("time", size) for unit, size in (("ns", 1e-9), ("us", 1e-6), ("ms", 1e-3), ("s", 1.0), ("min", 60.0))},
    "h": ("time", 3600.0),
    **dict.fromkeys(("b", "byte", "bytes"), ("memory", 2.0 ** (-20))),
    **dict.fromkeys(("kb", "kib"), ("memory", 2.0 ** (-10))),
    **dict.fromkeys(("mb", "mib"), ("memory", 1.0)),
    **dict.fromkeys(("gb", "gib"), ("memory", 1024.0)),
}
"""What a unit measures, and its size in the unit of the common table."""
_WORDS: Final = {
    **dict.fromkeys(("minute", "minutes", "mins"), "min"),
    **dict.fromkeys(("hour", "hours", "hr", "hrs"), "h"),
}
_MEASURED: Final = {"throughput_per_s": "rate", "memory_mib": "memory"}
_NAMES: Final = {
    ("time", 1.0): "s", ("time", 1e-3): "ms", ("time", 1e-6): "us", ("memory", 1.0): "MiB", ("memory", 1024.0): "GiB",
    ("memory", 2.0**-20): "bytes", ("rate", 1.0): "items per second",
}  # fmt: skip
_OF_UNITS: Final = frozenset({"unit", "units"})

Read = Mapping[str, tuple[str, float]]
"""Columns by their plain names: that of the common table, "" if it has none, and the factor to its unit."""


def is_of_units(called: str) -> bool:
    """Return whether a column with this plain name has units."""
    return not _OF_UNITS.isdisjoint(called.split("_"))


def contradicted(called: str, cell: Sequence[str], columns: Read) -> tuple[str, str] | None:
    """Return the plain name of a column that has another unit than a column of units states, and its unit.

    `called`: the plain name of the column of units: with other words it is of the columns that have all of them, else
    of all that measure the same. `cell`: the words of its cell, with usual units.
    """
    stated = _stated([_WORDS.get(word, word) for word in cell])
    if stated is None:
        return None
    about = {*called.split("_")} - _OF_UNITS
    named = [name for name in columns if about and about <= {*name.split("_")} and name != called]
    units = {name: _unit(*columns[name]) for name in named or columns}
    found = {name: unit for name, unit in units.items() if unit and (named or unit[0] == stated[0])}
    if not found or stated in found.values():
        return None
    name = next(iter(found))
    return name, _NAMES[found[name]]


def _stated(words: Sequence[str]) -> tuple[str, float] | None:
    first, last = (_SIZES.get(words[0]), _SIZES.get(words[-1])) if words else (None, None)
    if len(words) == 1 or last is None:
        return first
    return None if first else ("rate", 1.0 / last[1])


def _unit(column: str, factor: float) -> tuple[str, float] | None:
    measured = _MEASURED.get(column, "time" if re.fullmatch(r"(?:latency|ttft|tpot).*_s", column) else "")
    return (measured, factor) if measured else None

"""Bring a table of measurements into the usual layout: a line for each slice, and units in the names of its columns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from slurm_migbatch.profiling.aliases import SLICE, renamed, says_oom
from slurm_migbatch.profiling.jsonfile import MISSING
from slurm_migbatch.profiling.measurement import COLUMNS, OF_SPEED

_FACTORS: Final[Mapping[str, tuple[str, float]]] = {
    "us": ("s", 1e-6), "\N{MICRO SIGN}s": ("s", 1e-6), "\N{GREEK SMALL LETTER MU}s": ("s", 1e-6), "ms": ("s", 1e-3),
    "msec": ("s", 1e-3), "s": ("s", 1.0), "sec": ("s", 1.0), "mb": ("mib", 1.0), "mib": ("mib", 1.0),
    "gb": ("mib", 1024.0), "gib": ("mib", 1024.0),
}  # fmt: skip
_WITH_UNIT: Final = re.compile(rf"([0-9]+(?:\.[0-9]+)?) ?({'|'.join(_FACTORS)})", re.IGNORECASE)


@dataclass(frozen=True)
class TableLayout:
    """How the columns of a table are read.

    `header`: the columns afterwards. `slices`: for a table with columns for each slice their names there, by the name
    without the slice. `units`: the unit of columns whose cells state one.
    """

    header: tuple[str, ...]
    slices: Mapping[str, Mapping[str, str]]
    units: Mapping[str, str]

    @classmethod
    def of(cls, header: tuple[str, ...], rows: Iterable[Mapping[str, str]], *, sliced: bool) -> TableLayout:
        """Return the layout of a table; `sliced`: it has a column with the slices."""
        slices = {} if sliced else _by_slice(header)
        moved = {name for columns in slices.values() for name in columns.values()}
        common = tuple(name for name in header if name not in moved)
        inner = tuple(dict.fromkeys(name for columns in slices.values() for name in columns))
        units = _units(header, rows)
        names = (*common, *inner, *(("profile",) if slices else ()))
        return cls(tuple(_named(name, units) for name in names), slices, units)

    def lines(self, row: Mapping[str, str]) -> Iterator[dict[str, str]]:
        """Yield what a line says of each slice that it has figures of."""
        cells = {name: self._plain(name, text) for name, text in row.items()}
        moved = {name for columns in self.slices.values() for name in columns.values()}
        common = {_named(name, self.units): text for name, text in cells.items() if name not in moved}
        if not self.slices:
            yield common
        for profile, columns in self.slices.items():
            own = {without: cells[name] for without, name in columns.items()}
            if any(text.strip() not in ("", MISSING) for text in own.values()):
                yield {**dict.fromkeys(self.header, ""), **common, **own, "profile": profile}

    def _plain(self, name: str, text: str) -> str:
        match = _WITH_UNIT.fullmatch(text.strip()) if name in self.units else None
        return text if match is None else f"{float(match[1]) * _FACTORS[match[2].lower()][1]:.12g}"


def _by_slice(header: tuple[str, ...]) -> dict[str, dict[str, str]]:
    """Return the columns for each slice, by their names without it; none unless all speeds are among them."""
    slices: dict[str, dict[str, str]] = {}
    for name in header:
        match = SLICE.search(name)
        without = "" if match is None else (name[: match.start()] + name[match.end() :]).strip(" _-")
        if match is not None and _is_read(without):
            slices.setdefault(match[1], {})[without] = name
    speeds = [OF_SPEED.intersection(renamed([*columns])) for columns in slices.values()]
    return slices if all(speeds) and not OF_SPEED.intersection(renamed(header)) else {}


def _units(header: tuple[str, ...], rows: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return the unit of each column that is read under its name with a unit, and whose cells all state theirs."""
    units: dict[str, set[str]] = {name: set() for name in header if not _is_read(name)}
    for row in rows:
        for name, found in units.items():
            if (text := row[name].strip()) and text != MISSING and not says_oom(text):
                match = _WITH_UNIT.fullmatch(text)
                found.add("" if match is None else _FACTORS[match[2].lower()][0])
    stated = {name: found.pop() for name, found in units.items() if len(found) == 1}
    return {name: unit for name, unit in stated.items() if unit and _is_read(f"{name} {unit}")}


def _is_read(name: str) -> bool:
    return renamed([name])[0] in COLUMNS


def _named(name: str, units: Mapping[str, str]) -> str:
    return f"{name} ({units[name]})" if name in units else name

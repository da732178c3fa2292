"""The table of slowdowns of two jobs on one slice: CSV with `app1,app2,slowdown1,slowdown2`.

A line says how many times slower app1 is beside app2, and app2 beside app1.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slurm_migbatch.profiling import csvfile
from slurm_migbatch.profiling.csvfile import LineError, Problems, number

Pairs = dict[tuple[str, str], float]


def read(path: Path) -> Pairs:
    """Return a table. Raises OSError, and TableError naming the bad lines."""
    pairs: Pairs = {}
    problems = Problems()
    for _, pair in csvfile.read(path, problems, _pair):
        pairs |= pair
    problems.check()
    return pairs


def _pair(row: Mapping[str, str]) -> Pairs:
    first, second = (row.get(name, "").strip() for name in ("app1", "app2"))
    if not first or not second:
        raise LineError("app1 and app2 must name the two jobs")
    return {(first, second): _slowdown(row, "slowdown1"), (second, first): _slowdown(row, "slowdown2")}


def _slowdown(row: Mapping[str, str], column: str) -> float:
    value = number(row, column)
    if not 1 <= value <= 1e6:
        raise LineError(f"{column} must be between 1 and 1e+06, not {value:g}")
    return value

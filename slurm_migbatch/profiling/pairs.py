"""The table of slowdowns of two jobs on one slice: CSV with `app1,app2,slowdown1,slowdown2` and perhaps `profile`.

A line says how many times slower app1 is beside app2, and app2 beside app1, on slices of that profile; without a
profile on all slices.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slurm_migbatch.mig.profile import Profile, ProfileError
from slurm_migbatch.profiling import csvfile
from slurm_migbatch.profiling.csvfile import LineError, Problems, number

Pairs = dict[tuple[str, str, str], float]
"""Slowdowns by (application, the one beside it, profile); an empty profile stands for all."""


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
    profile = _profile(row.get("profile") or "")
    return {
        (first, second, profile): _slowdown(row, "slowdown1"),
        (second, first, profile): _slowdown(row, "slowdown2"),
    }


def _profile(text: str) -> str:
    try:
        return str(Profile.parse(text.strip())) if text.strip() else ""
    except ProfileError as error:
        raise LineError(str(error)) from error


def _slowdown(row: Mapping[str, str], column: str) -> float:
    value = number(row, column)
    if not 1 <= value <= 1e6:
        raise LineError(f"{column} must be between 1 and 1e+06, not {value:g}")
    return value

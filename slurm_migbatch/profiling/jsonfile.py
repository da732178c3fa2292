"""Turn JSON with measurements into CSV: an object, a list of objects, or one object a line, nested in any way.

An object that holds lists of objects, or objects by slice (`"1g.10gb": {...}`), is a point for each of them, with its
own values too, except speeds and memory, which are those of all together. The figures of an object in it are its own,
under both names (`"ttft": {"p99_ms": 90}` is the column `ttft p99_ms`), unless its name says nothing (`metrics`). Lists
of figures are ignored, and so are objects without a speed, such as the steps of a training with their losses.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Final

from slurm_migbatch.mig.profile import Profile, ProfileError

ENDS: Final = (".json", ".jsonl", ".ndjson")
FOUND: Final = (*ENDS, *(f"{end}.gz" for end in ENDS))
"""Ends of the names of files in JSON."""
_NAMELESS: Final = frozenset([
    "args", "arguments", "config", "configuration", "measurements", "metrics", "parameters", "params", "performance",
    "result", "results", "settings", "stats", "statistics", "summary",
])  # fmt: skip
_SETUP: Final = frozenset({"environment", "env", "hardware", "info", "metadata", "platform", "setup", "system"})
"""The same of objects that say where something was measured: their speeds and memory are not those of points."""
_OF_ALL: Final = re.compile(r"throughput|latency|time|ttft|tpot|itl|mem|vram|per_s|/s|_m?s$", re.IGNORECASE)
"""Parts of the names of speeds and memory."""
_OF_SPEED: Final = re.compile(r"throughput|latency|time|ttft|tpot|per_s|/s|fps|qps|rps|_s$", re.IGNORECASE)
MISSING: Final = "(missing)"
"""Cell of a figure that an object has not: a speed that is null or empty means that memory ran out, one that is not
there does not.
"""


@lru_cache(maxsize=1)  # a table is read several times
def as_csv(text: str) -> str:
    """Return the points as CSV, one a line in their order. Raises ValueError and RecursionError."""
    found = [point for value in _values(text) for point in _points(value, {})]
    points = [point for point in found if any(map(_OF_SPEED.search, point))] or found
    names = list(dict.fromkeys(name for point in points for name in point))
    written = io.StringIO()
    lines = csv.writer(written, lineterminator="\n")
    lines.writerow(names)
    lines.writerows([point.get(name, MISSING) for name in names] for point in points)
    return written.getvalue()


def _values(text: str) -> Iterable[Any]:
    try:
        return [json.loads(text)]
    except ValueError:
        if "\n" not in text.strip():
            raise
        return [json.loads(line) for line in text.splitlines() if line.strip()]


def _points(value: Any, common: Mapping[str, str]) -> Iterator[dict[str, str]]:
    if isinstance(value, list):
        for entry in value:
            if isinstance(entry, (dict, list)):
                yield from _points(entry, common)
        return
    if not isinstance(value, dict):
        return
    own = {**common}
    inner: list[tuple[Any, str]] = []
    _collect(value, "", own, inner)
    if not inner and own != common:
        yield own
    shared = {name: text for name, text in own.items() if not _OF_ALL.search(name)}
    for entry, profile in inner:
        yield from _points(entry, {**shared, "profile": profile} if profile else shared)


def _collect(value: Mapping[str, Any], before: str, own: dict[str, str], inner: list[tuple[Any, str]]) -> None:
    """Add the figures of an object to `own`, and what are points in it, with their profile or "", to `inner`."""
    for name, entry in value.items():
        bare = before.lower() in _SETUP and not _OF_ALL.search(name)
        called = name if bare else f"{before} {name}".strip()
        if isinstance(entry, dict) and _is_profile(name):
            inner.append((entry, name))
        elif isinstance(entry, dict):
            _collect(entry, before if name.lower() in _NAMELESS else called, own, inner)
        elif not isinstance(entry, list):
            own[called] = "" if entry is None else str(entry)
        elif any(isinstance(item, (dict, list)) for item in entry):
            inner.append((entry, name if _is_profile(name) else ""))


def _is_profile(name: str) -> bool:
    try:
        return bool(Profile.parse(name.lower()))
    except ProfileError:
        return False

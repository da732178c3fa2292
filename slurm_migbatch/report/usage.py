"""Sums of held slices: jobs, slice-hours, GPU-hours, percent and idle time, grouped by any columns.

The database adds up equal rows first (`store.usage`); pandas groups these sums by the requested columns. pandas is
imported only here, so that no other command waits for it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Final

import pandas as pd

from slurm_migbatch.mig.text import printable
from slurm_migbatch.report.errors import ReportError
from slurm_migbatch.report.lines import csv_line, separated_lines, table_lines
from slurm_migbatch.store.usage import HeldSlices

BY: Final = ("user", "account", "partition", "profile", "node", "month")
DEFAULT_BY: Final = ("account", "user")
SCHEMA_VERSION: Final = 1
MOST_MONTHS: Final = 240
CAPACITY, USED = "capacity", "used"
NOT_SAMPLED: Final = "not sampled"
_SUMS: Final = ("slice_hours", "gpu_hours", "sampled_gpu_hours", "idle_gpu_hours")


@dataclass(frozen=True)
class WindowPart:
    """A part of the window: its month (`2026-10`), or "" for all of it; unix seconds."""

    month: str
    start: float
    end: float


@dataclass(frozen=True)
class UsageRow:
    """One row of the result.

    Attributes:
        keys: values of the group columns, in order; empty in the total.
        jobs: runs that held slices; a requeued job has several.
        slice_hours: hours times slices.
        gpu_hours: slice-hours weighted by the share of a GPU (`report.equivalents`).
        percent: of the capacity of its nodes and month, or of all used hours; None if that is 0.
        idle_percent: share of the sampled GPU-hours in which SMs were idle; None if none were sampled.
        sampled_percent: share of GPU-hours in which the use of SMs was sampled.
    """

    keys: tuple[str, ...]
    jobs: int
    slice_hours: float
    gpu_hours: float
    percent: float | None
    idle_percent: float | None
    sampled_percent: float


@dataclass(frozen=True)
class Usage:
    """The result: its rows, their total, and the base of `percent` (CAPACITY or USED)."""

    by: tuple[str, ...]
    rows: tuple[UsageRow, ...]
    total: UsageRow
    percent_of: str


def parse_by(text: str) -> tuple[str, ...]:
    """Return the columns listed in `--by`; unique prefixes are accepted.

    Raises:
        ReportError: a word is not one of the columns.
    """
    words = []
    for word in filter(None, (part.strip().lower() for part in text.split(","))):
        names = [name for name in BY if name.startswith(word)]
        if word not in BY and len(names) != 1:
            raise ReportError(f"--by {word!r}: write some of {', '.join(BY)}")
        words.append(word if word in BY else names[0])
    return tuple(dict.fromkeys(words)) or DEFAULT_BY


def spans(by: Sequence[str], start: float, end: float) -> list[WindowPart]:
    """Return the separately counted parts of the window: months of local time if grouped by month.

    Raises:
        ReportError: there are too many of them.
    """
    if "month" not in by:
        return [WindowPart("", start, end)]
    months: list[WindowPart] = []
    since, moment = start, datetime.fromtimestamp(start)
    while since < end or not months:
        year, month = moment.year + moment.month // 12, moment.month % 12 + 1
        following = datetime(year, month, 1)
        months.append(WindowPart(f"{moment:%Y-%m}", since, min(end, following.timestamp())))
        since, moment = following.timestamp(), following
        if len(months) > MOST_MONTHS:
            raise ReportError(f"--by month shows up to {MOST_MONTHS} months; begin later (-S)")
    return months


def roll_up(
    pieces: Iterable[tuple[WindowPart, HeldSlices]],
    by: Sequence[str],
    equivalent: Callable[[str, int], float],
    capacity: Mapping[str, Mapping[str, float]] | None,
) -> Usage:
    """Add up the held slices by the columns of the result.

    Args:
        pieces: sums from the database, with `by` without profile and month as groups, and the part of the window in
            which slices were held.
        by: columns of the result, names in BY.
        equivalent: share of a GPU, from profile and size in memory slices.
        capacity: GPU-seconds by month ("" if not by month) and node; None if unknown.
    """
    names = [name for name in by if name not in ("profile", "month")]
    table = pd.DataFrame.from_records(
        [
            (*holding.groups, holding.profile, span.month, holding.size, *holding[3:])
            for span, holding in pieces
        ],
        columns=[*names, "profile", "month", "size", "run", "runs", "seconds", "sampled_s", "idle_s"],
    )  # fmt: skip
    shares = {key: equivalent(*key) for key in set(zip(table["profile"], table["size"], strict=True))}
    share = pd.Series([shares[key] for key in zip(table["profile"], table["size"], strict=True)], index=table.index)
    share = share.astype(float)
    table["slice_hours"] = table["seconds"] / 3600
    for name, seconds in (("gpu", "seconds"), ("sampled_gpu", "sampled_s"), ("idle_gpu", "idle_s")):
        table[f"{name}_hours"] = table[seconds] * share / 3600
    used = float(table["gpu_hours"].sum())

    def whole(keys: Mapping[str, str]) -> float:
        if capacity is None:
            return used
        months = [capacity.get(keys["month"], {})] if "month" in keys else capacity.values()
        node_seconds = (
            nodes.get(keys["node"], 0.0) if "node" in keys else math.fsum(nodes.values()) for nodes in months
        )
        return math.fsum(node_seconds) / 3600

    rows = []
    if len(table):
        for values, part in table.groupby(list(by), sort=True):
            keys = tuple(map(str, values))
            rows.append(_row(keys, part, whole(dict(zip(by, keys, strict=True)))))
    month = [*by].index("month") if "month" in by else None
    rows.sort(key=lambda row: ("" if month is None else row.keys[month], -row.gpu_hours, row.keys))
    return Usage(tuple(by), tuple(rows), _row((), table, whole({})), USED if capacity is None else CAPACITY)


def _row(keys: tuple[str, ...], part: Any, whole: float) -> UsageRow:
    slice_hours, gpu_hours, sampled, idle = (float(part[name].sum()) for name in _SUMS)
    aggregated, individual = part[part["run"] == 0], part[part["run"] != 0]
    return UsageRow(
        keys=keys,
        jobs=int(aggregated["runs"].sum()) + int(individual["run"].nunique()),
        slice_hours=slice_hours,
        gpu_hours=gpu_hours,
        percent=100 * gpu_hours / whole if whole > 0 else None,
        idle_percent=100 * idle / sampled if sampled > 0 else None,
        sampled_percent=100 * sampled / gpu_hours if gpu_hours > 0 else 0.0,
    )


def lines(usage: Usage, *, header: bool) -> Iterator[str]:
    """Yield the result as a table, with a total line if there is more than one row."""
    rows = [[*row.keys, *_figures(row)] for row in usage.rows]
    if len(rows) != 1:
        rows.append(["total", *[""] * (len(usage.by) - 1), *_figures(usage.total)])
    titles = [*(name.upper() for name in usage.by), *_titles(usage)]
    first, widths = len(usage.by), [max(len(line[n]) for line in [titles, *rows]) for n in range(len(titles))]
    for line in [titles, *rows]:
        line[first:] = [text.rjust(width) for text, width in zip(line[first:], widths[first:], strict=True)]
    yield from table_lines(titles, ([printable(cell) for cell in row] for row in rows), show_header=header)


def separated(usage: Usage, delimiter: str, *, header: bool) -> Iterator[str]:
    """Yield the rows with a delimiter between their columns, without a total."""
    rows = ([*map(printable, row.keys), *_figures(row)] for row in usage.rows)
    return separated_lines([*usage.by, *_titles(usage)], rows, delimiter, show_header=header)


def as_csv(usage: Usage, *, header: bool) -> Iterator[str]:
    """Yield the rows as CSV with plain numbers, without a total; unknown values are empty."""
    names = ["jobs", "slice_hours", "gpu_hours", f"percent_of_{usage.percent_of}", "idle_percent", "sampled_percent"]
    if header:
        yield csv_line([*usage.by, *names])
    for row in usage.rows:
        figures = (row.slice_hours, row.gpu_hours, row.percent, row.idle_percent, row.sampled_percent)
        yield csv_line([*map(printable, row.keys), row.jobs, *("" if f is None else f"{f:.6f}" for f in figures)])


def document(usage: Usage, start: float, end: float, now: float) -> str:
    """Return the result as JSON, with plain numbers and units in the names."""

    def as_fields(row: UsageRow) -> dict[str, Any]:
        figures = asdict(row)
        return {**dict(zip(usage.by, figures.pop("keys"), strict=False)), **figures}

    return json.dumps(
        {
            "schema_version": SCHEMA_VERSION,
            "generated_unix_s": now,
            "window": {"start_unix_s": start, "end_unix_s": end},
            "by": usage.by,
            "percent_of": usage.percent_of,
            "rows": [as_fields(row) for row in usage.rows],
            "total": as_fields(usage.total),
        }
    )


def _titles(usage: Usage) -> list[str]:
    return ["JOBS", "SLICE-HOURS", "GPU-HOURS", f"%{usage.percent_of.upper()}", "%IDLE", "%SAMPLED"]


def _figures(row: UsageRow) -> list[str]:
    return [
        str(row.jobs),
        f"{row.slice_hours:.2f}",
        f"{row.gpu_hours:.2f}",
        "" if row.percent is None else f"{row.percent:.1f}",
        NOT_SAMPLED if row.idle_percent is None else f"{row.idle_percent:.1f}",
        f"{row.sampled_percent:.0f}",
    ]

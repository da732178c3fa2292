"""Read and write the common table: measurements as CSV, one file or a whole folder of laboratories.

A file has the columns of `Measurement` in any order, with a header; `gpu`, `model`, `batch` and a column of speed
are required, missing others are unknown. Usual names and units of others are read as these (`aliases`), and other
columns ignored, with a notice.

A source may contain one point more than once: it was measured again. Of those that ran the median of each figure is
taken, which is robust against one disturbed run; a point that ran once fits, however often it did not.
"""

from __future__ import annotations

import csv
import gzip
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple, TextIO

from slurm_migbatch.profiling import aliases, csvfile, jsonfile
from slurm_migbatch.profiling.csvfile import Problems
from slurm_migbatch.profiling.layout import TableLayout
from slurm_migbatch.profiling.measurement import (
    COLUMNS,
    IDENTITY,
    LEAST_COUNT,
    OF_SPEED,
    SERVED_IDENTITY,
    TRAINED_IDENTITY,
    Measurement,
)  # fmt: skip
from slurm_migbatch.profiling.sources import LABORATORIES, Reading
from slurm_migbatch.values import atomicfile
from slurm_migbatch.values.grouping import grouped
from slurm_migbatch.workload.refusal import show

_FOUND: Final = tuple(name for name in COLUMNS if name not in (*IDENTITY, *SERVED_IDENTITY, *TRAINED_IDENTITY))
_MEASURED: Final = (
    "throughput_per_s", "latency_s", "latency_p99_s", "memory_mib", "ttft_s", "ttft_p99_s", "tpot_s", "tpot_p99_s",
)  # fmt: skip
_REQUIRED: Final = ("gpu", "model", "batch")
_NEEDED: Final = frozenset(_REQUIRED)
_OF_SPEED: Final = re.compile(
    r"throughput|latency|(?:^|_)(?:time|qps|rps|tps|ips|per_s|(?:it|req|requests|queries|batches|tokens|toks?)_s)(?:_|$)"
)
"""Parts of the names of columns of speed."""
_SINGLE: Final = {"params": "parameters", "flops_per_item": "operations"}
DISAGREE: Final = 1.5
"""Throughput and latency that differ by more than this factor are inconsistent."""
_SHOWN: Final = 5


@dataclass(frozen=True)
class MeasurementTable:
    """Points by IDENTITY, each once, and notices for the user."""

    rows: tuple[Measurement, ...]
    notices: tuple[str, ...] = ()


def merge(rows: Iterable[Measurement]) -> list[Measurement]:
    """Return each point once, in order of first occurrence; see above for points measured again."""
    points = grouped(rows, lambda row: row.point)
    return [group[0] if len(group) == 1 else _merged(group) for group in points.values()]


def _merged(group: Sequence[Measurement]) -> Measurement:
    group = [row for row in group if row.ran] or group
    merged: dict[str, Any] = {}
    for name in _FOUND:
        values = [value for row in group if (value := getattr(row, name)) not in (None, "")]
        if values:
            merged[name] = median(values) if name in _MEASURED else values[0]
    return replace(group[0], **merged)


def is_table(header: Sequence[str]) -> bool:
    """Return whether a file with this header is a common table, perhaps with other names of its columns."""
    return set(aliases.renamed(header)) >= _NEEDED


def read_folder(path: Path) -> list[Measurement]:
    """Return every point of the tables below a folder, or of one common table.

    Common tables and the folders of known laboratories are recognised by their headers, at any depth and in any
    number. Raises TableError (also if nothing is found) and OSError.
    """
    return list(scan([path]).rows)


def scan(
    paths: Iterable[Path],
    impossible: Callable[[Measurement], str] = lambda row: "",
    outcome: str = "nothing was read",
) -> MeasurementTable:
    """Return every point of several folders and files, as `read_folder` does, with notices of what was ignored.

    Args:
        paths: folders and files.
        impossible: returns why a row cannot have been measured, "" if it can. Such a row of a common table is a bad
            line: its error probably applies to the others too. Those of laboratories are dropped.
        outcome: beginning of the error.

    Raises:
        TableError: naming the bad lines of all of them; nothing is read partially.
        OSError: something cannot be read.
    """
    problems = Problems(outcome)
    rows: list[Measurement] = []
    notices: list[str] = []
    for path in paths:
        found, new_notices = (_folder if path.is_dir() else _file)(path, problems, impossible)
        rows += found
        notices += new_notices
    problems.check()
    return MeasurementTable(tuple(merge(rows)), tuple(notices))


def _file(path: Path, problems: Problems, impossible: Callable[[Measurement], str]) -> Reading:
    header = csvfile.header(path)
    if is_table(header):
        return _neutral(path, header, problems, impossible)
    owner = next((laboratory for laboratory in LABORATORIES if laboratory.owns(header)), None)
    if owner is not None:
        problems.add(path, 0, f"is a file of {owner.name}: give its directory")
    elif csvfile.is_json(path):
        lacking = [name for name in _REQUIRED if name not in aliases.renamed(header)]
        why = csvfile.unreadable(path) or f"or add what it lacks: {', '.join(lacking)}"
        problems.add(
            path, 0, f"is JSON: write its figures as CSV, with the columns gpu, model, batch and others ({why})"
        )
    elif why := csvfile.unreadable(path):
        problems.add(path, 0, why)
    else:
        columns = aliases.renamed(header)
        lacking = [name for name in _REQUIRED if name not in columns]
        named = f" (it lacks {', '.join(lacking)})" if set(columns) & set(COLUMNS) else ""
        problems.add(
            path,
            0,
            f"is not a table of measurements: its first line must name gpu, model, batch{named} and any of "
            + ", ".join(name for name in COLUMNS if name not in _NEEDED),
        )
    return Reading([], [])


def _folder(path: Path, problems: Problems, impossible: Callable[[Measurement], str]) -> Reading:
    rows: list[Measurement] = []
    notices: list[str] = []
    by_laboratory: dict[str, list[Path]] = {}
    ignored: list[Path] = []
    files, problems_before = csvfile.find(path, (*csvfile.FOUND, *jsonfile.FOUND)), len(problems)
    for file in files:
        header = csvfile.header(file)
        owner = next((laboratory for laboratory in LABORATORIES if laboratory.owns(header)), None)
        if is_table(header):
            found, new_notices = _neutral(file, header, problems, impossible)
            rows += found
            notices += new_notices
        elif owner is not None:
            by_laboratory.setdefault(owner.name, []).append(file)
        elif not csvfile.is_json(file):
            ignored.append(file)
    for laboratory in LABORATORIES:
        if own := by_laboratory.get(laboratory.name):
            found, new_notices = laboratory.read(path, own, problems)
            reasons = [why for row in found if (why := impossible(row))]
            rows += [row for row in found if not impossible(row)] if reasons else found
            notices += new_notices
            if reasons:
                notices.append(
                    f"{path}: {len(reasons)} rows of {laboratory.name} are impossible and skipped: {reasons[0]}"
                )
    if ignored:
        notices.append(f"{path}: {len(ignored)} other CSV files are ignored: {_names(ignored, path)}")
    if not rows and len(problems) == problems_before:
        names = ", ".join(laboratory.name for laboratory in LABORATORIES)
        count = sum(not csvfile.is_json(file) for file in files)
        problems.add(
            path,
            0,
            f"no measurements in its {count} CSV files; give a directory with common tables (columns gpu, model, "
            f"batch and others) or with the files of {names}",
        )
    return Reading(rows, notices)


def write(rows: Iterable[Measurement], file: TextIO) -> None:
    """Write the rows as a common table; reading it back gives the same rows."""
    lines = csv.writer(file, lineterminator="\n")
    lines.writerow(COLUMNS)
    for row in rows:
        lines.writerow([_cell(value) for value in row.to_dict().values()])


def save(path: Path, rows: Iterable[Measurement]) -> None:
    """Write the rows as a file that is always either the old or the new one; compressed if its name ends in .gz."""
    text = io.StringIO(newline="")
    write(rows, text)
    content = text.getvalue().encode()
    # without a time in it, the same points make the same file
    atomicfile.write(path, gzip.compress(content, mtime=0) if path.name.lower().endswith(".gz") else content)


def _cell(value: object) -> str:
    if value is None:
        return ""
    return str(int(value)) if isinstance(value, float) and value.is_integer() and value < 1e15 else str(value)


def _neutral(
    path: Path, header: Sequence[str], problems: Problems, impossible: Callable[[Measurement], str]
) -> Reading:
    # one cell alone may not tell; lines that cannot be read are reported below
    cells_of = (row for _, row in csvfile.read(path, Problems(), dict))
    layout = TableLayout.of(tuple(header), cells_of, sliced="profile" in aliases.renamed(header))
    renamed = aliases.renamed(layout.header)
    if unusable := _unusable(layout.header, renamed):
        problems.add(path, 1, unusable)
        return Reading([], [])
    names, separator = dict(zip(layout.header, renamed, strict=True)), csvfile.separator(path)
    cells_of = (line for _, row in csvfile.read(path, Problems(), dict) for line in layout.lines(row))
    decimal = aliases.decimal_mark(cells_of, names, separator)
    gpu_column = layout.header[renamed.index("gpu")]
    unread = [name for name, column in names.items() if column not in COLUMNS and name]

    def make(cells: dict[str, str]) -> list[tuple[Measurement, str, tuple[str, ...]]]:
        return [
            (
                Measurement.from_text(aliases.converted(row, names, decimal)),
                row[gpu_column].strip(),
                tuple(row[name].strip() for name in unread),
            )
            for row in layout.lines(cells)
        ]

    lines: list[_Line] = []
    for number, points in csvfile.read(path, problems, make):
        lines += [_Line(number, *point) for point in points]
        if why := next(filter(None, (impossible(row) for row, _, _ in points)), ""):
            problems.add(path, number, f"cannot be: {why}")
    notices = [*_of_columns(path, names), *_of_lines(path, lines), *_of_repeated(path, lines, unread)]
    return Reading([line.row for line in lines], notices)


class _Line(NamedTuple):
    """A row of a table, with its number, its GPU's name there, and its cells of columns that are not read."""

    number: int
    row: Measurement
    gpu: str
    unread: tuple[str, ...]


def _of_lines(path: Path, lines: Sequence[_Line]) -> Iterator[str]:
    """Yield notices of lines that were read in another way than they are written, or may be wrong."""

    def where(found: Sequence[_Line]) -> str:
        return f"{path}: in {len(found)} lines (first {found[0].number})"

    if named := [line for line in lines if line.row.gpu != line.gpu]:
        yield f"{where(named)} the slice is read from the GPU's name: {show(named[0].gpu)}"
    if contradicting := [line for line in lines if not line.row.agrees(DISAGREE)]:
        yield (
            f"{where(contradicting)} throughput_per_s and latency_s contradict each other: throughput is items per "
            "second of all processes, latency seconds per batch"
        )
    for name, of in _SINGLE.items():
        if small := [line for line in lines if 0 < (getattr(line.row, name) or 0) < LEAST_COUNT]:
            yield (
                f"{where(small)} {name} is below {LEAST_COUNT:g} and not used: it counts {of}, not millions or "
                "billions of them"
            )


def _of_repeated(path: Path, lines: Sequence[_Line], unread: Sequence[str]) -> Iterator[str]:
    """Yield a notice of repeated points with too different speeds: a column that is not read may distinguish them."""
    repeated: list[_Line] = []
    differing: set[str] = set()
    for group in grouped((line for line in lines if line.row.ran), lambda line: line.row.point).values():
        rates = [line.row.rate or 0.0 for line in group]
        cells = zip(unread, zip(*(line.unread for line in group), strict=True), strict=True)
        columns = [name for name, values in cells if len({*values}) > 1]
        if columns and max(rates) > DISAGREE * min(rates):
            repeated += group
            differing.update(columns)
    if repeated:
        names = ", ".join(show(name) for name in unread if name in differing)
        yield (
            f"{path}: {len(repeated)} lines (first {min(line.number for line in repeated)}) repeat points with other "
            f"speeds, of which the median is taken, and differ in {names}: if that is the input size, kind, precision "
            "or number of processes, call it input_size, kind, precision or procs; else split the table by source"
        )


def _of_columns(path: Path, names: Mapping[str, str]) -> list[str]:
    """Return notices of the columns with other names, and of those that are ignored."""
    notices = []
    if others := [f"{show(name)} as {column}" for name, column in names.items() if name != column]:
        notices.append(f"{path}: reading columns {', '.join(others)}")
    if unknown := [show(name) for name, column in names.items() if column not in COLUMNS and name]:
        notices.append(f"{path}: ignoring unknown columns: {', '.join(unknown)}")
    return notices


def _unusable(header: Sequence[str], renamed: Sequence[str]) -> str:
    """Return why a table with these columns cannot be read; "" if it can."""
    if not OF_SPEED.intersection(renamed) and not {"kind", *aliases.TIMED_TOKENS}.issubset(renamed):
        unread = [show(name) for name in header if _OF_SPEED.search(aliases.plain(name))]
        near = f" (the unit of {', '.join(unread)} is not known)" if unread else ""
        if by_slice := next((name for name in header if aliases.SLICE.search(name)), None):
            near = f" (a column for each slice must be called after a figure and its unit: {show(by_slice)} latency_ms)"
        return (
            f"has neither throughput_per_s nor latency_s{near}: every row would mean that it did not run; name the "
            "column of items per second throughput_per_s, that of seconds per batch latency_s (of servers kind, "
            "output, ttft_s and tpot_s are enough)"
        )
    # a data type and a quantization are both read as the precision
    duplicates = sorted({name for name in renamed if name in COLUMNS and renamed.count(name) > 1} - {"precision"})
    return f"has duplicate columns: {', '.join(duplicates)}" if duplicates else ""


def _names(paths: Sequence[Path], root: Path) -> str:
    shown = [str(path.relative_to(root)) for path in paths[:_SHOWN]]
    return ", ".join(shown) + (", ..." if len(paths) > _SHOWN else "")

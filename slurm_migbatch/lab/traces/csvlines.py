"""Read lines of a CSV file, plain or gzipped; errors name file and line."""

from __future__ import annotations

import csv
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Final, TextIO

from slurm_migbatch.profiling.csvfile import NOT_UTF8, foreign, open_text
from slurm_migbatch.workload.refusal import show

_MOMENT: Final = re.compile(
    r"(\d{4}-\d\d-\d\d)(?:[T ](\d\d:\d\d(?::\d\d)?)(\.\d{1,12})? ?(Z|UTC|([+-]\d\d)(?::?(\d\d))?)?)?", re.ASCII
)
"""Date, time of day, fraction of a second, zone."""

_SWF: Final = re.compile(r"\s*(-?[0-9.]+\s+){17}-?[0-9.]+\s*", re.ASCII)
"""A line of the Standard Workload Format: 18 numbers."""

TOO_LATE_S: Final = 1e11
"""No time in seconds since 1970 is as large, but those in milliseconds are, from 1973 on."""


_KINDS: Final = {
    "sacct": ("JobID|JobIDRaw", "AllocTRES"),
    "jobtable": ("id_job", "time_submit"),
    "openb": ("gpu_milli", "qos"),
    "muri": ("iteration_time", "num_gpu"),
    "mixed": ("num_replicas", "num_task"),
    "pollux": ("application", "num_replicas"),
    "joblog": ("submit_time|timestamp", "gpu_num|num_gpus|num_gpu|gpu_request|num_gpus_alloc"),
}
"""Columns that tell by which reader of a scenario a table is read."""
_OTHERS: Final = {";": "semicolons", "|": "|"}
"""Separators of columns that are not read, in words."""
_LONGEST: Final = 1 << 16
"""Most characters of a header that are searched for tabs."""


class TraceError(ValueError):
    """A trace cannot be read. The message is `path:line: what is wrong and what it should be`."""

    def __init__(self, path: Path, line: int, text: str) -> None:
        super().__init__(f"{path}:{line}: {text}" if line else f"{path}: {text}")
        self.path, self.line, self.text = path, line, text


class Skipped(Exception):
    """A row is not used although it can be read; the message says what such rows are, in the plural."""


class UnusedRows:
    """Rows of a trace that are not used: those whose block (`with`) raises Skipped, or TraceError if they are wrong."""

    def __init__(self) -> None:
        #: by what they are
        self.skipped: Counter[str] = Counter()
        self._count = 0
        self._first: TraceError | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        if isinstance(error, Skipped):
            self.skipped[str(error)] += 1
            return True
        if not isinstance(error, TraceError):
            return False
        self._count += 1
        self._first = self._first or error
        return True

    def add(self, error: TraceError) -> None:
        """Count a row that is wrong as a whole."""
        with self:
            raise error

    def notices(self, read: int) -> tuple[str, ...]:
        """Tell how many rows are skipped, and why the first wrong one is; raises its error if not more were `read`."""
        first, skipped = self._first, tuple(f"{count} {what} are skipped" for what, count in self.skipped.items())
        if first is None:
            return skipped
        if self._count >= read:
            rest = f"; {self._count} lines or jobs are wrong, {read} can be read" if self._count > 1 else ""
            raise TraceError(first.path, first.line, first.text + rest)
        where = f"line {first.line}: " if first.line else ""
        return (*skipped, f"{self._count} lines or jobs that are wrong are skipped, the first: {where}{first.text}")


class CsvLine:
    """One row: cells by column name, with methods to read them whose errors name the line."""

    __slots__ = ("_cells", "_columns", "number", "path")

    def __init__(self, path: Path, number: int, columns: dict[str, int], cells: Sequence[str]) -> None:
        self.path, self.number = path, number
        self._columns, self._cells = columns, cells

    def wrong(self, text: str) -> TraceError:
        """Return an error with this text that names the line."""
        return TraceError(self.path, self.number, text)

    def text(self, column: str) -> str:
        """Return the text of a cell, without surrounding blanks."""
        return self._cells[self._columns[column]].strip()

    @property
    def columns(self) -> Collection[str]:
        """The names of the file's columns."""
        return self._columns.keys()

    def has(self, column: str) -> bool:
        """Return whether the file has this column."""
        return column in self._columns

    def first_of(self, columns: Sequence[str]) -> str | None:
        """Return the first of these columns that the file has; None without any."""
        for column in columns:  # called for every cell that may have several names: a generator takes twice as long
            if column in self._columns:
                return column
        return None

    def number_of(self, column: str, low: float = -math.inf, high: float = math.inf) -> float:
        """Return a cell as a finite number from `low` to `high`."""
        text = self._cells[self._columns[column]]
        try:
            value = float(text)
        except ValueError:
            raise self.wrong(f"{column} must be a number, not '{show(text)}'") from None
        if not low <= value <= high or value in (math.inf, -math.inf):
            raise self.wrong(f"{column} must be {_range(low, high)}, not {show(text)}")
        return value

    def count_of(self, column: str, low: int = 0, high: float = math.inf) -> int:
        """Return a cell as a whole number from `low` to `high`."""
        value = self.number_of(column, low, high)
        if value != int(value):
            raise self.wrong(f"{column} must be a whole number, not {value}")
        return int(value)

    def seconds_of(self, column: str) -> float:
        """Return a cell with a time in seconds, of any beginning."""
        value = self.number_of(column, 0)
        if value >= TOO_LATE_S:
            wrong = f"{column} must be in seconds, not {show(self.text(column))}"
            raise self.wrong(f"{wrong}: if these are milliseconds, divide it by 1000")
        return value

    def moment(self, column: str) -> float:
        """Return a cell with a date and time as seconds since 1970; see the function `moment`."""
        try:
            return moment(self.text(column))
        except ValueError as error:
            raise self.wrong(f"{column} must be {error}") from None


def moment(text: str) -> float:
    """Parse a date and time such as `2017-10-09 07:01:55`, with or without a zone (UTC), in seconds since 1970.

    Raises ValueError, whose text follows "must be".
    """
    match = _MOMENT.fullmatch(text)
    try:
        if match is None:
            raise ValueError(text)
        day, clock, fraction, _, hours, minutes = match.groups()
        zone = f"{hours or '+00'}:{minutes or '00'}"
        return datetime.fromisoformat(f"{day} {clock or '00:00'}{zone}").timestamp() + float(fraction or 0)
    except (ValueError, OverflowError):
        raise ValueError(f"a time such as 2017-10-09 07:01:55, not '{show(text)}'") from None


def _range(low: float, high: float) -> str:
    if high == math.inf:
        return f"{low:g} or more" if low > -math.inf else "a finite number"
    return f"between {low:g} and {high:g}"


@contextmanager
def opened(path: Path, errors: str = "strict") -> Iterator[TextIO]:
    """Open a text file, decompressed if it is gzipped. Raises TraceError if it cannot be read or is not UTF-8."""
    try:
        if why := foreign(path):
            raise TraceError(path, 0, why)
        with open_text(path, errors) as file:
            yield file
    except UnicodeDecodeError:
        raise TraceError(path, 0, NOT_UTF8) from None
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(path, 0, f"cannot be read: {getattr(error, 'strerror', None) or error}") from None


def lines(
    path: Path,
    columns: Sequence[str],
    delimiter: str = ",",
    *,
    errors: str = "strict",
    command: str = "",
    mend: Callable[[Sequence[str], list[str]], list[str] | None] | None = None,
    unused: UnusedRows | None = None,
    rename: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[CsvLine]:
    """Yield every row of a file whose header has at least these columns; a header that is repeated is no row.

    Args:
        columns: required columns of the header; `a|b` requires one of them.
        delimiter: separator of cells; where it is a comma, tabs are one too if the header has them and no comma, as
            `mysql -B` prints tables. Only between commas `"` is no ordinary character.
        errors: "replace" replaces bytes that are not UTF-8.
        command: the command that prints such a file, for the error.
        mend: gets the header and a row that is not blank, and returns the row to read; None: there is none.
        unused: counts rows with too few or too many cells; None: they are errors.
        rename: other names for columns of the file; a column that has one of these already is not read.

    Raises:
        TraceError: the file cannot be read, is empty, lacks a column or has one twice, or a row has too few or too many
            cells.
    """
    try:
        with opened(path, errors) as file:
            if delimiter == "," and _has_tabs(file):
                delimiter = "\t"
            # programs that write CSV quote, sacct and mysql do not
            rows = csv.reader(
                file, delimiter=delimiter, quoting=csv.QUOTE_MINIMAL if delimiter == "," else csv.QUOTE_NONE
            )
            header = next(rows, None)
            if header is None:
                raise TraceError(path, 0, f"is empty; its first line should name {_named(columns)}")
            places = _places(path, _renamed(header, rename), columns, command, renamed=bool(rename))
            width = len(header)
            for cells in rows:
                if cells == header:  # several files were joined
                    continue
                row = cells if mend is None or _blank(cells, width) else mend(header, cells)
                if row is None or _blank(row, width):
                    continue
                if len(row) != width:
                    error = TraceError(path, rows.line_num, f"has {len(row)} cells, the header has {width}")
                    if unused is None:
                        raise error
                    unused.add(error)
                    continue
                yield CsvLine(path, rows.line_num, places, row)
    except csv.Error as invalid:
        raise TraceError(path, rows.line_num, f"is not valid CSV: {invalid}") from None


def names_of(path: Path) -> list[str]:
    """Return the names of a file's columns, if it is separated by commas or tabs. Raises TraceError."""
    with opened(path) as file:
        delimiter = "\t" if _has_tabs(file) else ","
        try:
            return _renamed(next(csv.reader(file, delimiter=delimiter), []), {})
        except csv.Error:
            return []


def _renamed(header: Sequence[str], rename: Mapping[str, str]) -> list[str]:
    names = [name.strip() for name in header]
    taken = {rename[name] for name in names if name in rename}
    return [rename.get(name, "" if name in taken else name) for name in names]


def _has_tabs(file: TextIO) -> bool:
    first = file.readline(_LONGEST)
    file.seek(0)
    return "\t" in first and "," not in first


def _blank(cells: Sequence[str], width: int) -> bool:
    return len(cells) != width and not "".join(cells).strip()


def _places(path: Path, names: Sequence[str], columns: Sequence[str], command: str, *, renamed: bool) -> dict[str, int]:
    """Return the index of each column; raises TraceError if a required one is missing or occurs twice."""
    if not any(names):
        raise TraceError(path, 1, f"is blank; the first line must name {_named(columns)}")
    if repeated := [known for name in columns for known in name.split("|") if names.count(known) > 1]:
        raise TraceError(path, 1, f"has the columns {', '.join(repeated)} more than once")
    if missing := _missing(names, columns):
        if other := _other_form(",".join(names)):
            raise TraceError(path, 0, other + (f"; write the file with {command}" if command else ""))
        if found := next((other for other in _OTHERS if not _missing(names[0].split(other), columns)), ""):
            text = f"separates its columns by {_OTHERS[found]}: write the file with commas or tabs"
            raise TraceError(path, 1, text + (f", or with {command}" if command else ""))
        todo = f"write the file with {command}" if command else "rename those in this line that mean the same"
        todo += ', or name them in workload.columns (trace = "joblog")' if renamed else ""
        if kind := _kind(names, columns):
            todo = f'trace = "{kind}" reads such a table'
        raise TraceError(path, 1, f"lacks the columns {_named(missing)}; found {show(', '.join(names))}; {todo}")
    return {name: number for number, name in enumerate(names)}


def _missing(names: Sequence[str], columns: Sequence[str]) -> list[str]:
    return [name for name in columns if not any(known in names for known in name.split("|"))]


def _kind(names: Sequence[str], columns: Sequence[str]) -> str:
    """Return the reader that reads a table with these names; empty: unknown, or the one that needs these columns."""
    found = re.split(r"[,;|\t]", ",".join(names))
    for kind, needed in _KINDS.items():
        if not _missing(found, needed):
            return "" if set(needed) <= set(columns) else kind
    return ""


def _other_form(first: str) -> str:
    """Return what a file is that is no table with a header, by its first line; empty: unknown."""
    if first.startswith(";") or _SWF.fullmatch(first):
        return (
            "is in the Standard Workload Format (SWF), which has no GPUs: a trace must tell the GPUs of each job, as a "
            'CSV with the columns submit_time, duration and gpu_num does (trace = "joblog")'
        )
    if first.startswith(("{", "[")):
        return 'is JSON, not a table; JSON is read from sacct --json (trace = "sacct") and of Philly (trace = "philly")'
    return ""


def _named(columns: Sequence[str]) -> str:
    return ", ".join(column.replace("|", " or ") for column in columns)

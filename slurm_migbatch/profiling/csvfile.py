"""Read CSV files of laboratories: plain or gzipped, with a header, and with line numbers for error messages.

Cells are separated by the one of `,`, `;`, tab and `|` that the header has most of, or that a line before it states, as
Excel writes it: `sep=;`. Empty lines and comments (`# ...`) before the header are skipped, and the line below it in a
table in Markdown. JSON is read as `jsonfile` describes, its points counted as lines.
"""

from __future__ import annotations

import csv
import gzip
import io
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, TextIO, TypeVar

from slurm_migbatch.profiling import jsonfile
from slurm_migbatch.workload.refusal import show

T = TypeVar("T")

SUFFIXES: Final = (".csv", ".csv.gz")
FOUND: Final = (*SUFFIXES, ".tsv", ".tsv.gz")
"""Ends of the names of CSV and TSV files."""
SEPARATORS: Final = ",;\t|"
SHOWN_PROBLEMS: Final = 10
"""Number of bad lines named in an error; the others are counted."""
BEYOND: Final = 1e30
"""No figure is as large, or as small as its inverse: beyond it are typing errors, whose products overflow."""
LARGEST_COUNT: Final = 10**9


_LONGEST: Final = 65536
"""Most characters of a header that are searched for the separator."""
LONGEST_ROW: Final = 1 << 20
"""Most characters of a row: a small compressed file may hold one that is larger than the memory."""
LONGEST_JSON: Final = 1 << 26
_RULE: Final = re.compile(r":?-+:?")
"""A cell of the line below the header of a table in Markdown."""
_STATED: Final = re.compile(rf'"?sep=([{re.escape(SEPARATORS)}])"?[{re.escape(SEPARATORS)}]*', re.IGNORECASE)
"""Excel's first line, which states the separator."""
_GZIP: Final = b"\x1f\x8b"
_BZIP2: Final = re.compile("BZh[1-9]1AY")
NOT_UTF8: Final = "is not UTF-8 text: save it in UTF-8 (not UTF-16 or Latin-1), compressed with gzip only"
PARQUET: Final = (
    "is Parquet, not a table in text: write it as CSV, for example by Python with pandas and pyarrow, "
    "pandas.read_parquet(FILE).to_csv('FILE.csv.gz', index=False)"
)
_UNREADABLE: Final = (csv.Error, UnicodeDecodeError, EOFError, zlib.error, gzip.BadGzipFile)


class TableError(ValueError):
    """Tables that cannot be read; the message names each bad line, one below the other."""


class LineError(ValueError):
    """An error in one line; the reader adds the file's name and the line number."""


class Problems:
    """Bad lines of all files of one import, so that one run shows them together."""

    def __init__(self, outcome: str = "nothing was read") -> None:
        """`outcome`: what follows from bad lines, the beginning of the error."""
        self._outcome, self._found = outcome, list[str]()

    def __len__(self) -> int:
        return len(self._found)

    def add(self, path: Path, line: int, problem: object) -> None:
        """Add a bad line; `line` 0 is the file as a whole."""
        self._found.append(f"{path}:{line}: {problem}" if line else f"{path}: {problem}")

    def check(self) -> None:
        """Raise TableError if there are any."""
        if not self._found:
            return
        if len(self._found) == 1:
            raise TableError(f"{self._outcome}: {self._found[0]}")
        shown = self._found[:SHOWN_PROBLEMS]
        if len(self._found) > len(shown):
            shown.append(f"and {len(self._found) - len(shown)} more")
        raise TableError(f"{self._outcome}:\n  " + "\n  ".join(shown))


def is_csv(path: Path) -> bool:
    """Return whether the name is that of a CSV file."""
    return path.name.lower().endswith(SUFFIXES)


def find(root: Path, ends: tuple[str, ...] = FOUND) -> list[Path]:
    """Return the files below a folder whose names end so, by name; hidden ones are skipped, links followed.

    A folder that several links lead to is read once. What is no plain file (a pipe, a device) is skipped: it may never
    end.

    Raises OSError if a folder cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise error

    files: list[Path] = []
    seen: set[str] = set()
    for folder, below, names in os.walk(root, onerror=refuse, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            below.clear()
            continue
        seen.add(real)
        below[:] = sorted(name for name in below if not name.startswith("."))
        files += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(path for path in files if path.name.lower().endswith(ends) and path.is_file())


def open_text(path: Path, errors: str = "strict") -> TextIO:
    """Return the file as text, decompressed if its name ends in .gz or it begins as gzip files do."""
    with path.open("rb") as file:
        packed = path.suffix.lower() == ".gz" or file.read(len(_GZIP)) == _GZIP
    if packed:
        return io.TextIOWrapper(gzip.open(path, "rb"), encoding="utf-8-sig", errors=errors, newline="")
    return path.open(encoding="utf-8-sig", errors=errors, newline="")


def is_json(path: Path) -> bool:
    """Return whether the name is that of a file in JSON."""
    return path.name.lower().removesuffix(".gz").endswith(jsonfile.ENDS)


def _open_table(path: Path) -> TextIO:
    """Return the file as text, which is CSV. Raises csv.Error if it should be JSON and is not, and OSError."""
    file = open_text(path)
    if not is_json(path):
        return file
    with file:
        text = file.read(LONGEST_JSON + 1)
    if len(text) > LONGEST_JSON:
        raise csv.Error(f"it has more than {LONGEST_JSON} characters")
    try:
        return io.StringIO(jsonfile.as_csv(text), newline="")
    except (ValueError, RecursionError) as error:
        raise csv.Error(f"it is not JSON: {error}") from None


def foreign(path: Path) -> str:
    """Return why a file's first characters are not those of UTF-8 text; "" if they are. Raises OSError.

    They are those of Parquet, the byte order mark of UTF-16, those of zstd or bzip2, or contain a zero byte, as UTF-16
    without its mark, archives and xz do.
    """
    with open_text(path, "replace") as file:
        first = file.read(8)
    if first.startswith("PAR1"):
        return PARQUET
    packed = first.startswith(("\ufffd\ufffd", "(\ufffd/\ufffd", "PK\3\4")) or "\0" in first[:8] or _BZIP2.match(first)
    return NOT_UTF8 if packed else ""


def header(path: Path) -> tuple[str, ...]:
    """Return the first line's cells, in lower case and stripped.

    () for an empty file or one that is not CSV.

    Raises OSError.
    """
    try:
        with _open_table(path) as file:
            return _names(next(_lines(file)[0], []))
    except _UNREADABLE:
        return ()


def separator(path: Path) -> str:
    """Return the character between the cells of a file whose `header` can be read. Raises OSError."""
    with _open_table(path) as file:
        return _before_header(file)[1]


def unreadable(path: Path) -> str:
    """Return why a file's first line cannot be read; "" if it can. Raises OSError."""
    try:
        if why := foreign(path):
            return why
        with _open_table(path) as file:
            return "" if next(_lines(file)[0], []) else "is empty"
    except UnicodeDecodeError:
        return NOT_UTF8
    except _UNREADABLE as error:
        return f"cannot be read: {error}"


def read(path: Path, problems: Problems, make: Callable[[dict[str, str]], T]) -> Iterator[tuple[int, T]]:
    """Yield the result of `make` for each line (cells by lower-case column name), with the line's number.

    `make` raises ValueError for an invalid line; lines with more or fewer cells than the header are invalid too, such
    as the last one of a truncated file. All errors are added to `problems`. Blank lines and repeated headers are
    skipped.
    """
    number = 1
    try:
        with _open_table(path) as file:
            lines, before = _lines(file)
            first = next(lines, [])
            names = _names(first)
            before -= is_json(path)
            for cells in lines:
                number = lines.line_num + before
                shown = [cell.strip() for cell in cells if cell.strip()]
                if not shown or cells == first or all(map(_RULE.fullmatch, shown)):  # several files were joined
                    continue
                if len(cells) != len(names):
                    problems.add(path, number, f"has {len(cells)} cells where the header has {len(names)}")
                    continue
                try:
                    record = make(dict(zip(names, cells, strict=True)))
                except ValueError as error:
                    problems.add(path, number, error)
                    continue
                yield number, record
    except _UNREADABLE as error:
        problems.add(path, number, f"is not valid CSV from here on: {error}")


def number(row: Mapping[str, str], column: str) -> float:
    """Parse a cell as a nonnegative number. Raises LineError."""
    text = row.get(column, "").strip()
    try:
        value = float(text)
    except ValueError:
        raise LineError(f"{column} must be a number, not '{show(text)}'") from None
    if value != 0 and not 1 / BEYOND < value < BEYOND:
        wanted = (
            "a number from 0 up" if not 0 < value < float("inf") else f"0, or between {1 / BEYOND:g} and {BEYOND:g}"
        )
        raise LineError(f"{column} must be {wanted}, not {show(text)}")
    return value


def whole(row: Mapping[str, str], column: str) -> int:
    """Parse a cell as a positive integer. Raises LineError."""
    value = number(row, column)
    if not 1 <= value <= LARGEST_COUNT or value != int(value):
        raise LineError(f"{column} must be a whole number from 1 to 10^9, not {show(row[column])}")
    return int(value)


class _Rows:
    """The rows of a file; raises csv.Error at one that is longer than LONGEST_ROW."""

    def __init__(self, file: TextIO, separator: str) -> None:
        self._file, self._left = file, LONGEST_ROW
        self._reader = csv.reader(iter(self._line, ""), delimiter=separator, skipinitialspace=True)

    @property
    def line_num(self) -> int:
        """The number of lines read."""
        return self._reader.line_num

    def __iter__(self) -> _Rows:
        return self

    def __next__(self) -> list[str]:
        self._left = LONGEST_ROW
        return next(self._reader)

    def _line(self) -> str:
        line = self._file.readline(self._left)
        self._left -= len(line)
        if not self._left:
            raise csv.Error(f"a row has more than {LONGEST_ROW} characters")
        return line


def _lines(file: TextIO) -> tuple[_Rows, int]:
    """Return a reader of the file's lines, which begins with the header, and the number of lines before that."""
    before, separator = _before_header(file)
    file.seek(0)
    for _ in range(before):
        file.readline(_LONGEST)
    return _Rows(file, separator), before


def _before_header(file: TextIO) -> tuple[int, str]:
    """Return the number of lines before the header, and the separator of cells."""
    before, stated = 0, ""
    line = file.readline(_LONGEST)
    while line:
        following = file.readline(_LONGEST)
        match = _STATED.fullmatch(line.strip("\r\n "))
        if match is None and line.strip() and not _is_comment(line, following):
            break
        before, stated = before + 1, match[1] if match else stated
        line = following
    return before, stated or max(SEPARATORS, key=line.count)


def _is_comment(line: str, following: str) -> bool:
    """Return whether a line is a comment, and no header that begins with `#` and has as many cells as the next line."""
    counts = [(line.count(mark), following.count(mark)) for mark in SEPARATORS]
    return line.startswith("#") and not any(count and count == next_count for count, next_count in counts)


def _names(cells: list[str]) -> tuple[str, ...]:
    return tuple(cell.strip().lower() for cell in cells)

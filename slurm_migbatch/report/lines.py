"""Output lines of commands that do not print like sacct."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from slurm_migbatch.mig.text import printable


def pair_lines(pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield `key: value` lines as seff prints them; an empty key continues the value above."""
    rows = list(pairs)
    width = max((len(key) for key, _ in rows), default=0) + 1
    for key, value in rows:
        yield printable(f"{key + ':' if key else '':<{width}} {value}").rstrip()


def table_lines(header: Sequence[str], rows: Iterable[Sequence[str]], *, show_header: bool = True) -> Iterator[str]:
    """Yield columns as wide as their widest value, two blanks apart; only the header if there are no rows."""
    lines = [list(header)] if show_header else []
    lines += [list(row) for row in rows]
    widths = [max((len(line[i]) for line in lines), default=0) for i in range(len(header))]
    for line in lines:
        yield printable("  ".join(f"{text:<{width}}" for text, width in zip(line, widths, strict=True))).rstrip()


def separated_lines(
    header: Sequence[str], rows: Iterable[Sequence[str]], delimiter: str, *, show_header: bool, closed: bool = False
) -> Iterator[str]:
    """Yield columns with a delimiter between them; `closed` ends lines with it too."""
    for row in chain([header] if show_header else [], rows):
        yield delimiter.join(row) + (delimiter if closed else "")


def csv_line(cells: Iterable[Any]) -> str:
    """Return the cells as a line of a CSV file; texts that a spreadsheet would take for formulas begin with a quote."""
    import csv
    import io

    out = io.StringIO()
    safe = (f"'{cell}" if isinstance(cell, str) and cell[1:] and cell[0] in "=+-@\t\r" else cell for cell in cells)
    csv.writer(out, lineterminator="").writerow(safe)
    return out.getvalue()

"""Tables as sacct prints them: fixed columns under a line of dashes, or separated by a delimiter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from slurm_migbatch.mig.text import printable
from slurm_migbatch.report.columns import Column, Context, Fields


@dataclass(frozen=True)
class Style:
    """How a table is written. `delimiter` None means fixed widths; `closed` ends lines with the delimiter too."""

    header: bool = True
    delimiter: str | None = None
    closed: bool = False
    slices: bool = True


def render(
    columns: Sequence[Column], runs: Iterable[tuple[Fields, Sequence[Fields]]], context: Context, style: Style
) -> Iterator[str]:
    """Yield the lines of the table, without their ends. A run of several slices has a line for each below its own."""
    if style.header:
        yield from _header(columns, style)
    cells = [column.cell for column in columns]
    slice_cells = [column.slice_cell for column in columns]
    widths = [column.width for column in columns]
    for run, slices in runs:
        yield _line([cell(run, slices, context) for cell in cells], widths, style)
        if style.slices and len(slices) > 1:
            for number, mig_slice in enumerate(slices):
                yield _line(
                    ["" if cell is None else cell(mig_slice, number, context) for cell in slice_cells], widths, style
                )


def _header(columns: Sequence[Column], style: Style) -> Iterator[str]:
    names = [column.name for column in columns]
    if style.delimiter is not None:
        yield _line(names, [], style)
        return
    widths = [column.width for column in columns]
    yield " ".join(_fit(name[: abs(width)], width) for name, width in zip(names, widths, strict=True)).rstrip()
    yield " ".join("-" * abs(width) for width in widths)


def _line(cells: Sequence[str], widths: Sequence[int], style: Style) -> str:
    # names and reasons are the users' own: what could move a terminal's cursor or break a line is not passed on
    clean = [printable(cell) for cell in cells]
    if style.delimiter is not None:
        return style.delimiter.join(clean) + (style.delimiter if style.closed else "")
    return " ".join(map(_fit, clean, widths)).rstrip()


def _fit(text: str, width: int) -> str:
    size = abs(width)
    if len(text) > size:
        text = text[: size - 1] + "+"
    return text.ljust(size) if width < 0 else text.rjust(size)

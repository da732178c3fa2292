"""Tables as sacct prints them: fixed columns under a line of dashes, or separated by a delimiter."""

from __future__ import annotations

from slurm_migbatch.mig.text import printable
from slurm_migbatch.values import TYPE_CHECKING, Value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from slurm_migbatch.report.columns import Column, Context, Fields


class Style(Value):
    """Format of a table. `delimiter` None means fixed widths; `closed` ends lines with the delimiter too."""

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
    line = _liner([column.width for column in columns], style)
    for run, slices in runs:
        yield line([cell(run, slices, context) for cell in cells])
        if style.slices and len(slices) > 1:
            for number, mig_slice in enumerate(slices):
                yield line(["" if cell is None else cell(mig_slice, number, context) for cell in slice_cells])


def _header(columns: Sequence[Column], style: Style) -> Iterator[str]:
    if style.delimiter is not None:
        yield _liner([], style)([column.name for column in columns])
        return
    widths = [column.width for column in columns]
    yield _liner(widths, style)([column.name[: abs(column.width)] for column in columns])
    yield " ".join("-" * abs(width) for width in widths)


def _liner(widths: Sequence[int], style: Style) -> Callable[[Sequence[str]], str]:
    """Return a function that formats a line of cells.

    Names and reasons are written by users: control characters are not passed on.
    """
    delimiter = style.delimiter
    if delimiter is not None:
        end = delimiter if style.closed else ""
        return lambda cells: delimiter.join(map(printable, cells)) + end
    padded = " ".join(f"%{width}s" for width in widths)
    sizes = list(map(abs, widths))

    def line(cells: Sequence[str]) -> str:
        fitting = [
            cell if len(cell) <= size else f"{cell[: size - 1]}+" for cell, size in zip(cells, sizes, strict=True)
        ]
        return printable(padded % tuple(fitting)).rstrip()

    return line

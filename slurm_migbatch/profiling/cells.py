"""Enumerate the points to measure on one device (batch, input size, processes) and exclude those that cannot fit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from slurm_migbatch.profiling.measurement import Measurement

MAX_CELLS = 4096
_RANGE = re.compile(r"([0-9]{1,9})-([0-9]{1,9})")


class CellError(ValueError):
    """A text that is not a list of numbers; the message gives the form."""


class MeasurementCell(NamedTuple):
    """One point of a model on the device.

    `batch`: items in a batch of one process. `input_size`: tokens or pixels of an item, None if the target takes
    none. `procs`: identical processes at once.
    """

    batch: int
    input_size: int | None = None
    procs: int = 1

    def __str__(self) -> str:
        text = f"batch {self.batch}"
        if self.input_size is not None:
            text += f", input {self.input_size}"
        return text + (f", {self.procs} processes" if self.procs > 1 else "")

    def needs_at_least(self, other: MeasurementCell) -> bool:
        """Return whether this cell takes no less memory than `other`: it is no smaller in any respect."""
        if (self.input_size is None) != (other.input_size is None):
            return False
        larger = (self.input_size or 0) >= (other.input_size or 0)
        return self.batch >= other.batch and larger and self.procs >= other.procs

    @classmethod
    def of(cls, row: Measurement) -> MeasurementCell:
        """Return the cell of a row of the table."""
        return cls(row.batch, row.input_size, row.procs)


def product(batches: Iterable[int], inputs: Iterable[int | None], procs: Iterable[int]) -> tuple[MeasurementCell, ...]:
    """Return all combinations by processes, input sizes, batches. Raises CellError beyond MAX_CELLS."""
    sizes = sorted(set(inputs), key=lambda size: size or 0)
    cells = tuple(MeasurementCell(b, i, p) for p in sorted(set(procs)) for i in sizes for b in sorted(set(batches)))
    if len(cells) > MAX_CELLS:
        raise CellError(f"{len(cells)} points are too many (at most {MAX_CELLS}): give fewer batches, inputs or procs")
    return cells


def open_cells(cells: Sequence[MeasurementCell], done: Iterable[Measurement]) -> list[MeasurementCell]:
    """Return the cells still to try: not measured, and no cell that needs at most as much memory failed to fit."""
    rows = list(done)
    seen = {MeasurementCell.of(row) for row in rows}
    unfit = [MeasurementCell.of(row) for row in rows if not row.ran]
    return [cell for cell in cells if cell not in seen and not any(cell.needs_at_least(f) for f in unfit)]


def numbers(text: str, *, doubling: bool = False) -> tuple[int, ...]:
    """Return the ascending numbers of `1,2,8` or of a range: `1-3` is 1,2,3.

    With `doubling`, `1-48` is 1,2,4,8,16,32,48.

    Raises CellError.
    """
    chosen: set[int] = set()
    for part in text.split(","):
        part = part.strip()
        match = _RANGE.fullmatch(part)
        if match:
            low, high = int(match[1]), int(match[2])
            if not 1 <= low <= high or (not doubling and high - low >= MAX_CELLS):
                raise CellError(f"{part!r} is not a range of numbers: write the smaller one first, for example 1-8")
            while low < high:
                chosen.add(low)
                low = 2 * low if doubling else low + 1
            chosen.add(high)
        elif re.fullmatch("[0-9]{1,9}", part) and int(part) > 0:
            chosen.add(int(part))
        else:
            raise CellError(f"{part!r} is not a number above 0: write 1,2,8 or a range such as 1-8")
    return tuple(sorted(chosen))

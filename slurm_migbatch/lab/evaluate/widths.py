"""Define half the widths of a held-out prediction's intervals, in logarithms, at any level of coverage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from slurm_migbatch.lab.evaluate.requested import ComputedCells
from slurm_migbatch.predict.calibration import Calibration
from slurm_migbatch.predict.cells import Array


class Widths(Protocol):
    """Half the widths of a prediction's intervals, by cell."""

    def at(self, level: float) -> tuple[Array, Array]:
        """Return the distances from the middle to the lower and to the upper end of the two-sided interval with
        coverage `level`.
        """


@dataclass(frozen=True)
class CurveWidths:
    """Half the widths of a curve's intervals: multiples of its standard deviations, by the calibration.

    `stranger`: the learned state has none of the model's family on the same stack; `close`: see `Calibration.factor`.
    """

    spread: Array
    pace: npt.NDArray[np.intp]
    calibration: Calibration
    points: int
    stranger: bool
    close: bool

    def at(self, level: float) -> tuple[Array, Array]:
        """See `Widths`."""
        factor = self.calibration.factor(level, self.points, self.pace, stranger=self.stranger, close=self.close)
        half = factor * self.spread
        return half, half


@dataclass(frozen=True)
class ComputedWidths:
    """Half the widths of computed cells, and those of a curve for all others."""

    cells: ComputedCells
    others: CurveWidths

    def at(self, level: float) -> tuple[Array, Array]:
        """See `Widths`."""
        (below, above), (low, high) = self.cells.widths(level), self.others.at(level)
        return np.where(self.cells.known, below, low), np.where(self.cells.known, above, high)

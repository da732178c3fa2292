"""Pool measured points with common properties: a Gaussian process with heavy-tailed noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from slurm_migbatch.predict.cells import Array
from slurm_migbatch.values.grouping import grouped

if TYPE_CHECKING:
    from slurm_migbatch.predict.llm.served import ServedPoint
    from slurm_migbatch.predict.llm.trained import TrainedPoint

NOISE: Final = 0.05
TAIL: Final = 4.0
"""Degrees of freedom of the noise: a point unlike its series counts less."""
LIMIT: Final = 45.0
"""Squared distance from the computed value, in units of its spread, from which a point is ignored."""
MOST_POINTS: Final = 120
"""Most points kept per GPU, an even choice of every series."""
_ROUNDS: Final = 3


P = TypeVar("P", bound="ServedPoint | TrainedPoint")
Errors = Iterator[tuple[str, float, float]]
"""Figures of a point, each with its error against the prediction and the standard deviation of that."""


def trust(distance: float) -> float:
    """Return the weight of a point at this squared distance: from 1 at none to 0 at LIMIT (Tukey's biweight)."""
    return max(0.0, 1.0 - distance / LIMIT) ** 2


class PooledPoints:
    """The points of one figure, solved for what they say about others."""

    def __init__(self, alike: Array, spread: Array, off: Array, trusts: Array, least: float) -> None:
        """Solve for the points.

        Args:
            alike: correlation of each pair, 1 for a point with itself.
            spread: standard deviation of the computed value, by point.
            off: logarithms of measured over computed.
            trusts: weight of each, above 0.
            least: standard deviation that no number of measurements removes.
        """
        covariance = alike * np.outer(spread, spread)
        weight = np.ones(len(off))
        for _ in range(_ROUNDS):
            inverse = np.linalg.inv(covariance + np.diag(NOISE**2 / (trusts * weight)))
            # each point against the prediction from the others
            missed = (inverse @ off) ** 2 / inverse.diagonal()
            weight = np.minimum((TAIL + 1.0) / (TAIL + missed), 1.0) ** 2
        self._inverse = np.linalg.inv(covariance + np.diag(NOISE**2 / (trusts * weight))).astype(np.float64)
        self._weights, self._spread, self._least = self._inverse @ off, spread, least

    def at(self, alike: Array, spread: float) -> tuple[float, float]:
        """Return the error of a computed value of this spread, from the correlation of each point with it, and the
        standard deviation that remains.
        """
        covariance = alike * self._spread * spread
        variance = spread**2 - float(covariance @ self._inverse @ covariance)
        return float(covariance @ self._weights), math.sqrt(max(variance, self._least**2))


def bounded(points: Sequence[P], order: Callable[[P], Any]) -> list[P]:
    """Return at most MOST_POINTS of each GPU in a stable order, of each series an even choice of those in `order`."""
    kept: list[P] = []
    for _, own in sorted(grouped(points, lambda point: point.gpu).items()):
        series = grouped(own, lambda point: point.series)
        limit = max(MOST_POINTS // len(series), 1)
        for _, members in sorted(series.items())[:MOST_POINTS]:
            members = sorted(members, key=order)
            chosen = sorted({*np.linspace(0, len(members) - 1, min(limit, len(members))).astype(int).tolist()})
            kept += [members[i] for i in chosen]
    return kept

"""Intervals that hold what they promise: conformal calibration over whole models.

The surfaces' own standard deviations say which points are less sure; how many of them make an interval is taken from
models that were left out. Scores (distance over standard deviation) are grouped by the number of measured points and by
whether host or device sets the pace, and models count equally, so that the promise is made for the next *model* (split
conformal prediction with models as the exchangeable units; a model that is like none before can still miss more).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Final

import numpy as np

from slurm_migbatch.predict.cells import Array

LEVELS: Final = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98)
MOST_POINTS: Final = 3
"""Models with more measured points are taken as having this many."""
FEW_MODELS: Final = 3
"""With fewer models in a group the groups of both regimes are taken together."""


@dataclass(frozen=True)
class Score:
    """A left-out model's score at one point: the group it counts for and its distance in standard deviations."""

    model: str
    points: int
    by_device: bool
    value: float


@dataclass(frozen=True)
class Calibration:
    """Multiples of the standard deviation by group (`2d`: two points, paced by the device) for each of LEVELS."""

    factors: Mapping[str, tuple[float, ...]]

    def factor(self, level: float, points: int, by_device: Array) -> Array:
        """The multiple for two-sided intervals that hold with probability `level`, for each point."""
        host, device = (self._one(level, min(points, MOST_POINTS), letter) for letter in "hd")
        chosen: Array = np.where(by_device > 0.5, device, host)
        return chosen

    def _one(self, level: float, points: int, letter: str) -> float:
        known = self.factors.get(f"{points}{letter}") or self.factors.get(f"{points}*")
        if known is None:
            return _normal(level)
        return float(np.interp(level, LEVELS, known))

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {name: list(factors) for name, factors in self.factors.items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Calibration:
        """Read `to_dict`'s form; raises TypeError or ValueError where it is none."""
        factors = {str(name): tuple(float(value) for value in values) for name, values in data.items()}
        for name, values in factors.items():
            if len(values) != len(LEVELS) or not all(0 < value < math.inf for value in values):
                raise ValueError(f"the calibration of {name!r} is not understood")
        return cls(factors)


def calibrate(scores: Sequence[Score]) -> Calibration:
    """The calibration that the scores of left-out models call for."""
    factors = {}
    for points in range(MOST_POINTS + 1):
        here = [score for score in scores if score.points == points]
        for letter, group in (
            ("*", here),
            ("h", [score for score in here if not score.by_device]),
            ("d", [score for score in here if score.by_device]),
        ):
            models = {score.model for score in group}
            if len(models) >= FEW_MODELS:
                factors[f"{points}{letter}"] = tuple(_quantile(group, len(models), level) for level in LEVELS)
    return Calibration(factors)


def _quantile(scores: Sequence[Score], models: int, level: float) -> float:
    """The score below which `level` of the points lie, where models weigh alike.

    The usual correction for finite samples (the next model counts as one more, with the worst score) is left out: with
    ten models it makes intervals of 90 % hold 97 %, and every tenth of width is paid with larger slices.
    """
    size: dict[str, int] = {}
    for score in scores:
        size[score.model] = size.get(score.model, 0) + 1
    ordered = sorted(scores, key=lambda score: score.value)
    reached, last = 0.0, 1.0
    for score in ordered:
        reached += 1.0 / size[score.model] / models
        last = max(score.value, 1e-3)
        if reached >= level:
            break
    return last


def _normal(level: float) -> float:
    """Without left-out models: a normal distribution's multiple, half as much again for what it does not know."""
    return 1.5 * NormalDist().inv_cdf(0.5 + level / 2.0)

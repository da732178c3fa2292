"""Calibrate prediction intervals to their stated coverage: conformal calibration over whole models.

The surfaces' standard deviations say which points are less certain; the number of standard deviations in an interval
comes from models that were held out. Scores (distance over standard deviation) are grouped by the number of measured
points and by what limits the speed. Models count equally, so the coverage holds for the next *model* (split conformal
prediction with models as the exchangeable units; a model unlike all earlier ones can still miss more often).

This applies to a stack and family with measured models. For a stranger (another laboratory or family) STRANGERS
applies: the multiples that covered strangers in public tables, which after one measured model are the least.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from slurm_migbatch.predict.cells import Array
from slurm_migbatch.values.grouping import grouped

LEVELS: Final = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98)
MOST_POINTS: Final = 3
"""Models with more measured points count as having this many."""
FEW, MANY = 2, 30
"""Number of models that form a group of their own: over all points, and of one pace."""
_GROUPS: Final = {"*": FEW, "a": FEW, "s": FEW, "h": MANY, "d": MANY}
_LETTERS: Final = ("ha*", "da*", "s*")
"""Groups of points of each pace (host, device, shared), the finest first."""


STRANGER: Final = "x"
CLOSE: Final = "i"
"""A stranger of which the specifications say closely what it keeps in training (`Known.is_close`)."""
_QUANTILES: Final = (0.5, 0.8, 0.9)
STRANGERS: Final[Mapping[tuple[str, str], Sequence[tuple[float, float, float]]]] = {
    ("time", "infer"): ((0.35, 0.75, 1.50), (0.38, 0.85, 1.50), (0.50, 1.15, 1.50), (0.55, 1.10, 1.45)),
    ("time", "train"): ((1.20, 2.30, 2.60), (1.10, 2.50, 4.50), (1.20, 4.20, 6.00), (0.90, 3.80, 5.50)),
    ("memory", "infer"): ((0.80, 1.15, 1.85), (1.10, 1.75, 3.30), (0.67, 1.28, 1.65), (0.67, 1.28, 1.65)),
    ("memory", "train"): ((1.50, 2.10, 2.45), (1.50, 3.60, 4.70), (0.67, 4.40, 4.90), (0.67, 1.28, 1.65)),
}
"""Multiples of the standard deviation that covered 50 %, 80 % and 90 % of a stranger's points after 0 to 3 measured
points, by figure and kind of work. In the tables of ParvaGPU, MIGPerf and MISO each laboratory, each family, and
everything was held out; laboratories weigh about equally, because the coverage is stated for the next laboratory. Each
kind of work has two laboratories, so this says little about a third: the multiples of one of the two alone cover much
less, or all, of the other's first predictions in inference. With two and three points, memory followed the predictions
more closely than a normal distribution, but only in one laboratory: the normal distribution's multiples are kept,
because a memory limit that is too low ends jobs.
"""
CLOSER: Final[Mapping[tuple[str, str], Sequence[tuple[float, float, float]]]] = {
    ("memory", "train"): ((0.80, 1.30, 1.65),)
}
"""The same for such a stranger (CLOSE) without measured points: the far multiples above are those of models without
specifications. They cover MIGPerf's image models and those of `measurements/` (bf16, which needs less than the prior's
32 bits), and the texts of both if their parameters are all that is known.
"""


@dataclass(frozen=True)
class Score:
    """Score of a held-out model at one point: its distance in standard deviations, after `points` measured ones.

    `pace` is what limits the speed there (`surface.HOST`, `DEVICE` or `SHARED`).
    """

    model: str
    points: int
    pace: int
    value: float


@dataclass(frozen=True)
class Calibration:
    """Multiples of the standard deviation for each of LEVELS, by group.

    A group is a number of measured points and a letter: `h` and `d` (limited by host or device) with at least MANY
    models, `a` for both (one process alone), `s` for processes that share the slice, `*` for all, `x` for strangers,
    `i` for strangers whose specifications say closely what they keep.
    """

    factors: Mapping[str, tuple[float, ...]]

    def factor(
        self, level: float, points: int, pace: npt.NDArray[np.intp], *, stranger: bool = False, close: bool = False
    ) -> Array:
        """Return, for each point, the multiple of a two-sided interval with coverage `level`. `close`: see
        `Known.is_close`.
        """
        unlike = CLOSE + STRANGER if close else STRANGER
        groups = [unlike if stranger else letters + unlike for letters in _LETTERS]
        factors = np.array([self._factor(level, min(points, MOST_POINTS), letters) for letters in groups])
        chosen: Array = factors[pace]
        return chosen

    def _factor(self, level: float, points: int, letters: str) -> float:
        for letter in letters:
            known = self.factors.get(f"{points}{letter}")
            if known is not None:
                return float(np.interp(level, LEVELS, known))
        return _normal(level)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-able form."""
        return {name: list(factors) for name, factors in self.factors.items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Calibration:
        """Read the form of `to_dict`; raises TypeError or ValueError if it is invalid."""
        factors = {str(name): tuple(float(value) for value in values) for name, values in data.items()}
        for name, values in factors.items():
            if len(values) != len(LEVELS) or not all(0 < value < math.inf for value in values):
                raise ValueError(f"cannot parse the calibration of {name!r}")
        return cls(factors)


@cache
def unmeasured(figure: str, kind: str) -> Calibration:
    """Return the calibration of a figure and kind of work without measurements."""
    groups = {STRANGER: STRANGERS[figure, kind], CLOSE: CLOSER.get((figure, kind), ())}
    return Calibration(
        {f"{points}{letter}": _at_levels(known) for letter, rows in groups.items() for points, known in enumerate(rows)}
    )


def _at_levels(known: Sequence[float]) -> tuple[float, ...]:
    """Return the multiple for each of LEVELS from those of _QUANTILES.

    Between the quantiles it is linear in the logarithms of the multiple and of a normal distribution's multiple, beyond
    the last it continues the last segment, and below the first it follows a normal distribution.
    """
    normals, values = np.log([_normal(level) for level in _QUANTILES]), np.log(known)
    wanted = np.log([_normal(level) for level in LEVELS])
    inside = np.interp(wanted, normals, values)
    beyond = (values[-1] - values[-2]) / (normals[-1] - normals[-2])
    logs = inside + np.maximum(wanted - normals[-1], 0.0) * beyond + np.minimum(wanted - normals[0], 0.0)
    return tuple(np.exp(logs).tolist())


def calibrate(scores: Sequence[Score], strangers: Calibration | None = None) -> Calibration:
    """Return the calibration from the scores of held-out models, with the strangers' calibration included."""
    factors = dict(strangers.factors) if strangers else {}
    for points in range(MOST_POINTS + 1):
        of_points = [score for score in scores if score.points == points]
        for letter, least in _GROUPS.items():
            group = [score for score in of_points if letter in _LETTERS[score.pace]]
            by_model = grouped(group, lambda score: score.model)
            models = [np.sort([max(score.value, 1e-3) for score in own]) for own in by_model.values()]
            usual = factors.get(f"{points}{STRANGER}")
            if len(models) >= least:
                factors[f"{points}{letter}"] = _factors(models)
            elif models and least == FEW and usual and f"{points}{CLOSE}" not in factors:
                # one model alone may be well predicted by chance, but where it is not, others are not either
                own = np.maximum(usual, _quantiles(models, np.array(LEVELS)))
                factors[f"{points}{letter}"] = tuple(own.tolist())
    return Calibration(factors)


def _factors(models: Sequence[Array]) -> tuple[float, ...]:
    """Return the score that covers each of LEVELS for a held-out model, from the sorted scores of each model.

    The quantile is found by holding the models out once more: each is compared with the quantile of the others. With
    few models, one of which is unlike the rest, the quantile at the level itself would cover more than stated.
    """
    tried = np.concatenate([np.arange(0.02, 0.9, 0.02), np.arange(0.9, 1.0, 0.005), [1.0]])
    covered = np.zeros(len(tried))
    for i, model in enumerate(models):
        others = [*models[:i], *models[i + 1 :]]
        covered += [np.searchsorted(model, q, side="right") / len(model) for q in _quantiles(others, tried)]
    covered /= len(models)
    chosen = [tried[int(np.argmax(covered >= level)) if covered[-1] >= level else -1] for level in LEVELS]
    scores = np.maximum.accumulate(_quantiles(models, np.array(chosen)))
    return tuple(float(value) for value in scores)


def _quantiles(models: Sequence[Array], shares: Array) -> Array:
    """Return the scores below which `shares` of the points lie, with models weighted equally."""
    values = np.concatenate(models)
    weight = np.concatenate([np.full(len(model), 1.0 / len(model) / len(models)) for model in models])
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weight[order])
    index = np.minimum(np.searchsorted(reached, shares - 1e-12), len(values) - 1)
    quantiles: Array = values[order][index]
    return quantiles


def _normal(level: float) -> float:
    """Return the multiple without held-out models: a normal distribution's, times 1.5."""
    return 1.5 * NormalDist().inv_cdf(0.5 + level / 2.0)

"""Find single measured points that the other points of the same model contradict: a wrong unit or batch in one line, or
a run that something disturbed. The fit is by least squares, and one such point would move the whole curve.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from slurm_migbatch.predict.cells import Array, Cells
from slurm_migbatch.predict.fewshot import adapt
from slurm_migbatch.predict.surface import NUGGET, Belief, Surface

PART: Final = 5
"""One point in so many may be contradicted; if more are, none can be told to be right."""
FAR: Final = math.log(2.0)
"""Least difference (of logarithms) from what the others predict; curves do not follow every step of real software."""
CERTAIN: Final = 5.0
"""The same in standard deviations of that prediction."""
USUAL: Final = 0.6745
"""Median distance of points from their curve in standard deviations; more is the noise of the table."""
UNLIKELY: Final = 2.0
"""The same for points that nobody confirms."""
SUSPECT: Final = 4.0
"""Standard deviations of its measurement from which a point, or one near it, may be contradicted."""
TRIED: Final = 12
"""Points furthest from the curve that are left out in turn: it is bent towards the contradicted one."""


def contradicted(surface: Surface, prior: Belief, cells: Cells, logs: Array, noise: Array) -> list[int]:
    """Return the indices of the points that the others contradict."""
    found: list[int] = []
    left = np.arange(len(logs))
    while len(found) < len(logs) // PART:
        away = _away(surface, adapt(surface, prior, cells.take(left), logs[left], noise[left]), cells, logs, left)
        if np.max(np.abs(away) / noise[left]) <= SUSPECT:
            break
        fits = []
        for place in np.argsort(-np.abs(away) / noise[left])[:TRIED].tolist():
            others = np.delete(left, place)
            belief = adapt(surface, prior, cells.take(others), logs[others], noise[others])
            distances = np.abs(_away(surface, belief, cells, logs, others) / noise[others])
            fits.append((float(np.sum(distances**2)), int(left[place]), float(np.median(distances)), belief))
        _, point, median, belief = min(fits, key=lambda fit: fit[:2])
        value, deviation = belief.predict(surface, cells.take([point]))
        deviation = np.sqrt(deviation**2 + max(noise[point] ** 2 - NUGGET**2, 0.0))
        certain = CERTAIN * float(deviation[0]) * max(median / USUAL, 1.0)
        if abs(logs[point] - value[0]) <= max(FAR, certain):
            break
        found.append(point)
        left = left[left != point]
    return found


def unconfirmed(
    surface: Surface, prior: Belief, cells: Cells, logs: Array, noise: Array, alone: Sequence[int]
) -> list[int]:
    """Return those of the points `alone`, each of one user beyond the work of all others, that are unlikely by the
    points of the others: they reach further than these, so that the whole curve would follow them.
    """
    others = [place for place in range(len(logs)) if place not in {*alone}]
    if not alone or not others:
        return []
    belief = adapt(surface, prior, cells.take(others), logs[others], noise[others])
    value, deviation = belief.predict(surface, cells.take(alone))
    away = np.abs(logs[list(alone)] - value)
    far = away > np.maximum(FAR, UNLIKELY * np.hypot(deviation, noise[list(alone)]))
    return [place for place, is_far in zip(alone, far.tolist(), strict=True) if is_far]


def _away(surface: Surface, belief: Belief, cells: Cells, logs: Array, points: npt.NDArray[np.intp]) -> Array:
    return np.asarray(surface.curve(belief.mean, cells.take(points)) - logs[points])

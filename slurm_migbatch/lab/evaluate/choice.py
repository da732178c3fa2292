"""Evaluate choices: the slice and batch that is picked under a latency limit, and its measured result.

A case is a model on one GPU with a limit of 1, 1.5, 2, 4 or 8 times its measured latency at batch 8 on the largest
slice. Picked is, of the measured cells of one process, the one with the most predicted throughput per compute
slice among those predicted to keep the limit: by the median, or by the upper end of the interval of a level
(the margin). A prediction keeps a limit that it exceeds by less than a careful measurement's noise (2 %): a limit is
itself a measured figure here, and the choice of a slice must not depend on its last digit. For profiled cells the
method uses the measured figure. A limit is exceeded if the measured latency is over it, by any amount. Quality is the
measured throughput per compute slice relative to the best that keeps the limit, over the cases that kept it; no
choice counts 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from slurm_migbatch.lab.evaluate.curves import MeasuredCurves
from slurm_migbatch.lab.evaluate.heldout import Guess, HeldOutPrediction
from slurm_migbatch.predict.calibration import LEVELS
from slurm_migbatch.predict.cells import Array
from slurm_migbatch.predict.surface import NUGGET

FACTORS: Final = (1.0, 1.5, 2.0, 4.0, 8.0)
LIMIT_BATCH: Final = 8.0
BROKEN_TARGET: Final = 0.05
QUALITY_TARGET: Final = 0.93
_ROUNDING: Final = 1.0 + 1e-9


@dataclass(frozen=True)
class ChoiceOutcome:
    """Result of one choice: `quality` is None if the limit was exceeded, 0 if nothing was chosen."""

    model: str
    limit_s: float
    offered: bool
    broken: bool
    quality: float | None


def cases(guess: Guess, level: float | None) -> list[ChoiceOutcome]:
    """Return the choices for a prediction with the margin of `level`, or (None) by its medians."""
    curves = _at_usual_size(MeasuredCurves.of(guess.sample))
    if curves is None:
        return []
    shown = np.isin(curves.index, guess.done)
    value = np.where(shown, curves.logs, guess.value[curves.index])
    upper = value
    if level is not None:
        assert isinstance(guess, HeldOutPrediction)
        upper = value + np.where(shown, 0.0, guess.above(level)[curves.index])
    at = _limit_point(curves)
    outcomes = []
    for factor in FACTORS:
        limit = float(curves.seconds[at]) * factor
        within = curves.seconds <= limit * _ROUNDING
        worth = curves.batch / curves.seconds / curves.slices
        noise = np.where(shown, _ROUNDING, 1.0 + NUGGET)
        allowed = np.isfinite(value) & (np.exp(np.nan_to_num(upper, nan=np.inf)) <= limit * noise)
        if not allowed.any():
            outcomes.append(ChoiceOutcome(guess.sample.model, limit, False, False, 0.0))
            continue
        predicted = np.where(allowed, np.log(curves.batch / curves.slices) - value, -np.inf)
        chosen = int(np.argmax(predicted))
        broken = not within[chosen]
        best = float(worth[within].max())
        outcomes.append(
            ChoiceOutcome(guess.sample.model, limit, True, broken, None if broken else float(worth[chosen]) / best)
        )
    return outcomes


def summary(outcomes: Sequence[ChoiceOutcome]) -> dict[str, Any]:
    """Return the share of limits exceeded, and the mean quality over the cases that kept theirs."""
    qualities = [case.quality for case in outcomes if case.quality is not None]
    return {
        "cases": len(outcomes),
        "broken": round(sum(case.broken for case in outcomes) / len(outcomes), 4),
        "not_offered": round(sum(not case.offered for case in outcomes) / len(outcomes), 4),
        "quality": round(float(np.mean(qualities)), 4) if qualities else 0.0,
    }


def choices(guesses: Mapping[tuple[str, int], Sequence[Guess]], level: float) -> list[dict[str, Any]]:
    """Summarise each method and number of points: by medians and, for the predictor, with margins."""
    rows = []
    for (method, points), group in guesses.items():
        predicted = all(isinstance(guess, HeldOutPrediction) for guess in group)
        for margin in [None, *(sorted({*LEVELS, level}) if predicted else ())]:
            held = [case for guess in group for case in cases(guess, margin)]
            if held:
                rows.append({"method": method, "k": points, "level": margin, **summary(held)})
    return rows


def _at_usual_size(curves: MeasuredCurves) -> MeasuredCurves | None:
    """Return the points of the most frequent input size; None if there are fewer than two."""
    if len(curves) < 2:
        return None
    sizes, counts = np.unique(curves.size, return_counts=True)
    return curves.take(np.flatnonzero(curves.size == sizes[int(np.argmax(counts))]))


def _limit_point(curves: MeasuredCurves) -> int:
    full = np.flatnonzero(curves.full)
    distance: Array = np.abs(np.log(curves.batch[full] / LIMIT_BATCH))
    return int(full[int(np.argmin(distance))])

"""Evaluate relative speeds of slices: throughput over that of the largest slice at the same model, input and batch.

A scheduler of training jobs needs this at submission: what a job loses on a smaller slice. The predictor is compared
with two rules: the share of compute slices, and the mean of the other models on the same slice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from slurm_migbatch.lab.evaluate.curves import MeasuredCurves
from slurm_migbatch.lab.evaluate.heldout import Guess, HeldOutPrediction, Mask
from slurm_migbatch.lab.evaluate.scores import Errors
from slurm_migbatch.lab.sim.relative import relative_speed
from slurm_migbatch.predict.cells import Array

TARGET: Final = 0.161
"""Mean absolute error of the mean-per-slice rule on MISO, with families held out."""


def speeds(curves: MeasuredCurves, logs: Array) -> tuple[Array, Mask]:
    """Return each point's relative speed by `logs` (of seconds), and True if it is informative.

    That is below the largest slice.
    """
    at = curves.on_full()
    mask: Mask = (at >= 0) & ~curves.full
    return np.asarray(np.exp(logs[at] - logs), dtype=np.float64), mask


def score(groups: Sequence[tuple[str, int, Sequence[tuple[Guess, Sequence[MeasuredCurves]]]]]) -> list[dict[str, Any]]:
    """Return for each method and number of points the mean absolute error.

    Each prediction comes with the curves of other models.
    """
    rows = []
    for method, points, pairs in groups:
        errors = _errors((guess, _expected(guess)) for guess, _ in pairs)
        if errors:
            rows.append({"method": method, "k": points, **_summary(errors)})
        if all(isinstance(guess, HeldOutPrediction) for guess, _ in pairs):
            errors = _errors((guess, _predicted_speeds(guess)) for guess, _ in pairs)
            if errors:
                rows.append({"method": f"{method}, middle figures", "k": points, **_summary(errors)})
    if groups:
        pairs = groups[0][2]
        share = _errors((guess, _slice_shares(guess)) for guess, _ in pairs)
        mean = _errors((guess, _mean(guess, others)) for guess, others in pairs)
        for name, errors in (("share of compute slices", share), ("mean of other models", mean)):
            if errors:
                rows.append({"method": name, "k": 0, **_summary(errors)})
    return rows


def _expected(guess: Guess) -> Array:
    """Return the predictor's expectation over its belief; computed cells and other methods have one figure."""
    if not isinstance(guess, HeldOutPrediction):
        return _predicted_speeds(guess)
    curves = MeasuredCurves.of(guess.sample)
    expected = np.full(len(curves), np.nan)
    at = curves.on_full()
    usable = np.flatnonzero(at >= 0)
    cells = guess.sample.cells
    expected[usable] = relative_speed(
        guess.belief, cells.take(curves.index[usable]), cells.take(curves.index[at[usable]])
    )
    computed = guess.computed[curves.index]
    return np.where(computed & computed[at], _predicted_speeds(guess), expected)


def _predicted_speeds(guess: Guess) -> Array:
    curves = MeasuredCurves.of(guess.sample)
    return speeds(curves, guess.value[curves.index])[0]


def _slice_shares(guess: Guess) -> Array:
    curves = MeasuredCurves.of(guess.sample)
    return np.asarray(curves.slices / curves.slices[curves.full].max(initial=1.0), dtype=np.float64)


def _mean(guess: Guess, others: Iterable[MeasuredCurves]) -> Array:
    curves = MeasuredCurves.of(guess.sample)
    speeds_by_slices: dict[float, list[Array]] = {}
    for other in others:
        if other.sample.kind == guess.sample.kind and len(other):
            real, mask = speeds(other, other.logs)
            for share in np.unique(other.slices[mask]):
                speeds_by_slices.setdefault(float(share), []).append(real[mask & (other.slices == share)])
    means = {slices: float(np.concatenate(values).mean()) for slices, values in speeds_by_slices.items()}
    return np.array([means.get(float(slices), np.nan) for slices in curves.slices])


def _errors(predictions: Iterable[tuple[Guess, Array]]) -> Errors:
    by_model: dict[str, list[Array]] = {}
    family = {}
    for guess, values in predictions:
        curves = MeasuredCurves.of(guess.sample)
        if not len(curves):
            continue
        real, mask = speeds(curves, curves.logs)
        mask = mask & np.isfinite(values) & ~np.isin(curves.index, guess.done)
        if mask.any():
            by_model.setdefault(guess.sample.model, []).append(np.abs(values - real)[mask])
            family[guess.sample.model] = guess.sample.known.family
    return Errors({model: np.concatenate(errors) for model, errors in by_model.items()}, family)


def _summary(errors: Errors) -> dict[str, Any]:
    pooled = np.concatenate(list(errors.by_model.values()))
    return {
        "models": len(errors.by_model),
        "points": len(pooled),
        "mae": round(float(pooled.mean()), 4),
        "mae_mean_of_models": round(errors.mape / 100, 4),
        "per_model": {name: round(float(e.mean()), 4) for name, e in sorted(errors.by_model.items())},
    }

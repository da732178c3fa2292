"""Summarize errors and coverage of many predictions, with models counting equally."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np

from slurm_migbatch.lab.evaluate.heldout import Guess, HeldOutPrediction, Mask
from slurm_migbatch.predict.cells import Array

G = TypeVar("G", bound=Guess)
LEVELS: Final = (0.8, 0.9)
"""Levels at which coverage is reported."""


@dataclass(frozen=True)
class Errors:
    """Relative errors of scored points by model; in per cent when summarized."""

    by_model: Mapping[str, Array]
    family: Mapping[str, str]

    def __bool__(self) -> bool:
        return bool(self.by_model)

    @property
    def mape(self) -> float:
        """Mean over models of each model's mean error, in per cent."""
        return float(np.mean([errors.mean() for errors in self.by_model.values()])) * 100

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-able summary."""
        if not self.by_model:
            return {"models": 0, "points": 0}
        pooled = np.concatenate(list(self.by_model.values()))
        families: dict[str, list[float]] = {}
        for model, errors in self.by_model.items():
            families.setdefault(self.family.get(model) or "?", []).append(float(errors.mean()) * 100)
        return {
            "models": len(self.by_model),
            "points": len(pooled),
            "mape": round(self.mape, 2),
            "median": round(float(np.median(pooled)) * 100, 2),
            "p90": round(float(np.quantile(pooled, 0.9)) * 100, 2),
            "per_model": {name: round(float(e.mean()) * 100, 2) for name, e in sorted(self.by_model.items())},
            "per_family": {name: round(float(np.mean(means)), 2) for name, means in sorted(families.items())},
        }


def collect(guesses: Sequence[G], values: Callable[[G], Array], mask: Callable[[G], Mask]) -> Errors:
    """Collect one value for each cell that `mask` selects, by model."""
    parts: dict[str, list[Array]] = {}
    for guess in guesses:
        chosen = values(guess)[mask(guess)]
        if len(chosen):
            parts.setdefault(guess.sample.model, []).append(chosen)
    family = {guess.sample.model: guess.sample.known.family for guess in guesses}
    return Errors({model: np.concatenate(arrays) for model, arrays in parts.items()}, family)


def coverage(
    predictions: Sequence[HeldOutPrediction], level: float, mask: Callable[[HeldOutPrediction], Mask]
) -> dict[str, float]:
    """Return the coverage of the intervals of `level`: the mean over models, and all points pooled.

    Also their width, as the factor from the median to the upper end.
    """
    covered = collect(predictions, lambda outcome: outcome.held(level), mask).by_model
    if not covered:
        return {}
    widths = collect(predictions, lambda outcome: np.exp(outcome.above(level)), mask).by_model
    return {
        "level": level,
        "mean": round(float(np.mean([values.mean() for values in covered.values()])), 4),
        "pooled": round(float(np.concatenate(list(covered.values())).mean()), 4),
        "worst_model": round(float(min(values.mean() for values in covered.values())), 4),
        "width_factor": round(float(np.median(np.concatenate(list(widths.values())))), 3),
    }


def scored(guess: Guess) -> Mask:
    """Return True for the cells that count: of one process, and not profiled."""
    mask: Mask = guess.open & (guess.procs == 1)
    return mask


def scored_all(guess: Guess) -> Mask:
    """Return True for cells of any number of processes that were not profiled."""
    return guess.open

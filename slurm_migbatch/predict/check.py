"""Compare predictions with measurements: whether a new model is better, whether coverage is as stated, what drifts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Final

import numpy as np

from slurm_migbatch.predict.cells import Array, Cells, GpuSpec
from slurm_migbatch.predict.known import Known, ModelKnowledge
from slurm_migbatch.predict.learned import LearnedPredictor
from slurm_migbatch.predict.llm import served, trained
from slurm_migbatch.predict.runs import Expect, Key, Observation
from slurm_migbatch.predict.samples import SHORT
from slurm_migbatch.predict.state import SURFACES, Learned
from slurm_migbatch.profiling.measurement import SERVE, Measurement
from slurm_migbatch.values.grouping import grouped

LARGEST_MISS: Final = math.log(10.0)
"""An error counts at most as a factor of ten, so that one outlier does not decide."""
SLACK: Final = 0.02
CHANCE: Final = 0.1
"""Insignificant difference of two mean errors (of logarithms): SLACK, plus CHANCE over the root of the points."""
MUCH: Final = math.log(1.25)
"""Worsening of one figure that no improvement of another outweighs."""
ENOUGH: Final = 20
"""Number of runs needed to judge coverage."""


@dataclass(frozen=True)
class Miss:
    """Mean absolute logarithm of measured over predicted, each model counting once; number of models and points."""

    error: float
    models: int
    points: int

    def to_dict(self) -> dict[str, float]:
        """Return the JSON-able form."""
        return {"error": round(self.error, 5), "models": self.models, "points": self.points}


def expected_by(learned: Learned) -> Expect:
    """Return the median predictions of a learned state, for `runs.select_learnable` and for the errors."""

    def expect(figure: str, key: Key, rows: Sequence[Measurement], known: Known, gpu: GpuSpec) -> Sequence[float]:
        belief, _, _ = learned.belief(figure, key[0], key[1], known, gpu)
        values: list[float] = belief.predict(SURFACES[figure], Cells.of_rows(rows, gpu, known))[0].tolist()
        return values

    return expect


def distances(learned: Learned, rows: Iterable[Measurement], knowledge: ModelKnowledge) -> dict[tuple[str, Key], Array]:
    """Return log(measured / predicted) of every row that has the figure, by figure and key. Figures are time and
    memory, for servers also ttft and tpot, and for language models' training jobs also the step.
    """
    expect = expected_by(learned)
    rows = list(rows)
    groups = grouped(
        (row for row in rows if row.kind != SERVE), lambda row: (knowledge.canonical(row.model), row.kind, row.gpu)
    )
    servers, trainings = served.ServedMeasurements(learned.served), trained.TrainedMeasurements(learned.trained)
    errors: dict[tuple[str, Key], list[float]] = {}
    computed = [((at.model, SERVE, at.gpu), servers.errors(at)) for at in served.points_of(rows)]
    computed += [((at.model, "train", at.gpu), trainings.errors(at)) for at in trained.points_of(rows)]
    for key, figures in computed:
        for figure, away, _ in figures:
            errors.setdefault((figure, key), []).append(away)
    logs: dict[tuple[str, Key], Array] = {key: np.array(away) for key, away in errors.items()}
    for key, group in groups.items():
        known, gpu = knowledge.of(key[0], group), GpuSpec.of_rows(group)
        for figure in SURFACES:
            with_figure = _measured(group, figure)
            if with_figure:
                values = np.log([row.figure(figure) or 1.0 for row in with_figure])
                logs[figure, key] = values - np.asarray(expect(figure, key, with_figure, known, gpu))
    return logs


def _measured(rows: Iterable[Measurement], figure: str) -> list[Measurement]:
    """Return the rows that have a figure; memory that was too little is none."""
    enough = (row for row in rows if figure != "memory" or row.source != SHORT)
    return [row for row in enough if row.figure(figure) is not None]


def misses(learned: Learned, rows: Iterable[Measurement], knowledge: ModelKnowledge) -> dict[str, Miss]:
    """Return the error of predictions by figure; figures without rows are missing."""
    by_figure = grouped(distances(learned, rows, knowledge).items(), lambda item: item[0][0])
    return {
        figure: Miss(
            fmean(float(np.mean(np.minimum(np.abs(away), LARGEST_MISS))) for _, away in items),
            len(items),
            sum(len(away) for _, away in items),
        )
        for figure, items in by_figure.items()
    }


def worse(candidate: Mapping[str, Miss], current: Mapping[str, Miss], tolerance: float) -> str:
    """Return why a candidate is rejected, "" if it is not: a larger error over all figures, or a much larger one in one
    figure.
    """
    if not candidate:
        return ""
    points = max(miss.points for miss in candidate.values())
    insignificant = SLACK + CHANCE / math.sqrt(points)
    candidate_error, current_error = (fmean(miss.error for miss in misses.values()) for misses in (candidate, current))
    if candidate_error > current_error * (1.0 + tolerance) + insignificant:
        factors = math.exp(candidate_error), math.exp(current_error)
        return "its error on the check data is a factor of {:.2f}, that of the current one {:.2f}".format(*factors)
    for figure, miss in candidate.items():
        if miss.error > current[figure].error * (1.0 + tolerance) + insignificant + MUCH:
            return (
                f"its {figure} is off by a factor of {math.exp(miss.error):.2f} where it was checked, that of the "
                f"current one by {math.exp(current[figure].error):.2f}"
            )
    return ""


@dataclass(frozen=True)
class Coverage:
    """Coverage of an upper bound: `share` of `runs` ended within the bound stated for `confidence`."""

    runs: int
    kept: int
    confidence: float

    @property
    def share(self) -> float:
        """Between 0 and 1; 1 without runs."""
        return self.kept / self.runs if self.runs else 1.0

    @property
    def broken(self) -> bool:
        """Whether coverage is below the stated one by more than chance (two standard deviations)."""
        chance = 2.0 * math.sqrt(self.confidence * (1.0 - self.confidence) / max(self.runs, 1))
        return self.runs >= ENOUGH and self.share < self.confidence - chance

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-able form."""
        return {"runs": self.runs, "share": round(self.share, 4), "broken": self.broken}


def coverage(
    predictor: LearnedPredictor, observations: Iterable[Observation], confidence: float
) -> dict[str, Coverage]:
    """Return how many runs ended within the upper bounds of their time and memory, by figure."""
    groups = grouped((observation.row for observation in observations), lambda row: (row.model, row.kind, row.gpu))
    runs: dict[str, int] = {}
    within: dict[str, int] = {}
    for key, group in groups.items():
        known, gpu = predictor.knowledge.of(key[0], group), GpuSpec.of_rows(group)
        for figure in SURFACES:
            with_figure = _measured(group, figure)
            if not with_figure:
                continue
            high = predictor.interval(figure, key[0], known, gpu, key[1], Cells.of_rows(with_figure, gpu, known))[2]
            values = np.array([row.figure(figure) or 0.0 for row in with_figure])
            runs[figure] = runs.get(figure, 0) + len(with_figure)
            within[figure] = within.get(figure, 0) + int(np.sum(values <= high))
    return {figure: Coverage(count, within[figure], confidence) for figure, count in runs.items()}


def ratios(learned: Learned, rows: Iterable[Measurement], knowledge: ModelKnowledge) -> dict[str, dict[str, Any]]:
    """Return measured over predicted by `model/kind/gpu` and figure: the median, and the number of rows."""
    by_key: dict[str, dict[str, Any]] = {}
    for (figure, key), away in distances(learned, rows, knowledge).items():
        drift = {"ratio": round(math.exp(float(median(away.tolist()))), 4), "runs": len(away)}
        by_key.setdefault("/".join(key), {})[figure] = drift
    return by_key

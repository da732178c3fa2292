"""Find measured points that may be valid but are far from all other measurements.

They are used: a site's measurements of a model count for that model. The import reports them, because a table
that is wrong by the same factor everywhere looks like that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

import numpy as np

from slurm_migbatch.predict.bounds import PART, UNSTATED_BITS, precision_of
from slurm_migbatch.predict.cells import Array, Cells, GpuSpec
from slurm_migbatch.predict.known import Known
from slurm_migbatch.predict.learned import LearnedPredictor
from slurm_migbatch.predict.llm import served, trained
from slurm_migbatch.predict.llm.memory import MIB
from slurm_migbatch.predict.llm.names import generates
from slurm_migbatch.predict.llm.pooling import Errors, P
from slurm_migbatch.predict.llm.speed import SPAN
from slurm_migbatch.profiling.measurement import SERVE, Measurement
from slurm_migbatch.values.grouping import grouped

FAR: Final = math.log(3.0)
"""Logarithm of measured over predicted from which a point is unusual if it also lies outside the predicted interval."""
WORDS: Final = {
    "time": "a batch takes", "memory": "memory is", "ttft": "the first token takes", "tpot": "each further token takes",
    "step": "a step takes", "beside": "memory besides weights and optimizer is",
}  # fmt: skip

_Away = tuple[Measurement, float, float]
"""A row, the logarithm of measured over predicted, and the tolerance of the prediction."""


@dataclass(frozen=True)
class Unusual:
    """Points of a model on a GPU that are far from one figure's predictions: how many of how many, their median factor,
    and the first of them.
    """

    figure: str
    model: str
    kind: str
    gpu: str
    far: int
    points: int
    factor: float
    first: Measurement

    @property
    def text(self) -> str:
        """Return the sentence for the user who imports them."""
        first = f"{self.first.profile or 'the whole GPU'}, batch {self.first.batch}"
        return (
            f"unusual: {self.model} ({self.kind}) on {self.gpu}: at {self.far} of {self.points} points "
            f"(first: {first}) {WORDS[self.figure]} {self.factor:.2g} times the value expected from all other data"
        )


def unusual(rows: Iterable[Measurement], predictor: LearnedPredictor) -> list[Unusual]:
    """Return the points of a table that are far from the predictions of a predictor that has not seen it."""
    groups = grouped(rows, lambda row: (predictor.knowledge.canonical(row.model), row.kind, row.gpu))
    reports = []
    for (model, kind, gpu), group in sorted(groups.items()):
        for figure, distances in _distances(model, kind, group, predictor):
            far = [(row, log) for row, log, tolerance in distances if abs(log) > max(FAR, tolerance)]
            if far:
                factor = math.exp(median(log for _, log in far))
                reports.append(Unusual(figure, model, kind, gpu, len(far), len(distances), factor, far[0][0]))
    return reports


def _distances(
    model: str, kind: str, rows: Sequence[Measurement], predictor: LearnedPredictor
) -> Iterator[tuple[str, list[_Away]]]:
    if kind == SERVE:
        servers = served.ServedMeasurements(predictor.learned.served)
        yield from _computed(rows, served.point_of, servers.errors)
    elif kind == "train" and (generates(model) or predictor.computable("time", model, kind, GpuSpec.of_rows(rows))):
        trainings = trained.TrainedMeasurements(predictor.learned.trained)
        yield from _computed(rows, trained.point_of, trainings.errors)
    else:
        yield from _of_curves(model, kind, rows, predictor)


def _of_curves(
    model: str, kind: str, rows: Sequence[Measurement], predictor: LearnedPredictor
) -> Iterator[tuple[str, list[_Away]]]:
    known, gpu = predictor.knowledge.of(model, rows), GpuSpec.of_rows(rows)
    for figure in ("time", "memory"):
        distances: list[_Away] = []
        with_figure = [row for row in rows if row.figure(figure) is not None]
        _, measured, _ = predictor.learned.belief(figure, model, kind, known, gpu)
        groups = _by_weights(with_figure, known, measured) if figure == "memory" else {known: with_figure}
        for described, group in groups.items():
            ends = predictor.interval(figure, model, described, gpu, kind, Cells.of_rows(group, gpu, known))
            low, middle, high = np.log(ends)
            values: Array = np.log([row.figure(figure) or 1.0 for row in group])
            logs = values - middle
            tolerance = np.where(logs > 0, high - middle, middle - low)
            distances += zip(group, logs.tolist(), tolerance.tolist(), strict=True)
        if distances:
            yield figure, distances


def _by_weights(rows: Sequence[Measurement], known: Known, measured: int) -> dict[Known, list[Measurement]]:
    """Return the rows by the model with its weights in their precision.

    A measured curve is that of one precision: rows of another one are left out.
    """
    groups = grouped(rows, lambda row: _in_precision(known, row))
    return {described: group for described, group in groups.items() if described == known or not measured}


def _in_precision(known: Known, row: Measurement) -> Known:
    """Return the model with its weights in the precision that an inference row or the model's name states."""
    kept = precision_of(row) if row.kind == "infer" else None
    if kept is None or (kept.bits >= UNSTATED_BITS and not row.precision):
        return known
    weight_mib = known.params * kept.bits / 8 / MIB
    same = PART <= weight_mib / known.weight_mib <= 1 / PART
    return known if same else replace(known, weight_mib=weight_mib)


def _computed(
    rows: Sequence[Measurement], point_of: Callable[[Measurement], P | None], errors: Callable[[P], Errors]
) -> Iterable[tuple[str, list[_Away]]]:
    """Return the distances from figures that are computed and corrected by measurements."""
    distances: dict[str, list[_Away]] = {}
    for row in rows:
        point = point_of(row)
        for figure, log, spread in () if point is None else errors(point):
            distances.setdefault(figure, []).append((row, log, SPAN * spread))
    return distances.items()

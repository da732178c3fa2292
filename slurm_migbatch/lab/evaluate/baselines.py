"""Define simple rules with the same data as the predictor: its baselines, computed in the same run.

- `linear`: the time of the same batch on the largest slice, divided by the slice's share.
- `roofline`: the whole curve over the batch on the largest slice. The smallest time seen is the floor. If the time
  at a batch is over 1.2 times the floor it is divided by the share, otherwise the best time per item is; the result is
  never below the floor.
- `gbm`: boosted trees on operations, parameters, slice and batch; nothing of the model is measured. Those with
  all of the predictor's specifications are in `factual`.
- `gbm ratio`: the same on slice and batch, for the ratio to the first profiled point.
- `physics`: t = t0 + c * batch / share, fitted to the profiled points (t0 = 0 with one of them).
- `residual gbm`: boosted trees learn the error of that form from the other models; `with facts` adds
  operations and parameters.

Points are fixed: the largest slice at batch 8 for one; at its smallest batch and at 32 for two; and the smallest slice
at batch 8 for three. Rules marked `our points` get those that the predictor chose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from slurm_migbatch.lab.evaluate import factual
from slurm_migbatch.lab.evaluate.curves import MeasuredCurves
from slurm_migbatch.lab.evaluate.heldout import Guess, HeldOutPrediction
from slurm_migbatch.predict.cells import Array
from slurm_migbatch.predict.samples import Sample

CURVE: Final = -1
"""Instead of a number of points: a whole curve over the batch."""
FLOOR_FACTOR: Final = 1.2
TREES: Final = 150
MOST_ROWS: Final = 4000
"""Larger training tables are reduced to an even choice of rows, so that a run takes minutes."""
ENOUGH: Final = 3
"""Minimum number of models on the same GPU to train trees; with fewer all GPUs are used together."""


def guesses(
    samples: Iterable[Sample],
    others: Sequence[MeasuredCurves],
    outcomes: Sequence[HeldOutPrediction],
    max_points: int = 3,
    *,
    trees: bool = True,
) -> Iterator[Guess]:
    """Yield the rules' predictions for the samples, learning from `others`.

    `outcomes` are the predictor's, for the points that it chose. Without `trees` only the rules without training.
    """
    for sample in samples:
        curves = MeasuredCurves.of(sample)
        if not len(curves):
            continue
        teachers = _teachers(curves, others)
        yield _guess("linear", curves, CURVE, np.flatnonzero(curves.full), _linear(curves))
        yield _guess("roofline", curves, CURVE, np.flatnonzero(curves.full), _roofline(curves))
        yield _guess("roofline with facts", curves, 0, (), factual.roofline(curves, teachers))
        if trees and teachers:
            yield _guess("gbm", curves, 0, (), _plain(curves, teachers, _facts))
            yield _guess("gbm with facts", curves, 0, (), _plain(curves, teachers, factual.features))
        wishes = [_wishes(curves, points) for points in range(1, max_points + 1)]
        for given in wishes:
            done = curves.nearest(given)
            if len(done) == len(given) < len(curves):
                yield from _fitted(curves, teachers if trees else [], done, given)
        for outcome in outcomes:
            if outcome.sample is sample and 1 <= outcome.points <= max_points:
                yield from _at_our_points(curves, teachers if trees else [], outcome)


def _fitted(
    curves: MeasuredCurves,
    teachers: Sequence[MeasuredCurves],
    done: Sequence[int],
    wishes: Sequence[tuple[float, float]],
) -> Iterator[Guess]:
    points = len(done)
    yield _guess("physics", curves, points, done, np.log(_Form.fit(curves, done).seconds(curves)))
    taught = [(teacher, teacher.nearest(wishes)) for teacher in teachers]
    taught = [(teacher, given) for teacher, given in taught if len(given) == points]
    if taught:
        yield _guess("residual gbm", curves, points, done, _residual(curves, done, taught, _form_features))
        yield _guess(
            "residual gbm with facts", curves, points, done, _residual(curves, done, taught, _form_and_fact_features)
        )
        yield _guess("gbm ratio", curves, points, done, _ratio(curves, done, taught))


def _at_our_points(
    curves: MeasuredCurves, teachers: Sequence[MeasuredCurves], outcome: HeldOutPrediction
) -> Iterator[Guess]:
    position_of = {int(cell): i for i, cell in enumerate(curves.index)}
    if not all(cell in position_of for cell in outcome.done):
        return
    done = [position_of[cell] for cell in outcome.done]
    form = _Form.fit(curves, done)
    yield _guess("physics, our points", curves, len(done), done, np.log(form.seconds(curves)))
    wishes = [(float(curves.share[i]), float(curves.batch[i])) for i in done]
    taught = [(teacher, teacher.nearest(wishes)) for teacher in teachers]
    taught = [(teacher, given) for teacher, given in taught if len(given) == len(done)]
    if taught:
        value = _residual(curves, done, taught, _form_features)
        yield _guess("residual gbm, our points", curves, len(done), done, value)


def _guess(method: str, curves: MeasuredCurves, points: int, done: Iterable[int], value: Array) -> Guess:
    """Return the prediction for all of the sample's cells; cells of more than one process are not predicted."""
    sample = curves.sample
    whole = np.full(len(sample.cells), np.nan)
    whole[curves.index] = value
    given = tuple(int(curves.index[i]) for i in done)
    return Guess(method, sample, "time", points, given, whole, sample.logs, sample.cells.procs)


def _teachers(curves: MeasuredCurves, others: Iterable[MeasuredCurves]) -> list[MeasuredCurves]:
    same_kind = [other for other in others if other.sample.kind == curves.sample.kind and len(other)]
    same_gpu = [other for other in same_kind if other.sample.gpu.name == curves.sample.gpu.name]
    return same_gpu if len({other.sample.model for other in same_gpu}) >= ENOUGH else same_kind


def _wishes(curves: MeasuredCurves, points: int) -> list[tuple[float, float]]:
    largest, smallest = float(curves.share.max()), float(curves.share.min())
    if points == 1:
        return [(largest, 8.0)]
    return [(largest, float(curves.batch.min())), (largest, 32.0), (smallest, 8.0)][:points]


def _linear(curves: MeasuredCurves) -> Array:
    at = curves.on_full()
    scaled = curves.logs[at] + np.log(curves.share.max() / curves.share)
    return np.asarray(np.where(at >= 0, scaled, np.nan), dtype=np.float64)


def _roofline(curves: MeasuredCurves) -> Array:
    value = np.full(len(curves), np.nan)
    for size in np.unique(curves.size):
        on_full = np.flatnonzero(curves.full & (curves.size == size))
        if not len(on_full):
            continue
        floor = curves.seconds[on_full].min()
        best = (curves.seconds[on_full] / curves.batch[on_full]).min()
        seconds_at = {curves.batch[i]: curves.seconds[i] for i in on_full}
        for i in np.flatnonzero(curves.size == size):
            whole = seconds_at.get(curves.batch[i], 0.0)
            seconds = whole if whole > FLOOR_FACTOR * floor else best * curves.batch[i]
            value[i] = np.log(max(floor, seconds * curves.share.max() / curves.share[i]))
    return value


@dataclass(frozen=True)
class _Form:
    """The model t = t0 + c * load."""

    t0: float
    c: float

    @classmethod
    def fit(cls, curves: MeasuredCurves, done: Sequence[int]) -> _Form:
        from scipy.optimize import nnls

        load, seconds = curves.load[list(done)], curves.seconds[list(done)]
        if len(done) == 1:
            return cls(0.0, float(seconds[0] / load[0]))
        # relative errors count, and neither part is negative
        (t0, c), _ = nnls(np.column_stack([1.0 / seconds, load / seconds]), np.ones(len(done)))
        return cls(float(t0), max(float(c), 1e-9))

    def seconds(self, curves: MeasuredCurves) -> Array:
        return np.asarray(self.t0 + self.c * curves.load, dtype=np.float64)


_Features = Callable[[MeasuredCurves, _Form], Array]


def _shape(curves: MeasuredCurves) -> Array:
    return np.column_stack([np.log(curves.share), np.log(curves.batch * curves.work)])


def _facts(curves: MeasuredCurves) -> Array:
    known = curves.sample.known
    ones = np.ones(len(curves))
    return np.column_stack([np.log(known.flops * curves.sample.cells.work[curves.index]), np.log(known.params) * ones])


def _form_features(curves: MeasuredCurves, form: _Form) -> Array:
    host = np.log((form.t0 + 1e-6) / form.c) * np.ones(len(curves))
    return np.column_stack([_shape(curves), np.log(curves.load), host])


def _form_and_fact_features(curves: MeasuredCurves, form: _Form) -> Array:
    ones = np.ones(len(curves))
    return np.column_stack([_shape(curves), _facts(curves), np.log(form.t0 + 1e-6) * ones, np.log(form.c) * ones])


def _plain(
    curves: MeasuredCurves, teachers: Sequence[MeasuredCurves], facts: Callable[[MeasuredCurves], Array]
) -> Array:
    def features(measured: MeasuredCurves) -> Array:
        return np.column_stack([_shape(measured), facts(measured)])

    rates = [np.log(teacher.batch) - teacher.logs for teacher in teachers]
    predicted = _boosted([features(teacher) for teacher in teachers], rates, features(curves))
    return np.asarray(np.log(curves.batch) - predicted, dtype=np.float64)


def _residual(
    curves: MeasuredCurves,
    done: Sequence[int],
    taught: Sequence[tuple[MeasuredCurves, Sequence[int]]],
    features: _Features,
) -> Array:
    forms = [_Form.fit(teacher, given) for teacher, given in taught]
    inputs = [features(teacher, form) for (teacher, _), form in zip(taught, forms, strict=True)]
    wrong = [teacher.logs - np.log(form.seconds(teacher)) for (teacher, _), form in zip(taught, forms, strict=True)]
    own_form = _Form.fit(curves, done)
    return np.asarray(
        np.log(own_form.seconds(curves)) + _boosted(inputs, wrong, features(curves, own_form)), dtype=np.float64
    )


def _ratio(
    curves: MeasuredCurves, done: Sequence[int], taught: Sequence[tuple[MeasuredCurves, Sequence[int]]]
) -> Array:
    def rates(measured: MeasuredCurves) -> Array:
        return np.asarray(np.log(measured.batch) - measured.logs, dtype=np.float64)

    def features(measured: MeasuredCurves, given: Sequence[int]) -> Array:
        at = rates(measured)[list(given)]
        inputs = [np.full(len(measured), value) for value in (at[0], *(at[1:] - at[0]))]
        return np.column_stack([_shape(measured), *inputs])

    predicted = _boosted(
        [features(teacher, given) for teacher, given in taught],
        [rates(teacher) - rates(teacher)[given[0]] for teacher, given in taught],
        features(curves, done),
    )
    return np.asarray(np.log(curves.batch) - predicted - rates(curves)[done[0]], dtype=np.float64)


def _boosted(features: Sequence[Array], targets: Sequence[Array], asked: Array) -> Array:
    from sklearn.ensemble import GradientBoostingRegressor

    inputs, outputs = np.vstack(features), np.concatenate(targets)
    if len(inputs) > MOST_ROWS:
        chosen = np.linspace(0, len(inputs) - 1, MOST_ROWS).astype(int)
        inputs, outputs = inputs[chosen], outputs[chosen]
    trees = GradientBoostingRegressor(n_estimators=TREES, max_depth=3, random_state=0)
    trees.fit(inputs, outputs)
    return np.asarray(trees.predict(asked), dtype=np.float64)

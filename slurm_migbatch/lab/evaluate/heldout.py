"""Predict held-out models, after 0, 1, 2, ... points chosen by the stated rule.

A model is held out under all its names and from every laboratory in the table. If a second table is used for
training, measurements of the model by another laboratory may stay (users have such tables too); those of the scored
laboratory itself never do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from slurm_migbatch.lab.evaluate.requested import LearnedSite, computed
from slurm_migbatch.lab.evaluate.widths import ComputedWidths, CurveWidths, Widths
from slurm_migbatch.predict.cells import Array
from slurm_migbatch.predict.known import ModelKnowledge
from slurm_migbatch.predict.samples import Sample, samples_of
from slurm_migbatch.predict.state import SURFACES, Learned
from slurm_migbatch.predict.surface import Belief
from slurm_migbatch.predict.training import learn, observed, steps
from slurm_migbatch.profiling.measurement import Measurement

MOST_FOLDS: Final = 24
"""With more models than this several are held out at once: a fold, none of which is used for training."""
Leave = Literal["model", "family", "laboratory"]
Learn = Callable[[Sequence[Measurement], ModelKnowledge], Learned]
Mask = npt.NDArray[np.bool_]
OURS: Final = "predictor"
EMPTY: Final = "empty store"
"""The predictor without other measurements: public specifications only, and the same points of the model itself."""
_NAMES: Final = ModelKnowledge()


def identity(name: str) -> str:
    """Return one name for a model under all of its names: `org/ResNet_50` and `resnet50` are one.

    The names are the same with or without specifications.
    """
    return re.sub(r"[^a-z0-9]", "", _NAMES.canonical(name))


@dataclass(frozen=True)
class Guess:
    """A method's prediction of one figure of one sample given the measurements `done`, with the measured values.

    All arrays have one entry for each measured cell, including profiled ones; `value` and `logs` are natural logarithms
    of seconds per batch, or of MiB. `value` is NaN without a prediction. `points` is how many single points the method
    profiles (-1: a whole curve over the batch).
    """

    method: str
    sample: Sample
    figure: str
    points: int
    done: tuple[int, ...]
    value: Array
    logs: Array
    procs: Array

    @property
    def open(self) -> Mask:
        """Return True for each cell that is predicted and was not profiled: only these are scored."""
        mask: Mask = np.isfinite(self.value)
        mask[list(self.done)] = False
        return mask

    @property
    def errors(self) -> Array:
        """Relative error of each throughput (of memory: of the MiB), in [0, inf)."""
        distance = self.logs - self.value if self.figure == "time" else self.value - self.logs
        return np.asarray(np.abs(np.expm1(distance)), dtype=np.float64)


@dataclass(frozen=True)
class HeldOutPrediction(Guess):
    """The predictor's result, with its intervals.

    `belief` is that of the model's curve. `computed`: cells that are computed from the architecture instead, as
    requests for them are (`requested`). `seen`: the training table has the model, from another laboratory.
    """

    belief: Belief
    widths: Widths
    computed: Mask
    seen: bool

    def above(self, level: float) -> Array:
        """Return the distance from the middle to the upper end of the interval with coverage `level`, in logarithms."""
        return self.widths.at(level)[1]

    def held(self, level: float) -> Array:
        """Return 1.0 if the interval of `level` covers the measured value, else 0.0."""
        below, above = self.widths.at(level)
        distance = self.logs - self.value
        return ((-distance <= below) & (distance <= above)).astype(np.float64)


@dataclass(frozen=True)
class Fold:
    """Samples to score, and the state learned without their models, with its rows; `of`: the number of folds."""

    samples: tuple[Sample, ...]
    rows: Sequence[Measurement]
    learned: Learned
    knowledge: ModelKnowledge
    seen: frozenset[str]
    of: int

    @property
    def site(self) -> LearnedSite:
        """What a site has learned that requests for the samples."""
        return LearnedSite(self.rows, self.learned, self.knowledge)


def folds(
    rows: Sequence[Measurement],
    knowledge: ModelKnowledge,
    *,
    train: Sequence[Measurement] | None = None,
    leave: Leave = "model",
    learn: Learn = learn,
) -> Iterator[Fold]:
    """Yield the models of `rows` in turn, each with the state learned without it: from the other rows, or from `train`.

    `leave` "family" holds out a model's whole family. "laboratory" holds out all rows of one laboratory, and
    nothing else: another one's rows of the same model stay. A fold is learned on demand.
    """
    samples = samples_of(rows, knowledge)
    if leave == "laboratory" and train is None:
        yield from _laboratories(rows, samples, knowledge, learn)
        return
    family = {sample.model: sample.known.family for sample in samples}

    def key(name: str) -> str:
        return identity(name) if leave == "model" else family.get(knowledge.canonical(name), identity(name))

    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(key(sample.model), []).append(sample)
    if train is not None:
        yield from _learned_elsewhere(rows, train, knowledge, groups.values(), learn)
        return
    names = sorted(groups)
    count = min(len(names), MOST_FOLDS)
    for start in range(count):
        held_out_names = set(names[start::MOST_FOLDS])
        without = [row for row in rows if key(row.model) not in held_out_names]
        held_out = tuple(sample for name in sorted(held_out_names) for sample in groups[name])
        yield Fold(held_out, without, learn(without, knowledge), knowledge, frozenset(), count)


def _laboratories(
    rows: Sequence[Measurement], samples: Sequence[Sample], knowledge: ModelKnowledge, learn: Learn
) -> Iterator[Fold]:
    names = sorted({laboratory(row.source) for row in rows})
    for name in names:
        without = [row for row in rows if laboratory(row.source) != name]
        held_out = tuple(sample for sample in samples if laboratory(sample.stack.split("|", 1)[1]) == name)
        seen = {identity(row.model) for row in without} & {identity(sample.model) for sample in held_out}
        yield Fold(held_out, without, learn(without, knowledge), knowledge, frozenset(seen), len(names))


def laboratory(source: str) -> str:
    """Return the laboratory of a source, its first word: `MIGPerf fine-tuning` is MIGPerf's."""
    return source.split(" ", 1)[0]


def _learned_elsewhere(
    rows: Sequence[Measurement],
    train: Sequence[Measurement],
    knowledge: ModelKnowledge,
    groups: Collection[Sequence[Sample]],
    learn: Learn,
) -> Iterator[Fold]:
    """Yield folds that are scored on one table and learned from another.

    Of a scored model, rows of the same GPU and source are excluded: they may be the scored points.
    """
    laboratories = {(row.gpu, row.source) for row in rows}
    shared = {identity(row.model) for row in train if (row.gpu, row.source) in laboratories}
    whole: Learned | None = None
    for group in groups:
        names = {identity(sample.model) for sample in group}
        usable = [row for row in train if identity(row.model) not in names or (row.gpu, row.source) not in laboratories]
        if names & shared:
            learned = learn(usable, knowledge)
        else:
            learned = whole = whole or learn(train, knowledge)
        seen = {identity(row.model) for row in usable} & names
        yield Fold(tuple(group), usable, learned, knowledge, frozenset(seen), len(groups))


def outcomes(fold: Fold, figure: str = "time", max_points: int = 3) -> Iterator[HeldOutPrediction]:
    """Yield predictions for a fold's samples after 0, 1, ... `max_points` points; fewer if cells run out.

    Cells whose requests get computed figures have these (`requested`), all others those of curves.
    """
    surface = SURFACES[figure]
    for sample in fold.samples:
        cells, _, _ = observed(figure, sample)
        if not len(cells):
            continue
        population = fold.learned.population(figure, sample.kind)
        prior = population.prior(sample.model, sample.known, sample.gpu, sample.stack)
        calibration = fold.learned.calibration(figure, sample.kind)
        stranger = population.is_stranger(sample.known, sample.gpu, sample.stack)
        close = sample.known.is_close
        for points, done, belief, cells, logs in steps(figure, sample, prior, max_points):
            value, deviation, pace = belief.predict_paced(surface, cells)
            curve = CurveWidths(deviation, pace, calibration, points, stranger, close)
            answers = computed(fold.site, sample, figure, done)
            yield HeldOutPrediction(
                OURS,
                sample,
                figure,
                points,
                tuple(done),
                np.where(answers.known, answers.value, value),
                logs,
                cells.procs,
                belief,
                ComputedWidths(answers, curve),
                answers.known,
                identity(sample.model) in fold.seen,
            )


def with_empty_store(fold: Fold, figure: str = "time", max_points: int = 3) -> Iterator[Guess]:
    """Yield predictions for a fold's samples by the predictor without other models."""
    for outcome in outcomes(replace(fold, rows=(), learned=Learned()), figure, max_points):
        yield Guess(
            EMPTY, outcome.sample, figure, outcome.points, outcome.done, outcome.value, outcome.logs, outcome.procs
        )


def by_points(predictions: Iterable[HeldOutPrediction]) -> Mapping[int, list[HeldOutPrediction]]:
    """Group the outcomes by the number of points profiled."""
    groups: dict[int, list[HeldOutPrediction]] = {}
    for outcome in predictions:
        groups.setdefault(outcome.points, []).append(outcome)
    return dict(sorted(groups.items()))

"""A single wrong point among right ones of its model moves no prediction and is named; noisy ones widen intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from slurm_migbatch.predict.cells import Cells
from slurm_migbatch.predict.known import ModelKnowledge
from slurm_migbatch.predict.learned import LearnedPredictor
from slurm_migbatch.predict.state import SURFACES
from slurm_migbatch.predict.training import ignored, learn
from slurm_migbatch.profiling.measurement import Measurement
from tests.support.laboratory import A100, MODELS, known, table

KNOWLEDGE = ModelKnowledge()
FIGURES = {"time": "latency_s", "memory": "memory_mib"}


def few(name: str, step: int) -> list[Measurement]:
    """One point in `step` of a model: of other batches on each slice."""
    rows = [row for row in table() if row.model == name]
    return [replace(row, throughput_per_s=None) for row in rows[::step]]


def scaled(row: Measurement, figure: str, factor: float) -> Measurement:
    column = FIGURES[figure]
    return replace(row, **{column: factor * getattr(row, column)})


def most_off(figure: str, name: str, rows: Sequence[Measurement]) -> float:
    """Return the largest distance (of logarithms) of what is learned from these rows from all measured points."""
    every = [row for row in table() if row.model == name]
    belief, _, _ = learn(rows, KNOWLEDGE).belief(figure, name, "infer", known(name), A100)
    value, _ = belief.predict(SURFACES[figure], Cells.of_rows(every, A100, known(name)))
    return float(np.max(np.abs(value - np.log([row.figure(figure) or 0.0 for row in every]))))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet50", "bert-base", "mobilenet-v2"])
@pytest.mark.parametrize("factor", [0.05, 0.3, 4.0, 60.0])
@pytest.mark.parametrize("figure", FIGURES)
def test_one_wrong_point_moves_no_prediction(figure: str, factor: float, name: str) -> None:
    for step in (1, 3):
        rows = few(name, step)
        place = len(rows) // 2
        wrong = [*rows[:place], scaled(rows[place], figure, factor), *rows[place + 1 :]]
        assert most_off(figure, name, wrong) < most_off(figure, name, rows) + 0.1
        assert ignored(wrong, KNOWLEDGE) == [(figure, wrong[place])]


def test_right_points_are_all_used() -> None:
    assert ignored(table(), KNOWLEDGE) == []
    noisy = np.random.default_rng(3)
    rows = [scaled(row, "time", float(np.exp(0.15 * noisy.standard_normal()))) for row in table()]
    rows = [row for row in rows if row.model in MODELS[:4]]
    assert ignored(rows, KNOWLEDGE) == []


def test_few_points_contradict_none() -> None:
    """Of four points none can be told to be wrong: the model may be unlike its specifications."""
    rows = few("resnet50", 11)
    assert len(rows) == 4
    assert ignored([scaled(rows[0], "time", 10.0), *rows[1:]], KNOWLEDGE) == []


def test_slow_model_contradicts_its_specifications_only() -> None:
    rows = [scaled(row, "time", 20.0) for row in few("resnet50", 2)]
    assert ignored(rows, KNOWLEDGE) == []


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.1, 0.3])
def test_intervals_are_as_wide_as_noisy_measurements_require(noise: float) -> None:
    """A dozen noisy points, as of a busy host: nine of ten upper ends hold, as stated, not six."""
    held = []
    for number, name in enumerate(MODELS):
        draw = np.random.default_rng([number, round(100 * noise)])
        every = [row for row in table() if row.model == name]
        some = [every[i] for i in sorted(draw.choice(len(every), 12, replace=False))]
        rows = [scaled(row, "time", float(np.exp(noise * draw.standard_normal()))) for row in some]
        predictor = LearnedPredictor(learn([replace(row, throughput_per_s=None) for row in rows], KNOWLEDGE))
        cells = Cells.of_rows(every, A100, known(name))
        _, _, high = predictor.interval("time", name, known(name), A100, "infer", cells)
        held += [(row.seconds or 0.0) <= end for row, end in zip(every, high, strict=True)]
    assert np.mean(held) > 0.8

"""Measurements never make the first guess for other models worse than no data would: neither measurements of a single
model nor a wrong table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from slurm_migbatch.predict.cells import Cells
from slurm_migbatch.predict.fewshot import adapt
from slurm_migbatch.predict.known import ModelKnowledge
from slurm_migbatch.predict.population import Population
from slurm_migbatch.predict.state import Learned
from slurm_migbatch.predict.surface import TIME
from slurm_migbatch.predict.training import learn
from slurm_migbatch.profiling.measurement import Measurement
from tests.support.examples import thinned
from tests.support.laboratory import A100, MODELS, known, measure, table, truth

KNOWLEDGE = ModelKnowledge()
STACK = "a100-80gb|lab"


def missed(learned: Learned, rows: Sequence[Measurement], name: str) -> float:
    """Mean absolute error, in logarithms, of the first guess for a model."""
    found = [row for row in rows if row.model == name]
    prior = learned.population("time", "infer").prior(name, known(name), A100, STACK)
    value, _ = prior.predict(TIME, Cells.of_rows(found, A100, known(name)))
    return float(np.abs(value - np.log([row.seconds or 0.0 for row in found])).mean())


def timed(row: Measurement, seconds: float) -> Measurement:
    return replace(row, latency_s=seconds, throughput_per_s=row.batch / seconds)


def scaled(factor: float) -> Callable[[list[Measurement]], list[Measurement]]:
    return lambda rows: [timed(row, factor * (row.seconds or 0.0)) for row in rows]


def shuffled(rows: list[Measurement]) -> list[Measurement]:
    order = np.random.default_rng(1).permutation(len(rows))
    return [timed(row, rows[i].seconds or 0.0) for row, i in zip(rows, order, strict=True)]


def one_time(rows: list[Measurement]) -> list[Measurement]:
    return [timed(row, 0.02) for row in rows]


def one_rate(rows: list[Measurement]) -> list[Measurement]:
    return [timed(row, row.batch / 400.0) for row in rows]


WRONG = {
    "10 times": scaled(10.0),
    "a tenth": scaled(0.1),
    "milliseconds": scaled(1000.0),
    "shuffled": shuffled,
    "one time": one_time,
    "one rate": one_rate,
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shift", [0.0, 0.4])
def test_one_measured_model_does_not_spoil_predictions_for_others(name: str, shift: float) -> None:
    rows = table(shift=shift)
    learned = learn([row for row in rows if row.model == name], KNOWLEDGE)
    others = [model for model in MODELS if model != name]
    with_it = np.mean([missed(learned, rows, other) for other in others])
    assert with_it <= 1.1 * np.mean([missed(Learned(), rows, other) for other in others])


@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_wrong_table_does_not_spoil_predictions(wrong: Callable[[list[Measurement]], list[Measurement]]) -> None:
    """Neither a table that is wrong as a whole, nor one with wrong rows of some models among right ones."""
    rows = table(shift=0.4)
    bad = [row for name in MODELS for row in wrong([row for row in rows if row.model == name])]
    mixed = [
        (wrong_row if wrong_row.model in MODELS[1::3] else right_row)
        for right_row, wrong_row in zip(rows, bad, strict=True)
    ]
    errors = []
    for name in thinned(MODELS[::2], list(WRONG.values()).index(wrong)):
        stores = (learn([row for row in found if row.model != name], KNOWLEDGE) for found in (bad, mixed))
        errors.append([missed(state, rows, name) for state in (*stores, Learned())])
    all_bad, some_bad, nothing = np.mean(errors, axis=0)
    assert all_bad <= 1.1 * nothing
    assert some_bad <= nothing


def test_slow_transformer_moves_other_transformers_but_not_cnns() -> None:
    """One transformer that is slow, because its stack computes products in fp32, affects the guess for another
    transformer, not for a convolutional network."""
    slow = truth("bert-base", 0, 1.4)
    learned = learn(measure("bert-base", slow), KNOWLEDGE).population("time", "infer")
    item = TIME.names.index("item")

    def moved(name: str) -> float:
        table_prior, physics = (state.prior(name, known(name), A100, STACK) for state in (learned, _nothing()))
        return float(table_prior.mean[item] - physics.mean[item])

    assert moved("vit-b-16") > 0.4
    assert abs(moved("resnet50")) < 0.05


@pytest.mark.slow
def test_stack_that_is_slower_on_all_models_is_learned() -> None:
    """At least two thirds of the factor show in the guess for another model."""
    rows = scaled(3.0)(table())
    stores = [(name, learn([row for row in rows if row.model != name], KNOWLEDGE)) for name in MODELS]
    assert np.mean([missed(learned, rows, name) for name, learned in stores]) < np.log(3.0) / 3


def _nothing() -> Population:
    return Learned().population("time", "infer")


@pytest.mark.parametrize("shift", [-0.4, 0.0, 0.4])
def test_one_point_predicts_better_than_proportional_scaling(shift: float) -> None:
    """On average over the models, compared with time in proportion to the batch and inverse to the slice, through the
    same point. (Not for each model: items that cost 2.7 times what facts say are taken for a slow host.)"""
    errors = []
    for name in MODELS:
        rows = measure(name, truth(name, 0, shift), noise=0.0)
        cells = Cells.of_rows(rows, A100, known(name))
        logs = np.log([row.seconds or 0.0 for row in rows])
        point = next(i for i, row in enumerate(rows) if (row.profile, row.batch) == ("7g.80gb", 4))
        prior = Learned().population("time", "infer").prior(name, known(name), A100, STACK)
        belief = adapt(TIME, prior, cells.take([point]), logs[[point]], 0.05)
        load = np.log(cells.batch / cells.sm)
        guesses = (belief.predict(TIME, cells)[0], logs[point] + load - load[point])
        errors.append([np.abs(np.expm1(logs - guess)).mean() for guess in guesses])
        assert belief.predict(TIME, cells.take([point]))[0][0] == pytest.approx(logs[point], abs=0.1)
    ours, simple = np.mean(errors, axis=0)
    assert ours < simple

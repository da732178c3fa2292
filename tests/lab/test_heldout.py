"""A scored model is not part of the training data, and no profiled point is scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from slurm_migbatch.lab.evaluate.heldout import MOST_FOLDS, HeldOutPrediction, folds, identity, outcomes
from slurm_migbatch.lab.evaluate.scores import collect, coverage, scored, scored_all
from slurm_migbatch.lab.evaluate.widths import CurveWidths
from slurm_migbatch.predict.calibration import LEVELS, Calibration
from slurm_migbatch.predict.facts import BUILT_IN
from slurm_migbatch.predict.known import ModelKnowledge
from slurm_migbatch.predict.state import Learned
from slurm_migbatch.profiling.measurement import Measurement
from tests.support.small_laboratory import MODELS, laboratory


class Spy:
    """Learns nothing and records the tables that it was given."""

    def __init__(self) -> None:
        self.tables: list[list[Measurement]] = []

    def __call__(self, rows: Sequence[Measurement], knowledge: ModelKnowledge) -> Learned:
        self.tables.append(list(rows))
        return Learned()


@pytest.mark.parametrize("blind", [False, True])
def test_scored_model_is_excluded_from_training_under_all_of_its_names(blind: bool) -> None:
    rows = laboratory()
    names = {"resnet50": "org/ResNet_50", "bert-base": "bert-base-uncased"}
    other = [replace(row, source="there", model=names.get(row.model, row.model)) for row in rows]
    spy = Spy()
    seen = set()
    for fold in folds([*rows, *other], ModelKnowledge(() if blind else BUILT_IN), learn=spy):
        scored_here = {identity(sample.model) for sample in fold.samples}
        assert not scored_here & {identity(row.model) for row in spy.tables[-1]}
        assert len({identity(row.model) for row in spy.tables[-1]}) == len(MODELS) - 1
        assert len(fold.samples) == 2
        seen |= scored_here
    assert seen == {identity(name) for name in MODELS}


def test_leave_family_excludes_the_whole_family() -> None:
    spy = Spy()
    left = [
        {sample.model for sample in fold.samples}
        for fold in folds(laboratory(), ModelKnowledge(), leave="family", learn=spy)
    ]
    assert sorted(map(sorted, left)) == [["bert-base"], ["densenet121", "resnet101", "resnet50", "vgg16"]]
    assert {row.model for row in spy.tables[0]} | {row.model for row in spy.tables[1]} == set(MODELS)


def test_leave_laboratory_excludes_all_and_only_its_own_tables() -> None:
    mine = laboratory(models=("vgg16", "resnet50"), source="here")
    tuned = laboratory(models=("resnet101",), source="here fine-tuning")
    theirs = laboratory(models=("vgg16",), source="there")
    spy = Spy()
    found = list(folds([*mine, *tuned, *theirs], ModelKnowledge(), leave="laboratory", learn=spy))
    left = [{(sample.model, sample.stack.split("|")[1]) for sample in fold.samples} for fold in found]
    assert left == [
        {("vgg16", "here"), ("resnet50", "here"), ("resnet101", "here fine-tuning")},
        {("vgg16", "there")},
    ]
    assert [{row.source for row in table} for table in spy.tables] == [{"there"}, {"here", "here fine-tuning"}]
    assert [fold.seen for fold in found] == [{"vgg16"}, {"vgg16"}]


def test_many_models_are_grouped_into_folds_each_excluded_from_training() -> None:
    rows = [replace(row, model=f"net-{i}") for i in range(60) for row in laboratory(models=("vgg16",), batches=(1,))]
    spy = Spy()
    scored_models = []
    for fold in folds(rows, ModelKnowledge(), learn=spy):
        fold_models = {sample.model for sample in fold.samples}
        assert not fold_models & {row.model for row in spy.tables[-1]}
        scored_models += sorted(fold_models)
    assert len(spy.tables) == MOST_FOLDS
    assert sorted(scored_models) == sorted({row.model for row in rows})


def test_training_table_keeps_a_scored_model_only_from_other_laboratories() -> None:
    mine, theirs = laboratory(models=("vgg16", "resnet50")), laboratory(models=("vgg16",), source="there")
    both = [*mine, *theirs, *laboratory(models=("resnet101",), source="there")]
    spy = Spy()
    found = {fold.samples[0].model: fold for fold in folds(mine, ModelKnowledge(), train=both, learn=spy)}
    assert found["vgg16"].seen == {"vgg16"} and not found["resnet50"].seen
    for name, fold in found.items():
        assert all(row.source == "there" for row in fold.rows if row.model == name)
    assert {row.model for row in found["resnet50"].rows} == {"vgg16", "resnet101"}


def test_training_table_without_the_scored_models_is_learned_only_once() -> None:
    spy = Spy()
    theirs = laboratory(models=("resnet101", "densenet121"), source="there")
    assert len(list(folds(laboratory(models=("vgg16", "resnet50")), ModelKnowledge(), train=theirs, learn=spy))) == 2
    assert len(spy.tables) == 1


def test_profiled_points_are_never_scored() -> None:
    rows = laboratory(noise=0.02, procs=(1, 2), models=("vgg16", "resnet50"))
    for fold in folds(rows, ModelKnowledge(), learn=Spy()):
        for outcome in outcomes(fold):
            assert len(set(outcome.done)) == outcome.points
            assert not scored(outcome)[list(outcome.done)].any()
            assert not scored_all(outcome)[list(outcome.done)].any()
            assert scored_all(outcome).sum() == len(outcome.logs) - outcome.points
            assert (outcome.procs[scored(outcome)] == 1).all()


def test_unmeasured_points_do_not_change_the_prediction() -> None:
    """The prediction after k points depends on these k figures only."""
    rows = laboratory(models=("vgg16", "resnet50"))
    fold = next(iter(folds(rows, ModelKnowledge(), learn=Spy())))
    for outcome in outcomes(fold):
        shifted = replace(fold.samples[0], logs=fold.samples[0].logs + 1.0)
        shifted.logs[list(outcome.done)] = fold.samples[0].logs[list(outcome.done)]
        again = [changed for changed in outcomes(replace(fold, samples=(shifted,))) if changed.points == outcome.points]
        assert again[0].done == outcome.done
        np.testing.assert_array_equal(again[0].value, outcome.value)


def fake(sure: float = 0.1) -> HeldOutPrediction:
    """Two points off by 5 % and 20 %, with standard deviations of `sure`."""
    fold = next(iter(folds(laboratory(models=("vgg16",), batches=(1,)), ModelKnowledge(), learn=Spy())))
    outcome = next(iter(outcomes(fold)))
    count = len(outcome.logs)
    calibration = Calibration({"0h": tuple([1.0] * len(LEVELS)), "0d": tuple([1.0] * len(LEVELS))})
    return replace(
        outcome,
        value=outcome.logs - np.log([1.05, 1.2, 1.0, 1.0][:count]),
        widths=CurveWidths(np.full(count, sure), np.zeros(count, dtype=np.intp), calibration, 0, False, False),
    )


def test_errors_are_relative_errors_of_throughput() -> None:
    errors = collect([fake()], lambda outcome: outcome.errors, scored)
    assert errors.to_dict()["mape"] == pytest.approx(100 * (0.05 + 0.2) / 4)
    assert errors.to_dict()["points"] == 4


def test_coverage_is_the_share_of_points_within_the_interval() -> None:
    assert coverage([fake(0.1)], 0.8, scored)["mean"] == 0.75
    assert coverage([fake(0.2)], 0.8, scored)["mean"] == 1.0
    assert coverage([fake(0.1)], 0.8, scored)["width_factor"] == pytest.approx(np.exp(0.1), abs=1e-3)
    assert coverage([], 0.8, scored) == {}

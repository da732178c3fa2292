"""The simple rules, choice and relative speed on laboratories whose results are known in advance."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from slurm_migbatch.lab.evaluate import baselines, choice, relative
from slurm_migbatch.lab.evaluate.baselines import CURVE, guesses
from slurm_migbatch.lab.evaluate.curves import MeasuredCurves
from slurm_migbatch.lab.evaluate.factual import roofline
from slurm_migbatch.lab.evaluate.heldout import Guess, folds, outcomes
from slurm_migbatch.lab.evaluate.scores import collect, scored
from slurm_migbatch.predict.known import ModelKnowledge
from slurm_migbatch.predict.state import Learned
from slurm_migbatch.profiling.measurement import Measurement
from tests.support.small_laboratory import GPU, MODELS, added, laboratory, proportional, samples, sharp


def errors(rows: list[Measurement], *, trees: bool = False) -> dict[tuple[str, int], float]:
    found: dict[tuple[str, int], list[Guess]] = {}
    every = samples(rows)
    for sample in every:
        others = [MeasuredCurves.of(other) for other in every if other.model != sample.model]
        for guess in guesses([sample], others, [], trees=trees):
            found.setdefault((guess.method, guess.points), []).append(guess)
    return {key: collect(group, lambda guess: guess.errors, scored).mape for key, group in found.items()}


def test_rules_are_exact_in_a_device_bound_laboratory() -> None:
    found = errors(laboratory(proportional))
    assert found["linear", CURVE] == pytest.approx(0, abs=1e-6)
    assert found["roofline", CURVE] == pytest.approx(0, abs=1e-6)
    assert all(found["physics", k] == pytest.approx(0, abs=1e-6) for k in (1, 2, 3))


def test_physics_rule_is_exact_for_its_own_form_from_two_points() -> None:
    found = errors(laboratory(added))
    assert found["physics", 1] > 5
    assert found["physics", 2] == pytest.approx(0, abs=1e-6)
    assert found["physics", 3] == pytest.approx(0, abs=1e-6)


def test_roofline_is_exact_with_a_host_time_floor_and_linear_is_not() -> None:
    found = errors(laboratory(sharp))
    assert found["roofline", CURVE] == pytest.approx(0, abs=1e-6)
    assert found["linear", CURVE] > 20


def test_linear_is_not_scored_on_the_profile_that_it_was_given() -> None:
    sample = samples(laboratory(models=("vgg16",)))[0]
    linear = next(guess for guess in guesses([sample], [], []) if guess.method == "linear")
    assert {sample.rows[i].profile for i in np.flatnonzero(scored(linear))} == {"1g.10gb", "2g.20gb", "3g.40gb"}


def test_linear_predicts_no_batch_that_the_largest_profile_did_not_run() -> None:
    rows = [row for row in laboratory(models=("vgg16",)) if not (row.profile == "7g.80gb" and row.batch == 16)]
    sample = samples(rows)[0]
    linear = next(guess for guess in guesses([sample], [], []) if guess.method == "linear")
    assert {sample.rows[i].batch for i in np.flatnonzero(~np.isfinite(linear.value))} == {16}
    assert not scored(linear)[~np.isfinite(linear.value)].any()


def test_trees_learn_errors_that_models_have_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    """The form is wrong where time is the larger of host and device time, in the same way for every model."""
    monkeypatch.setattr(baselines, "TREES", 30)
    found = errors(laboratory(sharp, models=("vgg16", "resnet50", "resnet101", "densenet121")), trees=True)
    assert {method for method, _ in found} == {
        "linear", "roofline", "roofline with facts", "physics", "gbm", "gbm with facts", "gbm ratio", "residual gbm",
        "residual gbm with facts",
    }  # fmt: skip
    assert found["residual gbm", 2] < found["physics", 2]


def test_roofline_with_facts_is_fitted_to_the_laboratory() -> None:
    """The costs of launches and of items in this laboratory are fitted to its other models."""
    models = ("vgg16", "resnet50", "resnet101", "densenet121")
    found = [MeasuredCurves.of(sample) for sample in samples(laboratory(sharp, models=models))]
    for curves in found:
        others = [other for other in found if other is not curves]
        fitted, plain = (np.abs(roofline(curves, those) - curves.logs).mean() for those in (others, []))
        assert fitted < plain


def test_physics_rule_is_also_given_the_points_of_the_predictor() -> None:
    for fold in folds(
        laboratory(models=("vgg16", "resnet50", "resnet101")), ModelKnowledge(), learn=lambda r, k: Learned()
    ):
        ours = list(outcomes(fold))
        others = [MeasuredCurves.of(sample) for sample in samples(list(fold.rows))]
        done = {
            g.points: g.done
            for g in guesses(fold.samples, others, ours, trees=False)
            if g.method == "physics, our points"
        }
        assert done == {outcome.points: outcome.done for outcome in ours if outcome.points}


def truth(rows: list[Measurement], factor: float = 1.0) -> Guess:
    sample = samples(rows)[0]
    return Guess("exact", sample, "time", 0, (), sample.logs + np.log(factor), sample.logs, sample.cells.procs)


def test_exact_predictions_give_the_best_choice() -> None:
    cases = choice.cases(truth(laboratory(models=("resnet50",))), None)
    assert len(cases) == len(choice.FACTORS)
    assert choice.summary(cases) == {"cases": 5, "broken": 0.0, "not_offered": 0.0, "quality": 1.0}
    reference = MODELS["resnet50"][0] / 1e3
    assert [case.limit_s for case in cases] == pytest.approx([reference * factor for factor in choice.FACTORS])


def test_optimistic_predictions_break_limits_and_pessimistic_ones_offer_none() -> None:
    rows = laboratory(added, models=("vgg16",))
    assert choice.summary(choice.cases(truth(rows, 0.3), None))["broken"] > 0.5
    feared = choice.summary(choice.cases(truth(rows, 1e6), None))
    assert feared == {"cases": 5, "broken": 0.0, "not_offered": 1.0, "quality": 0.0}


def test_measured_points_override_wrong_predictions() -> None:
    guess = truth(laboratory(proportional, models=("vgg16",)), 1e6)
    full = tuple(i for i, row in enumerate(guess.sample.rows) if row.profile == "7g.80gb")
    found = choice.summary(choice.cases(replace(guess, done=full), None))
    assert (found["broken"], found["not_offered"]) == (0.0, 0.0)


def test_margin_breaks_no_more_limits_and_offers_no_more_slices() -> None:
    fold = next(iter(folds(laboratory(models=("vgg16",)), ModelKnowledge(), learn=lambda r, k: Learned())))
    outcome = next(iter(outcomes(fold)))
    with_margin, without = choice.cases(outcome, 0.9), choice.cases(outcome, None)
    assert sum(case.broken for case in with_margin) <= sum(case.broken for case in without)
    assert sum(case.offered for case in with_margin) <= sum(case.offered for case in without)


def test_relative_speed_of_device_bound_models_is_the_compute_share() -> None:
    every = samples(laboratory(proportional, kind="train"))
    curves = [MeasuredCurves.of(sample) for sample in every]
    exact = [
        (Guess("exact", s, "time", 0, (), s.logs, s.logs, s.cells.procs), [c for c in curves if c.sample is not s])
        for s in every
    ]
    found = {score["method"]: score["mae"] for score in relative.score([("exact", 0, exact)])}
    assert found == {"exact": 0.0, "share of compute slices": 0.0, "mean of other models": 0.0}


def test_mean_of_other_models_uses_their_speed_on_the_same_profile() -> None:
    """Two models at one batch: one waits for the host (speed 1 on any slice), one for the device (speed = share)."""
    host = [replace(r, latency_s=0.01, throughput_per_s=None) for r in laboratory(models=("vgg16",), batches=(8,))]
    device = laboratory(proportional, models=("resnet50",), batches=(8,))
    first, second = samples([*host, *device])
    guess = Guess("none", second, "time", 0, (), second.logs, second.logs, second.cells.procs)
    found = {
        score["method"]: score["mae"] for score in relative.score([("none", 0, [(guess, [MeasuredCurves.of(first)])])])
    }
    off = {"resnet50": 0.0, "vgg16": 0.0}
    off[second.model] = float(np.mean([1 - slices / 7 for slices in (1, 2, 3)]))
    assert found["mean of other models"] == pytest.approx(off[second.model], abs=1e-3)
    own = 0.0 if second.model == "resnet50" else off[second.model]
    assert found["share of compute slices"] == pytest.approx(own, abs=1e-3)


def test_whole_gpu_counts_as_all_of_its_compute_slices() -> None:
    rows = [
        replace(row, profile="", compute_slices=None, memory_slices=None, sm_count=None, gpu=GPU)
        for row in laboratory(models=("vgg16",))
        if row.profile == "7g.80gb"
    ]
    assert set(MeasuredCurves.of(samples(rows)[0]).slices) == {7.0}


def test_choice_tolerates_small_prediction_errors_at_the_limit() -> None:
    """A host-bound model takes about as long at batch 1 as at the batch at which the limit was measured."""
    rows = laboratory(sharp, models=("densenet121",), batches=(1, 4, 8))
    close = truth(rows, 1.01)
    assert choice.summary(choice.cases(close, None)) == {"cases": 5, "broken": 0.0, "not_offered": 0.0, "quality": 1.0}
    # a measured figure is not a prediction: there the limit applies exactly
    slow = replace(rows[0], latency_s=(rows[0].seconds or 0.0) * 1.01, throughput_per_s=None)
    guess = truth([slow, *rows[1:]])
    first = choice.cases(replace(guess, done=tuple(range(len(guess.logs)))), None)[0]
    assert first.offered and not first.broken

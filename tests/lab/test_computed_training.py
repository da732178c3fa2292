"""The evaluation predicts held-out training of public language models as a request for it is answered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from slurm_migbatch.lab.evaluate.heldout import Fold, HeldOutPrediction, folds, outcomes, with_empty_store
from slurm_migbatch.predict.candidate import Figures, Interval
from slurm_migbatch.predict.cells import GpuSpec
from slurm_migbatch.predict.known import ModelKnowledge
from slurm_migbatch.predict.learned import LearnedPredictor
from slurm_migbatch.predict.selection import Chooser
from slurm_migbatch.predict.training import learn
from slurm_migbatch.profiling.measurement import Measurement
from slurm_migbatch.workload.buckets import Bucket
from slurm_migbatch.workload.catalog import GpuKind, Partition
from slurm_migbatch.workload.gpufacts import facts_of
from slurm_migbatch.workload.hints import parse
from tests.support.gpu_kinds import H100, P

KNOWLEDGE = ModelKnowledge()
NAME = "NVIDIA H100 80GB HBM3"
FACTS = facts_of(NAME)
assert FACTS is not None
KIND: GpuKind = replace(H100, tflops=FACTS.tflops, bandwidth_gbs=FACTS.bandwidth_gbs)
PARTITION = Partition("gpu", (KIND,))
PROFILES = [info for info in KIND.geometry.profiles if not info.profile.suffix]
BLANK = LearnedPredictor()


def row(model: str, profile: str, batch: int, size: int, slower: float = 1.0, more: float = 1.0) -> Measurement:
    """A step that takes `slower` times the seconds, and `more` times the memory, that are computed for BERT base."""
    info = KIND.geometry.info(P(profile))
    figures = BLANK.figures(Bucket("bert-base", "train", batch, size, "tok"), KIND)[info.profile]
    return Measurement(
        gpu=NAME, model=model, family="encoder", kind="train", profile=profile, compute_slices=info.compute_slices,
        memory_slices=info.memory_slices, sm_count=info.sm_count, batch=batch, input_size=size,
        latency_s=slower * figures.latency_s.mid, memory_mib=more * figures.memory_mib.mid, source="there",
    )  # fmt: skip


def table(model: str, slower: float = 1.0, more: float = 1.0) -> list[Measurement]:
    return [
        row(model, info.profile.name, batch, size, slower * (1 + 0.2 * math.sin(batch)), more)
        for info in PROFILES
        for batch, size in ((1, 128), (4, 128), (8, 512), (32, 128))
    ]


def fold_of(rows: Sequence[Measurement], model: str, knowledge: ModelKnowledge = KNOWLEDGE) -> Fold:
    return next(fold for fold in folds(rows, knowledge) if {s.model for s in fold.samples} == {model})


def ends(outcome: HeldOutPrediction, level: float = 0.8) -> list[list[float]]:
    """Low, middle and high of each cell, not as logarithms."""
    below, above = outcome.widths.at(level)
    return np.exp(np.stack([outcome.value - below, outcome.value, outcome.value + above])).T.tolist()


def interval(figures: Figures, figure: str) -> Interval:
    return figures.latency_s if figure == "time" else figures.memory_mib


@pytest.mark.slow
@pytest.mark.parametrize("figure", ["time", "memory"])
def test_held_out_training_of_an_encoder_is_what_a_request_gets(figure: str) -> None:
    rows = [*table("bert-base", 1.7, 0.8), *table("roberta-base", 1.4, 0.9), *table("gpt2", 1.5)]
    fold = fold_of(rows, "bert-base")
    (sample,) = fold.samples
    found = {outcome.points: outcome for outcome in outcomes(fold, figure)}
    for points in (0, 1):
        outcome = found[points]
        done = [sample.rows[i] for i in outcome.done]
        predictor = LearnedPredictor(learn([*fold.rows, *done], KNOWLEDGE))
        assert outcome.computed.all()
        for cell, given in zip(sample.rows, ends(outcome), strict=True):
            bucket = Bucket("bert-base", "train", cell.batch, cell.input_size or 0, "tok")
            shipped = interval(predictor.figures(bucket, KIND)[P(cell.profile)], figure)
            assert given == pytest.approx(shipped.to_list(), rel=1e-6), cell
    assert not found[2].computed.any() and not found[3].computed.any()
    assert not np.allclose(found[0].value, found[1].value), "the measured point corrects the computation"


@pytest.mark.slow
@pytest.mark.parametrize(("model", "hint"), [("gpt2", ""), ("bert-base", "dtype=bf16"), ("bert-base", "optimizer=sgd")])
@pytest.mark.parametrize("figure", ["time", "memory"])
def test_request_with_hints_of_language_models_is_computed_whatever_was_measured(
    model: str, hint: str, figure: str
) -> None:
    stated = {"dtype=bf16": {"precision": "bf16"}, "optimizer=sgd": {"tuning": "sgd"}}.get(hint, {})
    rows = [*(replace(row, **stated) for row in table(model, 1.7, 0.8)), *table("roberta-base", 1.4)]
    fold = fold_of(rows, model)
    (sample,) = fold.samples
    for outcome in outcomes(fold, figure):
        done = [sample.rows[i] for i in outcome.done]
        chooser = Chooser(LearnedPredictor(learn([*fold.rows, *done], KNOWLEDGE)))
        assert outcome.computed.all()
        for cell, given in zip(sample.rows, ends(outcome), strict=True):
            words = f"migbatch: model={model} role=train batch={cell.batch} input={cell.input_size}tok {hint}"
            workload = chooser.workload(parse(words))
            assert workload is not None
            shipped = interval(chooser.token_figures(workload, None, PARTITION)[cell.profile], figure)
            assert given == pytest.approx(shipped.to_list(), rel=1e-6), cell


@pytest.mark.parametrize("figure", ["time", "memory"])
def test_pass_of_an_encoder_whose_precision_is_stated_is_what_a_request_with_dtype_gets(figure: str) -> None:
    passes = [replace(row, kind="infer", precision="tf32") for row in table("bert-base", 1.7, 0.8)]
    fold = fold_of([*passes, *(replace(row, kind="infer") for row in table("roberta-base"))], "bert-base")
    (sample,) = fold.samples
    chooser = Chooser(LearnedPredictor())
    outcome = next(iter(outcomes(fold, figure)))
    assert outcome.computed.all()
    for cell, given in zip(sample.rows, ends(outcome), strict=True):
        workload = chooser.workload(
            parse(f"migbatch: model=bert-base batch={cell.batch} input={cell.input_size}tok dtype=tf32")
        )
        assert workload is not None
        shipped = interval(chooser.token_figures(workload, None, PARTITION)[cell.profile], figure)
        assert given == pytest.approx(shipped.to_list(), rel=1e-6), cell


def test_time_of_an_encoder_follows_the_curve_once_measured_without_memory_too() -> None:
    rows = [*(replace(row, memory_mib=None) for row in table("bert-base", 1.7)), *table("roberta-base")]
    computed = {outcome.points: outcome.computed for outcome in outcomes(fold_of(rows, "bert-base"))}
    assert computed[0].all() and computed[1].all() and not computed[2].any()
    learned = learn(rows, KNOWLEDGE)
    gpu = GpuSpec.of_rows(rows)
    predictor = LearnedPredictor(learned)
    assert predictor.computable("time", "bert-base", "train", gpu) is None
    assert predictor.computable("memory", "bert-base", "train", gpu) is not None
    assert predictor.computable("memory", "roberta-base", "train", gpu) is None


def test_training_that_is_not_computed_is_predicted_by_its_curve() -> None:
    others = table("roberta-base")
    for model in ("resnet50", "our-net"):
        fold = fold_of([*(replace(row, family="") for row in table(model)), *others], model)
        assert not any(outcome.computed.any() for outcome in outcomes(fold))
    inferred = [replace(row, kind="infer") for row in [*table("bert-base"), *others]]
    assert not any(outcome.computed.any() for outcome in outcomes(fold_of(inferred, "bert-base")))
    assert not any(
        outcome.computed.any()
        for outcome in outcomes(fold_of(others + table("bert-base"), "bert-base", ModelKnowledge(())))
    )


def test_cells_of_several_processes_are_predicted_by_the_curve() -> None:
    """No request is for them."""
    rows = [row if row.batch > 1 else replace(row, procs=2) for row in table("bert-base")]
    for outcome in outcomes(fold_of([*rows, *table("roberta-base")], "bert-base"), "time", 1):
        assert (outcome.computed == (outcome.procs == 1)).all() and np.isfinite(outcome.value).all()


def test_empty_store_computes_without_other_models() -> None:
    fold = fold_of([*table("bert-base", 1.7), *table("roberta-base", 1.7)], "bert-base")
    first, empty = next(iter(outcomes(fold))), next(iter(with_empty_store(fold)))
    (sample,) = fold.samples
    for i, cell in enumerate(sample.rows):
        bucket = Bucket("bert-base", "train", cell.batch, cell.input_size or 0, "tok")
        assert math.exp(empty.value[i]) == pytest.approx(BLANK.figures(bucket, KIND)[P(cell.profile)].latency_s.mid)
    assert (first.value > empty.value).all()


def test_wider_levels_have_wider_intervals() -> None:
    fold = fold_of([*table("bert-base"), *table("roberta-base")], "bert-base")
    for figure in ("time", "memory"):
        outcome = next(iter(outcomes(fold, figure)))
        widths = [outcome.widths.at(level) for level in (0.1, 0.5, 0.8, 0.9, 0.98)]
        assert all((np.diff([side[end] for side in widths], axis=0) > 0).all() for end in (0, 1))


def test_whole_gpus_and_tables_without_the_largest_slice_are_requested_too() -> None:
    whole = [
        replace(row, profile="", compute_slices=None, memory_slices=None, sm_count=None)
        for row in table("bert-base")
        if row.profile == "7g.80gb"
    ]
    small = [row for row in table("bert-base") if row.profile in ("1g.10gb", "2g.20gb")]
    for own in (whole, small, [*whole, *small]):
        fold = fold_of([*own, *table("roberta-base")], "bert-base")
        outcome = next(iter(outcomes(fold)))
        (sample,) = fold.samples
        predictor = LearnedPredictor(learn(fold.rows, KNOWLEDGE))
        for cell, given in zip(sample.rows, outcome.value, strict=True):
            figures = predictor.figures(Bucket("bert-base", "train", cell.batch, cell.input_size or 0, "tok"), KIND)
            assert math.exp(given) == pytest.approx(figures[P(cell.profile or "7g.80gb")].latency_s.mid)
    cpu = [replace(row, gpu="cpu") for row in whole]
    assert not any(o.computed.any() for o in outcomes(fold_of([*cpu, *table("roberta-base")], "bert-base")))

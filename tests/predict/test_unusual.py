"""Measurements far from all other data are reported, and nothing else is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slurm_migbatch.predict.known import ModelKnowledge
from slurm_migbatch.predict.learned import LearnedPredictor
from slurm_migbatch.predict.llm.memory import need_of
from slurm_migbatch.predict.llm.speed import figures_of, machine_of
from slurm_migbatch.predict.llm.workload import workload_of
from slurm_migbatch.predict.training import learn
from slurm_migbatch.predict.unusual import Unusual, unusual
from slurm_migbatch.profiling.measurement import Measurement
from slurm_migbatch.workload.hints import parse
from tests.support.gpu_kinds import H100, P
from tests.support.laboratory import MODELS, table

NEW = "bert-base"


@pytest.fixture(scope="module")
def predictor() -> LearnedPredictor:
    """A predictor that has seen all models but one."""
    rows = [row for row in table() if row.model != NEW]
    return LearnedPredictor(learn(rows, ModelKnowledge()))


def scaled(rows: list[Measurement], factor: float) -> list[Measurement]:
    return [
        replace(row, latency_s=factor * (row.latency_s or 0.0), throughput_per_s=None, memory_mib=None) for row in rows
    ]


def test_rows_that_agree_are_not_reported(predictor: LearnedPredictor) -> None:
    assert NEW in MODELS
    for factor in (0.7, 1.0, 1.5):
        assert unusual(scaled(table(), factor), predictor) == []


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_wrong_table_is_reported_once_per_model(predictor: LearnedPredictor, factor: float) -> None:
    rows = [row for row in table() if row.model == NEW]
    (found,) = unusual(scaled(rows, factor), predictor)
    assert (found.figure, found.model, found.kind) == ("time", NEW, "infer")
    assert found.factor == pytest.approx(factor, rel=0.5) and found.far > found.points / 2
    assert f"{NEW} (infer)" in found.text and "times the value expected from all other data" in found.text


def language(kind: str, factor: float, name: str = "qwen2.5-0.5b", family: str = "decoder") -> list[Measurement]:
    """A language model served or trained at `factor` times the computed times."""
    words = "max_num_seqs=4 input=512 output=128 engine=vllm" if kind == "serve" else "role=train micro_batch=4 seq=512"
    workload = workload_of(parse(f"migbatch: model={name} {words}"))
    assert workload is not None
    info = H100.geometry.info(P("3g.40gb"))
    figures = figures_of(workload, need_of(workload, info.memory_mib), machine_of(H100, info), 0.0)
    ttft, tpot = factor * figures.ttft_s.mid, factor * figures.tpot_s.mid
    row = Measurement(
        "NVIDIA H100 80GB HBM3", name, family, kind, "3g.40gb", 3, 4, info.sm_count, 4, 512,
        latency_s=ttft + 127 * tpot if kind == "serve" else ttft,
    )  # fmt: skip
    return [replace(row, engine="vllm", output=128, ttft_s=ttft, tpot_s=tpot) if kind == "serve" else row]


@pytest.mark.parametrize(("kind", "figures"), [("serve", ["ttft", "tpot"]), ("train", ["step"])])
@pytest.mark.parametrize("factor", [0.2, 5.0, 30.0])
def test_language_model_rows_are_compared_with_the_computed_figures(
    predictor: LearnedPredictor, kind: str, figures: list[str], factor: float
) -> None:
    assert unusual(language(kind, 1.5), predictor) == []
    found: list[Unusual] = unusual(language(kind, factor), predictor)
    assert [finding.figure for finding in found] == figures
    assert all(finding.factor == pytest.approx(factor, rel=0.05) for finding in found)


def test_training_of_a_public_encoder_is_compared_with_what_a_request_gets(predictor: LearnedPredictor) -> None:
    """That is computed until two points of it are measured, then the curve."""
    near, far = (language("train", factor, "bert-base", "encoder") for factor in (1.5, 5.0))
    assert unusual(near, predictor) == []
    (found,) = unusual(far, predictor)
    assert found.figure == "step" and found.factor == pytest.approx(5.0, rel=0.05)
    points = [replace(far[0], batch=batch, latency_s=(far[0].latency_s or 0.0) * batch / 4) for batch in (2, 4, 8)]
    measured = LearnedPredictor(learn([replace(row, memory_mib=5000.0) for row in points], ModelKnowledge()))
    assert unusual(far, measured) == []
    (found,) = unusual(near, measured)
    assert found.figure == "time"


@pytest.mark.parametrize(
    ("name", "precision"), [("qwen3-32b", "awq"), ("qwen3-32b-awq", ""), ("gpt-oss-20b", ""), ("bert-large", "int8")]
)
def test_memory_is_compared_with_the_weights_in_the_precision_of_the_row(name: str, precision: str) -> None:
    need = {"bert-large": 1500.0, "gpt-oss-20b": 14_000.0}.get(name, 20_000.0)
    row = Measurement(
        "NVIDIA H100 80GB HBM3", name, input_size=128, batch=1, latency_s=0.2, memory_mib=need, precision=precision
    )
    for rows in ([], [row for row in table() if row.model == "resnet50"]):
        others = LearnedPredictor(learn(rows, ModelKnowledge()))
        assert [found for found in unusual([row], others) if found.figure == "memory"] == []
        (found,) = (
            found for found in unusual([replace(row, memory_mib=20 * need)], others) if found.figure == "memory"
        )
        assert found.factor == pytest.approx(20.0, rel=0.5)


def test_memory_in_another_precision_than_the_curve_is_not_compared() -> None:
    row = Measurement("NVIDIA H100 80GB HBM3", "qwen3-32b", input_size=512, batch=1, latency_s=0.2, memory_mib=66_000.0)
    points = [replace(row, batch=batch, latency_s=0.2 * batch) for batch in (1, 2, 4)]
    measured = LearnedPredictor(learn(points, ModelKnowledge()))
    quantized = replace(row, memory_mib=18_000.0, precision="awq")
    assert unusual([quantized], measured) == []
    assert [found.figure for found in unusual([replace(quantized, precision="")], measured)] == ["memory"]

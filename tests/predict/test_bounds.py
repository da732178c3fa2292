"""Rows that no GPU can reach are distinguished from rows that are only surprising."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from slurm_migbatch.predict.bounds import impossible
from slurm_migbatch.predict.known import ModelKnowledge
from slurm_migbatch.profiling.measurement import Measurement
from tests.support.laboratory import MODELS, table

KNOWLEDGE = ModelKnowledge()
H100 = "NVIDIA H100 80GB HBM3"
#: 16 GB of weights; 3352 GB/s and 989 TFLOPS: at least 5 ms per pass, and at most 61,000 tokens per second
SERVED = Measurement(
    H100, "llama-3.1-8b", "decoder", "serve", batch=1, input_size=512, output=128, latency_s=1.0, ttft_s=0.05,
    tpot_s=0.008, engine="vllm",
)  # fmt: skip
TRAINED = Measurement(
    H100, "llama-3.2-1b", "decoder", "train", batch=4, input_size=2048, latency_s=0.5, memory_mib=40_000.0
)
#: 8.2 GFLOP per image on a quarter of a GPU, 98 MiB of weights
IMAGES = Measurement(
    "NVIDIA A100-SXM4-80GB", "resnet50", "cnn", "infer", "2g.20gb", 2, 2, 28, 32, 224, latency_s=0.02, memory_mib=3000.0
)


@pytest.mark.parametrize("row", [SERVED, TRAINED, IMAGES])
def test_usual_and_threefold_speeds_are_possible(row: Measurement) -> None:
    assert impossible(row, KNOWLEDGE) == ""
    for factor in (1 / 3, 3.0, 1000.0):
        other = replace(row, latency_s=factor * (row.latency_s or 0.0), tpot_s=row.tpot_s and factor * row.tpot_s)
        assert impossible(other, KNOWLEDGE) == ""


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (replace(SERVED, tpot_s=0.0004), "too short to read the weights of llama-3.1-8b"),
        (replace(SERVED, batch=64, latency_s=0.01), "TFLOPS"),
        (replace(SERVED, batch=64, latency_s=None, throughput_per_s=5000.0), "TFLOPS"),
        (replace(SERVED, memory_mib=9000.0), "less than the weights of llama-3.1-8b"),
        (replace(SERVED, memory_mib=100_000.0), "more than"),
        (replace(IMAGES, model="ours", memory_mib=2.1), "less than any process has in use.*MiB, not GiB"),
        (replace(SERVED, memory_mib=80 * 1024.0), "all that NVIDIA H100 80GB HBM3 has, not what was in use"),
        (replace(IMAGES, memory_mib=20 * 1024.0), "all that 2g.20gb has, not what was in use"),
        (replace(TRAINED, latency_s=0.005), "TFLOPS"),
        (replace(TRAINED, memory_mib=2000.0), "less than the weights"),
        (replace(IMAGES, latency_s=20e-6), "TFLOPS.*2g.20gb"),
        (replace(IMAGES, procs=400), "less than the weights"),
        (replace(IMAGES, memory_mib=30_000.0), "more than 2g.20gb has"),
        (replace(IMAGES, gpu="NVIDIA A100-SXM4-40GB", profile="7g.80gb"), "7g.80gb is more than NVIDIA A100"),
    ],
)
def test_row_beyond_the_hardware_limits_is_impossible(row: Measurement, message: str) -> None:
    assert re.search(message, impossible(row, KNOWLEDGE)), impossible(row, KNOWLEDGE)


@pytest.mark.parametrize(
    "gpu",
    ["8x NVIDIA H100 80GB HBM3", "4xA100", "H100-SXM-80GBx8", "NVIDIA B200 (x2)", "2 NVIDIA A100-SXM4-40GB", "A100*2",
     "2*A100", "DGX A100 (8x A100)", "H100 SXM5 80GB (8x)", "HGX H100 8-GPU", "A100-SXM4-80GB (4 GPUs)", "A100 2x"],
)  # fmt: skip
def test_row_of_several_gpus_is_refused(gpu: str) -> None:
    assert f"{gpu} is more than one GPU" in impossible(replace(SERVED, gpu=gpu), KNOWLEDGE)


@pytest.mark.parametrize(
    "gpu",
    [
        "NVIDIA GeForce RTX 3090",
        "GRID A100X-20C",
        "1x H100 80GB",
        "H100 (1 GPU)",
        "RTX 6000 GPU",
        "NVIDIA RTX PRO 6000",
    ],
)
def test_x_in_the_name_of_one_gpu_is_no_count(gpu: str) -> None:
    assert impossible(replace(SERVED, gpu=gpu), KNOWLEDGE) == ""


@pytest.mark.parametrize(
    ("gpu", "part"),
    [
        ("NVIDIA A100-SXM4-80GB", {"compute_slices": 3}),
        ("NVIDIA A100-SXM4-80GB", {"sm_count": 42}),
        ("NVIDIA A30", {"compute_slices": 2}),
        ("NVIDIA X900", {"compute_slices": 1}),
    ],
)
def test_slice_without_its_profile_is_not_taken_for_the_whole_gpu(gpu: str, part: dict[str, int]) -> None:
    row = Measurement(gpu, "resnet50", batch=8, latency_s=0.02)
    assert impossible(row, KNOWLEDGE) == ""
    assert "is a part of" in impossible(replace(row, **part), KNOWLEDGE)  # type: ignore[arg-type]
    for whole in ({"sm_count": 98}, {"compute_slices": 7, "memory_slices": 8}):
        assert impossible(replace(row, gpu="NVIDIA A100-SXM4-80GB", **whole), KNOWLEDGE) == ""  # type: ignore[arg-type]


def test_narrower_precision_allows_less_memory() -> None:
    small = replace(SERVED, memory_mib=9000.0)
    for row in (replace(small, precision="awq"), replace(small, model="llama-3.1-8b-instruct-awq")):
        assert impossible(row, KNOWLEDGE) == ""
    assert "specify the precision" in impossible(small, KNOWLEDGE)
    assert impossible(replace(small, engine="ollama"), KNOWLEDGE) == ""
    adapters = replace(TRAINED, model="llama-3.1-8b", latency_s=5.0, memory_mib=9000.0)
    assert "less than the weights" in impossible(adapters, KNOWLEDGE)
    assert impossible(replace(adapters, tuning="qlora"), KNOWLEDGE) == ""


@pytest.mark.parametrize(
    ("model", "mib"), [("flan-t5-xl", 6900), ("whisper-large-v2", 4100), ("gpt-j-6b", 13_100), ("gpt2-xl", 4100)]
)
def test_model_may_have_been_cast_to_16_bits_if_no_precision_is_stated(model: str, mib: float) -> None:
    row = Measurement(gpu="h100-80gb", model=model, batch=1, latency_s=1.0, memory_mib=mib)
    assert impossible(row, KNOWLEDGE) == ""
    assert "less than the weights" in impossible(replace(row, memory_mib=mib / 2), KNOWLEDGE)
    assert "less than the weights" in impossible(replace(row, precision="fp32"), KNOWLEDGE)


def test_part_of_a_model_with_parameters_of_its_own_is_possible() -> None:
    encoder = Measurement(
        gpu="h100-80gb", model="whisper-large-v2", batch=1, latency_s=1.0, memory_mib=1400, params=635e6
    )
    assert impossible(encoder, KNOWLEDGE) == ""
    assert "less than the weights" in impossible(replace(encoder, params=None), KNOWLEDGE)


def test_missing_facts_set_no_bound() -> None:
    for row in (
        replace(IMAGES, latency_s=20e-6, model="our-net", memory_mib=None),
        replace(IMAGES, latency_s=20e-6, gpu="cpu", profile="", memory_mib=1.0),
        replace(IMAGES, latency_s=None),
    ):
        assert impossible(row, KNOWLEDGE) == ""
    with_flops = replace(IMAGES, latency_s=20e-6, model="our-net", flops_per_item=8e9)
    assert "TFLOPS" in impossible(with_flops, KNOWLEDGE)


def test_row_without_its_input_size_is_compared_at_its_own_operations_or_the_usual_size() -> None:
    fast = replace(IMAGES, latency_s=20e-6, input_size=None)
    assert "at input_size 224: specify the input_size if it differs" in impossible(fast, KNOWLEDGE)
    assert impossible(replace(fast, input_size=32), KNOWLEDGE) == ""
    assert impossible(replace(fast, flops_per_item=2e8), KNOWLEDGE) == ""
    assert "specify" not in impossible(replace(fast, flops_per_item=8e9), KNOWLEDGE)
    assert "at input_size 224" in impossible(replace(fast, flops_per_item=8.0), KNOWLEDGE)  # in 10^9, not used
    for model in ("bert-large", "modernbert-large"):
        texts = Measurement(gpu=H100, model=model, batch=8, throughput_per_s=50_000.0)
        assert impossible(texts, KNOWLEDGE) == ""
        assert "at input_size 128" in impossible(replace(texts, throughput_per_s=900_000.0), KNOWLEDGE)


@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-32b"])
def test_generated_tokens_may_be_the_items_of_a_row_without_an_input_size(model: str) -> None:
    row = Measurement(gpu=H100, model=model, batch=256, throughput_per_s=20_000.0, precision="fp8")
    assert impossible(row, KNOWLEDGE) == ""
    assert "TFLOPS" in impossible(replace(row, throughput_per_s=2e6), KNOWLEDGE)


def test_laboratory_rows_are_possible() -> None:
    for shift in (-0.4, 0.0, 0.4):
        rows = [replace(row, memory_mib=None) for row in table(shift=shift)]  # no memory limit there
        assert {row.model for row in rows} == set(MODELS)
        assert not any(impossible(row, KNOWLEDGE) for row in rows)

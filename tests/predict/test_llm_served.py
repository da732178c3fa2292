"""Measured servers of language models correct the computed figures, and a wrong table does not mislead."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from slurm_migbatch.predict.check import misses, worse
from slurm_migbatch.predict.known import ModelKnowledge
from slurm_migbatch.predict.learned import LearnedPredictor
from slurm_migbatch.predict.llm.memory import need_of
from slurm_migbatch.predict.llm.pooling import MOST_POINTS
from slurm_migbatch.predict.llm.served import ServedMeasurements, points_of
from slurm_migbatch.predict.llm.speed import TokenFigures, figures_of, machine_of
from slurm_migbatch.predict.llm.workload import workload_of
from slurm_migbatch.predict.selection import Chooser, SliceChoice
from slurm_migbatch.predict.state import Learned, StateError
from slurm_migbatch.predict.training import learn, settle
from slurm_migbatch.profiling.measurement import Measurement
from slurm_migbatch.workload.gpufacts import model_of
from slurm_migbatch.workload.hints import parse
from tests.support.gpu_kinds import H100, SITE, P

KNOWLEDGE = ModelKnowledge()
OWN = "migbatch profile run 2026-01-01"
MODELS = ("llama-3-8b", "qwen2.5-7b", "mistral-7b", "gemma-2-9b", "qwen3-4b")
LOADS = ((1, 512), (4, 512), (16, 512), (4, 2048))


def computed(model: str, profile: str, batch: int, size: int, engine: str = "vllm") -> TokenFigures:
    return asked(Learned(), model, profile, batch, size, engine)


def asked(learned: Learned, model: str, profile: str, batch: int, size: int, engine: str = "vllm") -> TokenFigures:
    words = f"migbatch: model={model} max_num_seqs={batch} input={size} output=128" + (
        f" engine={engine}" if engine else ""
    )
    workload = workload_of(parse(words))
    assert workload is not None
    info = H100.geometry.info(P(profile))
    share = info.sm_count / H100.sm_count
    machine = machine_of(H100, info)
    correction = ServedMeasurements(learned.served).correction(workload, model_of(H100.name), machine, share)
    return figures_of(workload, need_of(workload, info.memory_mib), machine, 0.0, correction)


def rows_of(
    model: str,
    factor: float | tuple[float, float],
    profiles: Sequence[str] = ("3g.40gb",),
    engine: str = "vllm",
    source: str = OWN,
) -> list[Measurement]:
    """Rows of a server whose time to first token and time per output token are `factor` times the computed ones."""
    ttft_factor, tpot_factor = factor if isinstance(factor, tuple) else (factor, factor)
    found = []
    for name in profiles:
        info = H100.geometry.info(P(name))
        for batch, size in LOADS:
            figures = computed(model, name, batch, size, engine)
            ttft, tpot = ttft_factor * figures.ttft_s.mid, tpot_factor * figures.tpot_s.mid
            whole = ttft + 127 * tpot
            found.append(
                Measurement(
                    gpu="NVIDIA H100 80GB HBM3", model=model, family="decoder", kind="serve", profile=name,
                    compute_slices=info.compute_slices, memory_slices=info.memory_slices, sm_count=info.sm_count,
                    batch=batch, input_size=size, throughput_per_s=batch / whole, latency_s=whole, source=source,
                    engine=engine, output=128, ttft_s=ttft, tpot_s=tpot,
                )
            )  # fmt: skip
    return found


def test_server_of_a_model_that_is_not_public_counts_if_its_rows_state_the_parameters() -> None:
    """Its name alone states no size: the table was kept and corrected nothing."""
    rows = [replace(row, model="our-chat", params=8.03e9) for row in rows_of("llama-3.1-8b", 1.8)]
    assert len(points_of(rows)) == len(rows)
    assert not points_of([replace(row, params=None) for row in rows])
    assert not points_of([replace(row, params=8.03) for row in rows])


def off(learned: Learned, model: str, profile: str = "3g.40gb", engine: str = "vllm") -> tuple[float, float]:
    """The factor by which the predicted times exceed the computed ones."""
    before, now = computed(model, profile, 4, 512, engine), asked(learned, model, profile, 4, 512, engine)
    return now.ttft_s.mid / before.ttft_s.mid, now.tpot_s.mid / before.tpot_s.mid


def choose(learned: Learned, words: str) -> SliceChoice:
    return Chooser(LearnedPredictor(learned)).choose(parse(f"migbatch: {words}"), SITE.partitions["gpu"])


def test_site_measurements_correct_the_prediction_for_a_public_model() -> None:
    learned = learn(rows_of("llama-3-8b", (1.8, 1.4)), KNOWLEDGE)
    ttft_factor, tpot_factor = off(learned, "llama-3-8b")
    assert ttft_factor == pytest.approx(1.8, rel=0.1) and tpot_factor == pytest.approx(1.4, rel=0.1)
    before, now = computed("llama-3-8b", "3g.40gb", 4, 512), asked(learned, "llama-3-8b", "3g.40gb", 4, 512)
    for name in ("ttft_s", "tpot_s"):
        narrow, wide = getattr(now, name), getattr(before, name)
        assert narrow.high / narrow.low < wide.high / wide.low
    assert now.measured == len(LOADS) and now.slice_mib == before.slice_mib
    assert now.tokens_s.mid < before.tokens_s.mid and now.latency_s.mid > before.latency_s.mid


def test_correction_is_weaker_for_other_slices_precisions_and_engines() -> None:
    learned = learn(rows_of("llama-3-8b", 1.6), KNOWLEDGE)
    own = off(learned, "llama-3-8b")[1]
    slice_, quantized = off(learned, "llama-3-8b", "1g.20gb")[1], off(learned, "llama-3-8b-awq")[1]
    engine, unnamed = off(learned, "llama-3-8b", engine="sglang")[1], off(learned, "llama-3-8b", engine="")[1]
    assert own > slice_ > 1.1 and own > quantized > 1.0 and own > unnamed > engine > 1.0
    assert off(learned, "qwen2.5-7b") == (1.0, 1.0), "one model is no evidence about an engine"


def test_deviation_shared_by_several_models_is_attributed_to_the_engine() -> None:
    rows = [row for name in MODELS[1:] for row in rows_of(name, 1.5)]
    learned = learn(rows, KNOWLEDGE)
    assert 1.02 < off(learned, "llama-3-8b")[1] < 1.5
    assert off(learned, "llama-3-8b", engine="sglang")[1] == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("factor", [10.0, 0.1, 1000.0, 0.001])
def test_impossible_measurements_are_ignored(factor: float) -> None:
    learned = learn(rows_of("llama-3-8b", factor), KNOWLEDGE)
    assert learned.served == () and off(learned, "llama-3-8b") == (1.0, 1.0)


@pytest.mark.parametrize("factor", [4.0, 0.25, 10.0])
def test_one_wrong_model_does_not_spoil_predictions_for_others(factor: float) -> None:
    """Predictions for others are no worse than the computed figures, which are off by a fifth here."""
    wrong = rows_of("llama-3-8b", factor)
    right = [row for name in MODELS[1:4] for row in rows_of(name, 1.2)]
    for rows in (wrong, [*wrong, *right[: len(LOADS)]], [*wrong, *right]):
        learned = learn(rows, KNOWLEDGE)
        for figure in off(learned, "qwen3-4b"):
            assert abs(math.log(figure / 1.2)) <= 1.1 * math.log(1.2)


def test_inconsistent_or_incomplete_rows_are_ignored() -> None:
    (row, *_) = rows_of("llama-3-8b", 1.2)
    assert row.ttft_s and row.tpot_s and row.throughput_per_s and len(points_of([row])) == 1
    bad = [
        replace(row, tpot_s=10 * row.tpot_s),
        replace(row, throughput_per_s=10 * row.throughput_per_s),
        replace(row, output=None),
        replace(row, input_size=None),
        replace(row, ttft_s=None),
        replace(row, model="nothing-known"),
        replace(row, model="bert-base"),
        replace(row, gpu="cpu", profile="", compute_slices=None, memory_slices=None, sm_count=None),
        replace(row, kind="infer"),
    ]
    assert points_of(bad) == []


def test_outlier_counts_less_than_the_rest_of_its_series() -> None:
    rows = rows_of("llama-3-8b", 1.1, ("2g.20gb", "3g.40gb", "7g.80gb"))
    wild = replace(rows[5], ttft_s=6 * rows[5].ttft_s, tpot_s=6 * rows[5].tpot_s, latency_s=None, throughput_per_s=None)
    learned = learn([*rows[:5], wild, *rows[6:]], KNOWLEDGE)
    assert off(learned, "llama-3-8b")[1] < 1.5


def test_measurements_from_another_source_count_less() -> None:
    own, other = (
        off(learn(rows_of("llama-3-8b", 1.5, source=source), KNOWLEDGE), "llama-3-8b")[1] for source in (OWN, "theirs")
    )
    assert own > other > 1.1


def test_slice_for_a_tpot_limit_is_chosen_from_measurements() -> None:
    words = "model=llama-3-8b engine=vllm max_num_seqs=4 input=512 output=128 tpot=20ms"
    before = choose(Learned(), words)
    learned = learn(rows_of("llama-3-8b", 1.9, (before.offer.profile.name,)), KNOWLEDGE)
    after = choose(learned, words)
    assert after.offer.compute_slices > before.offer.compute_slices
    assert "measured points" in after.text and "measured points" not in before.text
    assert choose(learned, "model=llama-3-70b quantization=awq max_num_seqs=1").offer == (
        choose(Learned(), "model=llama-3-70b quantization=awq max_num_seqs=1").offer
    )


def test_served_points_round_trip_through_json_and_are_validated() -> None:
    rows = rows_of("llama-3-8b", 1.4)
    learned = learn(rows, KNOWLEDGE)
    again = Learned.from_dict(json.loads(json.dumps(learned.to_dict())))
    assert again.served == learned.served
    assert settle(Learned(), rows, KNOWLEDGE).served == learned.served
    old = learned.to_dict()
    del old["served"]
    assert Learned.from_dict(old).served == ()
    for invalid in ({"load": [math.nan] * 4}, {"spread": [0.0, 1.0]}, {"away": [1e9, 0.0]}, {"of": ["a"]}):
        data = learned.to_dict()
        data["served"][0] |= invalid
        with pytest.raises(StateError):
            Learned.from_dict(data)


def test_refit_is_scored_against_measured_servers() -> None:
    rows = rows_of("llama-3-8b", 1.5, ("2g.20gb", "3g.40gb"))
    good, bad = learn(rows[::2], KNOWLEDGE), learn(rows_of("llama-3-8b", 0.4, ("3g.40gb",)), KNOWLEDGE)
    mine, none, wrong = (misses(state, rows[1::2], KNOWLEDGE) for state in (good, Learned(), bad))
    assert mine["tpot"].error < 0.5 * none["tpot"].error < wrong["tpot"].error
    assert worse(wrong, none, 0.1) and not worse(mine, none, 0.1)


def test_number_of_served_points_is_bounded() -> None:
    rows = [
        replace(row, output=128 + number, latency_s=None, throughput_per_s=None)
        for number in range(60)
        for row in rows_of("llama-3-8b", 1.2)[:3]
    ]
    points = points_of([*rows, *rows_of("qwen2.5-7b", 1.2)])
    assert len(points) <= MOST_POINTS and {point.model for point in points} == {"llama-3-8b", "qwen2.5-7b"}
    assert ServedMeasurements(points).points == tuple(points)

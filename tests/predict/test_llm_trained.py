"""Measured training of language models corrects the computed figures, but never below what training must hold."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

from slurm_migbatch.predict.check import misses, worse
from slurm_migbatch.predict.known import ModelKnowledge
from slurm_migbatch.predict.learned import LearnedPredictor
from slurm_migbatch.predict.llm.memory import Need, need_of
from slurm_migbatch.predict.llm.pooling import MOST_POINTS
from slurm_migbatch.predict.llm.speed import TokenFigures, figures_of, machine_of
from slurm_migbatch.predict.llm.trained import TrainedMeasurements, points_of
from slurm_migbatch.predict.llm.workload import Workload, workload_of
from slurm_migbatch.predict.samples import samples_of
from slurm_migbatch.predict.selection import Chooser, SliceChoice
from slurm_migbatch.predict.sheet import Block
from slurm_migbatch.predict.state import Learned, StateError
from slurm_migbatch.predict.training import learn, settle
from slurm_migbatch.profiling.measurement import Measurement
from slurm_migbatch.workload.buckets import Bucket
from slurm_migbatch.workload.gpufacts import model_of
from slurm_migbatch.workload.hints import parse
from slurm_migbatch.workload.refusal import Refusal
from tests.support.gpu_kinds import H100, SITE, P

KNOWLEDGE = ModelKnowledge()
OWN = "migbatch profile run 2026-01-01"
STEPS = ((1, 512), (1, 2048), (2, 1024), (4, 512))
SMALL = "qwen2.5-0.5b"
LORA = "lora/adamw/checkpointing"
WORDS = {
    "": "", "full/checkpointing": "checkpointing=on", "lora": "method=lora", LORA: "method=lora checkpointing=on",
    "qlora": "method=qlora",
}  # fmt: skip
PARTITION = SITE.partitions["gpu"]


def hints(model: str, batch: int, size: int, tuning: str = "", more: str = "") -> str:
    return f"migbatch: model={model} role=train micro_batch={batch} seq={size} {WORDS[tuning]} {more}"


def workload(model: str, batch: int = 2, size: int = 1024, tuning: str = "") -> Workload:
    found = workload_of(parse(hints(model, batch, size, tuning)))
    assert found is not None
    return found


def asked(
    learned: Learned, model: str, profile: str = "3g.40gb", batch: int = 2, size: int = 1024, tuning: str = ""
) -> TokenFigures:
    measured = TrainedMeasurements(learned.trained)
    found, info = measured.sized(workload(model, batch, size, tuning)), H100.geometry.info(P(profile))
    machine = machine_of(H100, info)
    correction = measured.correction(found, model_of(H100.name), machine, info.sm_count / H100.sm_count)
    return figures_of(found, need_of(found, info.memory_mib), machine, 0.0, correction)


def need(learned: Learned, model: str, batch: int = 2, size: int = 1024, tuning: str = "") -> Need:
    return need_of(TrainedMeasurements(learned.trained).sized(workload(model, batch, size, tuning)), 40_000)


def floor(model: str, tuning: str = "") -> float:
    """MiB of weights, gradients and optimizer."""
    found = need_of(workload(model, tuning=tuning), 40_000)
    return found.weights + found.states


def rows_of(
    model: str,
    slower: float = 1.0,
    more: float | None = None,
    profiles: Sequence[str] = ("3g.40gb",),
    tuning: str = "",
    source: str = OWN,
) -> list[Measurement]:
    """Rows of training with steps `slower` times the computed, and `more` times the memory beside the floor."""
    found = []
    for name in profiles:
        info = H100.geometry.info(P(name))
        for batch, size in STEPS:
            seconds = slower * asked(Learned(), model, name, batch, size, tuning).latency_s.mid
            held = need_of(workload(model, batch, size, tuning), info.memory_mib)
            beside = held.activations + held.runtime
            found.append(
                Measurement(
                    gpu="NVIDIA H100 80GB HBM3", model=model, family="decoder", kind="train", profile=name,
                    compute_slices=info.compute_slices, memory_slices=info.memory_slices, sm_count=info.sm_count,
                    batch=batch, input_size=size, throughput_per_s=batch / seconds, latency_s=seconds, source=source,
                    memory_mib=None if more is None else held.weights + held.states + more * beside, tuning=tuning,
                )
            )  # fmt: skip
    return found


def off(learned: Learned, model: str, profile: str = "3g.40gb", tuning: str = "") -> float:
    """The factor by which the predicted step time exceeds the computed one."""
    before, now = (asked(state, model, profile, tuning=tuning) for state in (Learned(), learned))
    return now.latency_s.mid / before.latency_s.mid


def wider(learned: Learned, model: str, tuning: str = "") -> float:
    """The factor by which predicted memory beside weights, gradients and optimizer exceeds the computed one."""
    before, now = (need(state, model, tuning=tuning) for state in (Learned(), learned))
    assert (now.weights, now.states) == (before.weights, before.states)
    return (now.activations + now.runtime) / (before.activations + before.runtime)


def taught(rows: Sequence[Measurement]) -> Learned:
    """The state learned from training rows alone."""
    return Learned(trained=tuple(points_of(rows)))


def choose(learned: Learned, words: str) -> SliceChoice:
    return Chooser(LearnedPredictor(learned)).choose(parse(f"migbatch: {words}"), PARTITION)


def test_site_measurements_correct_the_prediction_for_a_training_job() -> None:
    learned = taught(rows_of(SMALL, 1.8, 1.5))
    assert off(learned, SMALL) == pytest.approx(1.8, rel=0.1)
    assert wider(learned, SMALL) == pytest.approx(1.5, rel=0.1)
    before, now = asked(Learned(), SMALL), asked(learned, SMALL)
    assert now.latency_s.high / now.latency_s.low < before.latency_s.high / before.latency_s.low
    assert now.memory_mib.mid > before.memory_mib.mid and now.slice_mib > before.slice_mib
    assert now.tokens_s.mid == pytest.approx(before.tokens_s.mid / off(learned, SMALL))
    assert (before.measured, now.measured) == (0, len(STEPS))


def test_measurements_on_a_gpu_of_unknown_speed_correct_memory_only() -> None:
    rows = [replace(row, gpu="NVIDIA X900 96GB") for row in rows_of(SMALL, 1.8, 1.5)]
    learned = taught(rows)
    assert wider(learned, SMALL) == pytest.approx(1.5, rel=0.1)
    assert off(learned, SMALL) == 1.0 and {point.away[0] for point in learned.trained} == {None}
    assert points_of(replace(row, memory_mib=None) for row in rows) == []


def test_measurements_apply_to_another_name_of_the_same_network() -> None:
    learned = taught(rows_of("llama-3-8b", 1.6, tuning="lora", profiles=("7g.80gb",)))
    own = off(learned, "llama-3-8b", "7g.80gb", "lora")
    assert off(learned, "llama-3.1-8b-instruct", "7g.80gb", "lora") == pytest.approx(own)


def test_correction_is_weaker_for_other_methods_slices_and_models() -> None:
    learned = taught(rows_of("qwen2.5-1.5b", 1.6, 1.4, ("7g.80gb",), tuning="lora"))
    own = off(learned, "qwen2.5-1.5b", "7g.80gb", "lora")
    slice_, full = off(learned, "qwen2.5-1.5b", "2g.20gb", "lora"), off(learned, "qwen2.5-1.5b", "7g.80gb")
    near, far = off(learned, "qwen2-1.5b", "7g.80gb", "lora"), off(learned, "llama-3-70b", "7g.80gb", "qlora")
    alike = off(learned, "llama-3.2-1b", "7g.80gb", "lora")
    assert own > slice_ > full > 1.1 and own == pytest.approx(near)
    assert full > alike > 1.01 and far == pytest.approx(1.0, abs=0.01), "one model is no evidence about all others"
    assert wider(learned, "qwen2.5-1.5b", "lora") > wider(learned, "qwen2.5-1.5b") > 1.05


def test_deviation_shared_by_several_models_is_attributed_to_the_site() -> None:
    names = ("qwen2.5-1.5b", "llama-3.2-1b", "gemma-2-2b", "gpt2")
    learned = taught([row for name in names for row in rows_of(name, 1.5)])
    alone = taught(rows_of("gpt2", 1.5))
    assert 1.5 > off(learned, "llama-3-8b", tuning="lora") > off(alone, "llama-3-8b", tuning="lora")


@pytest.mark.parametrize("factor", [12.0, 0.08, 1000.0, 0.001])
def test_impossible_measurements_are_ignored(factor: float) -> None:
    learned = taught(rows_of(SMALL, factor, factor))
    assert learned.trained == () and off(learned, SMALL) == 1.0


@pytest.mark.parametrize("factor", [4.0, 0.25])
def test_one_wrong_model_does_not_spoil_predictions_for_others(factor: float) -> None:
    """Predictions for others are hardly worse than the computed figures, which are off by a fifth here."""
    wrong = rows_of(SMALL, factor, factor)
    right = [row for name in ("qwen2.5-1.5b", "llama-3.2-1b", "gpt2") for row in rows_of(name, 1.2, 1.2)]
    for rows in (wrong, [*wrong, *right]):
        learned = taught(rows)
        for found in (off(learned, "gemma-2-2b"), wider(learned, "gemma-2-2b")):
            assert abs(math.log(found / 1.2)) <= 1.3 * math.log(1.2)


def test_training_memory_is_never_below_weights_and_optimizer_states() -> None:
    rows = rows_of(SMALL, 1.0, 0.2)
    assert need(taught(rows), SMALL).used > floor(SMALL)
    for held in (0.5 * floor(SMALL), floor(SMALL)):
        lying = [replace(row, memory_mib=held) for row in rows]
        assert need(taught(lying), SMALL) == need(Learned(), SMALL)
    adapters = [replace(row, tuning="") for row in rows_of("llama-3-8b", 1.0, 1.0, ("7g.80gb",), "lora")]
    assert need(taught(adapters), "llama-3-8b") == need(Learned(), "llama-3-8b"), "they do not state it"


def test_slice_for_training_is_chosen_from_measurements() -> None:
    words = hints(SMALL, 2, 1024).removeprefix("migbatch: ")
    before = choose(Learned(), words)
    learned = taught(rows_of(SMALL, 1.2, 4.0, (before.offer.profile.name,)))
    after = choose(learned, words)
    assert after.offer.memory_mib > before.offer.memory_mib
    assert f"with {len(STEPS)} measured points" in after.text and "measured points" not in before.text


def test_refusal_proposes_settings_that_fit_by_the_measurements() -> None:
    """The proposed settings are sized by the same measurements as the requested ones."""
    learned = taught([*rows_of(SMALL, 1.0, 3.0), *rows_of(SMALL, 1.0, 3.0, tuning="full/checkpointing")])
    for state in (Learned(), learned):
        with pytest.raises(Refusal) as caught:
            choose(state, f"model={SMALL} role=train micro_batch=16 seq=4096")
        ways = re.findall(r"(micro_batch=\d+ checkpointing=on) \(([0-9a-z.]+)\)", str(caught.value))
        assert ways
        for way, profile in ways:
            assert choose(state, f"model={SMALL} role=train seq=4096 {way}").offer.profile.gres_type == profile


def test_trained_points_round_trip_through_json_and_are_validated() -> None:
    rows = rows_of(SMALL, 1.4, 1.4)
    rows[0] = replace(rows[0], memory_mib=None)
    learned = learn(rows, KNOWLEDGE)
    again = Learned.from_dict(json.loads(json.dumps(learned.to_dict())))
    assert again.trained == learned.trained != ()
    assert settle(Learned(), rows, KNOWLEDGE).trained == learned.trained
    old = learned.to_dict()
    del old["trained"]
    assert Learned.from_dict(old).trained == ()
    for invalid in ({"load": [math.nan] * 3}, {"away": [1e9, 0.0]}, {"of": ["a"]}, {"away": [None, None]}):
        data = learned.to_dict()
        data["trained"][0] |= invalid
        with pytest.raises(StateError):
            Learned.from_dict(data)


def test_rows_without_usable_training_data_are_ignored() -> None:
    (row, *_) = rows_of(SMALL, 1.2, 1.2)
    assert len(points_of([row])) == 1
    bad = [
        replace(row, model="nothing-known"),
        replace(row, model="stable-diffusion-xl"),
        replace(row, input_size=None),
        replace(row, procs=2),
        replace(row, kind="infer"),
        replace(row, source="runs"),
        replace(row, gpu="cpu", profile="", compute_slices=None, memory_slices=None, sm_count=None),
        replace(row, latency_s=None, throughput_per_s=None, memory_mib=None),
        replace(row, latency_s=None, throughput_per_s=None),  # ran out of memory
        replace(row, latency_s=10 * (row.latency_s or 0.0)),  # contradicts its throughput
    ]
    assert points_of(bad) == []


def test_training_of_a_model_that_is_not_public_counts_if_its_rows_state_the_parameters() -> None:
    """Its name alone states no size: a table of its adapters was kept and corrected nothing."""
    rows = [replace(row, model="our-chat", params=8.03e9) for row in rows_of("llama-3-8b", 1.8, 1.8, tuning="lora")]
    measured = TrainedMeasurements(points_of(rows))
    assert len(measured.points) == len(rows)
    for size in ("params=8b", "arch=layers:32+hidden:4096+heads:32+kv:8+ffn:14336+vocab:128256"):
        found = workload_of(parse(f"migbatch: model=our-chat {size} method=lora seq=1024 micro_batch=2"))
        assert found is not None and measured.sized(found).beside > 1.4
    for less in ({"params": None}, {"family": "cnn"}, {"family": ""}):
        assert points_of(replace(row, **less) for row in rows) == []


def test_refit_is_scored_against_measured_training_steps() -> None:
    rows = rows_of(SMALL, 1.5, 1.5, ("2g.20gb", "3g.40gb"))
    good, bad = taught(rows[::2]), taught(rows_of(SMALL, 0.4, 0.4))
    mine, none, wrong = (misses(state, rows[1::2], KNOWLEDGE) for state in (good, Learned(), bad))
    for figure in ("step", "beside"):
        assert mine[figure].error < 0.5 * none[figure].error < wrong[figure].error
    assert worse(wrong, none, 0.1)


def test_adapter_rows_are_not_used_for_full_training() -> None:
    """The cost of a step with adapters, or with activation checkpointing, does not apply to the usual step."""
    rows = rows_of(SMALL, tuning="lora")
    assert samples_of(rows, KNOWLEDGE) == []
    assert samples_of([replace(row, tuning="full/adamw") for row in rows], KNOWLEDGE) != []


def test_number_of_trained_points_is_bounded() -> None:
    rows = [replace(row, input_size=512 + number) for number in range(60) for row in rows_of(SMALL, 1.2)[:3]]
    points = points_of([*rows, *rows_of("gpt2", 1.2)])
    assert len(points) <= MOST_POINTS and {point.model for point in points} == {SMALL, "gpt2"}


def bert(batch: int, seconds: float, mib: float) -> Measurement:
    return Measurement(
        H100.name, "bert-base", "encoder", "train", "7g.80gb", 7, 8, 132, batch, 128, throughput_per_s=batch / seconds,
        latency_s=seconds, memory_mib=mib, source=OWN,
    )  # fmt: skip


def test_training_of_a_public_encoder_is_computed_until_two_points_are_measured() -> None:
    """A job that names the model alone gets the same figures as one with the words of language models."""
    cell, profile = Bucket("bert-base", "train", 16, 128, "tok"), P("2g.20gb")
    computed = asked(Learned(), "bert-base", "2g.20gb", 16, 128)
    plain = LearnedPredictor().figures(cell, H100)[profile]
    assert plain.latency_s.to_list() == pytest.approx(computed.latency_s.to_list(), rel=0.1)
    assert plain.throughput_per_s.to_list() == pytest.approx(computed.throughput_per_s.to_list(), rel=0.1)
    assert plain.memory_mib == computed.memory_mib

    rows = [bert(16, 0.2, 5000.0), bert(8, 0.1, 4000.0), bert(32, 0.4, 8000.0)]
    once, often = (learn(rows[:count], KNOWLEDGE) for count in (1, 3))
    corrected = LearnedPredictor(once).figures(cell, H100)[profile]
    assert corrected.latency_s.mid > 1.5 * plain.latency_s.mid  # the measured step took three times the computed one
    measured = LearnedPredictor(often).figures(cell, H100)[P("7g.80gb")]
    assert measured.latency_s.mid == pytest.approx(0.2, rel=0.1)
    assert measured.memory_mib.mid == pytest.approx(5000.0, rel=0.1)


def test_table_without_the_service_has_the_computed_figures_of_training() -> None:
    sheet = LearnedPredictor().sheet(Block("roberta-base", "train", (1, 8), (128, 512)), H100)
    profiles = [info.profile for info in H100.geometry.profiles if not info.profile.suffix]
    full = profiles.index(P("7g.80gb"))
    assert (sheet[0] >= sheet[0][:, :, full : full + 1]).all(), "a slice is faster than the GPU"
    for row, (batch, size) in enumerate(((1, 128), (1, 512), (8, 128), (8, 512))):
        for column, profile in enumerate(profiles):
            computed = asked(Learned(), "roberta-base", str(profile), batch, size)
            assert sheet[0, :, row, column].tolist() == pytest.approx(computed.latency_s.to_list(), rel=0.1)
            assert sheet[2, :, row, column].tolist() == computed.memory_mib.to_list()

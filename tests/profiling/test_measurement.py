"""One measured point: which values it refuses, and which it derives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slurm_migbatch.profiling.measurement import COLUMNS, Measurement, MeasurementError, Tuning


def row(**cells: str) -> dict[str, str]:
    return {"gpu": "NVIDIA A100-SXM4-80GB", "model": "ResNet50", "batch": "8", **cells}


def test_text_cells_are_parsed_into_numbers() -> None:
    point = Measurement.from_text(row(profile="2G.20GB", latency_s="0.02", procs="2", sm_count="28.0"))
    assert (point.model, point.profile, point.sm_count) == ("resnet50", "2g.20gb", 28)
    assert point.seconds == 0.02
    assert point.rate == pytest.approx(800)
    assert point.ran
    assert point.to_dict()["memory_mib"] is None
    assert tuple(point.to_dict()) == COLUMNS


def test_a_point_without_speed_did_not_run() -> None:
    point = Measurement.from_text(row(profile="1g.10gb"))
    assert not point.ran
    assert not Measurement.from_text(row(latency_s="0", throughput_per_s="0.0")).ran
    assert point.seconds is None and point.rate is None


def test_seconds_are_computed_from_throughput() -> None:
    assert Measurement.from_text(row(throughput_per_s="400", procs="2")).seconds == pytest.approx(0.04)


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ({"batch": ""}, "batch is empty"),
        ({"gpu": " "}, "gpu is empty"),
        ({"batch": "1.5"}, "whole number"),
        ({"batch": "0"}, "from 1"),
        ({"latency_s": "-1"}, "leave it empty"),
        ({"latency_s": "nan"}, "must be a number"),
        ({"latency_s": "fast"}, "must be a number"),
        ({"latency_s": "1e308"}, "latency_s must be between 1e-30 and 1e\\+30, not 1e308"),
        ({"throughput_per_s": "1e-320"}, "throughput_per_s must be between"),
        ({"kind": "think"}, "infer, train or serve"),
        ({"profile": "1g"}, "profile"),
    ],
)
def test_invalid_cells_are_refused_by_column_name(cells: dict[str, str], message: str) -> None:
    with pytest.raises(MeasurementError, match=message):
        Measurement.from_text(row(**cells))


def test_tuning_column_is_parsed_with_the_words_of_hints() -> None:
    cells = {"gpu": "h100", "model": "llama-3-8b", "batch": "2", "input_size": "2048", "kind": "train"}
    row = Measurement.from_text({**cells, "tuning": "QLoRA/adamw_8bit/checkpointing"})
    assert row.trained == Tuning("qlora", "adamw_8bit", "on") and not row.trained.usual
    assert Measurement.from_text(cells).trained == Tuning() and Tuning().usual
    assert Tuning.parse("full/sgd").usual and not Tuning.parse("checkpointing").usual
    with pytest.raises(MeasurementError, match="joined by /, not lorra"):
        Measurement.from_text({**cells, "tuning": "lorra"})
    with pytest.raises(MeasurementError, match="tuning is only for kind train, not infer"):
        Measurement.from_text({**cells, "kind": "infer", "tuning": "lora"})
    assert row.point != replace(row, tuning="").point

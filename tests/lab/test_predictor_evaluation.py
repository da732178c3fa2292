"""The whole evaluation on small laboratories, usual and unusual ones, and its command."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from slurm_migbatch.cli.ending import Failure
from slurm_migbatch.lab.cli.eval import eval_
from slurm_migbatch.lab.evaluate import baselines, profiling
from slurm_migbatch.lab.evaluate.predictor import Options, evaluate
from slurm_migbatch.profiling.csvfile import TableError
from slurm_migbatch.profiling.measurement import Measurement
from tests.support.small_laboratory import GPU, laboratory, save

A30 = {"1g.10gb": ("1g.6gb", 1, 14), "2g.20gb": ("2g.12gb", 2, 28), "7g.80gb": ("4g.24gb", 4, 56)}
Rows = list[Measurement]


def test_errors_fall_with_profiled_points_in_a_regular_laboratory() -> None:
    """Models differ only in two figures: after three points the remaining error is mostly noise."""
    result = evaluate(laboratory(noise=0.01, procs=(1, 2), memory=True), None, Options(trees=False))
    time = result["kinds"]["infer"]["time"]
    assert [scores["k"] for scores in time] == [0, 1, 2, 3]
    assert time[3]["mape"] < 15 and time[3]["mape"] < time[0]["mape"]
    assert [scores["points"] for scores in time] == [5 * (20 - k) for k in range(4)]
    assert {scores["common"]["points"] for scores in time} == {5 * 17}
    assert set(time[0]["per_family"]) == {"cnn", "encoder"} and len(time[0]["per_model"]) == 5
    assert {cover["level"] for cover in time[0]["coverage"]} == {0.8, 0.9}
    assert result["kinds"]["infer"]["memory"][3]["mape"] < 15
    names = [bar["name"] for bar in result["bars"]]
    assert sum(name.startswith("mean error of throughput") for name in names) == 4
    assert sum(name.startswith("coverage") for name in names) == 8
    assert sum(name.startswith("choice") for name in names) == 3
    assert sum("against" in name for name in names) == 4


def test_unlisted_models_and_the_empty_store_are_reported_separately() -> None:
    rows = [replace(row, model="our-net") if row.model == "resnet50" else row for row in laboratory()]
    found = evaluate(rows, None, Options(trees=False))["kinds"]["infer"]
    for scores in found["time"]:
        assert scores["listed"]["models"] == 4 and scores["unlisted"]["models"] == 1
        assert {cover["level"] for cover in scores["unlisted"]["coverage"]} == {0.8, 0.9}
    empty = [row for row in found["rules"] if row["method"] == "empty store"]
    assert [row["k"] for row in empty] == [0, 1, 2, 3]
    assert empty[0]["same_points"]["points"] == found["time"][0]["points"]


def test_coverage_has_its_own_target_if_a_laboratory_is_left_out() -> None:
    rows = [*laboratory(models=("vgg16", "resnet50")), *laboratory(models=("resnet101",), source="there")]
    bars = evaluate(rows, None, Options(points=1, leave="laboratory", trees=False))["bars"]
    assert {bar["target"] for bar in bars if bar["name"].startswith("coverage")} == {0.05}


def test_predictor_and_rules_are_scored_on_the_same_points() -> None:
    found = evaluate(laboratory(models=("vgg16", "resnet50", "bert-base")), None, Options(points=2, trees=False))[
        "kinds"
    ]["infer"]
    for scores in found["rules"]:
        same = scores["same_points"]
        assert same["predictor_k"] == (2 if scores["k"] < 0 else scores["k"])
        assert 0 < same["points"] <= scores["points"]
    assert max(scores["k"] for scores in found["time"]) == 2


@pytest.fixture
def few_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "TREES", 15)


@pytest.mark.usefixtures("few_trees")
def test_the_same_table_gives_the_same_figures() -> None:
    rows = laboratory(noise=0.05, models=("vgg16", "bert-base"), batches=(1, 8, 32))
    assert evaluate(rows, None, Options()) == evaluate(rows, None, Options())


def test_training_has_its_own_relative_speed_bar() -> None:
    result = evaluate(laboratory(kind="train", models=("vgg16", "resnet50")), None, Options(trees=False))
    assert "infer" not in result["kinds"]
    assert [bar for bar in result["bars"] if bar["name"].startswith("relative speed")]
    assert any("no inference" in note for note in result["notes"])


def test_training_of_public_language_models_is_scored_as_computed() -> None:
    rows = laboratory(kind="train", models=("vgg16", "resnet50", "bert-base"), memory=True)
    rows = [replace(row, input_size=128) if row.model == "bert-base" else row for row in rows]
    result, blind = (evaluate(rows, None, Options(points=2, blind=blind, trees=False)) for blind in (False, True))
    (note,) = (note for note in result["notes"] if "computed" in note)
    assert note == "computed from the architecture, as requests get it: bert-base (k=0, 1)"
    assert not any("computed" in note for note in blind["notes"])
    relative = {row["method"]: row for row in result["kinds"]["train"]["relative"] if row["k"] == 0}
    ours, middle = relative["predictor"]["per_model"], relative["predictor, middle figures"]["per_model"]
    assert ours["bert-base"] == middle["bert-base"] and ours["vgg16"] != middle["vgg16"]


def test_models_known_from_the_training_table_are_stated() -> None:
    train = laboratory(source="there", models=("vgg16", "resnet101"))
    result = evaluate(laboratory(models=("vgg16", "resnet50")), train, Options(trees=False))
    assert any("known from other laboratories: vgg16" in note for note in result["notes"])
    first = result["kinds"]["infer"]["time"][0]
    assert (first["seen_elsewhere"]["models"], first["never_seen"]["models"]) == (1, 1)


def test_bad_tables_are_not_said_to_be_for_an_import(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("gpu,model,batch,latency_s\na100,net,x,1\n")
    for command in ("predictor", "profiling"):
        with pytest.raises(TableError, match=r"\Anothing was read: .*t\.csv:2: batch must be a number"):
            CliRunner().invoke(eval_, [command, "--data", str(tmp_path)], catch_exceptions=False)


ODD: dict[str, Callable[[Rows], Rows]] = {
    "one row": lambda rows: rows[:1],
    "one model": lambda rows: [row for row in rows if row.model == "vgg16"],
    "two points of a model": lambda rows: [row for row in rows if row.model != "vgg16"] + rows[:2],
    "three batches": lambda rows: [row for row in rows if row.batch in (1, 8, 32)],
    "no slices": lambda rows: [replace(r, compute_slices=None, memory_slices=None, sm_count=None) for r in rows],
    "no small slices": lambda rows: [row for row in rows if row.profile == "7g.80gb"],
    "whole gpus": lambda rows: [
        replace(r, profile="", compute_slices=None, memory_slices=None, sm_count=None)
        for r in rows
        if r.profile == "7g.80gb"
    ],
    "cpu": lambda rows: [
        replace(r, gpu="cpu", profile="", compute_slices=None, memory_slices=None, sm_count=None)
        for r in rows
        if r.profile == "7g.80gb"
    ],
    "h100": lambda rows: [replace(row, gpu="NVIDIA H100 80GB HBM3", sm_count=None) for row in rows],
    "a30": lambda rows: [
        replace(r, gpu="NVIDIA A30", profile=p, compute_slices=c, memory_slices=c, sm_count=s)
        for r in rows
        if r.profile in A30
        for p, c, s in [A30[r.profile]]
    ],
    "another gpu": lambda rows: [replace(r, gpu="FooBar 3000", sm_count=None, memory_slices=None) for r in rows],
    "unknown models": lambda rows: [replace(row, model=f"x-{row.model}-net") for row in rows],
    "other slices": lambda rows: [replace(r, profile="1g.20gb") if r.profile == "2g.20gb" else r for r in rows],
    "nothing ran": lambda rows: [replace(row, latency_s=None, throughput_per_s=None) for row in rows],
    "always two processes": lambda rows: [replace(row, procs=2) for row in rows],
    "two gpus": lambda rows: rows + [replace(row, gpu="a100-40gb", profile="") for row in rows[:8]],
    "some have memory": lambda rows: [replace(row, memory_mib=1000.0) for row in rows[:3]] + rows[3:],
    "many inputs": lambda rows: [replace(row, input_size=(128, 224, 384)[i % 3]) for i, row in enumerate(rows)],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("blind", [False, True])
def test_unusual_tables_are_scored_as_far_as_possible(name: str, blind: bool, tmp_path: Path) -> None:
    rows = ODD[name](laboratory(noise=0.02, models=("vgg16", "resnet50", "bert-base"), batches=(1, 8, 32)))
    result = evaluate(rows, None, Options(blind=blind, trees=False))
    json.dumps(result, allow_nan=False)
    if not blind:
        json.dumps(profiling.evaluate(tmp_path, rows), allow_nan=False)


def run(*args: str) -> str:
    done = CliRunner().invoke(eval_, list(args))
    assert done.exit_code == 0, done.output
    return done.stdout


def test_command_prints_a_json_object_with_bars(tmp_path: Path) -> None:
    data = save(laboratory(models=("vgg16", "resnet50")), tmp_path / "data")
    result = json.loads(run("predictor", "--data", str(data), "--json", "--quick", "--points", "1", "--level", "0.8"))
    assert result["data"] == str(data) and result["train"] is None
    assert all(set(bar) == {"name", "value", "target", "ok"} for bar in result["bars"]) and result["bars"]
    assert {scores["k"] for scores in result["kinds"]["infer"]["time"]} == {0, 1}
    train = save(laboratory(models=("resnet101", "bert-base"), source="there"), tmp_path / "train")
    result = json.loads(run("predictor", "--data", str(data), "--train", str(train), "--blind", "--quick", "--json"))
    assert result["train"] == str(train)


@pytest.mark.usefixtures("few_trees")
def test_command_prints_a_readable_report(tmp_path: Path) -> None:
    data = save(laboratory(models=("vgg16", "resnet50"), memory=True), tmp_path / "data")
    report = run("predictor", "--data", str(data))
    for part in ("error of throughput", "error of memory", "roofline", "under a latency limit", "relative", "all cnn"):
        assert part in report
    report = run("profiling", "--data", str(data), "--level", "0.9")
    assert "synthetic" in report and "100%" in report and "measured cells only" in report
    assert json.loads(run("profiling", "--data", str(data), "--json"))["bars"]


@pytest.mark.parametrize("name", ["nothing ran", "always two processes", "one row"])
def test_unusual_tables_are_scored_with_a_note_or_refused_with_what_is_needed(name: str, tmp_path: Path) -> None:
    rows = ODD[name](laboratory(models=("vgg16", "resnet50"), batches=(1, 8)))
    data = save(rows, tmp_path / "data")
    assert "note:" in run("predictor", "--quick", "--data", str(data))
    done = CliRunner().invoke(eval_, ["profiling", "--data", str(data)])
    assert isinstance(done.exception, Failure)
    assert "has no model to choose a slice for: rows of kind infer are needed, of one process" in str(done.exception)


def test_a_folder_without_tables_is_an_error(tmp_path: Path) -> None:
    done = CliRunner().invoke(eval_, ["predictor", "--data", str(tmp_path)])
    assert done.exit_code != 0 and "no measurements" in str(done.exception)
    assert CliRunner().invoke(eval_, ["predictor", "--data", str(tmp_path / GPU)]).exit_code == 2

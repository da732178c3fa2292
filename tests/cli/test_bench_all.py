"""All experiments in one run: a failure is reported and the others still run; headlines follow from results alone."""

import functools
import json
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from slurm_migbatch.cli.main import cli
from slurm_migbatch.lab.experiments import every, headlines, plots
from slurm_migbatch.lab.experiments.every import EXPERIMENTS, SHOWN, Experiment, child, measure
from slurm_migbatch.lab.experiments.headlines import HEADLINES, Headline

SCALE = Experiment("scale", fixed=("--nodes", "2", "--gpus", "1", "--pending", "5"), data=False, alone=True)

BAR = {"name": "x: gain", "value": 1.2, "target": 1.1, "ok": True, "at_least": True}
INSTANCES = {
    "notes": ["a note"],
    "rows": [
        {"name": "MIG off, a GPU for each model", "gpus": [4, 8], "total": 12},
        {"name": "integer programme, measured figures", "gpus": [1, 5], "total": 6},
        {"name": "ParvaGPU", "gpus": [2, 5], "total": 7},
    ],
    "bars": [],
}
OVER = {f"{order}, pairs over FFS": [0.8, 0.7, 0.9] for order in ("FIFO", "SJF")}
SHARING = {
    "decides": "decide.lending.pairs.pairs",
    "configuration": "0123",
    "notes": [],
    "cells": [{"load": 2, "slowdown": "Gavel", "error": 0.5, "over": OVER}],
    "bars": [BAR],
}
WAIT = {"wait_s": 5.0, "over_first_fit": {"wait_s": [1.0, 1.0, 1.0]}}
TAKEN = {"jobs": 0.5, "slices": 0.4, "over_first_fit": {"jobs": [1.12, 1.0, 1.2], "slices": [1.0, 1.0, 1.0]}}
FRAGMENTATION = {
    "notes": [],
    "populations": {
        "parts": {
            "loads": [
                {"load": 0.85, "queued": True, "ways": {"planner": WAIT}},
                {"load": 1.5, "queued": False, "ways": {"planner": TAKEN}},
            ]
        }
    },
    "bars": [BAR],
}
ENDS = {"over_equal": [0.2, 0.1, 0.3], "over_static": [1.1, 1.0, 1.2]}
DISPATCH = {"notes": [], "results": [{"load": 0.9, "ways": {"migbatchd": ENDS}}], "bars": [BAR]}
WAY = {"jct_ratio": [0.5, 0.4, 0.6], "restarts": 2.0, "restarts_interval": [2.0, 1.0, 3.0], "delay_p95_s": 8.0}
LENDING = {
    "notes": [],
    "results": [
        {"load": load, "ways": {"ours": {**WAY, "jct_ratio": [ratio, ratio - 0.1, ratio + 0.1]}, "half": WAY}}
        for load, ratio in (("small", 0.5), ("large", 0.7))
    ],
    "bars": [],
}


def test_headline_verdicts_follow_from_the_results():
    instances = headlines.instances(INSTANCES)
    assert instances.beaten
    assert "saved in all 50 (theirs 50)" in instances.ours
    assert headlines.sharing(SHARING).beaten
    assert "FIFO, mean over FFS 20 " in headlines.sharing(SHARING).ours
    assert headlines.lending(LENDING).beaten is False
    assert headlines.lending(LENDING).line().startswith("not beaten: DeepBoot")
    assert headlines.fragmentation(FRAGMENTATION).beaten
    assert "parts, load 1.5 12 " in headlines.fragmentation(FRAGMENTATION).ours
    assert headlines.dispatch(DISPATCH).beaten is None
    assert "0.20 of the best equal slices', 1.10 of the best static cut's" in headlines.dispatch(DISPATCH).ours
    rows = [{"rule": "least loss", "gain_jobs": [0.05]}, {"rule": "first fit", "gain_jobs": [0.0]}]
    placed = {"populations": {"parts": {"loads": [{"load": 1.5, "rules": rows}, {"load": 2.0, "rules": []}]}}}
    assert headlines.placement(placed).beaten is False
    paris = {"results": [{"variance": 0.9, "mean_over_best_homogeneous": {"ours": 1.2, "PARIS, ELSA": 0.8}}]}
    assert headlines.paris_elsa(paris).beaten is None
    assert "1.50 times" in headlines.paris_elsa(paris).line()
    every_mix = {"load": {"ours": [0.92, 0.9, 0.94]}, "utilisation_over_temporal": [1.7], "items_over_temporal": [3.0]}
    assert headlines.dstack({"results": [{"batches": "own", "all": every_mix}]}).beaten is False


PLOTTED = {
    "sharing": SHARING,
    "fragmentation": FRAGMENTATION,
    "dispatch": DISPATCH,
    "lending": LENDING,
}


@pytest.mark.parametrize(("name", "result"), PLOTTED.items())
def test_plots_are_written_as_valid_svg(tmp_path, name, result):
    written = plots.write(name, result, tmp_path / "new")
    assert written
    for path in written:
        assert path.name.startswith(f"{name}-")
        assert ElementTree.fromstring(path.read_text(encoding="utf-8")).tag.endswith("svg")


def test_failed_experiment_is_reported_and_the_others_still_run(tmp_path):
    def run(words):
        if words[1] == "lending":
            raise RuntimeError("no Pollux data")
        name = words[2] if words[1] == "study" else words[1]
        return {"instances": INSTANCES, "sharing": {"cells": "nonsense", "notes": ["n"]}, "scale": {"bars": [BAR]}}[
            name
        ]

    found = measure(
        tmp_path,
        also=("studies",),
        experiments=(Experiment("sharing"), Experiment("lending"), Experiment("instances", "bench study"), SCALE),
        run=run,
        together=2,
    )
    assert [row["name"] for row in found["experiments"]] == ["sharing", "lending", "scale", "instances"]
    assert found["failed"] == ["sharing", "lending"]
    rows = {row["name"]: row for row in found["experiments"]}
    assert rows["lending"]["error"] == "no Pollux data"
    assert "not as expected" in rows["sharing"]["error"]
    assert Headline(**rows["instances"]["headline"]).beaten
    assert rows["scale"]["headline"] is None
    assert [(bar["experiment"], bar["name"]) for bar in found["bars"]] == [("scale", "x: gain")]


def test_seeds_and_options_are_passed_to_the_commands(tmp_path):
    asked = []

    def run(words):
        asked.append(words)
        return {"bars": []}

    kinds = {experiment.title: experiment for experiment in EXPERIMENTS}
    assert set(kinds) == set(SHOWN) >= set(HEADLINES)
    for seeds, quick in ((None, False), (None, True), (12, True)):
        chosen = (kinds["dstack"], kinds["simulator"])
        measure(tmp_path, seeds, quick=quick, also=("studies",), experiments=chosen, run=run, together=1)
    mixes = [words[words.index("--mixes") + 1] for words in asked if words[2] == "dstack"]
    assert mixes == [str(kinds["dstack"].default), "2", "12"]
    scaled = ["--scale" in words for words in asked if words[1] == "simulator"]
    assert scaled == [False, True, True]
    assert kinds["dstack"].default >= 10


def test_child_process_returns_its_json_or_raises_its_error(tmp_path):
    assert len(child([*SCALE.options(tmp_path, None, quick=False)])["bars"]) == 2
    with pytest.raises(RuntimeError, match="openb_pod_list_default"):
        child(["bench", "fragmentation", "--data", str(tmp_path), "--json"])


@pytest.fixture
def small(monkeypatch):
    chosen = (Experiment("instances", "bench study"), SCALE)
    monkeypatch.setattr(every, "measure", functools.partial(every.measure, experiments=chosen))


def test_command_prints_one_table_and_fails_if_an_experiment_failed(small, tmp_path):
    done = CliRunner().invoke(cli, ["bench", "all", "--studies", "--data", str(tmp_path)])
    assert done.exit_code == 1
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[0] == ["EXPERIMENT", "BAR", "VALUE", "TARGET", "OK", "SECONDS"]
    assert any(line[0] == "instances" and "FAILED" in line for line in lines if line)
    assert sum("<=" in line for line in lines) == 2
    assert "scale: no paper has a figure for this" in done.stdout
    assert "minutes in all" in done.stdout


def test_command_prints_one_json_object(monkeypatch, tmp_path):
    monkeypatch.setattr(every, "measure", functools.partial(every.measure, experiments=(SCALE,)))
    done = CliRunner().invoke(cli, ["bench", "all", "--data", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["failed"] == []
    assert {bar["experiment"] for bar in found["bars"]} == {"scale"}

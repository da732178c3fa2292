"""`bench all`: what it runs, which experiments are studies, and that one with bars names the deciding function."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from slurm_migbatch.lab.cli import bench as command
from slurm_migbatch.lab.cli.eval import eval_
from slurm_migbatch.lab.cli.studies import study
from slurm_migbatch.lab.experiments import every
from slurm_migbatch.lab.experiments.every import EXPERIMENTS, SHOWN, Experiment, deciders
from slurm_migbatch.lab.experiments.plots import PLOTS

ROW = {"name": "b", "value": 1.0, "target": 2.0, "ok": True}


def answer(words):
    """What a command line would have printed."""
    if words[1] == "study":
        return {"bars": [], "notes": []}
    decider = {"decides": "decide.core.decide", "configuration": "0123"}
    return {"bars": [ROW], "notes": [], "results": [decider, {"load": 1, **decider}]}


def test_every_experiment_has_a_command_in_its_group():
    names = set(command.bench.commands)
    studies = set(study.commands)
    assert {experiment.name for experiment in EXPERIMENTS if experiment.study} == studies
    assert {experiment.name for experiment in EXPERIMENTS if experiment.group == "bench"} <= names
    assert {experiment.name for experiment in EXPERIMENTS if experiment.group == "eval"} <= set(eval_.commands)
    assert set(SHOWN) == {experiment.title for experiment in EXPERIMENTS} and len(SHOWN) == len(EXPERIMENTS)
    assert PLOTS.keys() <= set(SHOWN)
    for experiment in EXPERIMENTS:
        groups = {"bench": command.bench, "bench study": study, "eval": eval_}
        wanted = {param.opts[0] for param in groups[experiment.group].commands[experiment.name].params}
        words = experiment.options(Path("/data"), None, quick=False)
        assert {word for word in words if word.startswith("--")} <= wanted


def test_study_runs_as_a_study_command_and_has_no_bars(tmp_path):
    chosen = (Experiment("dispatch", seeds="--seeds"), Experiment("dstack", "bench study", "--mixes"))
    ran = []

    def run(words):
        ran.append(words)
        return answer(words)

    result = every.measure(tmp_path, 3, also=("studies",), experiments=chosen, run=run, together=1)
    assert ran[1] == ["bench", "study", "dstack", "--data", str(tmp_path), "--mixes", "3", "--json"]
    measured, study = result["experiments"]
    assert (measured["study"], study["study"]) == (False, True)
    assert measured["decides"] == ["decide.core.decide, configuration 0123"]
    assert result["bars"] == [{"experiment": "dispatch", **ROW}]


def test_studies_run_only_if_requested(tmp_path):
    chosen = (Experiment("services", "eval"), Experiment("placement", "bench study", "--seeds"))
    rows = [
        every.measure(tmp_path, also=("studies",) if wish else (), experiments=chosen, run=answer)["experiments"]
        for wish in (False, True)
    ]
    assert [[row["name"] for row in found] for found in rows] == [["services"], ["services", "placement"]]


def test_wrong_predictions_are_measured_only_if_requested(tmp_path):
    chosen = (Experiment("lending", seeds="--seeds"), Experiment("lending", seeds="--seeds", default=2, wrong=True))
    ran = []

    def run(words):
        ran.append(words)
        return answer(words)

    rows = [
        every.measure(tmp_path, also=("wrong",) if wish else (), experiments=chosen, run=run)["experiments"]
        for wish in (False, True)
    ]
    assert [[row["name"] for row in found] for found in rows] == [["lending"], ["lending", "lending --wrong"]]
    (wrong,) = [words for words in ran if "--wrong" in words]
    assert wrong[wrong.index("--seeds") + 1] == "2"


def test_table_marks_studies_and_names_the_deciding_function(tmp_path, monkeypatch):
    chosen = (Experiment("dispatch", seeds="--seeds"), Experiment("instances", "bench study"))
    monkeypatch.setattr(every, "child", answer)
    found = every.measure(tmp_path, also=("studies",), experiments=chosen, run=answer, together=1)
    for row in found["experiments"]:
        row["error"] = None
    monkeypatch.setattr(every, "measure", lambda *_args, **_kw: found)
    done = CliRunner().invoke(command.bench, ["all", "--data", str(tmp_path)])
    assert "a study: migbatchd does not run it" in done.stdout
    assert "dispatch: decide.core.decide, configuration 0123" in done.stdout
    assert "instances (study): " in done.stdout


def test_deciders_are_found_at_any_depth_of_a_result():
    decider = {"decides": "f", "configuration": "1"}
    assert deciders({"a": [{"b": decider}, decider], "c": {**decider, "configuration": "2"}}) == [
        "f, configuration 1",
        "f, configuration 2",
    ]
    assert deciders({"bars": []}) == []


@pytest.mark.parametrize("quick", [False, True])
def test_number_of_draws_is_the_requested_one_or_the_default(quick):
    experiment = Experiment("sharing", seeds="--seeds", default=20)
    assert experiment.draws(None, quick) == (2 if quick else 20)
    assert experiment.draws(7, quick) == 7

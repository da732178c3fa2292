"""`bench all`: what it runs, which of it is a study, and that an experiment with bars says what decides."""

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
    told = {"decides": "decide.core.decide", "configuration": "0123"}
    return {"bars": [ROW], "notes": [], "results": [told, {"load": 1, **told}]}


def test_every_command_exists_and_every_study_is_one():
    names = set(command.bench.commands)
    studies = set(study.commands)
    assert {each.name for each in EXPERIMENTS if each.study} == studies
    assert {each.name for each in EXPERIMENTS if each.group == "bench"} <= names
    assert {each.name for each in EXPERIMENTS if each.group == "eval"} <= set(eval_.commands)
    assert set(SHOWN) == {each.name for each in EXPERIMENTS} and len(SHOWN) == len(EXPERIMENTS)
    assert PLOTS.keys() <= set(SHOWN)
    for each in EXPERIMENTS:
        groups = {"bench": command.bench, "bench study": study, "eval": eval_}
        wanted = {param.opts[0] for param in groups[each.group].commands[each.name].params}
        words = each.options(Path("/data"), None, quick=False)
        assert {word for word in words if word.startswith("--")} <= wanted


def test_a_study_is_run_as_one_and_has_no_bars(tmp_path):
    chosen = (Experiment("dispatch", seeds="--seeds"), Experiment("dstack", "bench study", "--mixes"))
    ran = []

    def run(words):
        ran.append(words)
        return answer(words)

    result = every.measure(tmp_path, 3, studies=True, experiments=chosen, run=run, together=1)
    assert ran[1] == ["bench", "study", "dstack", "--data", str(tmp_path), "--mixes", "3", "--json"]
    measured, study = result["experiments"]
    assert (measured["study"], study["study"]) == (False, True)
    assert measured["decides"] == ["decide.core.decide, configuration 0123"]
    assert result["bars"] == [{"experiment": "dispatch", **ROW}]


def test_studies_run_where_they_are_asked_for(tmp_path):
    chosen = (Experiment("services", "eval"), Experiment("placement", "bench study", "--seeds"))
    rows = [
        every.measure(tmp_path, studies=wish, experiments=chosen, run=answer)["experiments"] for wish in (False, True)
    ]
    assert [[row["name"] for row in found] for found in rows] == [["services"], ["services", "placement"]]


def test_the_table_tells_bars_from_studies_and_what_decides(tmp_path, monkeypatch):
    chosen = (Experiment("dispatch", seeds="--seeds"), Experiment("instances", "bench study"))
    monkeypatch.setattr(every, "child", answer)
    found = every.measure(tmp_path, studies=True, experiments=chosen, run=answer, together=1)
    for row in found["experiments"]:
        row["error"] = None
    monkeypatch.setattr(every, "measure", lambda *_args, **_kw: found)
    done = CliRunner().invoke(command.bench, ["all", "--data", str(tmp_path)])
    assert "a study: migbatchd does not run it" in done.stdout
    assert "dispatch: decide.core.decide, configuration 0123" in done.stdout
    assert "instances (study): " in done.stdout


def test_deciders_are_found_wherever_a_result_has_them():
    told = {"decides": "f", "configuration": "1"}
    assert deciders({"a": [{"b": told}, told], "c": {**told, "configuration": "2"}}) == [
        "f, configuration 1",
        "f, configuration 2",
    ]
    assert deciders({"bars": []}) == []


@pytest.mark.parametrize("quick", [False, True])
def test_draws_are_as_asked_for(quick):
    one = Experiment("sharing", seeds="--seeds", default=20)
    assert one.draws(None, quick) == (2 if quick else 20)
    assert one.draws(7, quick) == 7

"""Pipelines as they ship, on a made-up table: jobs are what the filter leaves, and migbatchd's decision runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from slurm_migbatch.lab import shipped
from slurm_migbatch.lab.bars import NotMeasurable
from slurm_migbatch.lab.cli.bench import bench
from slurm_migbatch.lab.experiments import pipelines
from slurm_migbatch.lab.experiments.dispatch import table
from slurm_migbatch.lab.experiments.headlines import HEADLINES
from slurm_migbatch.lab.experiments.pipelines import ALONE, EQUAL, KINDS, ORACLE, OURS, PROPORTIONAL, WAYS
from slurm_migbatch.lab.sim.gpus import geometry
from slurm_migbatch.lab.studies.pariselsa import kinds_of
from slurm_migbatch.workload.hints import parse
from tests.support.experiments import measured_once

SLICES = kinds_of(geometry("a100-80gb"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Models whose items take time on each slice beside a floor, which is long for what makes text."""
    lines = ["gpu,model,profile,batch,procs,latency_s"]
    for model, batch, _ in (part for kind in KINDS.values() for part in kind):
        floor = 0.05 if model == "bert-large" else 0.002
        for kind in SLICES:
            lines.append(f"a100-80gb,{model},{kind.name},{batch},1,{floor + 0.004 * batch / kind.compute:.6f}")
    (tmp_path / "table.csv").write_text("\n".join(dict.fromkeys(lines)) + "\n")
    return tmp_path


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PIPELINES", 12), ("NODES", 1), ("PER_NODE", 4), ("LOADS", (0.5,))):
        monkeypatch.setattr(pipelines, name, value)


def test_every_job_is_granted_what_its_own_limit_needs_and_ours_name_their_pipeline(data: Path) -> None:
    seconds = table(data)
    drawn = pipelines.draw(seconds, 0.5, 3)
    assert len({one.slack for one in drawn}) == 12 and all(len(one.parts) in (3, 4) for one in drawn)
    right = pipelines.exact(seconds)
    for one in drawn:
        for way in (EQUAL, PROPORTIONAL):
            limits = pipelines.limits(way, one, right)
            assert sum(limits[:3]) <= one.deadline_s and min(limits) >= 1
        assert set(pipelines.limits(ALONE, one, right)) == {float(one.deadline_s)}
    ours, alone = (pipelines.workload(way, drawn, right) for way in (OURS, ALONE))
    assert [job.gres for job in ours] == [job.gres for job in alone]
    names = [parse(job.fields["comment"].split(" [")[0]).pipeline for job in ours]
    assert len(set(names)) == 12 and None not in names
    assert all(job.begin_s if not job.after else not job.begin_s for job in ours)
    assert not any("pipeline" in job.fields["comment"] or job.begin_s for job in alone)


def test_predictions_are_wrong_by_bounded_factors_both_ways(data: Path) -> None:
    factors = pipelines.wrong(table(data), 1)
    assert all(0.5 <= factor <= 2 for factor in factors.values())
    assert min(factors.values()) < 1 < max(factors.values())
    assert pipelines.wrong(table(data), 1) == factors != pipelines.wrong(table(data), 2)


def test_the_experiment_says_what_decides_and_what_bounds_it(data: Path) -> None:
    result = pipelines.measure(data, 2)
    assert [row["scenario"] for row in result["results"]] == [
        "load 0.5",
        "load 0.5, predictions wrong by up to 2 times",
    ]
    for row in result["results"]:
        ways = row["ways"]
        assert row["decides"] == shipped.DECIDES and set(ways) == {*WAYS, ORACLE}
        assert row["cheaper"] in (EQUAL, PROPORTIONAL) and ways[row["cheaper"]]["over_cheaper"] == [1.0, 1.0, 1.0]
        assert ways[ORACLE]["kept"] == 1.0
        assert all(0 <= ways[way]["kept"] <= 1 and ways[way]["slice_s"] > 0 for way in ways)
    right = result["results"][0]["ways"]
    assert right[OURS]["kept"] > right[ALONE]["kept"]
    assert len(result["bars"]) == 3
    told = HEADLINES["pipelines"](result)
    assert told.beaten is None and "of its slice-seconds" in told.ours


def test_the_command_prints_one_object_or_tables(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured_once(monkeypatch, pipelines)
    words = ["pipelines", "--data", str(data), "--seeds", "2"]
    done = CliRunner().invoke(bench, [*words, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["bench"] == "pipelines"
    done = CliRunner().invoke(bench, words)
    assert done.exit_code == 0, done.output
    assert "slurm_migbatch.decide.core.decide, configuration" in done.stdout and "oracle" in done.stdout


def test_a_table_without_the_models_is_refused_with_what_is_missing(data: Path) -> None:
    lines = (data / "table.csv").read_text().splitlines()
    (data / "table.csv").write_text("\n".join(line for line in lines if "vgg19" not in line) + "\n")
    with pytest.raises(NotMeasurable, match="lacks measurements of vgg19 at 32"):
        pipelines.measure(data, 2)

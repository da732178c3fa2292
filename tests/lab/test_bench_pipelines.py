"""Pipelines as shipped, on a synthetic table: jobs are as the filter leaves them, and migbatchd's decision runs."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest
from click.testing import CliRunner
from pytest import approx

from slurm_migbatch.lab import shipped
from slurm_migbatch.lab.bars import NotMeasurable
from slurm_migbatch.lab.cli.bench import bench
from slurm_migbatch.lab.experiments import pipelines
from slurm_migbatch.lab.experiments.dispatch import table
from slurm_migbatch.lab.experiments.headlines import HEADLINES
from slurm_migbatch.lab.experiments.pipelines import ALONE, EQUAL, KINDS, ORACLE, OURS, PROPORTIONAL, WAYS
from slurm_migbatch.lab.sim.gpus import geometry
from slurm_migbatch.lab.studies.pariselsa import kinds_of
from slurm_migbatch.predict.learned import CONFIDENCE
from slurm_migbatch.workload.hints import parse
from tests.support.experiments import measured_once

SLICES = kinds_of(geometry("a100-80gb"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Models with a time for each item that depends on the slice, and a fixed time, which is long for bert-large."""
    lines = ["gpu,model,profile,batch,procs,latency_s"]
    for model, batch, _ in (part for kind in KINDS.values() for part in kind):
        floor = 0.05 if model == "bert-large" else 0.002
        for kind in SLICES:
            lines.append(f"a100-80gb,{model},{kind.name},{batch},1,{floor + 0.004 * batch / kind.compute:.6f}")
    (tmp_path / "table.csv").write_text("\n".join(dict.fromkeys(lines)) + "\n")
    return tmp_path


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PIPELINES", 8), ("NODES", 1), ("PER_NODE", 4), ("LOADS", (0.5,))):
        monkeypatch.setattr(pipelines, name, value)


def test_variants_request_the_same_gres_and_only_ours_names_the_pipeline(data: Path) -> None:
    seconds = table(data)
    drawn = pipelines.draw(seconds, 0.5, 3)
    assert len({pipeline.slack for pipeline in drawn}) == 8 and all(len(pipeline.parts) in (3, 4) for pipeline in drawn)
    right = pipelines.exact(seconds)
    for pipeline in drawn:
        for way in (EQUAL, PROPORTIONAL):
            limits = pipelines.limits(way, pipeline, right)
            assert sum(limits[:3]) <= pipeline.deadline_s and min(limits) >= 1
        assert set(pipelines.limits(ALONE, pipeline, right)) == {float(pipeline.deadline_s)}
    ours, alone = (pipelines.workload(way, drawn, right) for way in (OURS, ALONE))
    assert [job.gres for job in ours] == [job.gres for job in alone]
    names = [parse(job.fields["comment"].split(" [")[0]).pipeline for job in ours]
    assert len(set(names)) == 8 and None not in names
    assert all(job.begin_s if not job.after else not job.begin_s for job in ours)
    assert not any("pipeline" in job.fields["comment"] or job.begin_s for job in alone)


def test_prediction_errors_are_bounded_and_go_both_ways(data: Path) -> None:
    factors = pipelines.wrong(table(data), 1)
    assert all(0.5 <= factor <= 2 for factor in factors.values())
    assert min(factors.values()) < 1 < max(factors.values())
    assert pipelines.wrong(table(data), 1) == factors != pipelines.wrong(table(data), 2)


def test_slow_ends_of_intervals_hold_as_often_as_the_predictor_says(data: Path) -> None:
    drawn = [pipelines.wrong(table(data), seed, pipelines.SLOW_END) for seed in range(100)]
    assert fmean(factor <= 1 for factors in drawn for factor in factors.values()) == approx(CONFIDENCE, abs=0.03)


@pytest.mark.slow
def test_measurement_names_the_deciding_function_includes_an_oracle_and_is_printed(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured_once(monkeypatch, pipelines)
    result = pipelines.measure(data=data, seeds=2)
    assert [row["scenario"] for row in result["results"]] == [
        "load 0.5",
        "load 0.5, predictions wrong by up to 2 times, intervals as wide",
        "load 0.5, predictions wrong by up to 2 times, no intervals",
    ]
    for row in result["results"]:
        ways = row["ways"]
        assert row["decides"] == shipped.DECIDES and set(ways) == {*WAYS, ORACLE}
        assert row["cheaper"] in (EQUAL, PROPORTIONAL) and ways[row["cheaper"]]["over_cheaper"] == [1.0, 1.0, 1.0]
        assert ways[ORACLE]["kept"] == 1.0
        assert all(0 <= ways[way]["kept"] <= 1 and ways[way]["slice_s"] > 0 for way in ways)
    right = result["results"][0]["ways"]
    assert right[OURS]["kept"] > right[ALONE]["kept"]
    assert len(result["bars"]) == 5
    headline = HEADLINES["pipelines"](result)
    assert headline.beaten is None and "of its slice-seconds" in headline.ours
    words = ["pipelines", "--data", str(data), "--seeds", "2"]
    done = CliRunner().invoke(bench, [*words, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == json.loads(json.dumps(result))
    assert result["bench"] == "pipelines"
    done = CliRunner().invoke(bench, words)
    assert done.exit_code == 0, done.output
    assert "slurm_migbatch.decide.core.decide, configuration" in done.stdout and "oracle" in done.stdout


def test_table_without_all_models_is_refused_and_the_error_names_them(data: Path) -> None:
    lines = (data / "table.csv").read_text().splitlines()
    (data / "table.csv").write_text("\n".join(line for line in lines if "vgg19" not in line) + "\n")
    with pytest.raises(NotMeasurable, match="lacks measurements of vgg19 at 32"):
        pipelines.measure(data, 2)

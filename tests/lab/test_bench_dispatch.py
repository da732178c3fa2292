"""Dispatch as shipped, on a synthetic table: migbatchd's own decision runs, and what it is compared with."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from slurm_migbatch.config import SupplyConfig, loads, render
from slurm_migbatch.lab import shipped
from slurm_migbatch.lab.bars import NotMeasurable
from slurm_migbatch.lab.cli.bench import bench
from slurm_migbatch.lab.experiments import dispatch
from slurm_migbatch.lab.experiments.dispatch import Auto, MeasuredTable
from slurm_migbatch.lab.sim.gpus import geometry
from slurm_migbatch.lab.studies.pariselsa import kinds_of
from slurm_migbatch.workload.hints import parse
from tests.support.experiments import measured_once

KINDS = kinds_of(geometry("a100-80gb"))
ONE, TWO, THREE, FOUR, ALL = KINDS


@pytest.fixture
def data(tmp_path):
    """Two models, each with a minimum latency and, above it, a time for each item that depends on the slice."""
    lines = ["gpu,model,profile,batch,procs,latency_s"]
    for name, floor, item in (("flat", 0.010, 0.002), ("steep", 0.001, 0.004)):
        for kind in KINDS:
            for batch in (1, 8, 32):
                lines.append(f"a100-80gb,{name},{kind.name},{batch},1,{max(floor, item * batch / kind.compute):.6f}")
    (tmp_path / "table.csv").write_text("\n".join(lines) + "\n")
    return tmp_path


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, value in (("JOBS", 25), ("WARM", 5), ("NODES", 1), ("PER_NODE", 2), ("LOADS", (0.8,))):
        monkeypatch.setattr(dispatch, name, value)


def test_configuration_is_the_shipped_one_except_for_the_learned_preference(data):
    default = replace(loads(render()), path="")
    config = dispatch.config_of(dispatch.draw(dispatch.table(data), 0.8, 0))
    assert config.supply.preference
    assert replace(config, supply=replace(config.supply, preference=())) == default
    ways = dispatch.configs(config)
    assert ways["migbatchd"] == config
    assert ways["without the preference"] == default
    assert ways["without re-typing"].dispatch == replace(default.dispatch, enabled=False)
    assert ways["without re-typing"].supply != SupplyConfig()


def test_job_is_granted_the_smallest_profile_that_meets_its_request(data):
    seconds = dispatch.table(data)
    jobs = dispatch.draw(seconds, 0.8, 3)
    table = MeasuredTable(seconds)
    for job in jobs:
        granted, weighed = table.candidates(parse(job.hints), "gpu")
        assert granted == job.granted == min(candidate.profile for candidate in weighed if candidate.ok)
        assert {candidate.profile for candidate in weighed if candidate.ok} == set(job.seconds)
        assert ALL in job.seconds
    assert {"slo=" in job.hints for job in jobs} == {True, False}
    assert table.candidates(parse("migbatch: model=nobody"), "gpu") is None
    assert len({job.granted for job in jobs}) > 2


def test_static_layout_serves_jobs_in_order_or_none_if_a_job_has_no_valid_slice():
    jobs = [Auto(0.0, {ONE: 100.0, ALL: 20.0}, ""), Auto(1.0, {ALL: 20.0}, ""), Auto(2.0, {ONE: 100.0, ALL: 20.0}, "")]
    assert dispatch.static(jobs, {ALL: 1}) == [20.0, 39.0, 58.0]
    assert dispatch.static(jobs, {ONE: 1, ALL: 1}) == [100.0, 20.0, 39.0]
    assert dispatch.static(jobs, {ONE: 7}) is None
    found = dispatch.cuts()
    assert found["best equal slices"]["1g.10gb"] == {ONE: 14}
    assert {THREE: 1, FOUR: 1, ALL: 1} in found["best static cut"].values()
    assert all(any(n for n in counts.values()) for counts in found["best static cut"].values())


def test_migbatchd_runs_jobs_on_their_granted_profiles(data):
    seconds = dispatch.table(data)
    jobs = [replace(job, at=10_000.0 * n) for n, job in enumerate(dispatch.draw(seconds, 0.8, 3)[:6])]
    ends = dispatch.shipped(jobs, dispatch.config_of(jobs), seconds)
    for job, end in zip(jobs, ends, strict=True):
        assert 0 <= end - job.seconds[job.granted] < 15  # nothing else runs: it waits only for a cycle and a plan


def test_measurement_names_the_deciding_function_and_the_command_repeats_it(data, tmp_path, monkeypatch):
    result = dispatch.measure(data, 2)
    (found,) = result["results"]
    assert found["decides"] == shipped.DECIDES
    assert set(found["ways"]) == {
        "migbatchd",
        "without re-typing",
        "without the preference",
        "best equal slices",
        "best static cut",
        "granted, at once",
    }
    ways = found["ways"]
    assert ways["granted, at once"]["jct_s"] <= ways["migbatchd"]["jct_s"]
    assert ways["best static cut"]["jct_s"] <= ways["best equal slices"]["jct_s"]
    assert ways["best equal slices"]["over_equal"] == [1.0, 1.0, 1.0]
    assert [bar["value"] for bar in result["bars"]] == pytest.approx(
        [ways["migbatchd"]["over_equal"][0], ways["migbatchd"]["over_static"][0]]
    )
    measured_once(monkeypatch, dispatch)
    words = ["dispatch", "--data", str(data), "--seeds", "2"]
    done = CliRunner().invoke(bench, [*words, "--json", "--plot", str(tmp_path / "plots")])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == json.loads(json.dumps(result)), "it is deterministic"
    assert len(result["bars"]) == 2
    assert len(list((tmp_path / "plots").glob("dispatch-*.svg"))) == 2
    done = CliRunner().invoke(bench, words)
    assert done.exit_code == 0, done.output
    assert "slurm_migbatch.decide.core.decide, configuration" in done.stdout
    assert "best static cut: " in done.stdout


def test_table_without_all_profiles_is_refused_and_the_error_names_them(tmp_path):
    lines = ["gpu,model,profile,batch,procs,latency_s"]
    lines += [f"a100-80gb,m,{kind.name},{batch},1,0.1" for kind in KINDS[:3] for batch in (1, 8)]
    (tmp_path / "table.csv").write_text("\n".join(lines) + "\n")
    with pytest.raises(NotMeasurable, match=r"7g\.80gb"):
        dispatch.measure(tmp_path)

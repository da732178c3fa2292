"""Sharing as shipped, on a synthetic trace: migbatchd's rules, the drawn jobs, and the contents of a measurement."""

import gzip
import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from slurm_migbatch.config import Config, LendingConfig, loads, render
from slurm_migbatch.daemon.settings import lending_settings
from slurm_migbatch.decide.lending.pairs import SharingRules, pairs
from slurm_migbatch.decide.lending.stage import LendingMemory
from slurm_migbatch.lab.bars import NotMeasurable
from slurm_migbatch.lab.cli.bench import bench
from slurm_migbatch.lab.experiments import sharing
from slurm_migbatch.lab.experiments.sharing import Cell
from slurm_migbatch.lab.shipped import provenance
from slurm_migbatch.lab.sim.job import SimulatedJob
from slurm_migbatch.lab.sim.policies.slicesharing import DECIDES, LivePairs, by_arrival, by_claim
from tests.support.experiments import measured_once

CELLS = [Cell(0.8, 1.3, 0.0), Cell(2.0, None, 1.0)]


def write(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(("\n".join(lines) + "\n").encode()))


@pytest.fixture
def data(tmp_path):
    """Sixty jobs of two models in the format of Muri, and three pairs in the format of Gavel."""
    rows = ["job_id,num_gpu,submit_time,iterations,model_name,batch_size,duration,iteration_time"]
    rows += [
        f"{n},{1 + n % 4},{n * 9000},{100 + 97 * (n % 7)},{'ab'[n % 2]},16,{90000 + 1000 * n},1000" for n in range(60)
    ]
    write(tmp_path / "muri" / "cluster_trace.csv.gz", rows)
    rows = ["gpu,job1,workers1,job2,workers2,steps_per_s_1,steps_per_s_2", "v100,A,1,,,10,", "v100,B,1,,,8,"]
    rows += ["v100,A,1,B,1,8,5", "v100,A,1,A,1,6,6"]
    write(tmp_path / "gavel" / "physical_cluster_throughputs.csv.gz", rows)
    return tmp_path


def test_rules_are_those_of_migbatchd_with_the_shipped_configuration():
    shipped = replace(loads(render()), path="")
    assert sharing.config() == replace(shipped, lending=replace(shipped.lending, share=True))
    assert not shipped.lending.share
    memory = LendingMemory(lending_settings(sharing.config().lending))
    assert memory.slice_sharing.runs._rules == sharing.rules() == SharingRules()
    assert memory.slice_sharing._enabled
    assert f"{pairs.__module__}.{pairs.__qualname__}" == DECIDES == sharing.settings()["decides"]
    other = Config(lending=LendingConfig(share=True, sure=0.9))
    assert provenance(DECIDES, other)["configuration"] != sharing.settings()["configuration"]


def test_drawn_jobs_have_one_slice_the_requested_load_and_claims_with_errors(data):
    found = sharing.source(data)
    right = sharing.draw(found, Cell(2.0, 1.3, 0.0), np.random.Generator(np.random.PCG64(3)))
    wrong = sharing.draw(found, Cell(2.0, 1.3, 1.0), np.random.Generator(np.random.PCG64(3)))
    slices = sharing.GPUS * 3
    assert sum(job.work for job in right) / (slices * max(job.arrival for job in right)) == pytest.approx(2.0)
    assert [job.work for job in right] == [job.work for job in wrong]
    claims = {job.claimed for job in found.jobs}
    assert {job.claimed for job in right} <= claims
    errors = np.log([b.claimed / a.claimed for a, b in zip(right, wrong, strict=True)])
    assert np.std(errors) == pytest.approx(1.0, abs=0.2)
    assert all(job.gpus == 1 and job.profile == sharing.PROFILE for job in right)


def test_queue_order_is_by_arrival_or_by_shortest_claim():
    jobs = [SimulatedJob(0, "long", 0.0, 500.0), SimulatedJob(1, "short", 1.0, 100.0, estimate=900.0)]
    assert sorted(jobs, key=by_arrival) == jobs
    assert sorted(jobs, key=by_claim) == jobs
    assert sorted([jobs[0], replace(jobs[1], estimate=None)], key=by_claim)[0].name == "short"


def test_short_job_shares_with_a_longer_one_and_equal_jobs_do_not_share(monkeypatch):
    monkeypatch.setattr(sharing, "GPUS", 1)
    xi = {("m", "m"): 1.5}

    def joined(works, way):
        jobs = [
            SimulatedJob(n, f"j{n}", float(n), work, profile=sharing.PROFILE, app="m") for n, work in enumerate(works)
        ]
        return sharing.play(jobs, sharing.policy(way, by_arrival, xi), xi, 0)

    equal, unequal = [1000.0] * 4, [1000.0] * 3 + [100.0]
    assert joined(equal, "alone")["joined"] == joined(equal, "pairs")["joined"] == 0
    assert joined(equal, "FFS")["joined"] == joined(unequal, "FFS")["joined"] == 1
    assert joined(unequal, "pairs")["joined"] == 1
    assert joined(unequal, "pairs")["jct_s"] < joined(unequal, "alone")["jct_s"]
    assert joined([1000.0] * 3, "FFS")["joined"] == 0


def test_pair_test_variant_has_the_shipped_rules_without_queue_lookahead():
    shipped = sharing.policy("pairs, measured", by_claim, {("a", "a"): 1.2})
    test = sharing.policy(sharing.PAIR_TEST, by_claim, {("a", "a"): 1.2})
    assert isinstance(shipped, LivePairs) and isinstance(test, LivePairs)
    assert shipped.rules == sharing.rules({("a", "a"): 1.2}) and shipped.rules.depth > 0
    assert test.rules == replace(shipped.rules, depth=0)


def test_jobs_of_two_users_do_not_share(monkeypatch):
    monkeypatch.setattr(sharing, "GPUS", 1)
    xi = {("m", "m"): 1.0}
    jobs = [
        SimulatedJob(n, f"j{n}", float(n), work, profile=sharing.PROFILE, app="m", user=str(n))
        for n, work in enumerate([1000.0] * 3 + [100.0])
    ]
    assert sharing.play(jobs, sharing.policy("pairs", by_arrival, xi), xi, 0)["joined"] == 0


@pytest.fixture
def few(monkeypatch):
    """Fewer jobs on fewer GPUs."""
    monkeypatch.setattr(sharing, "JOBS", 30)
    monkeypatch.setattr(sharing, "GPUS", 2)


@pytest.mark.slow
@pytest.mark.usefixtures("few")
def test_every_variant_is_measured_and_the_command_repeats_it_in_two_processes(data, tmp_path, monkeypatch):
    result = sharing.measure(data, 2, CELLS)
    assert result["decides"] == "slurm_migbatch.decide.lending.pairs.pairs"
    assert [cell["slowdown"] for cell in result["cells"]] == [1.3, "Gavel"]
    for cell in result["cells"]:
        assert set(cell["ways"]) == {f"{order}, {way}" for order in ("FIFO", "SJF") for way in sharing.WAYS}
        assert cell["ways"]["FIFO, alone"]["joined"] == 0 < cell["ways"]["FIFO, FFS"]["joined"]
        assert {key.split(" over ")[1] for key in cell["over"]} == {*sharing.BASES}
    *over, late = result["bars"]
    assert len(over) == 8
    assert late["value"] == max(
        cell["ways"][f"{order}, pairs"]["late"] for cell in result["cells"] for order in ("FIFO", "SJF")
    )
    for bar in over:
        key = bar["name"].split(", mean")[0]
        assert bar["value"] == max(cell["over"][key][0] for cell in result["cells"])  # means, not bounds of intervals
    monkeypatch.setattr(sharing, "all_cells", lambda: CELLS)
    measured_once(monkeypatch, sharing)
    words = ["sharing", "--data", str(data), "--seeds", "2", "--processes", "2"]
    done = CliRunner().invoke(bench, [*words, "--json", "--plot", str(tmp_path / "plots")])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == json.loads(json.dumps(result)), "it is deterministic"
    assert len(result["bars"]) == 9
    assert list((tmp_path / "plots").glob("sharing-*.svg"))
    done = CliRunner().invoke(bench, words)
    assert done.exit_code == 0, done.output
    assert "decide.lending.pairs.pairs, configuration" in done.stdout
    assert "FIFO, pairs over FFS" in done.stdout


def test_missing_data_file_is_named_in_the_error(tmp_path):
    with pytest.raises(NotMeasurable, match=r"cluster_trace\.csv"):
        sharing.measure(tmp_path)


def test_pair_with_a_large_slowdown_is_learned_and_separated(monkeypatch):
    """Two long jobs slow each other down by a factor of 40: without a table they share once, with a table never."""
    monkeypatch.setattr(sharing, "GPUS", 1)
    xi = {("m", "m"): 40.0}
    jobs = [
        SimulatedJob(n, f"j{n}", 200.0 * n, work, profile=sharing.PROFILE, app="m", costs=sharing.RESTART)
        for n, work in enumerate([90_000.0] * 3 + [1000.0] * 4)
    ]
    learned, known, alone = (
        sharing.play(jobs, sharing.policy(way, by_arrival, xi), xi, 0) for way in ("pairs", "pairs, measured", "alone")
    )
    assert learned["parted"] >= 1 and known["joined"] == 0 == known["parted"]
    assert learned["jct_s"] < 1.02 * alone["jct_s"] == pytest.approx(1.02 * known["jct_s"])

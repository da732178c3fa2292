"""SJF-BSBF and its variant with lookahead in the simulator, and the experiment about them on synthetic data."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_migbatch.cli.main import cli
from slurm_migbatch.decide.lending.lookahead import NEVER, PAIR, RULES
from slurm_migbatch.decide.lending.pair_finish import finishes
from slurm_migbatch.lab.bars import NotMeasurable
from slurm_migbatch.lab.sim import registry
from slurm_migbatch.lab.sim.cluster import SimulatedCluster
from slurm_migbatch.lab.sim.engine import Simulation, SimulationResult
from slurm_migbatch.lab.sim.gpus import whole
from slurm_migbatch.lab.sim.job import SimulatedJob
from slurm_migbatch.lab.sim.policies.queued import Sjf
from slurm_migbatch.lab.sim.policies.sharing import BsbfSharing
from slurm_migbatch.lab.sim.policy import Policy
from slurm_migbatch.lab.sim.speeds import Paired, Whole
from slurm_migbatch.lab.studies import bsbf as bench
from tests.support.experiments import measured_once
from tests.support.sharing_rules import ANY

Pairs = dict[tuple[str, str], float]


def play(policy: Policy, jobs: Sequence[SimulatedJob], gpus: int, xi: Pairs | float) -> SimulationResult:
    table, default = ({}, xi) if isinstance(xi, float) else (xi, 2.0)
    cluster = SimulatedCluster.of(whole("a100-80gb"), gpus, 4)
    return Simulation(cluster, jobs, policy, Paired(Whole(), table, default)).run()


def ends(result: SimulationResult) -> list[float | None]:
    return [run.ended for run in result.runs]


JOBS = st.lists(
    st.tuples(st.floats(0.0, 200.0), st.floats(1.0, 100.0), st.integers(1, 4), st.sampled_from("abc")),
    min_size=1,
    max_size=14,
).map(
    lambda rows: [SimulatedJob(n, f"{app}{n}", at, work, gpus=g, app=app) for n, (at, work, g, app) in enumerate(rows)]
)
SLOWDOWNS = st.lists(st.floats(1.0, 2.4), min_size=9, max_size=9).map(
    lambda values: dict(zip([(a, b) for a in "abc" for b in "abc"], values, strict=True))
)


def test_two_shared_jobs_end_at_the_times_of_the_closed_form() -> None:
    jobs = [SimulatedJob(0, "b", 0, 100, app="b"), SimulatedJob(1, "a", 0.5, 40, app="a")]
    xi = {("a", "b"): 1.3, ("b", "a"): 1.2}
    own, other = finishes(40, 99.5, 1.3, 1.2)
    assert ends(play(BsbfSharing((PAIR,)), jobs, 1, xi)) == pytest.approx([0.5 + other, 0.5 + own])


def test_pair_test_refuses_sharing_that_would_only_cause_delay() -> None:
    jobs = [SimulatedJob(0, "b", 0, 100, app="b"), SimulatedJob(1, "a", 1, 100, app="a")]
    assert ends(play(BsbfSharing((PAIR,)), jobs, 1, 1.8)) == [100, 200]


def test_multi_gpu_job_shares_with_several_jobs_and_uses_empty_gpus() -> None:
    jobs = [SimulatedJob(0, "b", 0, 100, gpus=2), SimulatedJob(1, "c", 0, 200), SimulatedJob(2, "a", 1, 10, gpus=4)]
    result = play(BsbfSharing((PAIR,)), jobs, 4, 1.1)
    assert result.runs[2].ended == pytest.approx(1 + 11)
    assert result.runs[0].ended == pytest.approx(101)


def test_lookahead_rules_consider_the_whole_queue_and_not_only_the_pair() -> None:
    jobs = [SimulatedJob(n, f"j{n}", min(n, 1), 100) for n in range(4)]
    assert ends(play(BsbfSharing((PAIR,)), jobs, 1, 1.6)) == [100, 200, 300, 400]
    assert sum(ends(play(BsbfSharing(RULES), jobs, 1, 1.6))) < 1000  # type: ignore[arg-type]


@settings(max_examples=40, deadline=None)
@given(JOBS, SLOWDOWNS)
def test_policy_without_sharing_equals_shortest_job_first(jobs: list[SimulatedJob], xi: Pairs) -> None:
    assert ends(play(BsbfSharing((NEVER,)), jobs, 4, xi)) == pytest.approx(ends(play(Sjf(), jobs, 4, xi)))


@settings(max_examples=25, deadline=None)
@given(JOBS, SLOWDOWNS, st.sampled_from([(PAIR,), (ANY,), RULES]))
def test_all_jobs_end_at_most_two_share_and_the_board_matches_the_simulation(jobs, xi, rules) -> None:
    class Watched(BsbfSharing):
        def decide(self, sim: Simulation) -> None:
            super().decide(sim)
            for gpu in sim.cluster.gpus:
                assert len(sim.cluster.runs(gpu.whole)) <= 2
            for key, task in self.sharing.tasks.items():
                assert task.remaining(sim.now) == pytest.approx(self.runs[key].remaining(sim.now), abs=1e-6)
            assert self.sharing.free == sim.cluster.empty.bit_count()

    first, second = (play(Watched(rules), jobs, 4, xi) for _ in range(2))
    assert None not in ends(first)
    assert ends(first) == ends(second)


def test_all_jobs_end_despite_wrong_run_time_estimates() -> None:
    rng = np.random.Generator(np.random.PCG64(5))
    jobs = [
        SimulatedJob(n, f"j{n}", float(5 * n), 50.0, gpus=1 + n % 3, estimate=float(rng.uniform(1, 200)))
        for n in range(30)
    ]
    assert None not in ends(play(BsbfSharing(RULES), jobs, 4, 1.3))


def test_job_that_never_fits_does_not_delay_others() -> None:
    jobs = [SimulatedJob(0, "huge", 0, 5, gpus=9), SimulatedJob(1, "small", 1, 10)]
    assert ends(play(BsbfSharing(RULES), jobs, 4, 1.3)) == [None, 11]


@pytest.mark.parametrize("name", ["sjf-bsbf", "sharing"])
def test_both_policies_are_registered_by_name(name: str) -> None:
    kind = registry.find(name)
    assert isinstance(kind, registry.PolicyKind)
    cluster = SimulatedCluster.of(whole("a100-80gb"), 2, 2)
    policy = kind.make(kind.params(), cluster)
    jobs = [SimulatedJob(n, f"j{n}", 0, 10 + n) for n in range(6)]
    assert None not in ends(Simulation(cluster, jobs, policy, Paired(Whole(), {}, 1.2)).run())


# -- the experiment --------------------------------------------------------------------------------------------


def write(path: Path, lines: Sequence[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as out:
        out.write("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few jobs in the format of each data set."""
    folder = tmp_path_factory.mktemp("data")
    rows = ["job_id,num_gpu,submit_time,iterations,model_name,batch_size,duration,iteration_time"]
    rows += [
        f"{n},{(1, 2, 8)[n % 3]},{n * 20000},{100 + 37 * n % 90},{('vgg', 'bert')[n % 2]},16,60000,500"
        for n in range(24)
    ]
    write(folder / "muri" / "cluster_trace.csv", rows)
    profile = folder / "pollux" / "traces" / "ncf"
    write(profile / "placements.csv.gz", ["placement,local_bsz,step_time,sync_time", "1,16,0.1,0", "1,32,0.2,0"])
    write(profile / "validation-32.csv.gz", ["progress,iteration,metric", "1,500,0.5", "2,1000,0.9"])
    rows = ["name,time,application,num_replicas,batch_size"] + [f"ncf-{n},{n * 60},ncf,1,32" for n in range(9)]
    write(folder / "pollux" / "workloads" / "workload-1.csv", rows)
    rows = ["timestamp,duration,num_gpus,gpu_time,cluster"]
    rows += [f"2017-10-01 {n // 60:02d}:{n % 60:02d}:00,60,1,60,vc" for n in range(150)]
    write(folder / "philly" / "philly_jobs.csv.gz", rows)
    rows = ["gpu,job1,workers1,job2,workers2,steps_per_s_1,steps_per_s_2", "v100,A,1,,,10,", "v100,B,1,,,8,"]
    rows += ["v100,A,1,B,1,8,5", "v100,A,1,A,1,6,6"]
    write(folder / "gavel" / "physical_cluster_throughputs.csv.gz", rows)
    return folder


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """One load and one fixed slowdown."""
    monkeypatch.setattr(bench, "LOADS", (2.0,))
    monkeypatch.setattr(bench, "FIXED", (1.3,))


@pytest.mark.usefixtures("few")
def test_measurement_compares_every_policy_in_every_cell_and_the_command_repeats_it(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = bench.measure(data, seeds=2)
    assert len(found["cells"]) == 4 * 3
    for cell in found["cells"]:
        assert list(cell["jct_s"]) == ["FIFO", "SJF", "SJF-FFS", "BSBF", "ours"]
        assert cell["draws"] == (1 if cell["jobs"] == "Muri" and cell["slowdown"] == "1.3" else 2)
    assert found["bars"] == []
    measured_once(monkeypatch, bench)
    words = ["bench", "study", "bsbf", "--data", str(data), "--seeds", "2"]
    done = CliRunner().invoke(cli, [*words, "--json"], standalone_mode=False)
    assert done.exception is None, done.exception
    assert json.loads(done.stdout) == json.loads(json.dumps(found)), "it is deterministic"
    done = CliRunner().invoke(cli, words, standalone_mode=False)
    assert done.exception is None, done.exception
    assert "over SJF-FFS" in done.stdout
    assert "study of a paper's idea" in done.stdout


def test_drawn_jobs_have_the_published_sizes_and_the_requested_load(data: Path) -> None:
    populations = {population.name: population for population in bench.populations(bench.source(data))}
    population = populations["30 jobs, load 2"]
    jobs = population.draw(np.random.Generator(np.random.PCG64(3)))
    assert sorted(job.gpus for job in jobs) == [1] * 10 + [2] * 8 + [4] * 6 + [8] * 4 + [16] * 2
    offered = sum(job.gpus * job.work for job in jobs)
    assert offered / (population.gpus * max(job.arrival for job in jobs)) == pytest.approx(2.0)


def test_drawn_slowdowns_are_measured_pairs(data: Path) -> None:
    kinds = {kind.name: kind for kind in bench.slowdowns(bench.source(data))}
    xi = kinds["Gavel"].draw(np.random.Generator(np.random.PCG64(1)), ["x", "y", "z"])
    pairs = {(1.25, 1.6), (1.6, 1.25), (10 / 6, 10 / 6)}
    assert all((xi[job, other], xi[other, job]) in pairs for job, other in xi if job != other)


def test_missing_data_file_is_named_in_the_error(data: Path, tmp_path: Path) -> None:
    with pytest.raises(NotMeasurable, match=r"cluster_trace\.csv"):
        bench.measure(tmp_path)

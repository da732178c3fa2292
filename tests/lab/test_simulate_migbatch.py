"""`migbatch simulate` with migbatchd's own decision, the default policy, on a simulated Slurm."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from slurm_migbatch.config import Config
from slurm_migbatch.config.reader import ConfigError
from slurm_migbatch.lab.cli.simulate import simulate
from slurm_migbatch.lab.sim import registry, scenario
from slurm_migbatch.lab.sim.cluster import PlaceError
from slurm_migbatch.lab.sim.gpus import geometry
from slurm_migbatch.lab.sim.play import ScenarioData, play
from slurm_migbatch.lab.slurm.controller import ServiceController
from slurm_migbatch.lab.slurm.run import (
    RoundTiming,
    SimulatedSite,
    SiteNode,
    SlurmSimulation,
    Submission,
    WorkloadOutcome,
)
from slurm_migbatch.lab.slurm.tracejobs import partitions_of, spread
from slurm_migbatch.lab.slurm.work import Fixed
from slurm_migbatch.predict.learned import LearnedPredictor
from slurm_migbatch.predict.selection import Chooser

LENDS = '[lending]\nenabled = true\npartitions = ["train"]\n'
BASE = """
[cluster]
nodes = 2
gpus = 2
[workload]
trace = "sacct"
path = "jobs.txt"
infer = ["infer"]
[speeds]
kind = "whole"
[costs]
train_restart_s = 5.0
train_checkpoint_s = 2.0
[policy]
"""
HEAD = "JobID|JobName|User|Partition|Submit|Start|End|Elapsed|Timelimit|State|ReqTRES|AllocTRES\n"
TABLE = """gpu,model,kind,profile,batch,throughput_per_s
a100-40gb,net,train,7g.40gb,8,100
a100-40gb,net,train,3g.20gb,8,60
"""
KINDS = (
    "gres/mig:2g.20gb=1",
    "gres/gpu=1",
    "gres/mig:3g.40gb=1",
    "gres/mig:1g.10gb=2",
    "gres/gpu=2",
    "gres/mig:1g.20gb=1",
)


def line(number: int, tres: str, minutes: int = 20, partition: str = "train") -> str:
    moment = f"2026-02-02T{8 + number // 60:02d}:{number % 60:02d}:00"
    cells = (number, "bert-base", f"user{number % 3}", partition, moment, moment, moment, f"00:{minutes:02d}:00")
    return "|".join(map(str, (*cells, "01:00:00", "COMPLETED", "", tres))) + "\n"


def mixed(jobs: int = 24) -> str:
    return "".join(line(n, KINDS[n % 6], 10 + n % 25, "infer" if n % 2 else "train") for n in range(jobs))


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def make(policy: str = "", jobs: str | None = None, base: str = BASE) -> Path:
        (tmp_path / "jobs.txt").write_text(HEAD + (mixed() if jobs is None else jobs))
        (tmp_path / "lends.toml").write_text(LENDS)
        path = tmp_path / "scenario.toml"
        path.write_text(base + policy)
        return path

    return make


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(simulate, [str(word) for word in words])


def simulated(*words: str | Path) -> dict[str, Any]:
    done = run(*words, "--json")
    assert done.exit_code == 0, (done.output, done.exception)
    found: dict[str, Any] = json.loads(done.output)
    return found


def jct(policy: dict[str, Any]) -> float:
    return float(policy["figures"]["all"]["jct_s"]["mean"]["mean"])


def test_default_policy_is_migbatch_and_its_configuration_is_reported(write: Callable[..., Path]) -> None:
    done = run(write(jobs=mixed(4)))
    assert done.exit_code == 0, done.output
    assert "slurm_migbatch.decide.core.decide with configuration" in done.output
    assert "(shipped defaults)" in done.output
    (ours,) = simulated(write())["policies"]
    assert ours["policy"] == "migbatch"
    assert ours["decides"] == "slurm_migbatch.decide.core.decide"
    assert len(ours["configuration"]) == 16
    assert ours["figures"]["all"]["done"]["mean"] == 24
    assert ours["notices"] == []


def test_same_seed_gives_the_same_figures_and_another_seed_different_ones(write: Callable[..., Path]) -> None:
    path = write()
    found = simulated(path)
    assert simulated(path) == found
    path.write_text(BASE + "[run]\nfirst_seed = 7\n")
    (other,), (ours,) = simulated(path)["policies"], found["policies"]
    assert jct(other) != jct(ours), "each job's sensitivity to neighbours is drawn"


def test_several_policies_are_compared_by_the_same_figures(write: Callable[..., Path], tmp_path: Path) -> None:
    html = tmp_path / "r.html"
    names = ("--policy", "migbatch", "--policy", "fifo", "--policy", "slices")
    done = run(write(jobs=mixed(8)), *names, "--html", html)
    assert done.exit_code == 0, done.output
    head = next(row for row in done.output.splitlines() if row.startswith("on sacct"))
    assert head.split()[2:] == ["migbatch", "fifo", "slices"]
    page = html.read_text()
    assert page.count("<svg") == 7
    assert "slurm_migbatch.decide.core.decide" in page
    ours, fifo, slices = simulated(write(), *names)["policies"]
    assert set(fifo["figures"]) | {"actions"} == set(ours["figures"])
    assert {name for name, value in ours["figures"]["all"].items() if value is None} == set()
    # jobs on slices leave room that jobs on whole GPUs do not; policy slices is ideal: no Slurm, no queue order to keep
    assert jct(slices) <= jct(ours) < 0.95 * jct(fifo)
    assert ours["figures"]["held"]["mean"] == pytest.approx(slices["figures"]["held"]["mean"], rel=0.1)
    assert ours["figures"]["all"]["paused_s"]["mean"] > 0


def test_policies_are_compared_on_the_jobs_that_ended_under_all_of_them(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    """The job of all four GPUs fits on no half, and delays the others if the first come are the first served."""
    jobs = line(0, "gres/gpu=4", 300) + "".join(line(n, "gres/gpu=1", 10 + n) for n in range(1, 5))
    path, html = write(jobs=jobs), tmp_path / "r.html"
    names = ("--policy", "fifo", "--policy", "halves")
    fifo, halves = simulated(path, *names)["policies"]
    for policy, ended in ((fifo, 5), (halves, 4)):
        assert policy["figures"]["all"]["done"]["mean"] == ended
        runs = play(scenario.load(path).with_policy(policy["policy"]), ScenarioData(scenario.load(path)), 0).runs
        times = [job_run.ended - job_run.job.arrival for job_run in runs if job_run.job.gpus == 1 and job_run.ended]
        compared = policy["figures"]["compared"]["all"]
        assert compared["jobs"]["mean"] == len(times) == 4
        assert compared["jct_s"]["mean"]["mean"] == pytest.approx(sum(times) / 4)
    done = run(path, *names, "--html", html)
    shown = next(row for row in done.output.splitlines() if row.startswith("mean wait")).split()
    assert shown[2:4] == ["5.0", "h"], done.output
    note = "those of the 4 jobs that ended under every policy; the others that ended: fifo 1, halves 0"
    assert note in done.output and note in html.read_text()
    assert "ended under every" not in run(write(), *names).output, "all jobs did"


def test_comparison_tells_that_jobs_of_several_gpus_are_placed_by_other_rules(write: Callable[..., Path]) -> None:
    jobs = "".join(line(n, f"gres/gpu={1 + n % 2}") for n in range(4))
    both = run(write(jobs=jobs), "--policy", "migbatch", "--policy", "easy")
    assert "note: 2 jobs have several GPUs or slices: migbatch starts them on one node or in equal" in both.output
    for names in (("migbatch",), ("easy", "fifo")):
        alone = run(write(jobs=jobs), *(word for name in names for word in ("--policy", name)))
        assert alone.exit_code == 0 and "several GPUs" not in alone.output
    single = run(write(jobs=line(0, "gres/gpu=1")), "--policy", "migbatch", "--policy", "easy")
    assert single.exit_code == 0 and "several GPUs" not in single.output


def test_slurm_alone_gives_each_job_whole_gpus(write: Callable[..., Path]) -> None:
    small = "".join(line(n, "gres/mig:1g.10gb=1") for n in range(8))
    ours, alone = simulated(write(jobs=small), "--policy", "migbatch", "--policy", "slurm")["policies"]
    assert ours["figures"]["all"]["done"]["mean"] == alone["figures"]["all"]["done"]["mean"] == 8
    # four GPUs: four of the jobs wait for the other four, of 20 minutes; eight slices are there at once
    assert (
        alone["figures"]["all"]["queue_s"]["mean"]["mean"] > 400 > 5 > ours["figures"]["all"]["queue_s"]["mean"]["mean"]
    )
    whole = "".join(line(n, "gres/gpu=1") for n in range(20))
    ours, alone = simulated(write(jobs=whole), "--policy", "migbatch", "--policy", "slurm")["policies"]
    assert jct(ours) == pytest.approx(jct(alone), rel=0.02)
    note = "2 jobs have several GPUs or slices: migbatch and slurm start them on one node"
    pair = "".join(line(n, f"gres/gpu={1 + n % 2}") for n in range(4))
    assert note in run(write(jobs=pair), *[w for p in ("migbatch", "slurm", "easy") for w in ("--policy", p)]).output


def test_slurm_alone_creates_no_instances_for_whole_gpus(write: Callable[..., Path]) -> None:
    jobs = "".join(line(n, "gres/gpu=1", 10) for n in range(6))
    for mig in ("true", "false"):
        base = BASE.replace("gpus = 2", f"gpus = 2\nmig = {mig}")
        (alone,) = simulated(write(jobs=jobs, base=base), "--policy", "slurm")["policies"]
        assert alone["figures"]["reconfigurations"]["mean"] == 0
        assert alone["figures"]["busy_of_held"]["mean"] == pytest.approx(1.0, abs=1e-3), "no job waits for an instance"


def test_slurm_alone_backfills_beside_a_job_that_waits_for_all_gpus(write: Callable[..., Path]) -> None:
    short = line(2, "gres/gpu=1", 10).replace("01:00:00", "00:15:00")  # ends before job 1 could start
    jobs = line(0, "gres/gpu=1") + line(1, "gres/gpu=4") + short + line(3, "gres/gpu=1")
    (alone,) = simulated(write(jobs=jobs), "--policy", "slurm")["policies"]
    waits = 0 + 19 + 0 + 37  # minutes: job 3 may not delay job 1, as its limit is an hour
    assert alone["figures"]["all"]["queue_s"]["mean"]["mean"] == pytest.approx(waits * 60 / 4, abs=5)


def with_drawn_models(folder: Path) -> str:
    """Write a table of speeds on the site's GPUs, and return a scenario that draws its jobs' models from it."""
    (folder / "table.csv").write_text(TABLE.replace("a100-40gb", "a100-80gb").replace("3g.20gb", "3g.40gb"))
    base = BASE.replace('kind = "whole"', 'kind = "table"\npath = "table.csv"')
    return base.replace("[speeds]", 'models = "draw"\n[speeds]')


def test_slurm_alone_runs_a_job_of_a_slice_as_fast_as_whole_gpus_are(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    base = with_drawn_models(tmp_path)
    jobs = "".join(line(n, "gres/mig:3g.40gb=1") for n in range(2))
    found = simulated(write(jobs=jobs, base=base), "--policy", "migbatch", "--policy", "slurm", "--policy", "easy")
    ours, alone, easy = map(jct, found["policies"])
    assert ours == pytest.approx(1200, rel=0.05), "neighbours slow it down"
    assert alone == pytest.approx(1200 * 0.6, abs=10)
    assert alone == pytest.approx(easy, abs=10)


def test_job_whose_drawn_model_does_not_fit_on_its_slice_ends_no_comparison(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    base = with_drawn_models(tmp_path)
    jobs = line(0, "gres/mig:1g.10gb=1") + line(1, "gres/mig:3g.40gb=2") + line(2, "gres/gpu=1")
    ours, slices = simulated(write(jobs=jobs, base=base), "--policy", "migbatch", "--policy", "slices")["policies"]
    assert ours["figures"]["all"]["done"]["mean"] == slices["figures"]["all"]["done"]["mean"] == 2
    assert "1 jobs did not fit on the slices that they got" in ours["notices"][0]


def test_processor_time_of_a_job_is_printed(write: Callable[..., Path]) -> None:
    done = run(write(jobs=mixed(4)), "--policy", "migbatch", "--policy", "easy")
    assert re.search(
        r"^processor time for each simulated job: migbatch [0-9.e-]+ s, easy [0-9.e-]+ s$", done.output, re.M
    )


def test_whole_gpu_jobs_take_about_as_long_as_with_fifo(write: Callable[..., Path]) -> None:
    jobs = "".join(line(n, f"gres/gpu={1 + n % 4}") for n in range(20))
    ours, fifo = simulated(write(jobs=jobs), "--policy", "migbatch", "--policy", "fifo")["policies"]
    assert ours["figures"]["all"]["done"]["mean"] == 20
    assert jct(ours) == pytest.approx(jct(fifo), rel=0.15)
    assert ours["figures"]["fragmentation"]["mean"] == pytest.approx(0.0, abs=1e-3)


def test_jobs_of_whole_gpus_and_nodes_wait_about_as_long_as_with_slurm_alone(write: Callable[..., Path]) -> None:
    """Most jobs have one GPU, some have half a node or a whole one; time limits are two to six times the run time."""
    rng = random.Random(7)
    jobs = []
    for number in range(300):
        gpus = rng.choices([1, 4, 8], [20, 2, 1])[0]
        minutes = rng.choice([5, 10, 20, 40]) * (1 if gpus == 1 else 2)
        submit = datetime(2026, 2, 2) + timedelta(minutes=4 * number)
        moment, took = f"{submit:%Y-%m-%dT%H:%M:%S}", str(timedelta(minutes=minutes))
        cells = (
            number,
            "",
            "u",
            "train",
            moment,
            moment,
            moment,
            took,
            str(timedelta(minutes=minutes * rng.choice([2, 6]))),
        )
        jobs.append("|".join(map(str, (*cells, "COMPLETED", "", f"gres/gpu={gpus}"))) + "\n")
    base = BASE.replace("nodes = 2\ngpus = 2", "nodes = 2\ngpus = 8")
    ours, alone = simulated(write(jobs="".join(jobs), base=base), "--policy", "migbatch", "--policy", "slurm")[
        "policies"
    ]
    waits = [policy["figures"]["all"]["queue_s"]["mean"]["mean"] for policy in (ours, alone)]
    assert waits[1] > 300, "the site is busy"
    assert waits[0] < 1.15 * waits[1]


def test_configuration_file_changes_the_outcome(write: Callable[..., Path], tmp_path: Path) -> None:
    never = tmp_path / "never.toml"
    never.write_text(LENDS + 'blackout = ["00:00-24:00"]\n')
    jobs = "".join(line(n, "gres/gpu=1", 10, "infer" if n % 2 else "train") for n in range(6))
    tail = "elastic = true\n[run]\nuntil_s = 3000\n"
    (usual,) = simulated(write(f'config = "lends.toml"\n{tail}', jobs))["policies"]
    (ours,) = simulated(write(f'config = "lends.toml"\n{tail}', jobs), "--config", never)["policies"]
    (named,) = simulated(write(f'config = "never.toml"\n{tail}', jobs))["policies"]
    assert ours["configuration"] == named["configuration"] != usual["configuration"]
    assert ours["figures"] == named["figures"]
    done = [
        (policy["figures"]["train"]["done"]["mean"], policy["figures"]["infer"]["done"]["mean"])
        for policy in (usual, ours)
    ]
    assert done == [(3, 3), (0, 3)], "nothing is lent at these hours"
    assert ours["figures"]["actions"]["release"]["mean"] == 0


def test_elastic_training_jobs_get_loans_and_give_them_back(write: Callable[..., Path]) -> None:
    jobs = "".join(line(n, "gres/gpu=1", 50) for n in range(8))
    jobs += "".join(line(20 + n, "gres/gpu=1", 10, "infer") for n in range(8))
    path = write('config = "lends.toml"\nelastic = true\n', jobs)
    loaded = scenario.load(path)
    result = play(loaded, ScenarioData(loaded), 0, log=True)
    assert all(job_run.ended is not None for job_run in result.runs)
    assert result.actions["release"] >= 8
    training = [job_run for job_run in result.runs if job_run.job.kind == "train"]
    stopped = [job_run for job_run in training if job_run.preempted]
    assert stopped, "inference needs what was lent"
    assert all(
        job_run.ended - job_run.job.arrival >= job_run.job.work for job_run in training if job_run.ended is not None
    )
    assert sum(job_run.lost for job_run in result.runs) < 60, "they write a checkpoint before they are stopped"
    assert sum(event.what == "preempt" for event in result.events) == sum(job_run.preempted for job_run in result.runs)
    assert sum(event.what == "complete" for event in result.events) == len(result.runs)
    assert not any(job_run.preempted for job_run in result.runs if job_run.job.kind == "infer")


def test_elastic_training_is_not_stopped_for_slices_on_which_it_is_no_faster(write: Callable[..., Path]) -> None:
    jobs = "".join(line(n, "gres/mig:1g.10gb=1", 20 + 5 * n) for n in range(10))
    jobs += "".join(line(10 + n, "gres/mig:1g.10gb=1", 5, "infer") for n in range(10))
    base = BASE.replace('"whole"', '"linear"')
    (policy,) = simulated(write('config = "lends.toml"\nelastic = true\n', jobs, base))["policies"]
    train = policy["figures"]["train"]
    assert train["done"]["mean"] == 10
    assert train["restarts"]["max"]["mean"] == 0, "speeds of kind linear are at most those on the requested slice"


def test_simulation_ends_at_its_time_limit(write: Callable[..., Path]) -> None:
    loaded = scenario.load(write("[run]\nuntil_s = 900\n"))
    result = play(loaded, ScenarioData(loaded), 0)
    assert len(result.runs) == 16
    assert result.end == 900
    assert 0 < sum(job_run.ended is not None for job_run in result.runs) < 16
    assert 0 < result.held <= 900 * result.slices


def test_a_time_limit_after_the_last_job_changes_nothing(write: Callable[..., Path]) -> None:
    names = [word for name in ("migbatch", "slurm", "easy", "slices") for word in ("--policy", name)]
    without = simulated(write(jobs=mixed(4)), *names)["policies"]
    limited = simulated(write("[run]\nuntil_s = 864000\n", mixed(4)), *names)["policies"]
    for one, other in zip(without, limited, strict=True):
        assert one["figures"] == other["figures"], one["policy"]


def test_jobs_that_run_when_the_time_is_over_have_begun_and_made_progress(write: Callable[..., Path]) -> None:
    jobs = line(0, "gres/gpu=1", 60, "infer") + line(1, "gres/gpu=1", 60, "infer") + line(2, "gres/gpu=1", 5)
    base = BASE.replace("[speeds]", "start_slo_s = 60\n[speeds]")
    found = simulated(write("[run]\nuntil_s = 1800\n", jobs, base), "--policy", "migbatch", "--policy", "slices")
    for policy in found["policies"]:
        figures = policy["figures"]["infer"]
        assert figures["done"]["mean"] == 0
        assert figures["slo"]["broken"]["mean"] == 0, "both started within seconds"
        assert figures["delay_s"]["mean"]["mean"] < 5
        assert figures["paused_s"]["mean"] < 10


def test_page_is_written_if_no_job_has_run(write: Callable[..., Path], tmp_path: Path) -> None:
    html = tmp_path / "r.html"
    for policy in ("migbatch", "fifo", "slices"):
        done = run(write(jobs=line(0, "gres/gpu=9")), "--policy", policy, "--html", html)
        assert done.exit_code == 0, (done.output, done.exception)
        assert "1 jobs had not ended" in html.read_text()


def test_refused_jobs_are_told_of_once_and_wait_for_nothing(write: Callable[..., Path]) -> None:
    jobs = line(0, "gres/gpu=1", 10) + line(1, "gres/gpu=9") + line(2, "gres/gpu=8") + line(3, "gres/gpu=4", 20)
    output = run(write(jobs=jobs)).output
    assert "2 jobs had not ended at the end: 2 of them were refused or did not fit, as told before\n" in output
    assert "capacity" not in output
    (ours,) = simulated(write(jobs=jobs))["policies"]
    waits = ours["figures"]["all"]["queue_s"]["mean"]["mean"] * 2
    assert ours["figures"]["waiting"]["mean"] * ours["figures"]["makespan_s"]["mean"] == pytest.approx(waits, abs=1)
    late = run(write("[run]\nuntil_s = 900\n", jobs=jobs)).output
    assert "3 jobs had not ended at the end: 2 of them were refused or did not fit, as told before; the others" in late


def test_late_inference_is_shown_without_training_in_the_trace(write: Callable[..., Path]) -> None:
    jobs = "".join(line(n, "gres/gpu=1", 60, "infer") for n in range(5))
    path = write(jobs=jobs, base=BASE.replace("[speeds]", "slo_s = 3700\n[speeds]"))
    (row,) = [row for row in run(path, "--policy", "fifo").output.splitlines() if row.startswith("inference late")]
    assert row.split() == ["inference", "late", "20.0%"], "four GPUs: the fifth waits"


def test_jobs_of_many_nodes_are_not_refused_for_lack_of_catalog_nodes(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    jobs = line(0, "gres/gpu=10") + line(1, "gres/gpu=6") + line(2, "gres/gpu=2")
    base = BASE.replace("nodes = 2", "nodes = 5")
    ours, alone = simulated(write(jobs=jobs, base=base), "--policy", "migbatch", "--policy", "slurm")["policies"]
    assert ours["figures"]["all"]["done"]["mean"] == alone["figures"]["all"]["done"]["mean"] == 3
    (note,) = ours["notices"]
    assert note.startswith(
        "2 jobs have more nodes than the configuration has catalog nodes ([cluster] catalog_nodes: 1)"
    )
    assert note.endswith("here are 5 catalog nodes")
    assert alone["notices"] == [], "without migbatch Slurm lists the GPUs"
    enough = tmp_path / "enough.toml"
    enough.write_text('[cluster]\ncatalog_nodes = "c[1-5]"\n')
    (ours,) = simulated(write(jobs=jobs, base=base), "--config", enough)["policies"]
    assert ours["notices"] == []


def test_refused_jobs_are_reported(write: Callable[..., Path]) -> None:
    jobs = line(0, "gres/gpu=1") + line(1, "gres/mig:1g.6gb=1") + line(2, "gres/gpu=9")
    (ours,) = simulated(write(jobs=jobs))["policies"]
    assert ours["figures"]["all"]["done"]["mean"] == 1
    first, second = ours["notices"]
    assert first.startswith("2 jobs were refused; the first, 1 (1 x 1g.6gb): ")
    assert "1g.6gb" in first.partition("): ")[2]
    assert second.startswith("2 jobs had not ended")


def test_slices_of_another_gpu_model_are_replayed_on_the_nearest_ones(write: Callable[..., Path]) -> None:
    kinds = ("1g.5gb", "1g.5gb", "1g.10gb", "3g.20gb", "1g.6gb", "7g.80gb", "5g.99gb")
    jobs = "".join(line(n, f"gres/mig:{kind}=1") for n, kind in enumerate(kinds))
    loaded = scenario.load(write(jobs=jobs, base=BASE.replace("[speeds]", 'slices = "nearest"\n[speeds]')))
    trace = ScenarioData(loaded).trace
    assert [str(job.profile) for job in trace.jobs] == [
        "1g.10gb", "1g.10gb", "1g.10gb", "3g.40gb", "2g.20gb", "7g.80gb", "5g.99gb",
    ]  # fmt: skip
    assert trace.notices[-3:] == (
        "2 jobs on slices 1g.5gb are replayed on 1g.10gb",
        "1 jobs on slices 1g.6gb are replayed on 2g.20gb",
        "1 jobs on slices 3g.20gb are replayed on 3g.40gb",
    )
    large = BASE.replace("nodes = 2", 'nodes = 2\ngpu = "h200"').replace("[speeds]", 'slices = "nearest"\n[speeds]')
    by_model = ScenarioData(scenario.load(write(jobs=jobs, base=large))).trace
    assert [str(job.profile) for job in by_model.jobs[:4]] == ["1g.18gb", "1g.18gb", "1g.35gb", "3g.71gb"], (
        "most slices are those of an A100 with 40 GB, where 1g.10gb has a quarter of the memory"
    )
    small = line(1, "gres/mig:1g.5gb=1")
    (only,) = ScenarioData(scenario.load(write(jobs=small, base=large))).trace.jobs
    assert str(only.profile) == "1g.18gb", "1g.5gb is also what some tools call the A30's 1g.6gb, a quarter of its GPU"


def test_slices_that_the_gpu_does_not_have_are_reported_before_any_policy(write: Callable[..., Path]) -> None:
    jobs = "".join(line(n, f"gres/mig:{kind}=1") for n, kind in enumerate(("1g.5gb", "1g.10gb", "3g.20gb", "1g.5gb")))
    path = write(jobs=jobs)
    assert ScenarioData(scenario.load(path)).trace.notices[-1] == (
        "3 jobs are on slices of another model than NVIDIA A100-SXM4-80GB (1g.5gb, 3g.20gb), which most policies do "
        'not run: set cluster.gpu to the model of the trace, or workload.slices = "nearest"'
    )
    path.write_text(BASE.replace("nodes = 2", "nodes = 2\nmig = false"))
    assert "another model" not in "".join(ScenarioData(scenario.load(path)).trace.notices)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("confg = 3\n", "unknown key 'confg', did you mean 'config'? in [policy]"),
        ('config = "none.toml"\n', "none.toml: cannot be read"),
        ("elastic = true\n", r"policy.elastic needs [lending] with enabled = true and partitions"),
        ('config = "off.toml"\n', "off.toml: [supply] enabled = false keeps the slices of slurm.conf, and simulated"),
        ('auto = "some"\n', "policy.auto must be one of 'no', 'infer', 'all'"),
        ('config = "bad.toml"\n', "bad.toml:2: unknown key 'partition', did you mean 'partitions'?"),
    ],
)
def test_invalid_policy_settings_raise_an_error_with_the_reason(
    write: Callable[..., Path], tmp_path: Path, policy: str, message: str
) -> None:
    (tmp_path / "bad.toml").write_text("[lending]\npartition = 3\n")
    (tmp_path / "off.toml").write_text("[supply]\nenabled = false\n")
    done = run(write(policy))
    assert done.exit_code == 1
    assert isinstance(done.exception, ConfigError)
    assert message in str(done.exception)


def test_invalid_command_lines_are_refused(write: Callable[..., Path], tmp_path: Path) -> None:
    done = run(write(), "--policy", "migbach")
    assert done.exit_code == 2 and "unknown policy 'migbach', did you mean 'migbatch'?" in done.output
    done = run(write(), "--policy", "fifo", "--config", "x.toml")
    assert done.exit_code == 2 and "--config is for policy migbatch" in done.output
    done = run(write(), "--policy", "fifo", "--policy", "sjf", "--log", tmp_path / "x")
    assert done.exit_code == 2 and "--log writes the events of one policy" in done.output
    done = run(write(base=BASE.replace("gpus = 2", "gpus = 2\nmig = false")))
    assert isinstance(done.exception, PlaceError) and "cluster.mig = true" in str(done.exception)


def named(job_name: str) -> str:
    return line(0, "gres/gpu=1").replace("bert-base", job_name)


@pytest.mark.parametrize("job_name", ["llama70b", "train.sh", "facebook/detr", "bert_large_ft"])
def test_a_job_name_of_sbatch_is_not_taken_for_a_model(write: Callable[..., Path], job_name: str) -> None:
    path = write('auto = "all"\n', named(job_name))
    (ours,) = simulated(path)["policies"]
    (same,) = simulated(write('auto = "all"\n', named("a job")))["policies"]
    assert ours["figures"]["all"]["done"]["mean"] == 1
    assert ours == same


def test_job_names_are_not_looked_up_in_a_table_of_speeds(write: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text(TABLE)
    base = BASE.replace('kind = "whole"', 'kind = "table"\npath = "table.csv"')
    found = simulated(write('name = "fifo"\n', named("train.sh"), base))
    assert found["policies"][0]["figures"]["all"]["done"]["mean"] == 1
    assert any('workload.models = "draw" draws a model' in notice for notice in found["notices"])


# -- the record and the submit filter ----------------------------------------------------------------------------------

AUTO = "migbatch: model=resnet-50 batch=8 role=infer items=2000"
TWO_KINDS = SimulatedSite((SiteNode("a1", (geometry("a30"),)), SiteNode("h1", (geometry("h100-80gb"),))))


def served(jobs: list[Submission], until: float = 4000.0) -> tuple[WorkloadOutcome, ServiceController, SlurmSimulation]:
    simulation = SlurmSimulation(TWO_KINDS, jobs)
    service = ServiceController(simulation, Config(), chooser=Chooser(LearnedPredictor()))
    return simulation.run(service, RoundTiming(), until), service, simulation


def asks(at: float, gres: str, seconds: float, comment: str = "", **more: Any) -> Submission:
    fields = {"user": "ann", "uid": 20_000, "comment": comment}
    return Submission(at, gres, lambda: Fixed(seconds), limit_s=3600, fields=fields, **more)


def test_auto_job_is_retyped_if_its_profile_is_not_free() -> None:
    full = [asks(0.0, "mig:1g.6gb:1", 900.0) for _ in range(4)]
    outcome, service, _ = served([*full, asks(60.0, "mig:auto", 30.0, AUTO)])
    auto = outcome.jobs[outcome.submissions[4] or 0]
    assert service.record.actions["retype"] == 1
    assert auto.row.gres == "gres/mig:1g.10gb:1"
    assert auto.end - auto.submit < 120, "it did not wait for the four"
    (named,) = [job for job in outcome.jobs.values() if job.job_id == outcome.submissions[0]]
    assert named.row.gres == "gres/mig:1g.6gb:1"


def test_job_with_a_requested_profile_waits_for_it() -> None:
    full = [asks(0.0, "mig:1g.6gb:1", 900.0) for _ in range(4)]
    outcome, service, _ = served([*full, asks(60.0, "mig:1g.6gb:1", 30.0, AUTO)])
    assert service.record.actions["retype"] == 0
    assert outcome.jobs[outcome.submissions[4] or 0].end >= outcome.begin + 900


def test_an_elastic_array_runs_as_many_tasks_as_its_deadline_needs() -> None:
    hints = "migbatch: model=resnet-50 batch=8 role=infer items=2000 deadline=30m"
    outcome, service, _ = served([asks(0.0, "mig:1g.10gb:1", 60.0, hints, tasks=40)], 6000.0)
    assert service.record.actions["throttle"] > 0
    spans = sorted((task.start or 0.0, task.end) for task in outcome.jobs.values())
    assert len(spans) == 40
    at_once = max(sum(begin <= at < end for begin, end in spans) for at, _ in spans[10:])
    assert at_once < 7, "an H100 has room for seven"
    assert spans[-1][1] - spans[0][0] <= 1800


def test_a_service_runs_as_many_instances_as_its_rate_needs() -> None:
    hints = "migbatch: model=resnet-50 batch=8 role=serve slo=200ms rate={}"

    def at_once(rate: int) -> int:
        outcome, _, _ = served([asks(0.0, "mig:1g.10gb:1", 300.0, hints.format(rate), tasks=24)], 6000.0)
        spans = sorted((task.start or 0.0, task.end) for task in outcome.jobs.values())
        assert len(spans) == 24
        return max(sum(begin <= at < end for begin, end in spans) for at, _ in spans[7:])

    assert at_once(1) == 1
    assert 1 < at_once(1000) < at_once(100_000) == 7, "an H100 has room for seven"


def test_submit_filter_refuses_an_unknown_profile_in_the_simulation() -> None:
    outcome, _, _ = served([asks(0.0, "mig:9g.99gb:1", 5.0), asks(0.0, "gpu:1", 5.0)])
    assert outcome.submissions[0] is None
    assert "9g.99gb" in outcome.refusals[0]
    assert outcome.jobs[outcome.submissions[1] or 0].state == "COMPLETED"


@pytest.mark.parametrize(
    ("count", "found"), [(1, (1, 1)), (8, (1, 8)), (9, (3, 3)), (16, (2, 8)), (17, (3, 6)), (40, (5, 8))]
)
def test_jobs_of_many_gpus_are_spread_evenly_over_the_fewest_nodes(count: int, found: tuple[int, int]) -> None:
    assert spread(count, 4, 8) == found


def test_partitions_are_those_of_the_configuration() -> None:
    from slurm_migbatch.config import loads

    assert partitions_of(Config()) == ("gpu", "")
    lends = loads('[cluster]\npartitions = ["t", "main"]\n[lending]\nenabled = true\npartitions = ["t"]\n')
    assert partitions_of(lends) == ("main", "t")
    every = loads('[cluster]\npartitions = ["t"]\n[lending]\nenabled = true\npartitions = ["t"]\n')
    assert partitions_of(every) == ("t", "t"), "the submit filter leaves jobs of other partitions alone"


def test_default_policy_is_registered() -> None:
    kind = registry.find(registry.DEFAULT)
    assert kind.settings(kind.params())["decides"] == "slurm_migbatch.decide.core.decide"
    with pytest.raises(KeyError):
        registry.find("nothing")

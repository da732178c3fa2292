"""Pollux in the simulator, on cases solved by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.lab.sim import registry
from slurm_migbatch.lab.sim.cluster import SimulatedCluster
from slurm_migbatch.lab.sim.engine import Simulation, SimulationResult
from slurm_migbatch.lab.sim.gpus import whole
from slurm_migbatch.lab.sim.job import JobCosts, SimulatedJob
from slurm_migbatch.lab.sim.policies.pollux import Pollux
from slurm_migbatch.lab.sim.speeds import Whole


def simulate(
    jobs: Sequence[SimulatedJob], gpus: int, per_node: int = 4, policy: Pollux | None = None
) -> SimulationResult:
    cluster = SimulatedCluster.of(whole("a100-80gb"), gpus, per_node)
    return Simulation(cluster, jobs, policy or Pollux(), Whole(), log=True).run()


def test_single_job_gets_all_gpus_it_can_use() -> None:
    """800 s of work on one GPU take 200 s on four GPUs, from the first round at 60 s on."""
    result = simulate([SimulatedJob(0, "a", 0, 800, least=1, most=4)], 4)
    assert (result.runs[0].started, result.runs[0].ended) == (60, 260)


def test_non_elastic_job_can_shrink_and_can_grow_if_stretch_is_set() -> None:
    jobs = [SimulatedJob(0, "a", 0, 120, gpus=2)]
    assert simulate(jobs, 4).runs[0].ended == 60 + 120
    assert simulate(jobs, 1).runs[0].ended == 60 + 240
    assert simulate(jobs, 4, policy=Pollux(stretch=2)).runs[0].ended == 60 + 60


def test_second_job_takes_half_of_the_gpus_and_returns_them_at_its_end() -> None:
    """a has four GPUs from 60 s on. b arrives at 61 s: at 120 s both have two, and a pays 30 s for its restart.
    b completes its 120 s of work (60 s x 2) at 180 s; then a is alone again, and restarts on four GPUs."""
    costs = JobCosts(restart_s=30)
    jobs = [SimulatedJob(0, "a", 0, 1000, least=1, most=4, costs=costs), SimulatedJob(1, "b", 61, 120, least=1, most=4)]
    result = simulate(jobs, 4)
    a, b = result.runs
    assert (b.started, b.ended) == (120, 180)
    assert a.preempted == 2
    # 4 x 60 s until 120; a pause; 2 x 30 s until 180; a pause; then four GPUs again
    left = 1000 - 4 * 60 - 2 * 30
    assert a.ended == pytest.approx(180 + 30 + left / 4)


def test_young_job_is_not_restarted_for_a_small_gain() -> None:
    """b frees one of three GPUs: a, which has two, is 120 s old and would gain half as much again, of which 120 / 150
    count, takes it; with a delay of 600 s it does not."""
    jobs = [SimulatedJob(0, "a", 0, 900, gpus=2, least=2, most=3), SimulatedJob(1, "b", 0, 50, gpus=1)]
    eager, hysteresis = (simulate(jobs, 3, policy=Pollux(delay_s=delay)) for delay in (30.0, 600.0))
    assert eager.runs[0].preempted == 1
    assert hysteresis.runs[0].preempted == 0


def test_inference_is_neither_moved_nor_shrunk() -> None:
    jobs = [SimulatedJob(0, "serve", 0, 600, "infer", gpus=2), SimulatedJob(1, "a", 70, 300, least=1, most=4)]
    serve, train = simulate(jobs, 4).runs
    assert (serve.started, serve.ended, serve.preempted) == (60, 660, 0)
    assert (train.started, train.ended) == (120, 120 + 150)


def test_restarts_may_cost_nothing_for_a_job_submitted_at_the_moment_of_a_round() -> None:
    jobs = [SimulatedJob(0, "a", 0, 1000, least=1, most=4), SimulatedJob(1, "b", 120, 120, least=1, most=4)]
    a, b = simulate(jobs, 4, policy=Pollux(delay_s=0)).runs
    assert (b.started, b.ended) == (120, 180)
    # 4 x 60 s, 2 x 60 s, then four GPUs again
    assert a.ended == pytest.approx(180 + (1000 - 4 * 60 - 2 * 60) / 4)


def test_no_rounds_take_place_while_nothing_can_change() -> None:
    """A job of three weeks, then 300 that wait for one GPU: rounds are few, and follow the ends of jobs."""
    weeks = 3 * 7 * 86400.0
    result = simulate([SimulatedJob(0, "a", 0, weeks, gpus=2)], 4)
    assert (result.runs[0].started, result.runs[0].ended) == (60, 60 + weeks)
    assert result.steps < 10
    jobs = [SimulatedJob(n, f"j{n}", float(n), 600) for n in range(300)]
    result = simulate(jobs, 1)
    assert [run.started for run in result.runs] == [60 + 600 * n for n in range(300)]
    assert result.steps < 4 * len(jobs)


def test_policy_is_registered_by_name_with_its_parameters() -> None:
    kind = registry.find("pollux")
    setup = registry.Setup(whole("a100-80gb"), 1, 4, (SimulatedJob(0, "a", 0, 100),), Whole())
    result = kind.play(kind.params(period_s=30.0), setup)
    assert result.runs[0].ended == 130


@given(st.integers(0, 10_000))
def test_every_job_that_fits_completes_and_no_gpu_is_allocated_twice(seed: int) -> None:
    rng = np.random.Generator(np.random.PCG64(seed))
    jobs = [
        SimulatedJob(
            n,
            f"j{n}",
            float(rng.uniform(0, 600)),
            float(rng.uniform(10, 900)),
            "infer" if rng.random() < 0.2 else "train",
            gpus=int(rng.integers(1, 5)),
            costs=JobCosts(5, 10, 2),
        )
        for n in range(8)
    ]
    result = simulate(jobs, 8, per_node=4)
    assert all(run.ended is not None for run in result.runs)
    held: dict[int, int] = {}
    for event in result.events:
        if event.what in ("preempt", "complete"):
            for place in event.places:
                assert held.pop(place.gpu) == event.job
        elif event.what == "start":
            for place in event.places:
                assert held.setdefault(place.gpu, event.job) == event.job

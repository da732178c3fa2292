"""Invariants for any policy: no GPU over its capacity, legal layouts, conserved work, same events for the same seed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_migbatch.lab.sim.cluster import Place, SimulatedCluster, bit_indexes
from slurm_migbatch.lab.sim.engine import Simulation, SimulationResult
from slurm_migbatch.lab.sim.fragmentation import fragmentation
from slurm_migbatch.lab.sim.gpus import geometry
from slurm_migbatch.lab.sim.job import JobCosts, SimulatedJob
from slurm_migbatch.lab.sim.policy import Policy
from slurm_migbatch.lab.sim.run import SimulatedRun
from slurm_migbatch.lab.sim.speeds import Linear, Neighbours
from slurm_migbatch.mig.layout import Layout


class Chaos(Policy):
    """Starts, shares, moves and preempts at random, and checks everything after each decision."""

    def __init__(self, seed: int, shared: bool) -> None:
        self.rng = np.random.default_rng(seed)
        self.shared = shared
        self.known: list[SimulatedRun] = []
        self.speeds: dict[int, tuple[float, float]] = {}
        self.work: Counter[int] = Counter()
        self.last = 0.0

    def begin(self, sim: Simulation) -> None:
        self.last = sim.now

    def arrive(self, sim: Simulation, run: SimulatedRun) -> None:
        self.known.append(run)

    def decide(self, sim: Simulation) -> None:
        for job, (rate, resumes) in self.speeds.items():
            self.work[job] += rate * max(0.0, sim.now - max(self.last, resumes))
        for run in self.known:
            if run.ended is not None:
                continue
            chance = self.rng.random()
            places = self.places(sim, run)
            if not run.places and places and chance < 0.8:
                sim.start(run, places)
            elif run.places and chance < 0.1:
                sim.preempt(run)
            elif run.places and places and chance < 0.2:
                sim.move(run, places)
            check(sim)
        self.speeds = {run.job.id: (run.rate, run.resumes) for run in self.known if run.places}
        self.last = sim.now
        if any(run.ended is None for run in self.known):
            sim.wake(sim.now + 11.0)

    def places(self, sim: Simulation, run: SimulatedRun) -> list[Place]:
        """Random places that are free, or sometimes held by another job."""
        found: list[Place] = []
        used = {gpu.index: gpu.used for gpu in sim.cluster.gpus}
        for _ in range(run.job.gpus):
            gpu = sim.cluster.gpus[int(self.rng.integers(len(sim.cluster.gpus)))]
            if self.shared and gpu.cells and self.rng.random() < 0.3:
                place = Place(gpu.index, sorted(gpu.cells)[0])
                if run not in gpu.cells[place.slot].runs and place not in found:
                    found.append(place)
                continue
            fitting = [slot for slot in sorted(gpu.geometry.slots) if gpu.geometry.fits(used[gpu.index], slot)]
            if fitting:
                slot = fitting[int(self.rng.integers(len(fitting)))]
                used[gpu.index] = used[gpu.index].add(slot)
                found.append(Place(gpu.index, slot))
        return found


def check(sim: Simulation) -> None:
    cluster = sim.cluster
    for gpu in cluster.gpus:
        gpu.geometry.check(gpu.layout)
        gpu.geometry.check(gpu.used)
        assert gpu.used == Layout(gpu.cells)
        assert set(gpu.used.slots) <= set(gpu.layout.slots)
        assert gpu.held == sum(cell.slices for cell in gpu.cells.values()) <= gpu.geometry.compute_slices
        assert bool(cluster.empty >> gpu.index & 1) == (not gpu.cells)
        assert cluster.alike[gpu.geometry, gpu.used] >> gpu.index & 1
        for slot, cell in gpu.cells.items():
            assert cell.runs
            for run in cell.runs:
                assert Place(gpu.index, slot) in run.places
    assert sum(bits.bit_count() for bits in cluster.alike.values()) == len(cluster.gpus)
    assert abs(cluster.fragmentation - sum(fragmentation(g.geometry, g.used) for g in cluster.gpus)) < 1e-9
    for free, nodes in enumerate(cluster.by_empty):
        for node in bit_indexes(nodes):
            assert sum(not cluster.gpus[gpu].cells for gpu in cluster.nodes[node]) == free


def jobs_of(seed: int, count: int) -> list[SimulatedJob]:
    rng = np.random.default_rng(seed)
    costs = JobCosts(2.0, 3.0, 1.0)
    return [
        SimulatedJob(
            n, f"j{n}", float(rng.uniform(0, 60)), float(rng.uniform(1, 60)), gpus=int(rng.integers(1, 3)), costs=costs
        )
        for n in range(count)
    ]


def play(seed: int, gpu: str, shared: bool) -> tuple[SimulationResult, Chaos]:
    cluster = SimulatedCluster.of(geometry(gpu), 3, per_node=2)
    policy = Chaos(seed, shared)
    speeds = Linear(cluster, exponent=0.5, shared=1.4)
    neighbours = Neighbours()
    sim = Simulation(cluster, jobs_of(seed, 6), policy, speeds, neighbours=neighbours, seed=seed, log=True)
    return sim.run(until=2000.0), policy


@pytest.mark.slow
@settings(max_examples=15)
@given(st.integers(0, 2**31), st.sampled_from(["a30", "a100-40gb", "h100-80gb"]), st.booleans())
def test_no_gpu_exceeds_its_capacity_and_work_is_conserved(seed: int, gpu: str, shared: bool) -> None:
    result, policy = play(seed, gpu, shared)
    for run in result.runs:
        done = policy.work[run.job.id]
        if run.ended is not None:
            assert abs(done - run.job.work - run.lost) < 1e-6 * (1 + done)
            assert run.began is not None
            assert run.started is not None
            assert run.job.arrival <= run.started <= run.began <= run.ended
        assert run.lost >= 0
        assert run.paused >= -1e-9
    assert -1e-6 <= result.busy <= result.held * (1 + 1e-9) <= result.slices * (result.end - result.begin) * (1 + 1e-9)
    assert 0 <= result.fragmentation <= 1


@settings(max_examples=5)
@given(st.integers(0, 2**31))
def test_same_seed_gives_the_same_events(seed: int) -> None:
    def course(result: SimulationResult) -> list[Any]:
        return [event.line() for event in result.events]

    first, second = play(seed, "a100-80gb", True)[0], play(seed, "a100-80gb", True)[0]
    assert course(first) == course(second)
    assert (first.held, first.busy, first.created) == (second.held, second.busy, second.created)

"""The study of DeepBoot on synthetic traces, and the invariants of its policy."""

import functools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_migbatch.lab.bars import NotMeasurable
from slurm_migbatch.lab.experiments.lendslices import Load
from slurm_migbatch.lab.papers.forecast import Levels
from slurm_migbatch.lab.papers.goodput import Goodput
from slurm_migbatch.lab.sim.cluster import SimulatedCluster
from slurm_migbatch.lab.sim.engine import Simulation
from slurm_migbatch.lab.sim.gpus import whole
from slurm_migbatch.lab.sim.job import JobCosts, SimulatedJob
from slurm_migbatch.lab.sim.policies.lending import GoodputSpeeds, WholeGpuLending
from slurm_migbatch.lab.studies import deepboot
from slurm_migbatch.lab.studies.deepboot import AFE, WAYS
from tests.support.lending_folders import STEPS, write_pollux

MODELS = {"cifar10": Goodput(STEPS, 4000.0, 128, 4096, 32, 1024)}
TINY = Load("tiny", 120, 3, 10.0)


@pytest.fixture
def data(tmp_path):
    return write_pollux(tmp_path)


def test_every_variant_is_measured_and_the_result_is_deterministic(data):
    measure = functools.partial(deepboot.measure, data, seeds=2, loads=[TINY])
    result = measure()
    assert result == measure()
    (found,) = result["results"]
    assert set(found["ways"]) == set(WAYS)
    assert found["ways"]["half"]["jct_ratio"][0] == 1.0
    assert found["ways"]["half"]["reclaimed"] == 0
    assert found["ways"]["ours"]["jct_s"] < found["ways"]["half"]["jct_s"]
    assert result["bars"] == [] and "decides" not in result  # a study has no bars
    json.dumps(result)


def test_noise_scale_is_recovered_from_the_iteration_counts(data):
    model = deepboot.goodputs(data / "sched" / "traces")["cifar10"]
    assert model.noise == pytest.approx(4000, rel=0.05)
    assert (model.first_batch, model.largest_batch) == (128, 2048)


def test_missing_data_sets_are_named_in_the_error(tmp_path, data):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(NotMeasurable, match="no Pollux data"):
        deepboot.measure(empty)
    (data / "mooncake_conversation_1h.csv").unlink()
    with pytest.raises(NotMeasurable, match="no request trace"):
        deepboot.measure(data)


class Watched(WholeGpuLending):
    """Checks the invariants after every decision."""

    def decide(self, sim):
        super().decide(sim)
        held = [place.gpu for run in self.training for place in run.places]
        assert len(held) == len(set(held))
        assert set(held) == set(self.holder)
        assert not set(held) & set(self.serving.values())
        assert not set(held) & set(self.replicas)
        for run in self.training:
            assert not run.places or run.job.least <= len(run.places) <= run.job.most
        if not self.way.lend:
            assert set(held) <= set(self.own)
        if self.waiting:
            assert not set(held) & set(self.lent)


@settings(max_examples=40, deadline=None)
@given(
    nodes=st.integers(1, 3),
    name=st.sampled_from(sorted(WAYS)),
    training=st.lists(st.tuples(st.floats(0, 3000), st.floats(10, 5000), st.integers(1, 8)), min_size=1, max_size=8),
    requests=st.lists(st.tuples(st.floats(0, 4000), st.floats(1, 200), st.integers(0, 2)), max_size=25),
)
def test_lending_respects_capacity_and_limits_on_any_cluster(nodes, name, training, requests):
    half = nodes * 2
    jobs = [
        SimulatedJob(n, f"t{n}", at, work, least=1, most=most, app="cifar10", costs=JobCosts(24, 24, 3))
        for n, (at, work, most) in enumerate(training)
    ] + [
        SimulatedJob(100 + n, f"i{n}", at, work, kind="infer", app=f"i{app}", costs=JobCosts(cold_start_s=6))
        for n, (at, work, app) in enumerate(requests)
    ]
    learning = GoodputSpeeds(MODELS, 2)
    policy = Watched(range(half), range(half, 2 * half), learning, AFE, WAYS[name], Levels(), 0.0)
    result = Simulation(SimulatedCluster.of(whole("a100-80gb"), 2 * half, 2), jobs, policy, learning).run()
    assert all(run.ended is not None for run in result.runs)

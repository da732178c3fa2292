"""Lending of slices in the simulator: inference first, loans legal at every moment, what a wave comes to."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slurm_migbatch.config import LendingConfig
from slurm_migbatch.decide.lending.expectation import Expectation
from slurm_migbatch.decide.lending.forecast import DAY_S
from slurm_migbatch.decide.lending.values import usual_speed
from slurm_migbatch.lab.sim import registry
from slurm_migbatch.lab.sim.cluster import PlaceError, SimulatedCluster
from slurm_migbatch.lab.sim.engine import Simulation
from slurm_migbatch.lab.sim.gpus import geometry
from slurm_migbatch.lab.sim.job import JobCosts, SimulatedJob
from slurm_migbatch.lab.sim.policies.slicelending import SliceLending, SliceWay
from slurm_migbatch.mig.profile import Profile
from tests.support.examples import examples

H100 = geometry("h100-80gb")
ONE, TWO, THREE, FOUR, ALL = (Profile.parse(p) for p in ("1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"))
COSTS = JobCosts(10, 10, 5)


class Root:
    """Training as fast as the square root of its slice, inference at 1."""

    def speed(self, job, places, steps=1):
        return 1.0 if job.kind == "infer" else usual_speed(H100, places[0].slot.profile)

    def slowdown(self, run, others):
        return 1.0 + len(others)


def train(number, at=0.0, work=1000.0, least=None, most=None):
    return SimulatedJob(number, f"t{number}", at, work, profile=least, largest=most, costs=COSTS)


def infer(number, at, seconds=60.0, profile=ALL, gpus=1):
    return SimulatedJob(number, f"i{number}", at, seconds, "infer", profile=profile, gpus=gpus, costs=JobCosts(2))


def played(jobs, way=None, own=0, lent=1, expected=None, clock=0.0, kind=SliceLending, log=False):
    policy = kind(range(own), range(own, own + lent), LendingConfig(), way or SliceWay(), expected, clock)
    result = Simulation(SimulatedCluster.of(H100, own + lent), jobs, policy, Root(), log=log).run()
    return {run.job.name: run for run in result.runs}, policy, result


def test_a_loan_ends_for_inference_which_waits_for_its_checkpoint_only():
    runs, policy, _ = played([train(0), infer(1, 200.0)])
    assert runs["i1"].began == pytest.approx(200 + 5 + 2, abs=1)
    assert (runs["t0"].preempted, policy.reclaims) == (1, 1)
    assert runs["t0"].ended > 260


def test_without_lending_training_keeps_to_its_own():
    runs, policy, result = played(
        [train(n) for n in range(4)] + [infer(9, 100.0)], SliceWay(lend=False), own=1, lent=1, log=True
    )
    assert {place.gpu for event in result.events if event.job < 9 for place in event.places} == {0}
    assert policy.reclaims == 0
    assert runs["i9"].began == pytest.approx(102, abs=1)


def test_what_inference_is_expected_to_need_is_kept_free():
    expected = Expectation()
    expected.learn([(str(FOUR), at, at + 199.0) for at in range(200, int(2 * DAY_S), 400)], 2 * DAY_S)
    jobs = [train(0, work=200.0), infer(1, 100.0, profile=FOUR)]
    runs, policy, _ = played(jobs, expected=expected, clock=2 * DAY_S)
    assert policy.reclaims == 0
    assert runs["i1"].began == pytest.approx(102.2, abs=0.1)
    _, policy, _ = played(jobs, SliceWay(forecast=False))
    assert policy.reclaims == 1


def test_whole_nodes_are_lent_and_called_back_together():
    jobs = [*(train(n, work=400.0) for n in range(3)), infer(9, 100.0, profile=ONE)]
    runs, policy, _ = played(jobs, SliceWay(forecast=False, servers=True))
    assert policy.reclaims == 3
    assert runs["i9"].began < 115
    assert all(runs[f"t{n}"].starts == 2 for n in range(3))


def test_a_job_that_is_alone_grows_when_others_have_ended():
    runs, _, _ = played([train(0, work=5000.0), *(train(n, work=200.0) for n in range(1, 7))])
    assert runs["t0"].preempted == 1
    assert runs["t0"].ended < 5000 + 1500


def test_what_fits_nowhere_waits_for_ever_and_holds_up_nobody():
    strange = Profile.parse("1g.24gb")
    runs, _, _ = played(
        [train(0, least=Profile.parse("7g.141gb")), infer(1, 0.0, profile=strange), infer(2, 0.0, gpus=3), train(3)]
    )
    assert [name for name, run in sorted(runs.items()) if run.ended is None] == ["i1", "i2", "t0"]


class Watched(SliceLending):
    """Checks after every decision what must always hold."""

    def decide(self, sim):
        super().decide(sim)
        for gpu in sim.cluster.gpus:
            gpu.geometry.check(gpu.used)
            for cell in gpu.cells.values():
                (run,) = cell.runs
                if run.job.kind == "infer":
                    assert gpu.index in self.lent
                elif not self.way.lend:
                    assert gpu.index in self.own
        for run in self.training.values():
            for place in run.places:
                p, least, most = place.slot.profile, run.job.profile, run.job.largest
                assert least is None or (p.compute >= least.compute and p.memory_gb >= least.memory_gb)
                assert most is None or (p.compute <= most.compute and p.memory_gb <= most.memory_gb)


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    own=st.integers(0, 2),
    lent=st.integers(1, 3),
    lend=st.booleans(),
    forecast=st.booleans(),
    servers=st.booleans(),
    training=st.lists(
        st.tuples(st.floats(0, 2000), st.floats(10, 3000), st.sampled_from([(None, None), (TWO, FOUR), (ALL, None)])),
        max_size=12,
    ),
    requests=st.lists(
        st.tuples(st.floats(0, 3000), st.floats(1, 300), st.sampled_from([ONE, TWO, THREE, ALL]), st.integers(1, 2)),
        max_size=25,
    ),
)
def test_any_cluster(own, lent, lend, forecast, servers, training, requests):
    lend = lend or not own
    jobs = [train(n, at, work, *bounds) for n, (at, work, bounds) in enumerate(training)]
    jobs += [infer(100 + n, *one) for n, one in enumerate(requests)]
    way = SliceWay(lend, forecast, servers)
    runs, _, _ = played(jobs, way, own, lent, kind=Watched)
    for run in runs.values():
        never = run.job.kind == "infer" and run.job.profile == ALL and run.job.gpus > lent
        assert (run.ended is None) == never


def test_by_name():
    kind = registry.find("lending-slices")
    assert isinstance(kind, registry.PolicyKind)
    params = kind.params()
    policy = kind.make(params, SimulatedCluster.of(H100, 8, 4))
    assert isinstance(policy, SliceLending)
    assert (policy.own, policy.lent) == (tuple(range(4)), tuple(range(4, 8)))
    assert (policy.way, policy.config) == (SliceWay(), LendingConfig())
    with pytest.raises(PlaceError, match="give it more nodes"):
        kind.make(params, SimulatedCluster.of(H100, 4, 4))
    with pytest.raises(ValueError, match="inference needs GPUs"):
        SliceLending([], [0], LendingConfig(), SliceWay(lend=False))

"""SJF-BSBF and its variant with lookahead in the simulator."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_migbatch.decide.lending.lookahead import NEVER, PAIR, RULES
from slurm_migbatch.decide.lending.pair_finish import finishes
from slurm_migbatch.lab.sim import registry
from slurm_migbatch.lab.sim.cluster import SimulatedCluster
from slurm_migbatch.lab.sim.engine import Simulation, SimulationResult
from slurm_migbatch.lab.sim.gpus import whole
from slurm_migbatch.lab.sim.job import SimulatedJob
from slurm_migbatch.lab.sim.policies.queued import Sjf
from slurm_migbatch.lab.sim.policies.sharing import BsbfSharing
from slurm_migbatch.lab.sim.policy import Policy
from slurm_migbatch.lab.sim.speeds import Paired, Whole
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


def test_long_queue_is_not_tested_with_every_running_job_at_every_event() -> None:
    """Jobs of one kind: if the shortest must not share, the longer ones must not either."""
    calls = 0

    def counted(own: float, other: float, slow_own: float, slow_other: float) -> float | None:
        nonlocal calls
        calls += 1
        return PAIR(own, other, slow_own, slow_other)

    jobs = [SimulatedJob(n, f"j{n}", 0, 100.0 + n, gpus=1 + n % 2, app="a") for n in range(200)]
    result = play(BsbfSharing((counted,)), jobs, 4, 2.0)
    assert ends(result) == ends(play(Sjf(), jobs, 4, 2.0))
    assert 0 < calls <= 4 * 2 * len(jobs)


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
    jobs = tuple(SimulatedJob(n, f"j{n}", 0, 10 + n) for n in range(6))
    setup = registry.Setup(whole("a100-80gb"), 1, 2, jobs, Paired(Whole(), {}, 1.2))
    assert None not in ends(kind.play(kind.params(), setup))

"""Baseline schedulers on cases solved by hand, and compared with each other on synthetic ones."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.lab.sim import registry
from slurm_migbatch.lab.sim.cluster import PlaceError, SimulatedCluster
from slurm_migbatch.lab.sim.engine import Simulation
from slurm_migbatch.lab.sim.gpus import geometry, whole
from slurm_migbatch.lab.sim.job import JobCosts, SimulatedJob
from slurm_migbatch.lab.sim.placing import slices, whole_gpus
from slurm_migbatch.lab.sim.policies.ffs import SjfFfs
from slurm_migbatch.lab.sim.policies.halves import Halves
from slurm_migbatch.lab.sim.policies.queued import Easy, Fifo, Sjf
from slurm_migbatch.lab.sim.policies.sliced import Slices, Static
from slurm_migbatch.lab.sim.policies.tiresias import Tiresias
from slurm_migbatch.lab.sim.policy import Policy
from slurm_migbatch.lab.sim.registry import Setup
from slurm_migbatch.lab.sim.run import SimulatedRun
from slurm_migbatch.lab.sim.speeds import Linear, Whole
from slurm_migbatch.mig.layout import Layout, Slot
from slurm_migbatch.mig.profile import Profile
from tests.support.layouts import partitions

A100 = geometry("a100-80gb")


def play(
    policy: Policy, jobs: Sequence[SimulatedJob], gpus: int, *, per_node: int = 8, shared: float = 2.0
) -> dict[str, SimulatedRun]:
    cluster = SimulatedCluster.of(whole("a100-80gb"), gpus, per_node)
    result = Simulation(cluster, jobs, policy, Linear(cluster, shared=shared)).run()
    return {run.job.name: run for run in result.runs}


def jobs_of(*rows: tuple[str, float, float, int], **named: Any) -> list[SimulatedJob]:
    return [SimulatedJob(n, name, at, work, gpus=gpus, **named) for n, (name, at, work, gpus) in enumerate(rows)]


#: a runs on one of two GPUs; b needs both; c, d and e would each fit beside a
BLOCKED = jobs_of(("a", 0, 10, 1), ("b", 1, 5, 2), ("c", 2, 7, 1), ("d", 3, 20, 1), ("e", 4, 1, 1))


def test_first_come_first_served_blocks_behind_a_large_job() -> None:
    runs = play(Fifo(), BLOCKED, 2)
    assert [runs[name].started for name in "abcde"] == [0, 10, 15, 15, 22]


def test_shortest_job_first_starts_any_job_that_fits() -> None:
    runs = play(Sjf(), BLOCKED, 2)
    # at 9 only e fits; at 10 both GPUs are free and b is the shortest
    assert [runs[name].started for name in "abcde"] == [0, 10, 2, 15, 9]


def test_easy_backfill_does_not_delay_the_first_pending_job() -> None:
    runs = play(Easy(), BLOCKED, 2)
    # c ends at 9 and e at 10, before the reservation of b; d would not
    assert [runs[name].started for name in "abcde"] == [0, 10, 2, 15, 9]


def test_easy_backfill_uses_gpus_that_the_reservation_does_not_need() -> None:
    rows = jobs_of(("a", 0, 10, 2), ("b", 1, 5, 3), ("c", 2, 100, 1), ("d", 3, 100, 1))
    runs = play(Easy(), rows, 4)
    # b takes three of four GPUs at 10: one is spare, enough for c but not for d as well
    assert (runs["b"].started, runs["c"].started, runs["d"].started) == (10, 2, 15)


def test_all_jobs_end_when_a_job_runs_longer_than_its_estimate() -> None:
    jobs = [
        SimulatedJob(0, "a", 0, 30, gpus=1, estimate=5),
        SimulatedJob(1, "b", 1, 5, gpus=2, estimate=5),
        SimulatedJob(2, "c", 10, 5, gpus=1, estimate=1),
    ]
    runs = play(Easy(), jobs, 2)
    assert runs["b"].started == 30
    assert all(run.ended is not None for run in runs.values())


@given(st.integers(0, 2**31))
def test_easy_starts_jobs_by_their_reservation_if_estimates_are_exact(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = [
        (f"j{n}", float(rng.integers(0, 50)), float(rng.integers(1, 40)), int(rng.integers(1, 5))) for n in range(12)
    ]

    class Watched(Easy):
        def __init__(self) -> None:
            super().__init__()
            self.promised: dict[int, float] = {}

        def decide(self, sim: Simulation) -> None:
            super().decide(sim)
            head = self.queue.first()
            if head is not None:
                need, run = head
                free, now = self.free(sim), sim.now
                for end, _, held in self._ends:
                    if free >= need:
                        break
                    free, now = free + held, end
                self.promised.setdefault(run.job.id, now)

    policy = Watched()
    runs = play(policy, jobs_of(*rows), 4)
    for run in runs.values():
        assert run.started is not None
        assert run.started <= policy.promised.get(run.job.id, run.started) + 1e-9


def test_ffs_prefers_empty_gpus_and_puts_at_most_two_jobs_on_a_gpu() -> None:
    rows = jobs_of(("a", 0, 10, 1), ("b", 0, 10, 1), ("c", 1, 10, 1), ("d", 1, 4, 2), ("e", 1, 100, 1))
    runs = play(SjfFfs(), rows, 2, shared=1.5)
    # d (the shortest) shares the GPUs of a and b; no other job fits until it ends after 6 s
    assert runs["d"].started == 1
    assert runs["d"].ended == 7
    assert runs["c"].started == 7
    assert runs["e"].started == 7
    assert runs["a"].ended == runs["b"].ended == 1 + 9 * 1.5


def test_tiresias_preempts_the_job_with_more_attained_service() -> None:
    costs = JobCosts(restart_s=1, checkpoint_s=2)
    rows = jobs_of(("long", 0, 100, 1), ("short", 50, 10, 1), costs=costs)
    runs = play(Tiresias(limits=(20, 1000)), rows, 1)
    # the long job dropped to a lower queue at 20, so the short one takes its GPU once its checkpoint is written
    assert (runs["short"].began, runs["short"].ended) == (52, 62)
    assert (runs["long"].preempted, runs["long"].ended) == (1, 62 + 1 + 50)
    rows = jobs_of(("first", 0, 15, 1), ("second", 5, 10, 1))
    runs = play(Tiresias(limits=(20, 1000)), rows, 1)
    assert runs["second"].started == 15  # jobs of the same queue do not preempt each other


def test_makespan_ends_with_the_last_job_and_not_with_a_timer_of_tiresias() -> None:
    cluster = SimulatedCluster.of(whole("a100-80gb"), 2)
    jobs = [SimulatedJob(number, "j", 0.0, 50.0, gpus=gpus) for number, gpus in enumerate((1, 1, 9))]
    result = Simulation(cluster, jobs, Tiresias(limits=(3600, 36000)), Whole()).run()
    assert result.end == 50, "the timers were set for 3600 s"
    assert result.held == 2 * 7 * 50
    assert result.waiting == pytest.approx(1.0), "the third job is larger than the cluster"


def test_tiresias_preempts_no_more_jobs_than_needed() -> None:
    rows = jobs_of(("a", 0, 500, 1), ("b", 0, 500, 2), ("c", 0, 500, 1), ("new", 300, 10, 2))
    runs = play(Tiresias(limits=(100, 10000)), rows, 4)
    assert [runs[name].preempted for name in "abc"] == [0, 1, 0]


@pytest.mark.parametrize("make", [Fifo, Sjf, Easy, SjfFfs, Tiresias, Slices])
def test_job_larger_than_the_cluster_never_starts_and_delays_no_other_job(make: Any) -> None:
    rows = jobs_of(("huge", 0, 10, 9), ("fine", 1, 10, 1))
    runs = play(make(), rows, 2)
    assert runs["huge"].ended is None
    assert runs["fine"].ended == 11


@pytest.mark.parametrize("make", [Fifo, Sjf, Easy, SjfFfs, Tiresias])
@given(seed=st.integers(0, 2**31))
def test_every_job_that_fits_completes_and_exclusive_policies_never_share(make: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = [(f"j{n}", float(rng.uniform(0, 30)), float(rng.uniform(1, 20)), int(rng.integers(1, 5))) for n in range(10)]
    runs = play(make(), jobs_of(*rows), 4, per_node=2, shared=1.3)
    assert all(run.ended is not None for run in runs.values())
    if make not in (SjfFfs, Tiresias):
        for run in runs.values():
            assert run.ended == pytest.approx(run.started + run.job.work)


def test_halves_run_training_and_inference_on_separate_nodes() -> None:
    jobs = [SimulatedJob(n, f"t{n}", 0, 10) for n in range(3)] + [SimulatedJob(9, "i", 5, 1, "infer")]
    runs = play(Halves(Fifo(range(1)), Fifo(range(1, 2))), jobs, 4, per_node=2)
    assert sorted(run.started for run in runs.values()) == [0, 0, 5, 10]
    assert runs["i"].started == 5


def test_slice_is_created_where_it_fits_and_otherwise_the_job_waits() -> None:
    profile = Profile.parse("3g.40gb")
    cluster = SimulatedCluster.of(A100, 1)
    jobs = [SimulatedJob(n, f"j{n}", 0, 10, profile=profile) for n in range(3)]
    jobs.append(SimulatedJob(3, "one", 1, 10, profile=Profile.parse("1g.10gb")))
    result = Simulation(cluster, jobs, Slices(), Whole()).run()
    started = [run.started for run in result.runs]
    assert started[:2] == [0, 0]
    assert started[2] == pytest.approx(10.2)
    assert started[3] == pytest.approx(10.2)  # two 3g slices take all the memory


def test_first_pending_job_blocks_later_jobs_only_with_block_set() -> None:
    big, small = Profile.parse("4g.40gb"), Profile.parse("1g.10gb")
    jobs = [
        SimulatedJob(0, "a", 0, 10, profile=big),
        SimulatedJob(1, "b", 1, 10, profile=big),
        SimulatedJob(2, "c", 2, 5, profile=small),
    ]
    for block, began in ((False, 2), (True, pytest.approx(10.21))):
        result = Simulation(SimulatedCluster.of(A100, 1), jobs, Slices(block=block), Whole()).run()
        assert result.runs[2].started == began


def test_static_partition_gives_the_smallest_free_slice_that_fits() -> None:
    layout = Layout([Slot.of("4g.40gb", 0, 4), Slot.of("2g.20gb", 4, 2), Slot.of("1g.10gb", 6, 1)])
    jobs = [
        SimulatedJob(0, "small", 0, 10, profile=Profile.parse("1g.10gb")),
        SimulatedJob(1, "again", 0, 10, profile=Profile.parse("1g.10gb")),
        SimulatedJob(2, "large", 0, 10),
        SimulatedJob(3, "wait", 0, 10, profile=Profile.parse("3g.40gb")),
    ]
    cluster = SimulatedCluster.of(A100, 1)
    result = Simulation(cluster, jobs, Static(layout), Linear(cluster), log=True).run()
    names = [str(event.places[0].slot.profile) for event in result.events if event.what == "start"]
    assert names == ["1g.10gb", "2g.20gb", "4g.40gb", "4g.40gb"]
    assert result.runs[3].started == result.runs[2].ended
    assert result.created == result.destroyed == 0


def test_static_partition_runs_no_job_that_is_larger_than_the_cluster() -> None:
    """Other policies run none, so there would be nothing to compare it with."""
    layout = Layout([Slot.of("4g.40gb", 0, 4), Slot.of("2g.20gb", 4, 2), Slot.of("1g.10gb", 6, 1)])
    jobs = [SimulatedJob(0, "three", 0, 10, gpus=3), SimulatedJob(1, "two", 0, 10, gpus=2)]
    for policy in (Static(layout), Fifo()):
        cluster = SimulatedCluster.of(A100, 2)
        result = Simulation(cluster, jobs, policy, Whole()).run()
        assert [run.started is not None for run in result.runs] == [False, True]


def test_partitions_are_all_maximal_layouts_without_duplicates() -> None:
    found = {tuple(str(profile) for profile in layout.profiles) for layout in partitions(A100)}
    assert ("7g.80gb",) in found
    assert ("3g.40gb", "3g.40gb") in found
    assert ("1g.10gb",) * 7 in found
    assert ("4g.40gb",) not in found
    assert len(found) == len(list(partitions(A100)))


def test_whole_gpus_are_taken_from_the_fullest_node_with_enough_free_gpus() -> None:
    cluster = SimulatedCluster.of(whole("a30"), 12, per_node=4)
    part = cluster.part()
    runs = [SimulatedRun(SimulatedJob(n, f"j{n}", 0, 1)) for n in range(12)]
    for gpu in (0, 4, 5):
        cluster.take(cluster.gpus[gpu].whole, runs[gpu], 0.0)

    def of(count: int) -> list[int] | None:
        places = whole_gpus(cluster, count, part)
        return None if places is None else [place.gpu for place in places]

    assert of(1) == [6]
    assert of(2) == [6, 7]
    assert of(3) == [1, 2, 3]
    assert of(4) == [8, 9, 10, 11]
    assert of(5) == [8, 9, 10, 11, 1]
    assert of(9) == [8, 9, 10, 11, 1, 2, 3, 6, 7]
    assert of(10) is None
    assert [place.gpu for place in whole_gpus(cluster, 1, cluster.part(range(2, 3))) or []] == [8]


def test_best_fit_places_slices_on_the_gpu_with_the_least_free_space() -> None:
    cluster = SimulatedCluster.of(A100, 3)
    part = cluster.part()
    run = SimulatedRun(SimulatedJob(0, "x", 0, 1))
    one, four = Profile.parse("1g.10gb"), Profile.parse("4g.40gb")
    first = slices(cluster, four, 1, part)
    assert first is not None
    assert first[0].gpu == 0
    cluster.take(first[0]._replace(gpu=1), run, 0.0)
    assert [place.gpu for place in slices(cluster, one, 1, part, "best") or []] == [1]
    assert [place.gpu for place in slices(cluster, one, 1, part, "first") or []] == [0]
    assert [place.gpu for place in slices(cluster, four, 2, part) or []] == [0, 2]
    assert slices(cluster, four, 3, part) is None
    together = slices(cluster, one, 5, part) or []
    assert [place.gpu for place in together] == [1, 1, 1, 0, 0]
    assert len(set(together)) == 5
    assert slices(cluster, Profile.parse("1g.6gb"), 1, part) is None


def test_every_registered_policy_completes_all_jobs() -> None:
    jobs = tuple(SimulatedJob(n, f"j{n}", n, 10, "infer" if n % 2 else "train") for n in range(8))
    setup = Setup(A100, 2, 2, jobs, Linear(SimulatedCluster.of(A100, 4, per_node=2)), until=1e6)
    for name in registry.POLICIES:
        kind = registry.find(name)
        assert kind.about
        result = kind.play(kind.params(), setup)
        assert sum(run.ended is not None for run in result.runs) == 8, name


def test_impossible_policy_parameters_raise_an_error_with_the_reason() -> None:
    static, halves = registry.find("static"), registry.find("halves")
    with pytest.raises(PlaceError, match=r"cannot be divided into 4g\.40gb, 4g\.40gb"):
        static.play(static.params(layout=("4g.40gb", "4g.40gb")), Setup(A100, 1, 1, (), Whole()))
    with pytest.raises(PlaceError, match="1 nodes cannot be divided"):
        halves.play(halves.params(), Setup(A100, 1, 4, (), Whole()))


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [
        ("h100-80gb", "3g.40gb 2g.20gb 1g.10gb"),
        ("h200", "3g.71gb 2g.35gb 1g.18gb"),
        ("a100-40gb", "3g.20gb 2g.10gb 1g.5gb"),
        ("a30", "2g.12gb 2g.12gb"),
        ("rtx-pro-6000", "2g.48gb 2g.48gb"),
    ],
)
def test_static_partition_is_by_default_one_that_the_model_has(gpu: str, expected: str) -> None:
    static, jobs = registry.find("static"), tuple(SimulatedJob(n, "j", 0.0, 10.0) for n in range(4))
    result = static.play(static.params(), Setup(geometry(gpu), 1, 1, jobs, Whole(), log=True))
    taken = [str(event.places[0].slot.profile) for event in result.events if event.what == "start"]
    assert taken[: len(expected.split())] == expected.split()
    plain = static.play(static.params(), Setup(whole(gpu), 1, 1, jobs, Whole()))
    assert plain.end == 40


def test_best_and_worst_static_partitions_have_the_expected_makespan() -> None:
    """Among the partitions, a search finds the one with the shortest makespan."""
    one, two = Profile.parse("1g.10gb"), Profile.parse("2g.20gb")
    jobs = [SimulatedJob(n, f"j{n}", 0, 10, profile=(one, two)[n % 2]) for n in range(6)]
    spans = {}
    for layout in itertools.islice(partitions(A100), 100):
        cluster = SimulatedCluster.of(A100, 1)
        result = Simulation(cluster, jobs, Static(layout), Whole()).run()
        if all(run.ended is not None for run in result.runs):
            spans[layout.profiles] = result.end
    # three 1g and three 2g need nine slices, so two rounds are needed; on a whole GPU six are
    assert min(spans.values()) == spans[(one,) * 3 + (two,) * 2] == 20
    assert max(spans.values()) == spans[(Profile.parse("7g.80gb"),)] == 60

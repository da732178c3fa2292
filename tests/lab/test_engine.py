"""The engine on cases small enough to solve by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from slurm_migbatch.lab.sim.cluster import Place, PlaceError, SimulatedCluster
from slurm_migbatch.lab.sim.engine import Simulation, SimulationError, SimulationResult
from slurm_migbatch.lab.sim.gpus import geometry, whole
from slurm_migbatch.lab.sim.job import JobCosts, JobError, SimulatedJob
from slurm_migbatch.lab.sim.policies.queued import Fifo
from slurm_migbatch.lab.sim.policy import Policy
from slurm_migbatch.lab.sim.run import SimulatedRun
from slurm_migbatch.lab.sim.speeds import Linear, Neighbours, Whole
from slurm_migbatch.mig.layout import Layout, Slot

A100 = geometry("a100-80gb")
FULL = Place(0, Slot.of("7g.80gb", 0, 8))
HALF = Place(0, Slot.of("3g.40gb", 4, 4))
FOUR = Place(0, Slot.of("4g.40gb", 0, 4))
ONE = [Place(0, Slot.of("1g.10gb", start, 1)) for start in range(7)]


class Script(Policy):
    """Performs each given action at its given time."""

    def __init__(self, *acts: tuple[float, Callable[[Simulation, dict[int, SimulatedRun]], None]]) -> None:
        self.acts = acts
        self.runs: dict[int, SimulatedRun] = {}
        self.events: list[tuple[Any, ...]] = []

    def begin(self, sim: Simulation) -> None:
        for at, act in self.acts:
            sim.wake(at, act)

    def arrive(self, sim: Simulation, run: SimulatedRun) -> None:
        self.events.append((sim.now, "arrive", run.job.id))
        self.runs[run.job.id] = run

    def complete(self, sim: Simulation, run: SimulatedRun) -> None:
        self.events.append((sim.now, "complete", run.job.id))

    def timer(self, sim: Simulation, key: Any) -> None:
        self.events.append((sim.now, "timer"))
        self.due = [*getattr(self, "due", []), key]

    def decide(self, sim: Simulation) -> None:
        for act in getattr(self, "due", []):
            act(sim, self.runs)
        self.due = []


def play(
    jobs: Sequence[SimulatedJob], *acts: Any, cluster: SimulatedCluster | None = None, **named: Any
) -> tuple[SimulationResult, list[SimulatedRun]]:
    cluster = SimulatedCluster.of(A100, 1) if cluster is None else cluster
    speeds = named.pop("speeds", None) or Linear(cluster)
    until = named.pop("until", math.inf)
    result = Simulation(cluster, jobs, Script(*acts), speeds, **named).run(until)
    return result, list(result.runs)


def test_two_jobs_on_one_gpu_run_one_after_the_other() -> None:
    jobs = [SimulatedJob(1, "a", 0, 10), SimulatedJob(2, "b", 3, 5)]
    result = Simulation(SimulatedCluster.of(whole("a100-80gb"), 1), jobs, Fifo(), Whole(), log=True).run()
    assert [run.ended for run in result.runs] == [10, 15]
    assert [run.began for run in result.runs] == [0, 10]
    assert result.held == result.busy == 15 * 7
    assert result.waiting == pytest.approx(7 / 15)
    assert [(event.time, event.what, event.job) for event in result.events] == [
        (0, "arrive", 1), (0, "start", 1), (3, "arrive", 2), (10, "complete", 1), (10, "start", 2), (15, "complete", 2),
    ]  # fmt: skip


def test_creating_a_gpu_instance_delays_the_job_that_needs_it() -> None:
    result, (run,) = play([SimulatedJob(1, "a", 0, 10)], (0, lambda sim, runs: sim.start(runs[1], [FULL])))
    assert (run.began, run.ended, run.paused) == (0.24, 10.24, pytest.approx(0.24))
    assert (result.created, result.destroyed) == (1, 0)
    assert result.held == pytest.approx(10.24 * 7)
    assert result.busy == pytest.approx(10 * 7)


def test_warm_start_costs_nothing_and_an_instance_in_the_way_is_destroyed() -> None:
    result, (first, second, third) = play(
        [SimulatedJob(1, "a", 0, 10, gpus=1), SimulatedJob(2, "b", 0, 10), SimulatedJob(3, "c", 0, 10)],
        (0, lambda sim, runs: sim.start(runs[1], [FULL])),
        (20, lambda sim, runs: sim.start(runs[2], [FULL])),
        (40, lambda sim, runs: sim.start(runs[3], [ONE[3]])),
    )
    assert first.ended == 10.24
    assert second.ended == 30
    assert third.began == pytest.approx(40 + 0.22 + 0.16)
    assert (result.created, result.destroyed) == (2, 1)


def test_job_on_one_of_seven_slices_takes_seven_times_as_long() -> None:
    _, (run,) = play([SimulatedJob(1, "a", 0, 10)], (0, lambda sim, runs: sim.start(runs[1], [ONE[0]])))
    assert run.ended == pytest.approx(0.16 + 70)


def test_next_job_waits_until_the_preempted_one_has_written_its_checkpoint() -> None:
    costs = JobCosts(cold_start_s=1, restart_s=5, checkpoint_s=4)

    def swap(sim: Simulation, runs: dict[int, SimulatedRun]) -> None:
        sim.preempt(runs[1])
        sim.start(runs[2], [FULL])

    _, (trained, served) = play(
        [
            SimulatedJob(1, "t", 0, 100, costs=costs),
            SimulatedJob(2, "i", 50, 10, "infer", costs=JobCosts(cold_start_s=2)),
        ],
        (0, lambda sim, runs: sim.start(runs[1], [FULL])),
        (50, swap),
        (70, lambda sim, runs: sim.start(runs[1], [FULL])),
        cluster=SimulatedCluster.of(whole("a100-80gb"), 1),
    )
    assert served.began == 50 + 4 + 2
    assert served.ended == 66
    assert trained.began == 1
    # 49 s of work before the preemption, the rest after the restart; nothing is lost
    assert trained.ended == 70 + 5 + 51
    assert (trained.preempted, trained.starts, trained.lost) == (1, 2, 0)


def test_preempted_job_restarts_elsewhere_only_after_its_checkpoint() -> None:
    def swap(sim: Simulation, runs: dict[int, SimulatedRun]) -> None:
        sim.preempt(runs[1])
        sim.start(runs[1], [sim.cluster.gpus[1].whole])

    _, (run,) = play(
        [SimulatedJob(1, "t", 0, 100, costs=JobCosts(restart_s=5, checkpoint_s=4))],
        (0, lambda sim, runs: sim.start(runs[1], [FULL])),
        (50, swap),
        cluster=SimulatedCluster.of(whole("a100-80gb"), 2),
    )
    assert run.ended == 50 + 4 + 5 + 50


def test_two_jobs_in_one_slice_slow_each_other_down_while_both_run() -> None:
    _, (long, short) = play(
        [SimulatedJob(1, "a", 0, 100), SimulatedJob(2, "b", 10, 20)],
        (0, lambda sim, runs: sim.start(runs[1], [FULL])),
        (10, lambda sim, runs: sim.start(runs[2], [FULL])),
        cluster=SimulatedCluster.of(whole("a100-80gb"), 1),
        speeds=Linear(SimulatedCluster.of(whole("a100-80gb"), 1), shared=1.25),
    )
    assert short.ended == 10 + 20 * 1.25
    assert long.ended == 100 + 25 - 25 / 1.25


def test_multi_gpu_job_runs_at_the_speed_of_its_slowest_gpu() -> None:
    cluster = SimulatedCluster.of(whole("a100-80gb"), 2)
    _, (gang, single) = play(
        [SimulatedJob(1, "g", 0, 100, gpus=2), SimulatedJob(2, "b", 0, 40)],
        (0, lambda sim, runs: sim.start(runs[1], [sim.cluster.gpus[0].whole, sim.cluster.gpus[1].whole])),
        (0, lambda sim, runs: sim.start(runs[2], [FULL])),
        cluster=cluster,
        speeds=Linear(cluster, shared=2.0),
    )
    assert single.ended == 80
    assert gang.ended == 80 + 60


def test_splitting_a_gpu_moves_one_job_and_starts_another() -> None:
    costs = JobCosts(checkpoint_s=3, restart_s=7)

    def split(sim: Simulation, runs: dict[int, SimulatedRun]) -> None:
        sim.move(runs[1], [FOUR])
        sim.start(runs[2], [HALF])

    result, (first, second) = play(
        [SimulatedJob(1, "a", 0, 70, costs=costs), SimulatedJob(2, "b", 10, 30)],
        (0, lambda sim, runs: sim.start(runs[1], [FULL])),
        (10.24, split),
    )
    # destroying 7g and creating 4g after the checkpoint, then the restart
    assert first.ended == pytest.approx(10.24 + 3 + 0.22 + 0.21 + 7 + 60 * 7 / 4)
    assert second.ended == pytest.approx(10.24 + 3 + 0.20 + 30 * 7 / 3)
    assert (result.created, result.destroyed, first.moves) == (3, 1, 1)


def test_resized_elastic_job_keeps_common_places_and_pauses_as_given() -> None:
    cluster = SimulatedCluster.of(whole("a100-80gb"), 4)

    def grow(sim: Simulation, runs: dict[int, SimulatedRun]) -> None:
        sim.move(runs[1], [gpu.whole for gpu in sim.cluster.gpus], save=0, pause=2)

    def shrink(sim: Simulation, runs: dict[int, SimulatedRun]) -> None:
        sim.move(runs[1], [FULL], save=0, pause=1)
        assert sim.cluster.empty == 0b1110

    _, (run,) = play(
        [SimulatedJob(1, "e", 0, 100, gpus=1, most=4, costs=JobCosts(checkpoint_s=50, restart_s=50))],
        (0, lambda sim, runs: sim.start(runs[1], [FULL])),
        (10, grow),
        (20, shrink),
        cluster=cluster,
        speeds=Linear(cluster, most=math.inf),
    )
    assert run.ended == 20 + 1 + (100 - 10 - 8 * 4)
    assert run.paused == 3
    assert run.service == (10 + 11 * 0 + 1 + (100 - 10 - 32)) * 7 + 10 * 28


def test_neighbour_on_the_same_gpu_slows_a_job_by_its_sensitivity() -> None:
    class Known(Neighbours):
        def draw(self, count: int, rng: Any) -> list[float]:
            return [0.07] * count

    _, (first, second) = play(
        [SimulatedJob(1, "a", 0, 4, gpus=1), SimulatedJob(2, "b", 0, 300)],
        (0, lambda sim, runs: sim.start(runs[1], [FOUR], pause=-0.21)),
        (0, lambda sim, runs: sim.start(runs[2], [HALF], pause=-0.20)),
        neighbours=Known(),
    )
    # each holds half of the memory, which is all the memory that the other one does not hold
    assert first.ended == pytest.approx(7 * 1.07)
    assert second.ended == pytest.approx(7 * 1.07 + (300 - 7 * 3 / 7) * 7 / 3)


def test_events_at_the_same_time_reach_the_policy_in_a_fixed_order() -> None:
    jobs = [SimulatedJob(1, "a", 0, 10), SimulatedJob(2, "b", 10, 1)]
    script = Script((0, lambda sim, runs: sim.start(runs[1], [FULL])), (10, lambda sim, runs: None))
    cluster = SimulatedCluster.of(whole("a100-80gb"), 1)
    Simulation(cluster, jobs, script, Whole()).run()
    assert script.events == [
        (0, "timer"), (0, "arrive", 1), (10, "complete", 1), (10, "timer"), (10, "arrive", 2),
    ]  # fmt: skip


def test_simulation_stops_at_its_horizon_and_counts_slices_held_so_far() -> None:
    result, (run,) = play(
        [SimulatedJob(1, "a", 0, 100)],
        (0, lambda sim, runs: sim.start(runs[1], [FULL])),
        cluster=SimulatedCluster.of(whole("a100-80gb"), 1),
        until=40,
    )
    assert run.ended is None
    assert run.left == 60
    assert (result.end, result.held) == (40, 40 * 7)


def test_invalid_policy_actions_raise_errors_that_name_job_and_gpu() -> None:
    one_job = [SimulatedJob(1, "a", 0, 10)]
    two = [SimulatedJob(1, "a", 0, 10), SimulatedJob(2, "b", 0, 10)]

    def start(*places: Place) -> Callable[[Simulation, dict[int, SimulatedRun]], None]:
        return lambda sim, runs: [sim.start(runs[n + 1], [place]) for n, place in enumerate(places)]  # type: ignore[return-value]

    with pytest.raises(PlaceError, match=r"GPU 0 has no room for 4g.40gb@0:4 of b: 4g.40gb@0:4 overlaps 7g.80gb@0:8"):
        play(two, (0, start(FULL, FOUR)))
    with pytest.raises(PlaceError, match="cannot be placed at 1:4"):
        play(one_job, (0, start(Place(0, Slot.of("4g.40gb", 1, 4)))))
    with pytest.raises(SimulationError, match="a cannot be started, it is not pending"):
        play(one_job, (0, lambda sim, runs: [sim.start(runs[1], [FULL]), sim.start(runs[1], [FULL])]))
    with pytest.raises(SimulationError, match="a cannot be moved, it is not running"):
        play(one_job, (0, lambda sim, runs: sim.move(runs[1], [FULL])))
    with pytest.raises(SimulationError, match="a cannot be preempted, it is not running"):
        play(one_job, (0, lambda sim, runs: sim.preempt(runs[1])))
    with pytest.raises(SimulationError, match="a is given a place twice"):
        play(one_job, (0, lambda sim, runs: sim.start(runs[1], [FULL, FULL])))
    with pytest.raises(SimulationError, match="a is given no places"):
        play(one_job, (0, lambda sim, runs: sim.start(runs[1], [])))

    class Nowhere(Linear):
        def speed(self, job: SimulatedJob, places: Sequence[Place]) -> float:
            return 0.0

    with pytest.raises(SimulationError, match=r"a does not fit at its place \(0:7g.80gb@0:8\)"):
        play(one_job, (0, start(FULL)), speeds=Nowhere(SimulatedCluster.of(A100, 1)))


def test_policy_that_sets_timers_without_advancing_time_is_stopped() -> None:
    def again(sim: Simulation, runs: dict[int, SimulatedRun]) -> None:
        sim.wake(sim.now, again)

    with pytest.raises(SimulationError, match="keeps setting timers for this moment"):
        play([SimulatedJob(1, "a", 0, 10)], (0, again))


def test_duplicate_job_ids_and_invalid_jobs_are_refused() -> None:
    with pytest.raises(SimulationError, match="same id"):
        play([SimulatedJob(1, "a", 0, 10), SimulatedJob(1, "b", 0, 10)])
    for wrong, message in (
        ({"arrival": -1.0, "work": 1.0}, "arrival"),
        ({"arrival": 0.0, "work": 0.0}, "work"),
        ({"arrival": 0.0, "work": math.nan}, "work"),
        ({"arrival": 0.0, "work": 1.0, "gpus": 0}, "at least 1 GPU"),
        ({"arrival": 0.0, "work": 1.0, "gpus": 2, "most": 1}, "least <= gpus <= most"),
    ):
        with pytest.raises(JobError, match=message):
            SimulatedJob(1, "x", **wrong)  # type: ignore[arg-type]


def test_layout_configured_before_the_start_costs_no_time() -> None:
    class Static(Script):
        def begin(self, sim: Simulation) -> None:
            super().begin(sim)
            sim.cluster.configure(0, Layout([FOUR.slot, HALF.slot]))
            with pytest.raises(PlaceError, match=r"GPU 0: 3g\.40gb cannot be placed at 1:4"):
                sim.cluster.configure(0, Layout([Slot.of("3g.40gb", 1, 4)]))

    cluster = SimulatedCluster.of(A100, 1)
    script = Static((0, lambda sim, runs: sim.start(runs[1], [HALF])))
    result = Simulation(cluster, [SimulatedJob(1, "a", 0, 3)], script, Linear(cluster)).run()
    assert result.runs[0].ended == 7
    assert result.created == 0

"""Workloads on the simulated Slurm and nodes, with the real controller."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slurm_migbatch.config import Config, LendingConfig, loads
from slurm_migbatch.decide.snapshot import NoPredictions
from slurm_migbatch.lab.sim.gpus import geometry
from slurm_migbatch.lab.slurm.controller import ServiceController, pace_of
from slurm_migbatch.lab.slurm.run import (
    ControllerInput,
    RoundTiming,
    SimulatedSite,
    SiteNode,
    SlurmSimulation,
    Stuck,
    Submission,
    WorkloadOutcome,
)
from slurm_migbatch.lab.slurm.work import PAUSE_S, Fixed, SimulatedTraining
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.workload.loans import LoanHints

H100 = geometry("h100-80gb")
SITE = SimulatedSite((SiteNode("n1", (H100, H100)), SiteNode("n2", (H100, H100))))


def ran(jobs: list[Submission], where: SimulatedSite = SITE) -> WorkloadOutcome:
    simulation = SlurmSimulation(where, jobs)
    return simulation.run(ServiceController(simulation), RoundTiming(), 20_000.0)


def test_jobs_of_every_size_complete_without_misfits() -> None:
    kinds = ["1g.10gb", "2g.20gb", "3g.40gb", "7g.80gb"]
    jobs = [Submission(5 + 3.0 * n, f"mig:{kinds[n % 4]}:1", lambda: Fixed(40.0), limit_s=120) for n in range(40)]
    simulation = SlurmSimulation(SITE, jobs)
    outcome = simulation.run(ServiceController(simulation), RoundTiming(), 20_000.0)
    assert len(outcome.jobs) == 40
    assert {job_outcome.state for job_outcome in outcome.jobs.values()} == {"COMPLETED"}
    assert not outcome.misfits and not simulation.nodes.unplanned
    assert all(job_outcome.end - (job_outcome.start or 0.0) >= 40.0 for job_outcome in outcome.jobs.values())


def test_same_workload_gives_the_same_outcome() -> None:
    jobs = [Submission(2.0 * n, f"mig:{n % 3 + 1}g.{(10, 20, 40)[n % 3]}gb:1", lambda: Fixed(30.0)) for n in range(30)]
    first, second = ran(jobs), ran(jobs)
    assert [replace(job, row=None) for job in first.jobs.values()] == [  # type: ignore[arg-type]
        replace(job, row=None)
        for job in second.jobs.values()  # type: ignore[arg-type]
    ]


def test_an_array_runs_within_its_throttle() -> None:
    outcome = ran([Submission(0.0, "mig:1g.10gb:1", lambda: Fixed(20.0), array="0-9%2")])
    spans = sorted((task.start or 0.0, task.end) for task in outcome.jobs.values())
    assert len(spans) == 10
    assert all(sum(begin <= at < end for begin, end in spans) <= 2 for at, _ in spans)


def test_job_starts_after_its_dependencies_and_its_begin_time() -> None:
    jobs = [
        Submission(0.0, "mig:1g.10gb:1", lambda: Fixed(50.0), begin_s=30.0),
        Submission(0.0, "mig:1g.10gb:1", lambda: Fixed(5.0), after=(0,)),
        Submission(0.0, "mig:5g.60gb:1"),
        Submission(1.0, "mig:1g.10gb:1", after=(2,)),
    ]
    outcome = ran(jobs)
    first, second = (outcome.jobs[job] for job in outcome.submissions[:2] if job is not None)
    assert first.start is not None and first.start >= outcome.begin + 30
    assert second.start is not None and second.start >= first.end
    assert outcome.submissions[2:] == (None, None) and "dependency" in outcome.refusals[3]


def test_a_submission_that_slurm_refuses_has_no_job() -> None:
    outcome = ran([Submission(0.0, "mig:5g.60gb:1"), Submission(1.0, "mig:1g.10gb:1", lambda: Fixed(5.0))])
    assert outcome.submissions[0] is None and outcome.submissions[1] in outcome.jobs


def test_simulation_that_cannot_progress_raises_an_error() -> None:
    def nobody(controller_input: ControllerInput) -> bool:
        return False

    simulation = SlurmSimulation(SITE, [Submission(0.0, "mig:7g.80gb:1")])
    with pytest.raises(Stuck, match=r"7g\.80gb"):
        simulation.run(nobody)


def test_long_simulation_is_not_stuck_when_its_last_running_job_has_ended() -> None:
    """Nothing else is going to happen by itself then, but the next round lets the next job start."""
    site = SimulatedSite((SiteNode("n1", (H100,)),))
    jobs = [Submission(0.0, f"mig:{kind}:1", lambda: Fixed(2000.0)) for kind in ("7g.80gb", "1g.10gb")]
    simulation = SlurmSimulation(site, jobs)
    controller = ServiceController(simulation)
    rounds = 0

    def many_rounds(controller_input: ControllerInput) -> bool:
        nonlocal rounds
        rounds += 1
        running = any(row.state == "RUNNING" for row in controller_input.jobs)
        return controller(controller_input) or (running and rounds < 999)

    outcome = simulation.run(many_rounds, RoundTiming(soon_s=1.0, idle_s=5000.0), 20_000.0)
    assert [outcome.jobs[job].state for job in outcome.submissions if job is not None] == ["COMPLETED"] * 2


def test_misfit_job_starts_as_soon_as_a_slice_is_free() -> None:
    """Not only after the two minutes by which Slurm delays a requeued job."""
    jobs = [Submission(at, "mig:4g.40gb:1", lambda: Fixed(60.0), limit_s=120) for at in (0.0, 30.0)]
    simulation = SlurmSimulation(SimulatedSite((SiteNode("n1", (H100, H100)),)), jobs)

    def lose_a_slot() -> None:
        for uuid, layout in simulation.nodes.known["n1"].items():
            for slot in layout.slots:
                if slot.profile.name == "4g.40gb" and slot not in simulation.nodes.held["n1"][uuid]:
                    simulation.nodes.zombie("n1", uuid, slot)

    simulation.clock.at(simulation.begin + 29.99, lose_a_slot)
    outcome = simulation.run(ServiceController(simulation))
    first, second = (outcome.jobs[job] for job in outcome.submissions if job is not None)
    assert outcome.misfits == (outcome.submissions[1],)
    assert second.end < first.end + 60.0 + 5.0


TRAIN = Submission(
    0.0,
    "mig:loan:1",
    lambda: SimulatedTraining(60.0, speed),
    "train",
    fields={"comment": "migbatch: role=train model=bert batch=8 signal=usr1 [mig:loan:1#loan0001]"},
)
LENT = SimulatedSite((SiteNode("n1", (H100,), ("gpu", "train")),))


@pytest.mark.parametrize("hours", ["", 'blackout = ["00:00-24:00"]'])
def test_simulation_uses_the_configuration_of_migbatch_toml(hours: str) -> None:
    config = loads(f'[cluster]\npoll_s = 5.0\n[lending]\nenabled = true\npartitions = ["train"]\n{hours}\n')
    simulation = SlurmSimulation(LENT, [TRAIN])
    outcome = simulation.run(ServiceController(simulation, config), pace_of(config), 300.0)
    assert len(outcome.jobs) == (0 if hours else 1)
    assert outcome.rounds >= (60 if hours else 10), "the service's rounds do not depend on what happens"


def test_exception_in_a_decision_ends_the_simulation() -> None:
    class Broken(NoPredictions):
        def training_speeds(self, _hints: LoanHints, _partition: str, /) -> dict[Profile, float]:
            raise LookupError("no such model")

    simulation = SlurmSimulation(LENT, [TRAIN])
    config = Config(lending=LendingConfig(enabled=True, partitions=("train",)))
    with pytest.raises(LookupError, match="no such model"):
        simulation.run(ServiceController(simulation, config, Broken()), RoundTiming(), 300.0)


# -- simulated work of jobs --------------------------------------------------------------------------------------------


def speed(profile: Profile) -> float:
    return profile.compute / 7


def test_training_job_continues_from_its_checkpoint() -> None:
    work = SimulatedTraining(100.0, speed, start_s=5.0, restart_s=3.0, checkpoint_s=2.0)
    work.begin(0.0, [Profile.parse("7g.80gb")], 0)
    assert work.end_at() == 105.0
    assert work.usr(45.0) == 47.0
    assert (work.saved, work.end_at()) == (40.0, 107.0 + PAUSE_S)
    assert work.usr(46.0) == 47.0, "signalled again, it finishes the current checkpoint"
    assert work.term(60.0, 30.0) == 60.0, "it is paused, and all its work is saved"
    assert work.saved == 40.0
    work.begin(60.0, [Profile.parse("7g.80gb")], 1)
    assert work.usr(61.0) is None, "no signal handler is installed yet"
    assert work.term(62.0, 30.0) == 62.0
    work.begin(62.0, [Profile.parse("7g.80gb")], 1)
    assert work.term(75.0, 30.0) == 77.0
    assert work.saved == 50.0
    work.begin(100.0, [Profile.parse("1g.10gb")], 1)
    assert work.end_at() == pytest.approx(103.0 + 50.0 * 7)


def test_work_after_the_last_checkpoint_is_lost() -> None:
    work = SimulatedTraining(100.0, speed, start_s=0.0, hears_term=False, every_s=8.0, checkpoint_s=2.0)
    work.begin(0.0, [Profile.parse("7g.80gb")], 0)
    assert work.end_at() == pytest.approx(125.0)
    assert work.term(25.0, 30.0) == 25.0
    assert work.saved == pytest.approx(16.0)
    slow = SimulatedTraining(100.0, speed, start_s=0.0, checkpoint_s=60.0)
    slow.begin(0.0, [Profile.parse("7g.80gb")], 0)
    assert (slow.term(10.0, 30.0), slow.saved) == (40.0, 0.0)


def test_lower_pace_delays_the_end_of_a_training_job() -> None:
    work = SimulatedTraining(100.0, speed, start_s=0.0)
    work.begin(0.0, [Profile.parse("7g.80gb")], 0)
    work.pace(20.0, 0.5)
    assert work.end_at() == pytest.approx(180.0)
    work.pace(60.0, 1.0)
    assert work.end_at() == pytest.approx(120.0)

"""retry=oom on the simulated Slurm: a job, or a task of an array, runs once more on a larger slice."""

from __future__ import annotations

import pytest

from slurm_migbatch.daemon.retrying import OomRetries
from slurm_migbatch.lab.slurm.client import SimulatedSlurm
from slurm_migbatch.lab.slurm.clock import VirtualClock
from slurm_migbatch.lab.slurm.records import SlurmSettings
from slurm_migbatch.predict.recurring import FAILED, RunsPolicy
from slurm_migbatch.slurm.client import SlurmError
from slurm_migbatch.store.recurring import RecurringRun
from tests.support.gpu_kinds import SITE

COMMENT = "migbatch: retry=oom max=1g.20gb [mig:1g.10gb:1#abc]"
LARGER = "migbatch: retry=oom max=1g.20gb [mig:1g.20gb:1#abc]"


@pytest.fixture
def slurm() -> SimulatedSlurm:
    made = SimulatedSlurm(VirtualClock(), SlurmSettings(), auto=True)
    made.add_node("n1", {"1g.10gb": 3, "1g.20gb": 2})
    return made


def ran_out(slurm: SimulatedSlurm, job: int) -> RecurringRun:
    """The record of a run that fails with the memory of its slice full."""
    restart = slurm.queue[job].restarts
    slurm.completed(job, "FAILED")
    slurm.released(job)
    return RecurringRun(
        job * 10 + restart, job * 10 + restart, job, restart, het=False, recurring="",
        profile="1g.10gb", ended=FAILED, peak_mib=9700.0, sm=None, dram=None, engine="", retry=True, partition="gpu",
        high="1g.20gb",
    )  # fmt: skip


def sent(slurm: SimulatedSlurm, *rows: RecurringRun) -> list[str]:
    """The error message of each run that is retried, empty where there was none."""
    retries = OomRetries(slurm, lambda: SITE, RunsPolicy(3))  # type: ignore[arg-type]
    return [retries.send(row, offer) for row, offer in retries.due(rows, lambda key: ())]


def test_job_out_of_memory_runs_again_on_a_larger_slice(slurm: SimulatedSlurm) -> None:
    job = slurm.submit("mig:1g.10gb:1", comment=COMMENT)
    slurm.clock.sleep(3)
    assert sent(slurm, ran_out(slurm, job)) == [""]
    slurm.clock.sleep(10)
    row = slurm.queue[job]
    assert (row.state, row.gres, row.comment, row.restarts) == ("RUNNING", "gres/mig:1g.20gb:1", LARGER, 1)


def test_array_task_runs_again_on_a_larger_slice_and_others_are_unchanged(slurm: SimulatedSlurm) -> None:
    slurm.submit("mig:1g.10gb:1", array="1-9%2", comment=COMMENT)
    slurm.clock.sleep(3)
    first, second = (row for row in slurm.jobs() if row.state == "RUNNING")
    done = ran_out(slurm, first.job_id)
    slurm.completed(second.job_id)
    slurm.released(second.job_id)
    assert sent(slurm, done) == [""]
    slurm.clock.sleep(10)
    found = {row.array_task: row for row in slurm.jobs()}
    assert found["1"].reason == "JobArrayTaskLimit", "the array's throttle applies to it"
    slurm.completed(found["3"].job_id)
    slurm.released(found["3"].job_id)
    slurm.clock.sleep(10)
    found = {row.array_task: row for row in slurm.jobs()}
    again = found.pop("1")
    assert (again.state, again.gres, again.comment, again.restarts) == ("RUNNING", "gres/mig:1g.20gb:1", LARGER, 1)
    assert again.job_id == first.job_id
    assert "2" not in found, "a completed task is not run again"
    assert {(row.gres, row.comment, row.restarts) for row in found.values()} == {("gres/mig:1g.10gb:1", COMMENT, 0)}


def test_last_array_task_with_the_id_of_the_array_is_retried_alone(slurm: SimulatedSlurm) -> None:
    array = slurm.submit("mig:1g.10gb:1", array="1-3", comment=COMMENT)
    slurm.clock.sleep(3)
    tasks = {row.array_task: row.job_id for row in slurm.jobs()}
    assert tasks["3"] == array
    rows = [ran_out(slurm, job) for job in tasks.values()]
    assert sent(slurm, rows[2]) == [""]
    slurm.clock.sleep(10)
    assert [(row.job_id, row.array_task, row.gres) for row in slurm.jobs()] == [(array, "3", "gres/mig:1g.20gb:1")]


def test_each_array_task_is_retried_only_once(slurm: SimulatedSlurm) -> None:
    slurm.submit("mig:1g.10gb:1", array="1-2", comment=COMMENT)
    slurm.clock.sleep(3)
    jobs = [row.job_id for row in slurm.jobs()]
    assert sent(slurm, *[ran_out(slurm, job) for job in jobs]) == ["", ""]
    slurm.clock.sleep(10)
    assert [row.restarts for row in slurm.jobs()] == [1, 1]
    assert sent(slurm, *[ran_out(slurm, job) for job in jobs]) == []
    assert slurm.jobs() == []


def test_pending_or_running_job_is_not_retried(slurm: SimulatedSlurm) -> None:
    job = slurm.submit("mig:1g.10gb:1", comment=COMMENT)
    slurm.clock.sleep(3)
    row = ran_out(slurm, job)
    assert sent(slurm, row) == [""]
    assert "pending or running again" in sent(slurm, row)[0]
    with pytest.raises(SlurmError):
        slurm.requeue_ended(999, update=lambda row: {})


def test_job_that_cannot_be_retried_is_not_left_held(slurm: SimulatedSlurm) -> None:
    job = slurm.submit("mig:1g.10gb:1", comment="mine")
    slurm.clock.sleep(3)
    assert "one slice" in sent(slurm, ran_out(slurm, job))[0]
    slurm.clock.sleep(200)
    assert (slurm.queue[job].state, slurm.queue[job].gres) == ("RUNNING", "gres/mig:1g.10gb:1")

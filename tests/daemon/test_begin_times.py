"""Start times that Slurm has overlooked: a requeued job on a cluster where nothing else happens."""

from __future__ import annotations

from dataclasses import replace

from slurm_migbatch.daemon.begin_times import BeginTimes
from slurm_migbatch.slurm.client import JobRow

NOW = 1_800_000_000.0
WAITING = JobRow(7, state="PENDING", reason="BeginTime", eligible=NOW + 2, submit=NOW - 1)


def after(row: JobRow, *moments: float) -> list[list[int]]:
    """Return what was overlooked at each moment, in seconds after the start time was given."""
    times = BeginTimes()
    times.note([7], NOW)
    return [[found.job_id for found in times.overlooked([row], NOW + at)] for at in moments]


def test_overlooked_job_is_returned_once_and_not_in_its_first_second() -> None:
    assert after(WAITING, 0, 2.5, 3.5, 4.5) == [[], [], [7], []]


def test_job_that_slurm_has_examined_is_left_alone() -> None:
    assert after(replace(WAITING, reason="Resources"), 3.5, 4.5) == [[], []]
    assert after(replace(WAITING, state="RUNNING", reason="None"), 3.5, 4.5) == [[], []]


def test_start_time_of_a_user_is_left_alone() -> None:
    """Nobody noted it; and one far ahead is not a start time that migbatchd has given."""
    assert BeginTimes().overlooked([WAITING], NOW + 10) == []
    assert after(replace(WAITING, eligible=NOW + 3600), 5, 100, 3700) == [[], [], []]


def test_state_of_the_moment_of_the_request_is_not_taken_for_its_result() -> None:
    """The queue was listed before the request, and had an earlier start time."""
    assert after(replace(WAITING, eligible=NOW - 30), 0.0) == [[]]


def test_jobs_that_have_left_the_queue_are_forgotten() -> None:
    times = BeginTimes()
    times.note([7], NOW)
    assert times.overlooked([], NOW + 1) == []
    assert times.overlooked([WAITING], NOW + 5) == []

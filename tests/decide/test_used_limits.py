"""The part of their time limits that jobs usually use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.decide.supply.used_limits import UsedLimits
from slurm_migbatch.slurm.client import JobRow
from tests.support.daemon_running import pending

LIMIT = 100


def running(job: int) -> JobRow:
    row = pending(job, "gres/mig:1g.10gb:1", time_limit_s=LIMIT)
    return replace(row, state="RUNNING", start=0.0, nodes=("n1",))


def after(used: Sequence[float]) -> UsedLimits:
    """Return what is known after jobs that used these parts of their limits, one after the other."""
    limits = UsedLimits()
    for job, part in enumerate(used):
        row = running(job)
        limits.follow({job: row}, [row], 0.0)
        limits.follow({}, (), part * LIMIT)
        limits.follow({}, (), LIMIT)  # the same queue again changes nothing
    return limits


@pytest.mark.parametrize(
    ("used", "usual"),
    [
        ([], 1.0),
        ([0.2] * 5, 1.0),
        ([0.2] * 20, 0.2),
        ([0.2] * 18 + [0.9] * 2, 0.9),
        ([0.2] * 17 + [0.9] * 3, 0.9),
        ([2.0] * 20, 1.0),
        ([0.0] * 20, 0.01),
        ([0.9] * 300 + [0.3] * 256, 0.3),
    ],
)
def test_nine_of_ten_jobs_use_no_more(used: list[float], usual: float) -> None:
    assert after(used).usual == pytest.approx(usual)


@given(st.lists(st.floats(0, 3), max_size=40))
def test_part_is_positive_and_at_most_the_whole_limit(used: list[float]) -> None:
    assert 0 < after(used).usual <= 1


def test_job_that_is_requeued_or_without_a_limit_is_not_counted() -> None:
    limits, endless = UsedLimits(), replace(running(2), time_limit_s=None)
    for row in (running(1), replace(running(1), state="PENDING", start=None, nodes=())):
        limits.follow({1: row, 2: endless}, [row, endless], 10.0)
    limits.follow({}, (), 20.0)
    assert limits == UsedLimits()

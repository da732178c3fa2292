"""The part of their time limits that jobs usually use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.decide.supply.used_limits import UsedLimits, UsualParts
from slurm_migbatch.slurm.client import JobRow
from tests.support.daemon_running import pending

LIMIT = 100
SOMEBODY, ANOTHER, NEW = 1, 2, 9


def running(job: int, uid: int = SOMEBODY) -> JobRow:
    row = pending(job, "gres/mig:1g.10gb:1", time_limit_s=LIMIT)
    return replace(row, state="RUNNING", start=0.0, nodes=("n1",), uid=uid)


def after(used: Iterable[tuple[int, float]]) -> UsedLimits:
    """Return what is known after jobs of these users used these parts of their limits, one after the other."""
    limits = UsedLimits()
    for job, (uid, part) in enumerate(used):
        row = running(job, uid)
        limits.follow({job: row}, [row], 0.0)
        limits.follow({}, (), part * LIMIT)
        limits.follow({}, (), LIMIT)  # the same queue again changes nothing
    return limits


def usual(used: Iterable[tuple[int, float]], uid: int) -> float:
    return UsualParts(after(used).parts).of(uid)


def of(uid: int, used: Sequence[float]) -> list[tuple[int, float]]:
    return [(uid, part) for part in used]


@pytest.mark.parametrize(
    ("used", "expected"),
    [
        ([], 1.0),
        ([0.2] * 5, 1.0),
        ([0.2] * 17, 1.0),
        ([0.2] * 18, 0.2),
        ([0.2] * 18 + [0.9] * 2, 0.9),
        ([0.2] * 17 + [0.9] * 3, 0.9),
        ([0.9] + [0.2] * 31, 0.2),
        ([2.0] * 20, 1.0),
        ([0.0] * 20, 0.01),
        ([0.9] * 300 + [0.3] * 32, 0.3),
    ],
)
def test_nine_of_ten_jobs_of_a_user_use_no_more(used: list[float], expected: float) -> None:
    assert usual(of(SOMEBODY, used), SOMEBODY) == pytest.approx(expected)


@given(st.lists(st.tuples(st.integers(1, 3), st.floats(0, 3)), max_size=100), st.integers(1, 4))
def test_part_is_positive_and_at_most_the_whole_limit(used: list[tuple[int, float]], uid: int) -> None:
    assert 0 < usual(used, uid) <= 1


def test_many_short_jobs_of_one_user_do_not_count_for_another() -> None:
    long, short = of(ANOTHER, [0.8] * 20), of(SOMEBODY, [0.1] * 500)
    assert usual([*long, *short], ANOTHER) == pytest.approx(0.8)
    assert usual([*long, *short], SOMEBODY) == pytest.approx(0.1)


def test_user_with_few_jobs_has_the_part_of_all_users_jobs_or_his_largest() -> None:
    others = [*of(SOMEBODY, [0.1] * 500), *of(ANOTHER, [0.4] * 30)]
    assert usual(others, NEW) == pytest.approx(0.4), "of each user equally many count"
    assert usual([*others, *of(NEW, [0.2])], NEW) == pytest.approx(0.4)
    assert usual([*others, *of(NEW, [0.7])], NEW) == pytest.approx(0.7)


def test_users_whose_jobs_ended_last_are_remembered() -> None:
    users = range(1000)
    limits = after([(uid, 0.5) for uid in users for _ in range(2)] + [(0, 0.5)])
    assert set(limits.parts) == {0, *users[-255:]}


def test_job_that_is_requeued_or_without_a_limit_is_not_counted() -> None:
    limits, endless = UsedLimits(), replace(running(2), time_limit_s=None)
    for row in (running(1), replace(running(1), state="PENDING", start=None, nodes=())):
        limits.follow({1: row, 2: endless}, [row, endless], 10.0)
    limits.follow({}, (), 20.0)
    assert limits == UsedLimits()

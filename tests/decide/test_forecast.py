"""Idle windows: what was seen before is expected again, and what was not seen is not counted on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.decide.lending.forecast import DAY_S, Gaps, Levels, Rises


def test_a_gap_that_has_lasted_is_a_long_one():
    gaps = Gaps()
    for _ in range(90):
        gaps.add(60.0)
    for _ in range(10):
        gaps.add(3600.0)
    assert gaps.lasting(0, 600) == pytest.approx(10 / 101)
    assert gaps.lasting(120, 600) == pytest.approx(10 / 11)


def test_nothing_is_counted_on_that_was_never_seen():
    gaps = Gaps()
    assert gaps.lasting(0, 1) == 0.0
    gaps.add(100.0)
    assert gaps.lasting(100, 1) == 0.0


def test_old_gaps_are_forgotten():
    gaps = Gaps(most=3)
    for seconds in (1000.0, 1.0, 1.0, 1.0):
        gaps.add(seconds)
    assert len(gaps) == 3
    assert gaps.lasting(0, 10) == 0.0


@given(
    st.lists(st.floats(0.1, 1e5), max_size=60),
    st.floats(0, 1e4),
    st.floats(0, 1e4),
    st.floats(0, 1e4),
)
def test_survival_is_a_probability_that_falls_with_the_window(lengths, idle, short, more):
    gaps = Gaps()
    for seconds in lengths:
        gaps.add(seconds)
    assert 0 <= gaps.lasting(idle, short + more) <= gaps.lasting(idle, short) < 1


def days(levels, count, busy, quiet=2):
    """So many days with `busy` slices needed from 9 to 17 o'clock and `quiet` otherwise."""
    for day in range(count):
        for minute in range(24 * 60):
            at = day * DAY_S + minute * 60
            levels.demand(at, busy if 540 <= minute < 1020 else quiet, 1)
    return count * DAY_S


def test_the_time_of_day_says_what_is_needed():
    levels = Levels()
    now = days(levels, 3, 20)
    assert levels.days == pytest.approx(3)
    assert levels.needed(now + 3 * 3600, 1800) == 2
    for minute in range(8 * 60 + 50):
        levels.demand(now + minute * 60, 2, 1)
    assert levels.needed(now + (8 * 60 + 50) * 60, 1800) == 20


def test_without_history_what_was_needed_last_is_what_is_known():
    levels = Levels()
    levels.demand(0, 5)
    levels.demand(30, 1)
    assert levels.needed(60, 1800) == 5
    assert levels.needed(1500, 1800) == 1


def test_a_rate_above_the_usual_raises_what_is_expected():
    levels = Levels()
    now = days(levels, 2, 8, quiet=8)
    assert levels.needed(now, 600) == 8
    for minute in range(30):
        levels.demand(now + minute * 60, 8, 4)
    assert 8 < levels.needed(now + 1800, 600) <= 8 * 3


@given(st.lists(st.tuples(st.floats(0, 4000), st.integers(0, 30)), min_size=1, max_size=40), st.floats(60, 7200))
def test_never_less_than_now_and_longer_never_needs_less(steps, horizon):
    levels = Levels()
    now = 0.0
    for wait, level in steps:
        now += wait
        levels.demand(now, level)
    assert levels.needed(now, horizon) >= steps[-1][1]
    assert levels.needed(now, horizon * 2) >= levels.needed(now, horizon)


def test_what_counts_as_recent_can_be_said():
    levels = Levels()
    levels.demand(0, 9)
    levels.demand(60, 1)
    levels.demand(300, 1)
    assert levels.needed(300, 60) == 9
    assert levels.needed(300, 60, recent_s=120) == 1


def test_a_compressed_day_is_a_day():
    usual, compressed = Levels(), Levels(day_s=DAY_S / 100)
    for minute in range(3 * 24 * 60):
        level = 20 if 540 <= minute % 1440 < 1020 else 2
        usual.demand(minute * 60, level, 1)
        compressed.demand(minute * 0.6, level, 1)
    for minute in range(3 * 1440, 4 * 1440, 60):
        assert compressed.needed(minute * 0.6, 6.0, 0.9) == usual.needed(minute * 60, 600.0, 0.9)


# -- rises -------------------------------------------------------------------------------------------------------------


def busy(rises, begin, seconds, low, high, every):
    """Demand that is `high` for a tenth of every so many seconds, and `low` otherwise."""
    at = begin
    while at < begin + seconds:
        rises.demand(at, high)
        rises.demand(at + every / 10, low)
        at += every
    return at


def test_a_level_that_is_seldom_exceeded_is_enough():
    rises = Rises()
    now = busy(rises, 0.0, 7200, 2, 5, 100)  # every 100 s demand rises above 2, 3 and 4, for 10 s
    assert rises.enough(now, 80) == 2
    assert rises.enough(now + 60, 120) == 5


def test_the_more_often_demand_rises_the_more_is_kept():
    seldom, often = Rises(), Rises()
    for rises, every in ((seldom, 1000), (often, 50)):
        now = busy(rises, 0.0, 7200, 1, 3, every)
        assert rises.enough(now, 300) == (1 if rises is seldom else 3)


def test_what_was_long_ago_no_longer_counts_but_the_same_hour_of_yesterday_does():
    rises = Rises(days=2)
    busy(rises, 0.0, 3600, 0, 4, 60)
    assert rises.enough(3 * 3600.0, 600) == 0
    assert rises.enough(DAY_S + 1800, 600) == 4
    assert rises.enough(4 * DAY_S, 600) == 0


def test_nothing_is_known_at_first_and_what_stays_needed_is_enough():
    rises = Rises()
    assert rises.enough(0.0, 60) == 0
    rises.demand(0.0, 7)
    assert rises.enough(600.0, 60) == 7


def test_rises_in_compressed_days():
    plain, fast = Rises(), Rises(day_s=864.0)
    now = busy(plain, 0.0, 7200, 1, 3, 600)
    busy(fast, 0.0, 72, 1, 3, 6)
    for idle_s in (100, 500, 1000):
        assert plain.enough(now, idle_s) == fast.enough(now / 100, idle_s / 100)

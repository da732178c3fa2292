"""Levels of demand: the forecast expects earlier levels to recur."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.decide.lending.forecast import DAY_S
from slurm_migbatch.lab.papers.forecast import Levels


def days(levels, count, busy, quiet=2):
    """`count` days with `busy` slices needed from 9:00 to 17:00 and `quiet` otherwise."""
    for day in range(count):
        for minute in range(24 * 60):
            at = day * DAY_S + minute * 60
            levels.demand(at, busy if 540 <= minute < 1020 else quiet, 1)
    return count * DAY_S


def test_forecast_follows_the_time_of_day():
    levels = Levels()
    now = days(levels, 3, 20)
    assert levels.days == pytest.approx(3)
    assert levels.needed(now + 3 * 3600, 1800) == 2
    for minute in range(8 * 60 + 50):
        levels.demand(now + minute * 60, 2, 1)
    assert levels.needed(now + (8 * 60 + 50) * 60, 1800) == 20


def test_forecast_without_history_is_the_recent_maximum():
    levels = Levels()
    levels.demand(0, 5)
    levels.demand(30, 1)
    assert levels.needed(60, 1800) == 5
    assert levels.needed(1500, 1800) == 1


def test_demand_rate_above_the_usual_one_raises_the_forecast():
    levels = Levels()
    now = days(levels, 2, 8, quiet=8)
    assert levels.needed(now, 600) == 8
    for minute in range(30):
        levels.demand(now + minute * 60, 8, 4)
    assert 8 < levels.needed(now + 1800, 600) <= 8 * 3


@given(st.lists(st.tuples(st.floats(0, 4000), st.integers(0, 30)), min_size=1, max_size=40), st.floats(60, 7200))
def test_forecast_is_at_least_the_current_level_and_grows_with_the_horizon(steps, horizon):
    levels = Levels()
    now = 0.0
    for wait, level in steps:
        now += wait
        levels.demand(now, level)
    assert levels.needed(now, horizon) >= steps[-1][1]
    assert levels.needed(now, horizon * 2) >= levels.needed(now, horizon)


def test_length_of_the_recent_period_can_be_set():
    levels = Levels()
    levels.demand(0, 9)
    levels.demand(60, 1)
    levels.demand(300, 1)
    assert levels.needed(300, 60) == 9
    assert levels.needed(300, 60, recent_s=120) == 1


def test_compressed_day_gives_the_same_forecast_as_a_real_day():
    usual, compressed = Levels(), Levels(day_s=DAY_S / 100)
    for minute in range(3 * 24 * 60):
        level = 20 if 540 <= minute % 1440 < 1020 else 2
        usual.demand(minute * 60, level, 1)
        compressed.demand(minute * 0.6, level, 1)
    for minute in range(3 * 1440, 4 * 1440, 60):
        assert compressed.needed(minute * 0.6, 6.0, 0.9) == usual.needed(minute * 60, 600.0, 0.9)

"""Forecast of idle gaps: gaps seen before are expected again, and gaps never seen are not relied on."""

import math

from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.decide.lending.forecast import DAY_S, LEAST, LevelGaps, age_for


def busy(gaps, begin, seconds, low, high, every):
    """Demand that is `high` for a tenth of each period of `every` seconds, and `low` otherwise."""
    at = begin
    while at < begin + seconds:
        gaps.demand(at, high)
        gaps.demand(at + every / 10, low)
        at += every
    return at


def test_demand_level_that_is_seldom_exceeded_is_enough():
    for every, enough in ((1000, 1), (50, 3)):
        gaps = LevelGaps()
        now = busy(gaps, 0.0, 7200, 1, 3, every)
        gaps.demand(now, 3)
        gaps.demand(now + every / 10, 1)
        assert gaps.enough(now + every / 10 + 30, 100) == enough


def test_recently_needed_slice_is_kept():
    gaps = LevelGaps()
    now = busy(gaps, 0.0, 7200, 1, 3, 1000)
    gaps.demand(now, 3)
    gaps.demand(now + 10, 1)
    assert gaps.enough(now + 10 + LEAST * 300 - 1, 300) == 3
    assert gaps.enough(now + 10 + LEAST * 300, 300) == 1


def test_gap_that_has_lasted_for_a_while_is_expected_to_be_long():
    gaps, at = LevelGaps(), 0.0
    while at < 7200:  # five requests in a burst, 20 s apart, and then nothing for a quarter of an hour
        for _ in range(5):
            gaps.demand(at, 1)
            gaps.demand(at + 10, 0)
            at += 20
        at += 900
    begin = at - 910
    assert gaps.enough(begin + 5, 40) == 1
    assert gaps.enough(begin + 12, 40) == 0
    assert gaps.enough(begin + 100, 2000) == 1  # no gap that has lasted 100 s lasts 2000 s more


def test_slice_is_not_kept_until_a_clock_that_was_set_back_has_caught_up():
    gaps = LevelGaps()
    now = busy(gaps, 10_000.0, 7200, 0, 1, 1000)
    gaps.demand(now, 1)
    gaps.demand(now + 10, 0)
    assert gaps.enough(now + 11, 60) == 1
    assert gaps.enough(now - 3600, 60) == 0
    gaps.demand(now - 3600, 1)
    assert min(gap for part in gaps._parts.values() for _, _, gap in part) >= 0


def test_gaps_count_if_recent_or_at_the_same_hour_of_yesterday():
    gaps = LevelGaps(days=2)
    busy(gaps, 0.0, 3600, 0, 4, 60)

    def kept(now):
        gaps.demand(now - 140.0, 1)
        gaps.demand(now - 130.0, 0)
        return gaps.enough(now, 500)

    assert kept(5 * 3600.0) == 0
    assert kept(DAY_S + 1800) == 0, "it has been idle for longer than any gap of yesterday"
    gaps.demand(DAY_S + 1900, 4)
    gaps.demand(DAY_S + 1910, 0)
    assert gaps.enough(DAY_S + 1910 + 125, 500) == 0
    assert gaps.enough(DAY_S + 1910 + 40, 120) == 2, "gaps of levels 2 and 3 lasted 54 s yesterday"
    gaps.demand(4 * DAY_S, 4)
    gaps.demand(4 * DAY_S + 10, 0)
    assert gaps.enough(4 * DAY_S + 50, 120) == 0


def test_without_recorded_gaps_the_current_demand_level_is_enough():
    gaps = LevelGaps()
    assert gaps.enough(0.0, 60) == 0
    gaps.demand(0.0, 7)
    assert gaps.enough(600.0, 60) == 7


def test_forecast_in_compressed_days_equals_that_in_normal_days():
    plain, fast = LevelGaps(), LevelGaps(day_s=864.0)
    now = busy(plain, 0.0, 7200, 1, 3, 600)
    busy(fast, 0.0, 72, 1, 3, 6)
    for idle_s in (100, 500, 1000, 3000):
        assert plain.enough(now, idle_s) == fast.enough(now / 100, idle_s / 100)


def test_memory_does_not_grow_with_the_size_of_arrays():
    """One user may submit and cancel an array of a million tasks again and again."""
    gaps = LevelGaps()
    for number in range(1000):
        gaps.demand(3.0 * number, 10_000 if number % 2 else number)
    assert sum(len(part) for part in gaps._parts.values()) <= 1000


@given(
    st.lists(
        st.tuples(st.sampled_from((0.0, 1.0, 7.0, 30.0)), st.integers(0, 200) | st.sampled_from((63, 64, 65))),
        max_size=60,
    )
)
def test_each_level_has_its_own_gaps(changes):
    gaps, begins, found, level, now = LevelGaps(), [0.0] * 202, [[] for _ in range(202)], 0, 0.0
    gaps.demand(now, 0)
    for seconds, demand in changes:
        now += seconds
        gaps.demand(now, demand)
        for above in range(level, demand):
            found[above].append(now - begins[above])
        begins[demand:level] = [now] * max(0, level - demand)
        level = demand
    later = now + 1800.0  # the gaps are of the last hour, but not of the current part of it
    gaps.demand(later, 200)
    gaps.demand(later, 0)
    near = [[gap for at in found[max(0, above - 1) : above + 2] for gap in at] for above in range(200)]
    for idle in (6.0, 20.0, 100.0):
        assert gaps.enough(later + idle, 20) == sum(idle < age_for(known, 20) for known in near)


@given(st.lists(st.floats(0.1, 1e5), min_size=1, max_size=60), st.floats(1, 1e5))
def test_mean_remaining_gap_from_the_returned_age_on_meets_the_target(lengths, idle_s):
    def rest(age):
        left = [seconds - age for seconds in lengths if seconds > age]
        return sum(left) / len(left) if left else math.inf

    age = age_for(lengths, idle_s)
    assert age == 0 or age in lengths
    assert rest(age) >= idle_s * (1 - 1e-9)
    assert all(rest(other) < idle_s * (1 + 1e-9) for other in [0.0, *lengths] if other < age)

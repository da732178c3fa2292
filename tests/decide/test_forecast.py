"""Rises of demand: what was seen before is expected again, and what was not seen is not counted on."""

from slurm_migbatch.decide.lending.forecast import DAY_S, Rises


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

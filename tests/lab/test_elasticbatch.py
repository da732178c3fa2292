"""Queues and elastic instances, by stepping them through time."""

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_migbatch.lab.papers.elasticbatch import (
    Bucket,
    Elasticity,
    Item,
    Load,
    Peaks,
    bucket_of,
    decide,
    next_batch,
    patience,
)
from slurm_migbatch.lab.papers.instances import Unservable
from slurm_migbatch.lab.papers.settings import Setting
from slurm_migbatch.mig.profile import Profile
from tests.support.examples import examples

ONE, TWO, SEVEN = (Profile.parse(p) for p in ("1g.10gb", "2g.20gb", "7g.80gb"))
SMALL, BEST, LARGE = Setting(ONE, 8, 1, 1.0), Setting(TWO, 20, 1, 1.0), Setting(SEVEN, 60, 1, 1.0)
KINDS = (SMALL, BEST, LARGE)  # 8, 20 and 60 items a second: 8, 10 and 8.6 for each compute slice
RULES = Elasticity(start_s=10.0, hold_s=60.0)
BUCKETS = (Bucket(128, 8, 0.5), Bucket(256, 4, 1.0), Bucket(512, 2, 2.0))


def items(*sizes, since=0.0):
    return [Item(since + i / 100, f"i{i}", size) for i, size in enumerate(sizes)]


# -- batches


def test_items_go_to_the_bucket_that_is_large_enough():
    assert [bucket_of(BUCKETS, size) for size in (1, 128, 129, 512, 4096)] == [0, 0, 1, 2, 2]


def test_a_full_bucket_goes_at_once_and_that_of_the_oldest_item_first():
    waiting = items(500, 100, 200, 200, 200, 200, 500)
    assert [item.size for item in next_batch(BUCKETS, waiting, 0.1)] == [500, 500]
    rest = [item for item in waiting if item.size != 500]
    assert [item.size for item in next_batch(BUCKETS, rest, 0.1)] == [200] * 4
    assert next_batch(BUCKETS, items(100, 200), 0.1) == ()


def test_a_batch_that_would_be_short_takes_neighbours_within_what_its_longest_item_allows():
    short = items(200, 100, 100, 100, 100)
    assert next_batch(BUCKETS, short, 0.4) == ()
    # the 100s have waited out their patience first; one 200 may join as long as four items are not exceeded
    assert [item.size for item in next_batch(BUCKETS, short, 0.55)] == [100] * 4
    assert [item.size for item in next_batch(BUCKETS, items(200, 100, 100), 0.55)] == [200, 100, 100]
    late = items(200, 100, 100, 100, 100, 100)
    assert len(next_batch((Bucket(128, 8, 9.0), *BUCKETS[1:]), late, 1.5)) == 4


def test_patience_is_shared_by_the_instances():
    assert patience(SMALL, 4) == 0.25
    assert patience(SMALL, 0) == 1.0


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.tuples(st.floats(0, 3), st.integers(1, 600)), max_size=20), st.floats(3, 6))
def test_no_batch_exceeds_what_its_longest_item_allows_and_everything_goes_in_the_end(waiting, now):
    left = [Item(since, f"i{i}", size) for i, (since, size) in enumerate(waiting)]
    for _ in range(len(left) + 1):
        batch = next_batch(BUCKETS, left, now + 10)
        if not batch:
            break
        assert len(batch) <= BUCKETS[max(bucket_of(BUCKETS, item.size) for item in batch)].batch
        left = [item for item in left if item not in batch]
    assert not left


# -- instances


def test_a_rate_is_met_by_the_best_kind_and_the_smallest_slice_for_the_rest():
    found = decide(Load(0, 45.0), 0.0, {}, KINDS, RULES)
    assert found.target == found.start == Counter({BEST: 2, SMALL: 1})
    assert not found.stop


def test_what_waits_is_worked_off_by_its_deadline():
    # 900 items in 100 s, ten of which the start takes: 10 a second
    assert Load(900, deadline=100.0).rate(0.0, 10.0) == 10.0
    assert decide(Load(900, deadline=100.0), 0.0, {}, KINDS, RULES).target == Counter({BEST: 1})
    assert decide(Load(900, 5.0), 0.0, {}, KINDS, RULES).target == Counter({SMALL: 1})
    assert decide(Load(5), 0.0, {}, KINDS, RULES).target == Counter({SMALL: 1})
    past = decide(Load(100, deadline=-5.0), 0.0, {}, KINDS, Elasticity(10.0, 60.0, most_slices=7))
    assert sum(s.profile.compute * n for s, n in past.target.items()) <= 7
    assert past.short == pytest.approx(100 - 60)


def test_growing_leaves_alone_what_runs_and_shrinking_waits_for_the_fall_to_last():
    first = decide(Load(0, 20.0), 0.0, {}, KINDS, RULES)
    grown = decide(Load(0, 26.0), 10.0, first.target, KINDS, RULES, first.peaks)
    assert grown.start == Counter({SMALL: 1})
    assert not grown.stop
    low = decide(Load(0, 6.0), 20.0, grown.target, KINDS, RULES, grown.peaks)
    assert low.target == grown.target
    still = decide(Load(0, 6.0), 69.0, low.target, KINDS, RULES, low.peaks)
    assert still.target == grown.target
    fallen = decide(Load(0, 6.0), 71.0, still.target, KINDS, RULES, still.peaks)
    assert fallen.target == Counter({SMALL: 1})
    assert fallen.stop == Counter({BEST: 1})
    empty = decide(Load(0, 0.0), 75.0, fallen.target, KINDS, RULES, fallen.peaks)
    assert empty.target == fallen.target
    assert decide(Load(0, 0.0), 140.0, empty.target, KINDS, RULES, empty.peaks).target == Counter()


def test_no_kind_that_keeps_the_limit_is_told_only_where_one_is_needed():
    assert decide(Load(0), 0.0, {}, (), RULES).target == Counter()
    with pytest.raises(Unservable):
        decide(Load(1), 0.0, {}, (), RULES)


def test_the_limit_of_slices_leaves_out_the_least_efficient_new_ones():
    found = decide(Load(0, 45.0), 0.0, {BEST: 1}, KINDS, Elasticity(10.0, 60.0, most_slices=4))
    assert found.target == Counter({BEST: 2})
    assert found.short == pytest.approx(5.0)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.floats(0, 200), min_size=1, max_size=40))
def test_stepping_a_changing_load_it_is_always_served_and_peaks_are_the_highest_rate_of_the_window(rates):
    running, peaks = Counter(), Peaks()
    for step, rate in enumerate(rates):
        now = 7.0 * step
        found = decide(Load(0, rate), now, running, KINDS, RULES, peaks)
        window = [r for i, r in enumerate(rates[: step + 1]) if now - 7.0 * i < RULES.hold_s]
        assert found.peaks.highest == max(window)
        assert sum(s.rate * n for s, n in found.target.items()) >= rate * (1 - 1e-6)
        assert found.target == running + found.start - found.stop
        assert found.short <= rate * 1e-6
        running, peaks = found.target, found.peaks


def test_stepping_a_bulk_of_items_it_is_done_by_the_deadline_and_nothing_is_left_running():
    """20,000 items in five minutes; new instances take ten seconds to serve, and decisions are made each second."""
    left, deadline, rules = 20_000.0, 300.0, Elasticity(start_s=10.0, hold_s=30.0)
    running, peaks, ready, changes = Counter(), Peaks(), [], 0
    finished = None
    for second in range(400):
        found = decide(Load(math.ceil(left), 0.0, deadline), second, running, KINDS, rules, peaks)
        ready += [(second + rules.start_s, setting) for setting, n in found.start.items() for _ in range(n)]
        for setting, n in found.stop.items():
            for _ in range(n):
                ready.remove(next(each for each in ready if each[1] == setting))
        changes += bool(found.start or found.stop)
        running, peaks = found.target, found.peaks
        assert Counter(setting for _, setting in ready) == running
        left = max(left - sum(setting.rate for at, setting in ready if at <= second), 0.0)
        if not left and finished is None:
            finished = second
    assert finished is not None
    assert finished <= deadline
    assert not running
    assert changes <= 12

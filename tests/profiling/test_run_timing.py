"""Warm-up and timing, with batches of given times."""

from itertools import chain, repeat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.profiling.timing import LEAST, MAX_BATCHES, P99_SAMPLE, Effort, Summary, collect, warm_up

seconds = st.floats(1e-6, 100.0)


def batches(*first, then=0.01):
    times = chain(first, repeat(then))
    return lambda: next(times)


def test_warmup_lasts_until_the_times_settle():
    falling = [1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2]
    assert warm_up(batches(*falling, then=0.1), Effort(warmup=3, min_seconds=0)) > len(falling)
    assert warm_up(batches(then=0.1), Effort(warmup=3, min_seconds=0)) == 6


def test_warmup_lasts_long_enough_for_clocks_to_rise():
    assert warm_up(batches(then=0.01), Effort(warmup=3, min_seconds=1.0)) >= 50


def test_slow_first_batch_does_not_end_the_warmup():
    assert warm_up(batches(60.0, then=0.1), Effort(warmup=5, warmup_seconds=10, min_seconds=0)) >= 5


def test_warmup_ends_when_times_never_settle():
    times = chain.from_iterable(repeat((0.1, 1.0, 3.0, 0.2, 0.7)))
    assert warm_up(lambda: next(times), Effort(warmup=3, warmup_seconds=10)) < 20
    assert warm_up(batches(then=30.0), Effort(warmup=3, warmup_seconds=10)) == 2


def test_minimum_repeats_and_minimum_seconds_are_both_reached():
    assert len(collect(batches(then=0.1), Effort(repeats=20, min_seconds=1))) == 20
    assert len(collect(batches(then=0.01), Effort(repeats=20, min_seconds=1))) in (100, 101)  # sums of 0.01 are rounded


def test_slow_batches_end_at_max_seconds_after_a_minimum_number():
    assert len(collect(batches(then=5.0), Effort(repeats=20, max_seconds=30))) == 6
    assert len(collect(batches(then=100.0), Effort(repeats=20, max_seconds=30))) == LEAST


def test_fast_batches_end_at_the_maximum_number():
    assert len(collect(batches(then=1e-9), Effort(min_seconds=1))) == MAX_BATCHES


def test_batches_continue_while_other_processes_measure():
    asked = iter([True, True, False])
    assert len(collect(batches(then=1.0), Effort(repeats=3, min_seconds=0), lambda: next(asked))) == 5


@given(st.lists(seconds, min_size=1, max_size=300))
def test_summary_statistics_are_consistent_with_the_times(times):
    summary = Summary.of(times)
    assert summary.count == len(times)
    assert min(times) * 0.999 <= summary.mean <= max(times) * 1.001
    assert min(times) <= summary.p50 <= max(times)
    assert (summary.p99 is None) == (len(times) < P99_SAMPLE)
    if summary.p99 is not None:
        assert sum(time <= summary.p99 for time in times) >= 0.99 * len(times)
        assert summary.p50 <= summary.p99


def test_p99_is_exceeded_by_one_in_a_hundred():
    assert Summary.of([float(n) for n in range(1, 101)]).p99 == pytest.approx(99.0)

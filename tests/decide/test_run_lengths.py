"""What is left of a job of which only an expectation is known, and what ended jobs teach about expectations."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.decide.lending.run_lengths import LengthErrors, LengthHistory

lengths = st.floats(1.0, 1e6)
parts = st.floats(0.01, 0.99)
errors = st.builds(LengthErrors, st.floats(-2.0, 2.0), st.floats(0.1, 2.0))


def test_a_job_that_has_not_run_is_expected_to_take_what_its_like_took():
    assert LengthErrors(0.0, 0.7).left_s(1000.0) == pytest.approx(1000.0)
    assert LengthErrors(math.log(0.5), 0.7).left_s(1000.0) == pytest.approx(500.0)


def test_a_job_past_its_expected_end_goes_on_for_long():
    left = [LengthErrors(0.0, 1.0).left_s(1000.0, ran) for ran in (0.0, 1000.0, 3000.0, 9000.0)]
    assert left[1:] == sorted(left[1:]) and left[3] > 2500.0
    assert LengthErrors(0.0, 0.1).left_s(1000.0, 1000.0) < 100.0, "where expectations are right it ends soon"


@given(errors, lengths, st.floats(0.0, 1e7), parts)
def test_it_ends_within_what_is_left_with_that_probability(one, expected, ran, part):
    left = one.left_s(expected, ran, part)
    assert left >= 0
    if ran < expected * math.exp(one.mean + 4 * one.deviation):
        assert one.ends_within(expected, ran, left) == pytest.approx(part, abs=1e-3)


@given(errors, lengths, st.floats(0.0, 1e9), parts, parts)
def test_more_is_left_with_a_larger_probability(one, expected, ran, first, second):
    low, high = sorted((first, second))
    assert one.left_s(expected, ran, low) <= one.left_s(expected, ran, high) + 1e-6


def test_ended_jobs_teach_how_far_a_user_is_off_and_others_a_little():
    history = LengthHistory()
    assert history.errors(7) == LengthErrors()
    for number in range(200):
        history.note(7, 1000.0, 500.0 * (1.2 if number % 2 else 1 / 1.2))
    assert history.errors(7).mean == pytest.approx(math.log(0.5), abs=0.03)
    assert history.errors(7).deviation == pytest.approx(math.log(1.2), abs=0.05)
    stranger = history.errors(8)
    assert stranger.mean == pytest.approx(math.log(0.5), abs=0.03), "of whom nothing is known is taken to be like all"
    for _ in range(100):
        history.note(8, 1000.0, 2000.0)
    assert history.errors(8).mean > 0 > history.errors(7).mean


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-1.0, 1e9), st.floats(-1.0, 1e9)), max_size=30))
def test_whatever_ended_the_errors_are_usable(ended):
    history = LengthHistory()
    for uid, expected, ran in ended:
        history.note(uid, expected, ran)
    for uid in range(4):
        found = history.errors(uid)
        assert found.deviation >= 0.1 and math.isfinite(found.mean) and found.left_s(100.0, 50.0) >= 0

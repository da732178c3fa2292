"""The remaining time of a job whose length is only estimated, and how ended jobs correct the estimates."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.decide.lending.run_lengths import LengthErrors, LengthHistory

lengths = st.floats(1.0, 1e6)
parts = st.floats(0.01, 0.99)
errors = st.builds(LengthErrors, st.floats(-2.0, 2.0), st.floats(0.1, 2.0))


def test_estimate_of_a_job_that_has_not_run_is_corrected_by_the_mean_error():
    assert LengthErrors(0.0, 0.7).left_s(1000.0) == pytest.approx(1000.0)
    assert LengthErrors(math.log(0.5), 0.7).left_s(1000.0) == pytest.approx(500.0)


def test_remaining_time_grows_after_the_expected_end():
    left = [LengthErrors(0.0, 1.0).left_s(1000.0, ran) for ran in (0.0, 1000.0, 3000.0, 9000.0)]
    assert left[1:] == sorted(left[1:]) and left[3] > 2500.0
    assert LengthErrors(0.0, 0.1).left_s(1000.0, 1000.0) < 100.0, "it ends soon if the expectations are right"


@given(errors, lengths, st.floats(0.0, 1e7), parts)
def test_job_ends_within_its_remaining_time_with_the_given_probability(length_errors, expected, ran, part):
    left = length_errors.left_s(expected, ran, part)
    assert left >= 0
    if ran < expected * math.exp(length_errors.mean + 4 * length_errors.deviation):
        assert length_errors.ends_within(expected, ran, left) == pytest.approx(part, abs=1e-3)


@given(errors, lengths, st.floats(0.0, 1e9), parts, parts)
def test_remaining_time_grows_with_the_probability(length_errors, expected, ran, first, second):
    low, high = sorted((first, second))
    assert length_errors.left_s(expected, ran, low) <= length_errors.left_s(expected, ran, high) + 1e-6


def test_errors_are_learned_per_user_and_from_all_users_for_a_new_one():
    history = LengthHistory()
    assert history.errors(7) == LengthErrors()
    for number in range(200):
        history.note(7, 1000.0, 500.0 * (1.2 if number % 2 else 1 / 1.2))
    assert history.errors(7).mean == pytest.approx(math.log(0.5), abs=0.03)
    assert history.errors(7).deviation == pytest.approx(math.log(1.2), abs=0.05)
    stranger = history.errors(8)
    assert stranger.mean == pytest.approx(math.log(0.5), abs=0.03), "an unknown job is assumed to be like all others"
    for _ in range(100):
        history.note(8, 1000.0, 2000.0)
    assert history.errors(8).mean > 0 > history.errors(7).mean


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-1.0, 1e9), st.floats(-1.0, 1e9)), max_size=30))
def test_errors_stay_usable_whatever_jobs_have_ended(ended):
    history = LengthHistory()
    for uid, expected, ran in ended:
        history.note(uid, expected, ran)
    for uid in range(4):
        found = history.errors(uid)
        assert found.deviation >= 0.1 and math.isfinite(found.mean) and found.left_s(100.0, 50.0) >= 0

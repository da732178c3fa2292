"""A training job's measurements beside predictions: they count, within bounds, and shape the other profiles."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.decide.lending.training_speed import LEAST_S, TRUST, SpeedReport, speeds, work_done

PREDICTED = {"1g.10gb": 0.2, "2g.20gb": 0.4, "3g.40gb": 0.6, "7g.80gb": 1.0}


def test_without_reports_the_predicted_speeds_are_used():
    assert speeds(PREDICTED) == PREDICTED
    assert speeds(PREDICTED, [SpeedReport("4g.40gb", 1000, 100)]) == PREDICTED


def test_runs_are_weighted_by_their_length():
    reports = [SpeedReport("1g.10gb", 100, 10), SpeedReport("1g.10gb", 3000, 100), SpeedReport("2g.20gb", 500, 10)]
    assert work_done(reports) == {"1g.10gb": (3100, 110), "2g.20gb": (500, 10)}


@pytest.mark.parametrize(
    "nothing",
    [
        SpeedReport("1g.10gb", 0, 100),
        SpeedReport("1g.10gb", 10, LEAST_S / 2),
        SpeedReport("1g.10gb", math.inf, 100),
        SpeedReport("", 10, 100),
        SpeedReport("1g.10gb", 10, math.nan),
        SpeedReport("1g.10gb", math.nan, 100),
    ],
)
def test_report_without_a_usable_speed_is_ignored(nothing):
    assert work_done([nothing]) == {}
    assert speeds(PREDICTED, [nothing]) == PREDICTED


def test_one_measured_profile_does_not_change_the_ratios():
    """Its items may be of any size; only measurements on two profiles show how these compare."""
    for items in (1, 1e9):
        assert speeds(PREDICTED, [SpeedReport("1g.10gb", items, 100)]) == pytest.approx(PREDICTED)


def test_two_measured_profiles_have_their_measured_ratio():
    """This job gains little from more than a 1g; the profile between the two cannot be faster than the 3g."""
    found = speeds(PREDICTED, [SpeedReport("1g.10gb", 1000, 100), SpeedReport("3g.40gb", 1500, 100)])
    assert found["3g.40gb"] / found["1g.10gb"] == pytest.approx(1.5)
    assert found["1g.10gb"] <= found["2g.20gb"] <= found["3g.40gb"] <= found["7g.80gb"]
    assert found["7g.80gb"] == 1.0


@given(
    st.dictionaries(st.sampled_from(sorted(PREDICTED)), st.tuples(st.floats(1e-3, 1e9), st.floats(5, 1e6))),
    st.floats(1e-6, 1e6),
)
def test_unit_of_items_does_not_matter_and_false_reports_are_bounded(items_by_profile, unit):
    reports = [SpeedReport(profile, items, seconds) for profile, (items, seconds) in items_by_profile.items()]
    found = speeds(PREDICTED, reports)
    assert found == pytest.approx(
        speeds(PREDICTED, [report._replace(items=report.items * unit) for report in reports]), rel=1e-6
    )
    assert set(found) == set(PREDICTED)
    for profile in found:
        assert 0 < found[profile] < math.inf
        for other in found:
            ratio = (found[profile] / found[other]) / (PREDICTED[profile] / PREDICTED[other])
            assert 1 / TRUST - 1e-9 <= ratio <= TRUST + 1e-9
    ordered = [profile for profile in PREDICTED if profile not in items_by_profile]
    assert [found[profile] for profile in ordered] == sorted(found[profile] for profile in ordered)


@given(st.permutations(range(4)))
def test_the_order_of_reports_does_not_matter(order):
    reports = [
        SpeedReport("1g.10gb", 900, 90),
        SpeedReport("1g.10gb", 10, 6),
        SpeedReport("7g.80gb", 70, 7),
        SpeedReport("2g.20gb", 90, 9),
    ]
    assert speeds(PREDICTED, [reports[i] for i in order]) == pytest.approx(speeds(PREDICTED, reports))


def test_predicted_speed_of_zero_is_refused():
    with pytest.raises(ValueError, match="above 0"):
        speeds({"1g.10gb": 0.0})

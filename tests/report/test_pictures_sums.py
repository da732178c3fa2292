"""What the charts show, on small records whose sums are known."""

from __future__ import annotations

import time
from datetime import datetime, timedelta

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_migbatch.report.pictures.bins import TimeBins
from slurm_migbatch.report.pictures.sums import (
    SliceColumns,
    agreement,
    layout_over_time,
    loans_over_time,
    profiles_over_time,
    use_by_account,
    use_over_time,
    waits_by_profile,
)
from tests.support.examples import examples

HOUR = 3600.0


def row(account="chem", since=0.0, until=HOUR, profile="7g.80gb", start=0, size=8, sm=None, gpu="GPU-a", index=0):
    return ("n1", gpu, index, profile, start, size, since, until, account, sm)


def hours(first=0.0, last=4 * HOUR, width=HOUR):
    return TimeBins(first, last, width, first)


def test_bins_have_round_widths_and_stay_within_the_window():
    bins = TimeBins.over(1000.0, 1000.0 + 31 * 86400, 240)
    assert bins.width == 6 * HOUR
    assert (bins.edges[0], bins.edges[-1]) == (bins.start, bins.end)
    assert bins.lengths.sum() == pytest.approx(31 * 86400)


@pytest.mark.parametrize("start", ["2026-03-27T10:00", "2026-10-23T10:00", "2026-01-05T00:00"])
@pytest.mark.parametrize(("days", "most"), [(5, 60), (40, 60), (300, 60), (800, 30)])
def test_bins_begin_at_the_same_local_times_before_and_after_daylight_saving_time(
    monkeypatch: pytest.MonkeyPatch, start: str, days: int, most: int
) -> None:
    with monkeypatch.context() as zone:
        zone.setenv("TZ", "Europe/Berlin")
        time.tzset()
        begin = datetime.fromisoformat(start)
        bins = TimeBins.over(begin.timestamp(), (begin + timedelta(days=days)).timestamp(), most)
        inner = [datetime.fromtimestamp(edge) for edge in bins.edges[1:-1]]
        clipped = (bins.edges[0], bins.edges[-1]) == (bins.start, bins.end)
    time.tzset()
    assert clipped and bins.count <= most + 2
    wall = bins.width if bins.width < 86400 else 86400
    assert {(edge.hour * 3600 + edge.minute * 60) % wall for edge in inner} == {0}
    assert (np.diff(bins.edges) > 0).all() and abs(bins.lengths[1:-1] - bins.width).max() <= 3600
    assert bins.of(bins.edges).tolist() == [*range(bins.count), bins.count - 1]


intervals = st.tuples(st.floats(-100, 500), st.floats(0, 300), st.floats(0, 3), st.integers(0, 2))


@given(st.lists(intervals, max_size=12), st.floats(0.5, 90))
@settings(max_examples=examples(200))
def test_held_time_in_bins_equals_the_overlap_with_each_bin(rows, width):
    bins = TimeBins(10.0, 400.0, width, 10.0 - width / 3)
    columns = [np.array(column, float) for column in zip(*rows, strict=True)] or [np.zeros(0)] * 4
    since, length, weight, group = columns
    found = bins.held(since, since + length, weight, group.astype(np.int64), 3)
    wanted = np.zeros((3, bins.count))
    for begin, lasts, amount, which in rows:
        for number in range(bins.count):
            both = min(begin + lasts, bins.edges[number + 1]) - max(begin, bins.edges[number])
            wanted[which, number] += amount * max(0.0, both)
    assert found == pytest.approx(wanted, abs=1e-6)


def test_use_of_an_account_is_divided_into_busy_idle_and_not_sampled():
    rows = [
        row(sm=0.25, until=2 * HOUR),
        row(profile="1g.10gb", size=1, until=7 * HOUR),  # the window ends after 4 hours
        row("bio", since=-HOUR, until=None, sm=1.0),
    ]
    held = SliceColumns.of(rows, 4 * HOUR)
    bio, chem = use_by_account(held, hours())
    assert (bio.name, bio.busy, bio.idle, bio.unknown) == ("bio", 4.0, 0.0, 0.0)
    assert (chem.busy, chem.idle, chem.unknown) == (0.5, 1.5, pytest.approx(4 / 7))
    assert chem.idle_share == 0.75
    assert use_over_time(held, hours()).sum() == pytest.approx(bio.total + chem.total)


def test_a_slice_counts_as_the_share_of_its_own_gpu():
    rows = [row(profile="4g.24gb", size=4), row(profile="2g.12gb", size=2, start=2), row(gpu="GPU-b")]
    held = SliceColumns.of(rows, HOUR, wholes={"GPU-a": (4, 4)})
    assert held.weight.tolist() == [1.0, 0.5, 1.0]
    lent = ("4g.24gb", 0.0, None, None, HOUR, "", "GPU-a", None)
    assert loans_over_time([lent], hours(), {"GPU-a": (4, 4)}).hours == 1.0


def test_slice_with_a_larger_memory_share_counts_by_it_also_on_loan():
    assert SliceColumns.of([row(profile="1g.20gb", size=2)], HOUR).weight.tolist() == [0.25]
    assert loans_over_time([("1g.20gb", 0.0, None, None, HOUR, "", "GPU-a", 2)], hours()).hours == 0.25


def test_hidden_accounts_are_shown_as_one():
    held = SliceColumns.of([row("chem"), row("bio")], HOUR, named=False)
    assert held.accounts == ["all accounts"]


def test_record_without_held_slices_has_no_use():
    held = SliceColumns.of([], HOUR)
    assert use_by_account(held, hours()) == []
    assert layout_over_time(held, hours(), [("n1", 0, "GPU-a")], 4).gpus == ["n1 GPU 0"]


def test_profiles_are_ordered_by_size_and_counted_in_gpu_equivalents():
    held = SliceColumns.of([row(until=30 * 60), row(profile="1g.10gb", size=1)], 4 * HOUR)
    assert held.profiles == ["1g.10gb", "7g.80gb"]
    found = profiles_over_time(held, hours())
    assert found[:, 0] == pytest.approx([1 / 7, 0.5])
    assert found[:, 1:].sum() == 0


def test_a_memory_slice_shows_the_profile_that_held_it_for_most_of_the_bin():
    rows = [
        row(profile="3g.40gb", start=4, size=4, until=40 * 60),
        row(profile="1g.10gb", start=4, size=1, since=40 * 60, until=HOUR),
        row(profile="1g.10gb", start=0, size=1, until=20 * 60),
        row(profile="1g.10gb", gpu="GPU-c", index=7),
    ]
    held = SliceColumns.of(rows, 4 * HOUR)
    found = layout_over_time(held, hours(), [("n1", 1, "GPU-b")], 2)
    assert (found.gpus, found.slices, found.left_out) == (["n1 GPU 0", "n1 GPU 1"], 8, 1)
    big = held.profiles.index("3g.40gb")
    assert found.profile[:8, 0].tolist() == [-1, -1, -1, -1, big, big, big, big]
    assert found.share[4, 0] == 1.0
    assert found.share[0, 0] == pytest.approx(1 / 3)
    assert (found.profile[8:] == -1).all()


def test_waits_of_rare_profiles_are_shown_together():
    found = waits_by_profile([("7g.80gb", 0, 5), ("1g.10gb", 6, 9), ("2g.20gb:3", 1, 1), ("3g.40gb", 1, 2)], 2)
    assert [(waits.profile, waits.total) for waits in found] == [("1g.10gb", 9), ("7g.80gb", 5), ("others", 3)]
    assert found[2].runs[1] == 3


def test_predictions_are_compared_with_measurements():
    found = agreement(np.array([100.0, 95.0, 200.0, np.nan, 5.0]), np.array([100.0, 100.0, 100.0, 1.0, 0.0]))
    assert (found.runs, found.within) == (3, pytest.approx((2 / 3, 2 / 3, 2 / 3)))
    assert found.middle == 1.0
    assert found.counts.sum() == 3
    assert agreement(np.array([np.nan]), np.array([1.0])) is None


def test_loans_are_counted_by_what_ended_them():
    rows = [
        ("7g.80gb", 0.0, 1.5 * HOUR, 1.5 * HOUR + 8, 1.5 * HOUR + 8, "reclaim", "GPU-a", 8),
        ("7g.80gb", 3 * HOUR, None, None, None, None, None, None),
        ("7g.80gb", -9.0, None, None, HOUR, "", "GPU-a", 8),
    ]
    found = loans_over_time(rows, hours())
    assert found.started.tolist() == [1, 0, 0, 1]
    assert {cause: counts.tolist() for cause, counts in found.ended.items()} == {
        "reclaim": [0, 1, 0, 0], "ended": [0, 1, 0, 0],
    }  # fmt: skip
    assert found.leaving_s == 8
    assert found.hours == pytest.approx(1.5 + 8 / 3600 + 1 + 1)

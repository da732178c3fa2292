"""Hours of the week: what is parsed, which times it covers, and how invalid text is refused."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.config.hours import DAYS, Hours, HoursError

MONDAY = datetime(2026, 11, 16)


def at(day: str, clock: str) -> datetime:
    hour, minute = clock.split(":")
    return MONDAY + timedelta(days=DAYS.index(day), hours=int(hour), minutes=int(minute))


def test_span_without_days_applies_every_day() -> None:
    office = Hours.parse("08:00-18:00")
    assert not office.covers(at("sun", "07:59")) and office.covers(at("sun", "08:00"))
    assert office.covers(at("wed", "17:59")) and not office.covers(at("wed", "18:00"))


def test_days_of_the_week_are_parsed() -> None:
    assert Hours.parse("Mon-Fri 08:00-18:00").days == frozenset(range(5))
    assert Hours.parse("sat,SUN 0:00-24:00").days == {5, 6}
    assert Hours.parse("Fri-Mon 01:00-02:00").days == {4, 5, 6, 0}
    assert Hours.parse("mon,wed-thu 01:00-02:00").days == {0, 2, 3}
    assert Hours.parse("Sat,Sun 00:00-24:00").covers(at("sun", "23:59"))
    assert not Hours.parse("Sat,Sun 00:00-24:00").covers(at("mon", "00:00"))


def test_span_over_midnight_belongs_to_the_day_on_which_it_begins() -> None:
    night = Hours.parse("Mon-Fri 22:00-06:00")
    assert night.covers(at("fri", "23:00")) and night.covers(at("sat", "05:59"))
    assert not night.covers(at("sat", "06:00")) and not night.covers(at("sat", "22:30"))
    assert not night.covers(at("mon", "05:00")) and night.covers(at("tue", "05:00"))


@pytest.mark.parametrize(
    "text",
    ["", "8-18", "08:00", "08:00-08:00", "24:00-06:00", "08:60-09:00", "25:00-26:00", "Mon Tue 08:00-09:00",
     "Workday 08:00-09:00", "Mon- 08:00-09:00", "08:00 - 18:00", "Mon-Tue-Wed 08:00-09:00", "-08:00-09:00"],
)  # fmt: skip
def test_invalid_hours_are_refused(text: str) -> None:
    with pytest.raises(HoursError):
        Hours.parse(text)


@given(
    days=st.frozensets(st.integers(0, 6), min_size=1),
    start=st.integers(0, 1439),
    end=st.integers(1, 1440),
    minute=st.integers(0, 7 * 1440 - 1),
)
def test_covered_times_agree_with_counting_from_each_start(
    days: frozenset[int], start: int, end: int, minute: int
) -> None:
    if start == end:
        return
    length = (end - start) % 1440 or 1440
    begins = [day * 1440 + start for day in days]
    expected = any((minute - begin) % (7 * 1440) < length for begin in begins)
    listed = ",".join(DAYS[day] for day in sorted(days))
    span = Hours.parse(f"{listed} {start // 60:02}:{start % 60:02}-{end // 60:02}:{end % 60:02}")
    assert span.covers(MONDAY + timedelta(minutes=minute)) == expected


@given(st.text(max_size=40))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        Hours.parse(text)
    except HoursError as error:
        assert str(error)

"""Slurm's formats of times and durations."""

import time
from collections.abc import Iterator
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.slurm.times import (
    TimeFormError,
    format_duration,
    parse_duration,
    parse_time,
    time_formatter,
)

NOW = datetime(2026, 3, 14, 15, 9, 26)


@pytest.fixture(autouse=True)
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A time zone with daylight saving time, whatever the machine's is."""
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("12:34", datetime(2026, 3, 14, 12, 34)),
        ("9:05:07", datetime(2026, 3, 14, 9, 5, 7)),
        ("23:59", datetime(2026, 3, 14, 23, 59)),
        ("1:30pm", datetime(2026, 3, 14, 13, 30)),
        ("12:00AM", datetime(2026, 3, 14, 0, 0)),
        ("12:15 pm", datetime(2026, 3, 14, 12, 15)),
        ("0102", datetime(2026, 1, 2)),
        ("1231", datetime(2025, 12, 31)),
        ("010225", datetime(2025, 1, 2)),
        ("010225-13:45", datetime(2025, 1, 2, 13, 45)),
        ("1/2", datetime(2026, 1, 2)),
        ("01/02/24", datetime(2024, 1, 2)),
        ("01/02-06:07:08", datetime(2026, 1, 2, 6, 7, 8)),
        ("01.02.24-06:07", datetime(2024, 1, 2, 6, 7)),
        ("2026-01-02", datetime(2026, 1, 2)),
        ("2026-01-2", datetime(2026, 1, 2)),
        ("2026-01-02T", datetime(2026, 1, 2)),
        ("2026-02-30", datetime(2026, 3, 2)),
        ("0230", datetime(2026, 3, 2)),
        ("102", datetime(2025, 10, 2)),
        ("1/2/2503:04", datetime(2025, 1, 2, 3, 4)),
        ("0:30am", datetime(2026, 3, 14, 0, 30)),
        ("6:00:00 AM", datetime(2026, 3, 14, 6)),
        ("12:00-13:00", datetime(2026, 3, 14, 13)),
        ("yesterday", datetime(2026, 3, 13)),
        ("yesterday noon", datetime(2026, 3, 13, 12)),
        ("yesterday-12:00", datetime(2026, 3, 13, 12)),
        ("midnight yesterday", datetime(2026, 3, 13)),
        ("2026-01-02T03:04", datetime(2026, 1, 2, 3, 4)),
        ("2026-01-02T03:04:05", datetime(2026, 1, 2, 3, 4, 5)),
        ("2026-01-02-03:04:05", datetime(2026, 1, 2, 3, 4, 5)),
        ("2026-01-02 03:04", datetime(2026, 1, 2, 3, 4)),
        ("today", datetime(2026, 3, 14)),
        ("TODAY", datetime(2026, 3, 14)),
        ("2026-01-02Tnoon", datetime(2026, 1, 2, 12)),
        ("tomorrow", datetime(2026, 3, 15)),
        ("midnight", datetime(2026, 3, 14)),
        ("noon", datetime(2026, 3, 14, 12)),
        ("elevenses", datetime(2026, 3, 14, 11)),
        ("fika", datetime(2026, 3, 14, 15)),
        ("teatime", datetime(2026, 3, 14, 16)),
        ("tomorrow-noon", datetime(2026, 3, 15, 12)),
        ("noon tomorrow", datetime(2026, 3, 15, 12)),
        ("now", NOW),
        ("now-2days", datetime(2026, 3, 12, 15, 9, 26)),
        ("now-2day", datetime(2026, 3, 12, 15, 9, 26)),
        ("now+1hour", datetime(2026, 3, 14, 16, 9, 26)),
        ("now - 30 minutes", datetime(2026, 3, 14, 14, 39, 26)),
        ("NOW-1weeks", datetime(2026, 3, 7, 15, 9, 26)),
        ("now-45", datetime(2026, 3, 14, 15, 8, 41)),
        ("now-5seconds", datetime(2026, 3, 14, 15, 9, 21)),
        ("uts1700000000", datetime(2023, 11, 14, 23, 13, 20)),
        # across the change to summer time: a day is 24 hours, a date is its midnight
        ("2026-03-29T12:00", datetime(2026, 3, 29, 12)),
        ("2026-03-29", datetime(2026, 3, 29)),
    ],
)
def test_every_time_format_of_sacct_is_parsed(text: str, meaning: datetime) -> None:
    assert parse_time(text, NOW.timestamp()) == meaning.timestamp()


@pytest.mark.parametrize("text", ["now-999999999weeks", "1960-01-01"])
def test_times_before_1970_are_clamped_to_zero(text: str) -> None:
    assert parse_time(text, NOW.timestamp()) == 0


def test_days_have_24_hours_across_the_change_to_summer_time() -> None:
    monday = datetime(2026, 3, 30, 12).timestamp()
    assert parse_time("now-2days", monday) == monday - 2 * 86400


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "foo", "now-", "now2days", "now-2fortnights", "25:00", "12:60", "12:00:60", "24:00", "13:00pm",
        "12:30p", "2026-13-01", "2026-1-2", "1332", "12", "0010", "12345", "1234567", "2026-01", "2025-01-02T03:04:05Z",
        "today+1",
        "01/02/2026", "uts5", "-", "T", "99999999999-01-01", "12:00xm", "now-2daysx", "now-1w", "now-1min",
        "now+1month", "now+999999999weeks", "9999-12-32",
    ],
)  # fmt: skip
def test_malformed_time_is_refused(text: str) -> None:
    with pytest.raises(TimeFormError):
        parse_time(text, NOW.timestamp())


@given(st.integers(min_value=86400, max_value=4_000_000_000))
def test_formatted_time_parses_back(moment: int) -> None:
    shown = time_formatter("standard")(float(moment))
    # the hour that occurs twice in autumn is read as the first one
    assert parse_time(shown) in (moment, moment - 3600)


@given(st.text(max_size=30))
def test_no_text_breaks_the_parser(text: str) -> None:
    try:
        assert time_formatter("standard")(parse_time(text, NOW.timestamp()))
    except TimeFormError as error:
        assert "YYYY-MM-DD" in str(error) or "does not exist" in str(error) or "year 9999" in str(error)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5", 300), ("5:30", 330), ("1:02:03", 3723), ("2-03:04:05", 183845), ("1-12", 129600), ("1-12:30", 131400),
        ("0", 0), ("00:00:00", 0), ("UNLIMITED", None), ("infinite", None), ("-1", None), ("120:00:00", 432000),
        ("1:02:03.5", 3723.5),
    ],
)  # fmt: skip
def test_durations_are_parsed(text: str, seconds: float | None) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "a", "1:2:3:4", "1-", "-", "1--2", "2h", "1-2-3", "1.5"])
def test_malformed_duration_is_refused(text: str) -> None:
    with pytest.raises(TimeFormError):
        parse_duration(text)


@given(st.integers(min_value=0, max_value=10**9))
def test_formatted_duration_parses_back(seconds: int) -> None:
    assert parse_duration(format_duration(seconds)) == seconds


def test_durations_are_formatted_as_by_slurm() -> None:
    assert [format_duration(s) for s in (None, -1, 0, 59.9, 86399, 86400, 10 * 86400 + 3661)] == [
        "UNLIMITED", "INVALID", "00:00:00", "00:00:59", "23:59:59", "1-00:00:00", "10-01:01:01",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("moment", "shown"),
    [
        (datetime(2026, 3, 14, 1, 2, 3), "01:02:03"),
        (datetime(2026, 3, 13, 1, 2, 3), "Ystday 01:02"),
        (datetime(2026, 3, 15, 1, 2, 3), "Tomorr 01:02"),
        (datetime(2026, 3, 17, 1, 2, 3), "Tue 01:02"),
        (datetime(2026, 3, 21, 1, 2, 3), "21 Mar 01:02"),
        (datetime(2026, 2, 1, 1, 2, 3), "1 Feb 01:02"),
        (datetime(2025, 12, 31, 1, 2, 3), "31 Dec 01:02"),
        (datetime(2024, 2, 1, 1, 2, 3), "1 Feb 2024"),
    ],
)
def test_relative_times_are_formatted_as_by_slurm(moment: datetime, shown: str) -> None:
    assert time_formatter("relative", NOW.timestamp())(moment.timestamp()) == shown


def test_time_is_formatted_in_the_requested_style() -> None:
    moment = datetime(2026, 3, 14, 1, 2, 3).timestamp()
    assert time_formatter(None)(moment) == time_formatter("")(moment) == "2026-03-14T01:02:03"
    assert time_formatter("%d.%m. %H:%M")(moment) == "14.03. 01:02"
    assert time_formatter("nonsense")(moment) == "2026-03-14T01:02:03"
    assert [time_formatter(style)(None) for style in ("standard", "relative")] == ["Unknown", "Unknown"]

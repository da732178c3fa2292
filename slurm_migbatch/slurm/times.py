"""Parse and format times and durations like Slurm's own commands.

Times are unix seconds (float), read and shown in local time. Grammar: the "valid time formats" of sacct(1), in the
past sense that sacct uses (a time of day is today's, a month after the current one is last year's), and `yesterday`,
which Slurm does not have.
"""

from __future__ import annotations

import time
from datetime import datetime, timedelta

from slurm_migbatch.values import TYPE_CHECKING, Pattern

if TYPE_CHECKING:
    import re
    from collections.abc import Callable

_CLOCK_WORDS = {"midnight": 0, "elevenses": 11, "noon": 12, "fika": 15, "teatime": 16}
_DAY_WORDS = {"yesterday": -1, "today": 0, "tomorrow": 1}
_UNITS = {"second": 1, "minute": 60, "hour": 3600, "day": 86400, "week": 604800}

_NOW = Pattern(r"now(?:\s*([+-])\s*(\d{1,9})\s*(?:(second|minute|hour|day|week)s?)?)?\s*$", "IGNORECASE")
_WORD = Pattern("|".join((*_DAY_WORDS, *_CLOCK_WORDS)), "IGNORECASE")
_CLOCK = Pattern(r"(\d{1,2}):(\d\d)(?::(\d\d)|(?!:))\s*(am|pm)?", "IGNORECASE")
_ISO = Pattern(r"(\d{4})-(\d\d)-(\d{1,2})")
#: a digit after a month, a day or a year belongs to it
_AMERICAN = Pattern(r"(\d\d|\d(?!\d))[./]?(\d\d|\d(?!\d))[./]?(?:(\d\d)|(?!\d))")
_GAP = Pattern(r"[ \t]+|-|T")

#: Slurm's minimum
_FIRST_UTS = 1_000_000
#: latest time: a day before the year 10000, which Python's calendar does not have, so that it is valid in any time zone
_LAST_S = 253_402_214_400.0

_DURATION = Pattern(r"(?:(\d{1,6})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?(\.\d+)?$")

TIME_FORMS = (
    "HH:MM[:SS][AM|PM], MMDD[YY][-HH:MM[:SS]], MM/DD[/YY][-HH:MM[:SS]], MM.DD[.YY][-HH:MM[:SS]], "
    "YYYY-MM-DD[THH:MM[:SS]], today, yesterday, tomorrow, midnight, noon, elevenses, fika, teatime, "
    "now[{+|-}count[seconds|minutes|hours|days|weeks]], uts<unix seconds>"
)


class TimeFormError(ValueError):
    """A text that is not a time or duration in any of Slurm's forms; the message names the forms."""


def parse_time(text: str, now: float | None = None) -> float:
    """Parse a time into unix seconds; times before 1970 are 0, because no record is older.

    Args:
        text: one of TIME_FORMS.
        now: the current time; by default the clock's.

    Raises:
        TimeFormError: the text has none of the forms, or names a day or hour that does not exist.
    """
    now = time.time() if now is None else now
    words = text.strip()
    if words[:3].lower() == "uts" and _number(words[3:], 7, 11) and int(words[3:]) >= _FIRST_UTS:
        return float(words[3:])
    today = datetime.fromtimestamp(now)
    date, clock, at = _iso(words)
    # like Slurm: a later date or time of day replaces an earlier one, and no gap is required between them
    while at < len(words):
        if match := _NOW.match(words, at):
            return _bounded(_from_now(match, now), words)
        if (match := _GAP.match(words, at)) and not _WORD.match(words, at):
            at = match.end()
            continue
        found_date, found_clock, end = _date_or_clock(words, at, today)
        if end == at:
            raise TimeFormError(f"Invalid time specification (pos={at}): {words}; write one of: {TIME_FORMS}")
        date, clock, at = found_date or date, found_clock or clock, end
    if date is None and clock is None:
        raise TimeFormError(f"Invalid time specification: {text!r} is not a time; write one of: {TIME_FORMS}")
    year, month, day = date or (today.year, today.month, today.day)
    try:
        # the 30th of February is the 2nd of March, as in mktime(3)
        moment = (datetime(year, month, 1, *(clock or (0, 0, 0))) + timedelta(days=day - 1)).timestamp()
    except (ValueError, OverflowError) as error:
        raise TimeFormError(f"Invalid time specification: {words} is a time that does not exist ({error})") from None
    return _bounded(moment, words)


def _bounded(moment: float, words: str) -> float:
    if moment > _LAST_S:
        raise TimeFormError(f"Invalid time specification: {words} is after the year 9999")
    return max(moment, 0.0)


def _number(text: str, shortest: int, longest: int) -> bool:
    return text.isdecimal() and shortest <= len(text) <= longest


def _iso(text: str) -> tuple[tuple[int, int, int] | None, tuple[int, int, int] | None, int]:
    """Read the most common form, YYYY-MM-DD[THH:MM[:SS]], like `_date_or_clock`, without compiling patterns."""
    written, t, time_of_day = text.partition("T")
    parts, places = written.split("-"), time_of_day.split(":") if t else []
    if [len(part) for part in parts] != [4, 2, 2] or [len(place) for place in places] not in ([], [2, 2], [2, 2, 2]):
        return None, None, 0
    if not all(part.isdecimal() for part in (*parts, *places)):
        return None, None, 0
    year, month, day = map(int, parts)
    clock = _clock(int(places[0]), int(places[1]), int(places[2]) if len(places) > 2 else 0, "") if places else None
    if not (1 <= month <= 12 and 1 <= day <= 31) or (places and clock is None):
        return None, None, 0
    return (year, month, day), clock, len(text)


def _from_now(match: re.Match[str], now: float) -> float:
    sign, count, unit = match.groups()
    delta = int(count or 0) * _UNITS[(unit or "second").lower()]
    return float(int(now) + (-delta if sign == "-" else delta))


def _date_or_clock(
    text: str, at: int, today: datetime
) -> tuple[tuple[int, int, int] | None, tuple[int, int, int] | None, int]:
    """Return (date, clock, end) of the date or time of day at position `at`; end is `at` if there is none."""
    if match := _WORD.match(text, at):
        word = match[0].lower()
        if word in _CLOCK_WORDS:
            return None, (_CLOCK_WORDS[word], 0, 0), match.end()
        day = today + timedelta(days=_DAY_WORDS[word])
        return (day.year, day.month, day.day), None, match.end()
    if match := _CLOCK.match(text, at):
        clock = _clock(int(match[1]), int(match[2]), int(match[3] or 0), (match[4] or "").lower())
        return None, clock, match.end() if clock else at
    if match := _ISO.match(text, at):
        year, month, day_of_month = int(match[1]), int(match[2]), int(match[3])
    elif match := _AMERICAN.match(text, at):
        month, day_of_month = int(match[1]), int(match[2])
        year = 2000 + int(match[3]) if int(match[3] or 0) else today.year - (month > today.month)
    else:
        return None, None, at
    if not (1 <= month <= 12 and 1 <= day_of_month <= 31):
        return None, None, at
    return (year, month, day_of_month), None, match.end()


def _clock(hour: int, minute: int, second: int, half: str) -> tuple[int, int, int] | None:
    if hour > 23 or minute > 59 or second > 59 or (half and hour > 12):
        return None
    if half:
        hour = hour % 12 + (12 if half == "pm" else 0)
    return hour, minute, second


def parse_duration(text: str) -> float | None:
    """Return the seconds of `text`: `[D-]HH:MM:SS`, `MM:SS`, minutes, `D-HH`, `D-HH:MM`; None for UNLIMITED.

    Raises:
        TimeFormError: the text is none of these.
    """
    stripped = text.strip()
    if stripped.upper() in ("UNLIMITED", "INFINITE", "-1"):
        return None
    match = _DURATION.match(stripped)
    if not match or (match[5] and not match[3]):
        raise TimeFormError(f"{text!r} is not a duration; write [days-]hours:minutes:seconds, minutes or UNLIMITED")
    days, first, second, third = (int(match[i]) if match[i] else None for i in (1, 2, 3, 4))
    assert first is not None
    fraction = float(match[5] or 0)
    if days is not None:
        return days * 86400 + first * 3600 + (second or 0) * 60 + (third or 0) + fraction
    if third is not None:
        return first * 3600 + (second or 0) * 60 + third + fraction
    return first * 60 + (second or 0) + fraction


def format_duration(seconds: float | None) -> str:
    """Format `[D-]HH:MM:SS`, whole seconds; "UNLIMITED" for None, "INVALID" for a negative duration, like Slurm."""
    if seconds is None:
        return "UNLIMITED"
    total = int(seconds)
    if total < 0:
        return "INVALID"
    minutes, second = divmod(total, 60)
    hours, minute = divmod(minutes, 60)
    if hours < 24:
        return f"{hours:02d}:{minute:02d}:{second:02d}"
    days, hour = divmod(hours, 24)
    return f"{days}-{hour:02d}:{minute:02d}:{second:02d}"


def format_clock(seconds: int) -> str:
    """Format nonnegative seconds as `H:MM:SS`, with any number of hours."""
    return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def time_formatter(style: str | None, now: float | None = None) -> Callable[[float | None], str]:
    """Return the function that formats times under SLURM_TIME_FORMAT=`style`: "standard", "relative" or strftime's.

    A style without "%" is not a strftime format; times are then formatted as "standard". None and 0 are "Unknown".
    """
    if style == "relative":
        today = datetime.fromtimestamp(time.time() if now is None else now).date().toordinal()

        def relative(moment: float | None) -> str:
            if not moment:
                return "Unknown"
            date = datetime.fromtimestamp(moment)
            return date.strftime(_relative_format(date, date.date().toordinal() - today))

        return relative
    pattern = style if style and "%" in style else "%Y-%m-%dT%H:%M:%S"

    def absolute(moment: float | None) -> str:
        return time.strftime(pattern, time.localtime(moment)) if moment else "Unknown"

    return absolute


def _relative_format(when: datetime, days: int) -> str:
    if days == 0:
        return "%H:%M:%S"
    if days in (-1, 1):
        return ("Ystday" if days < 0 else "Tomorr") + " %H:%M"
    if 1 < days <= 6:
        return "%a %H:%M"
    if abs(days) > 365:
        return f"{when.day} %b %Y"
    return f"{when.day} %b %H:%M"

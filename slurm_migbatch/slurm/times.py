"""Slurm's ways of writing moments and durations, read and written as its own commands do.

Moments are unix seconds (float), read and shown in local time. Grammar: the "valid time formats" of sacct(1), in the
past sense that sacct uses (a time of day is today's, a month after the current one is last year's).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import datetime, timedelta

_CLOCK_WORDS = {"midnight": 0, "elevenses": 11, "noon": 12, "fika": 15, "teatime": 16}
_UNITS = {"second": 1, "minute": 60, "hour": 3600, "day": 86400, "week": 604800}

_NOW = re.compile(r"now(?:\s*([+-])\s*(\d{1,9})\s*(?:(second|minute|hour|day|week)s?)?)?$", re.IGNORECASE)
_UTS = re.compile(r"uts(\d{7,11})$", re.IGNORECASE)
_WORD = re.compile(r"(today|tomorrow|midnight|elevenses|noon|fika|teatime)", re.IGNORECASE)
_CLOCK = re.compile(r"(\d{1,2}):(\d\d)(?::(\d\d))?\s*(am|pm)?", re.IGNORECASE)
_ISO = re.compile(r"(\d{4})-(\d{1,2})-(\d{1,2})(?!\d)")
_AMERICAN = re.compile(r"(\d{1,2})[./](\d{1,2})(?:[./](\d\d))?(?!\d)")
_DIGITS = re.compile(r"(\d\d)(\d\d)(\d\d)?(?!\d)")
_GAP = re.compile(r"[ \t]+|[ \t]*[-T][ \t]*")

_DURATION = re.compile(r"(?:(\d{1,6})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?(\.\d+)?$")

TIME_FORMS = (
    "HH:MM[:SS][AM|PM], MMDD[YY][-HH:MM[:SS]], MM/DD[/YY][-HH:MM[:SS]], MM.DD[.YY][-HH:MM[:SS]], "
    "YYYY-MM-DD[THH:MM[:SS]], today, tomorrow, midnight, noon, fika, teatime, "
    "now[{+|-}count[seconds|minutes|hours|days|weeks]], uts<unix seconds>"
)


class TimeFormError(ValueError):
    """A text that is no moment or duration in any of Slurm's forms; the message names the forms."""


def parse_time(text: str, now: float | None = None) -> float:
    """Parse a time into unix seconds.

    Args:
        text: one of TIME_FORMS.
        now: the current moment; the clock's where not given.

    Raises:
        TimeFormError: the text has none of the forms, or names a day or hour that does not exist.
    """
    now = time.time() if now is None else now
    stripped = text.strip()
    if match := _UTS.match(stripped):
        return float(match[1])
    if match := _NOW.match(stripped):
        sign, count, unit = match.groups()
        delta = int(count or 0) * _UNITS[(unit or "second").lower()]
        return float(int(now) + (-delta if sign == "-" else delta))
    today = datetime.fromtimestamp(now)
    date: tuple[int, int, int] | None = None
    clock: tuple[int, int, int] | None = None
    rest = stripped
    while rest:
        found_date, found_clock, length = _date_or_clock(rest, today)
        if not length or (found_date and date) or (found_clock and clock):
            raise TimeFormError(f"{text!r} is not a time; write it as one of: {TIME_FORMS}")
        date, clock, rest = found_date or date, found_clock or clock, rest[length:]
        if rest:
            gap = _GAP.match(rest)
            rest = rest[gap.end() :] if gap else rest
            if not rest:
                raise TimeFormError(f"{text!r} breaks off; write it as one of: {TIME_FORMS}")
    if date is None and clock is None:
        raise TimeFormError(f"an empty text is not a time; write it as one of: {TIME_FORMS}")
    try:
        moment = datetime(*(date or (today.year, today.month, today.day)), *(clock or (0, 0, 0)))
        return moment.timestamp()
    except (ValueError, OverflowError) as error:
        raise TimeFormError(f"{text!r} names a moment that does not exist ({error})") from None


def _date_or_clock(text: str, today: datetime) -> tuple[tuple[int, int, int] | None, tuple[int, int, int] | None, int]:
    """Return (date, clock, length) of the date or clock time that `text` begins with; length 0 where there is none."""
    if match := _WORD.match(text):
        word = match[1].lower()
        if word in _CLOCK_WORDS:
            return None, (_CLOCK_WORDS[word], 0, 0), match.end()
        day = today + timedelta(days=1) if word == "tomorrow" else today
        return (day.year, day.month, day.day), None, match.end()
    if match := _CLOCK.match(text):
        hour, minute, second = int(match[1]), int(match[2]), int(match[3] or 0)
        half = (match[4] or "").lower()
        if half and not 1 <= hour <= 12:
            return None, None, 0
        if half:
            hour = hour % 12 + (12 if half == "pm" else 0)
        return None, (hour, minute, second), match.end()
    if match := _ISO.match(text):
        return (int(match[1]), int(match[2]), int(match[3])), None, match.end()
    if match := _AMERICAN.match(text) or _DIGITS.match(text):
        month, day_of_month = int(match[1]), int(match[2])
        year = 2000 + int(match[3]) if match[3] else today.year - (month > today.month)
        return (year, month, day_of_month), None, match.end()
    return None, None, 0


def parse_duration(text: str) -> float | None:
    """Return the seconds that `text` means: `[D-]HH:MM:SS`, `MM:SS`, minutes, `D-HH`, `D-HH:MM`; None for UNLIMITED.

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
    """Format `[D-]HH:MM:SS`, whole seconds; "UNLIMITED" for None, "INVALID" for a negative duration, as Slurm."""
    if seconds is None:
        return "UNLIMITED"
    whole = int(seconds)
    if whole < 0:
        return "INVALID"
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    if hours < 24:
        return f"{hours:02d}:{minute:02d}:{second:02d}"
    days, hour = divmod(hours, 24)
    return f"{days}-{hour:02d}:{minute:02d}:{second:02d}"


def time_formatter(style: str | None, now: float | None = None) -> Callable[[float | None], str]:
    """Return the function that formats times under SLURM_TIME_FORMAT=`style`: "standard", "relative" or strftime's.

    A style without "%" is no strftime format; moments are then written as in "standard". None and 0 are "Unknown".
    """
    if style == "relative":
        today = datetime.fromtimestamp(time.time() if now is None else now).date().toordinal()

        def relative(moment: float | None) -> str:
            if not moment:
                return "Unknown"
            when = datetime.fromtimestamp(moment)
            return when.strftime(_relative_format(when, when.date().toordinal() - today))

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

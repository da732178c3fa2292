"""Parse hours of the week: `08:00-18:00`, `Mon-Fri 22:00-06:00`, `Sat,Sun 00:00-24:00`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from typing import Final

DAYS: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
MINUTES: Final = 24 * 60

_SPAN = re.compile(r"([0-9]{1,2}):([0-9]{2})-([0-9]{1,2}):([0-9]{2})")


class HoursError(ValueError):
    """A text that is not a list of hours; the message says what is wrong."""


@dataclass(frozen=True)
class Hours:
    """A span of the day on some days of the week (0 is Monday), in minutes after midnight of local time.

    `start` is included and `end` is not. If it ends before it starts it lasts until then of the next day, and
    `days` are those on which it begins.
    """

    days: frozenset[int]
    start: int
    end: int

    @classmethod
    def parse(cls, text: str) -> Hours:
        """Parse the text of spans; raises HoursError."""
        parts = text.split()
        if not 1 <= len(parts) <= 2:
            raise HoursError(f"{text!r} is not [days] HH:MM-HH:MM")
        match = _SPAN.fullmatch(parts[-1])
        if match is None:
            raise HoursError(f"{parts[-1]!r} is not HH:MM-HH:MM")
        start, end = (_minutes(*match.group(at, at + 1)) for at in (1, 3))
        if start in (end, MINUTES):
            raise HoursError(f"{parts[-1]!r} is an empty period; a whole day is 00:00-24:00")
        return cls(_days(parts[0]) if len(parts) == 2 else frozenset(range(7)), start, end)

    def covers(self, when: datetime) -> bool:
        """Return whether a local time is inside."""
        day, minute = when.weekday(), when.hour * 60 + when.minute
        if self.start < self.end:
            return day in self.days and self.start <= minute < self.end
        return (day in self.days and minute >= self.start) or ((day - 1) % 7 in self.days and minute < self.end)


def _minutes(hours: str, minutes: str) -> int:
    total = int(hours) * 60 + int(minutes)
    if int(minutes) > 59 or total > MINUTES:
        raise HoursError(f"{hours}:{minutes} is no time of day")
    return total


def _days(text: str) -> frozenset[int]:
    found: set[int] = set()
    for part in text.lower().split(","):
        first, dash, last = part.partition("-")
        ends = [first, last] if dash else [first, first]
        for day in ends:
            if day not in DAYS:
                raise HoursError(f"{day!r} is no day; write Mon, Tue, Wed, Thu, Fri, Sat or Sun")
        low, high = (DAYS.index(day) for day in ends)
        found.update((low + step) % 7 for step in range((high - low) % 7 + 1))
    return frozenset(found)

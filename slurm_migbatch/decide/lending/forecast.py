"""What inference will need in the next minutes, from what it needed: who lends idle slices has to know how long.

Simple on purpose, and empirical throughout; nothing is fitted:

- `LevelGaps`: how long demand stays at or below each level before it rises above it again. A slice that was needed a
  moment ago is mostly needed again in a moment, one that has been idle for a while stays so: the expected rest of a gap
  is taken over those gaps, of the last hour and around this time of day, that lasted as long as this one has by now.
- `Levels`: of slices that are filled in a fixed order, the n-th is needed when n are at once. How often within a
  horizon so many were, at this time of day on earlier days, says how long a window the n-th has. What was needed
  recently is expected to be needed again, and a recent rate above that time of day's raises all of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

DAY_S: Final = 86_400.0
BIN_S: Final = 60.0
AROUND_S: Final = 1800.0
"""Moments of earlier days this close in time of day count as this time of day."""
RECENT_S: Final = 600.0
PART_S: Final = 600.0
"""Gaps are kept by the part of the day in which they ended."""
LEAST: Final = 0.25
"""A slice has to have been idle for at least this share of the time for which it is to stay idle."""
_TINY: Final = 1e-6
_MOST_RATIO: Final = 3.0
"""The recent rate raises what is expected at most this many times: half an hour is a small sample."""

Part = dict[int, list[float]]
"""Seconds of the gaps that ended in a part of a day, by level."""


class LevelGaps:
    """How long demand stays at or below each level before it rises above it, of the last `days` days.

    The slice above level n is needed while demand is higher than n; a gap of that level is the time between. `demand`
    may be called at any rate; time must not go backwards.
    """

    def __init__(self, days: int = 14, day_s: float = DAY_S) -> None:
        """`day_s`: how long a day is, where time is compressed; its parts are compressed with it."""
        self._part = PART_S * day_s / DAY_S
        self._day, self._around = int(DAY_S / PART_S), int(AROUND_S / PART_S)
        self._days = days
        self._parts: dict[int, Part] = {}
        self._since: list[float] = []
        self._begin: float | None = None
        self._level = 0
        self._ages: tuple[int, float, dict[int, float]] = (-1, 0.0, {})
        self._relevant: list[Part] = []

    def demand(self, now: float, level: int) -> None:
        """From now on so much is needed at once."""
        if self._begin is None:
            self._begin = now
        if level > self._level:
            self._since += [self._begin] * (level - len(self._since))
            part = self._part_of(now)
            for above in range(self._level, level):
                part.setdefault(above, []).append(now - self._since[above])
        else:
            self._since[level : self._level] = [now] * (self._level - level)
        self._level = level

    def enough(self, now: float, idle_s: float) -> int:
        """Return the present level and how many slices above it are expected to be needed within `idle_s` seconds.

        A slice is not expected to be needed if of the gaps that lasted as long as it has been idle, at its level and
        those next to it, the rest was `idle_s` on average. One that has been idle for less than `LEAST` of that is;
        one that has been idle for longer than any gap that is known is not.
        """
        number = int(now / self._part + _TINY)
        if self._ages[:2] != (number, idle_s):
            self._ages, self._relevant = (number, idle_s, {}), self._open(number)
        ages = self._ages[2]
        kept = 0
        for level in range(self._level, len(self._since)):
            idle = now - self._since[level]
            if idle < LEAST * idle_s:
                kept += 1
                continue
            age = ages.get(level)
            if age is None:
                age = ages[level] = age_for(self._known(level), idle_s)
            kept += idle < age
        return self._level + kept

    def _known(self, level: int) -> list[float]:
        """The gaps of this level and those next to it, of the last hour and of this time on earlier days."""
        return [
            seconds
            for part in self._relevant
            for near in (level - 1, level, level + 1)
            if near in part
            for seconds in part[near]
        ]

    def _open(self, number: int) -> list[Part]:
        """The parts of the last hour and of this time on earlier days; not this one, which is not over."""
        parts = [*range(number - 2 * self._around, number)]
        for centre in range(number - self._day, number - self._days * self._day - 1, -self._day):
            parts += range(centre - self._around, centre + self._around + 1)
        return [self._parts[part] for part in parts if part in self._parts]

    def _part_of(self, now: float) -> Part:
        number = int(now / self._part + _TINY)
        if number not in self._parts:
            self._parts[number] = {}
            oldest = number - self._days * self._day - self._around
            for old in [part for part in self._parts if part < oldest]:
                del self._parts[old]
        return self._parts[number]


def age_for(gaps: Iterable[float], idle_s: float) -> float:
    """Return the least age (s) from which on gaps last `idle_s` more on average; that of the longest if none does.

    The mean of what is left of a gap falls as it ages and jumps where shorter gaps drop out, so only the lengths of
    gaps, and 0, can be that age.
    """
    ordered: Sequence[float] = sorted(gaps)
    count, total = len(ordered), math.fsum(ordered)
    age = 0.0
    for number, seconds in enumerate(ordered):
        if total - age * (count - number) >= idle_s * (count - number):
            return age
        age = seconds
        total -= seconds
    return age


class Levels:
    """How many slices were needed at once, minute by minute, of the last `days` days.

    `demand` may be called at any rate; time must not go backwards.
    """

    def __init__(self, days: int = 14, day_s: float = DAY_S) -> None:
        """`day_s`: how long a day is, where time is compressed; what is fixed here is compressed with it."""
        self._bin = BIN_S * day_s / DAY_S
        self._keep = int(days * DAY_S / BIN_S)
        self._first = 0
        self._peaks: list[int] = []
        self._starts: list[int] = []
        self._level = 0

    @property
    def days(self) -> float:
        """How many days of history there are."""
        return len(self._peaks) * BIN_S / DAY_S

    def demand(self, now: float, level: int, started: int = 0) -> None:
        """From now on `level` slices are needed at once; `started` of them have just begun."""
        self._reach(now)
        self._level = level
        self._peaks[-1] = max(self._peaks[-1], level)
        self._starts[-1] += started

    def needed(self, now: float, horizon_s: float, sure: float = 0.95, recent_s: float | None = None) -> int:
        """The least number of slices that suffices over the horizon with probability `sure`.

        Never less than the most of the last `recent_s` (ten minutes, of a day of 24 hours, where not given). Without a
        day of history that is all that is known.
        """
        self._reach(now)
        peaks = self._peaks
        end = len(peaks)
        back = RECENT_S / BIN_S if recent_s is None else recent_s / self._bin
        recent = max(peaks[max(0, end - max(1, int(back + _TINY))) :])
        span = max(1, math.ceil(horizon_s / self._bin - _TINY))
        around, day = int(AROUND_S / BIN_S), int(DAY_S / BIN_S)
        tops: list[int] = []
        usual = moments = 0
        centre = end - 1 - day
        while centre >= 0:
            for begin in range(max(0, centre - around), centre + around + 1, 5):
                tops.append(max(peaks[begin : begin + span]))
            window = self._starts[max(0, centre - around) : centre + 1]
            usual, moments = usual + sum(window), moments + len(window)
            centre -= day
        if not tops:
            return recent
        tops.sort()
        usually = tops[min(len(tops) - 1, max(0, math.ceil(sure * len(tops)) - 1))]
        latest = self._starts[max(0, end - around) :]
        ratio = 1.0
        if usual and latest:
            ratio = min(_MOST_RATIO, max(1.0, (sum(latest) / len(latest)) / (usual / moments)))
        return max(recent, math.ceil(usually * math.sqrt(ratio) - 1e-9))

    def _reach(self, now: float) -> None:
        """Open the bins up to this moment; what is needed goes on being needed."""
        bin_ = int(now / self._bin + _TINY)
        if not self._peaks:
            self._first = bin_
            self._peaks.append(self._level)
            self._starts.append(0)
        missing = bin_ - (self._first + len(self._peaks) - 1)
        if missing > 0:
            self._peaks += [self._level] * missing
            self._starts += [0] * missing
        surplus = len(self._peaks) - self._keep
        if surplus > self._keep // 8:
            del self._peaks[:surplus], self._starts[:surplus]
            self._first += surplus

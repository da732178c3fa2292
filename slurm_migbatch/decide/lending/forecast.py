"""What inference will need in the next minutes, from what it needed: who lends idle slices has to know how long.

Simple on purpose, and empirical throughout; nothing is fitted:

- `Gaps`: how long idle gaps last, as the share of those seen that lasted so long (Kaplan and Meier without censoring).
  Alibaba's readings of serving GPUs say why this is worth knowing: the median gap is two minutes, but gaps of more than
  ten hold 77 % of the idle time. A gap that has lasted a while is of the long ones.
- `Levels`: of slices that are filled in a fixed order, the n-th is needed when n are at once. How often within a
  horizon so many were, at this time of day on earlier days, says how long a window the n-th has. What was needed
  recently is expected to be needed again, and a recent rate above that time of day's raises all of it.
- `Rises`: how often demand rose above each level, and how long it stayed at or below it, in the last hour and around
  this time of day. Their quotient is how long the slice above that level stays idle on average before it is needed.
  Keeping a slice free is worth more the shorter that is, so a bound on it divides any load where a reclaim pays.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

DAY_S: Final = 86_400.0
BIN_S: Final = 60.0
AROUND_S: Final = 1800.0
"""Moments of earlier days this close in time of day count as this time of day."""
RECENT_S: Final = 600.0
_TINY: Final = 1e-6
_MOST_RATIO: Final = 3.0
"""The recent rate raises what is expected at most this many times: half an hour is a small sample."""


@dataclass(frozen=True)
class Minute:
    """`rises`: how often demand rose above each level. `spent`: seconds at each level."""

    rises: Counter[int] = field(default_factory=Counter)
    spent: dict[int, float] = field(default_factory=dict)


class Rises:
    """How long demand stays at or below each level before it rises above it, of the last `days` days.

    `demand` may be called at any rate; time must not go backwards.
    """

    def __init__(self, days: int = 14, day_s: float = DAY_S) -> None:
        """`day_s`: how long a day is, where time is compressed; minutes and hours are compressed with it."""
        self._bin = BIN_S * day_s / DAY_S
        self._day, self._around = int(DAY_S / BIN_S), int(AROUND_S / BIN_S)
        self._days = days
        self._minutes: dict[int, Minute] = {}
        self._level = 0
        self._at: float | None = None
        self._known: tuple[int, float, int] | None = None

    def demand(self, now: float, level: int) -> None:
        """From now on so much is needed at once."""
        self._pass(now)
        if level > self._level:
            self._minute(int(now / self._bin + _TINY)).rises.update(range(self._level, level))
        self._level = level

    def enough(self, now: float, idle_s: float) -> int:
        """The least level above which demand rises so seldom that `idle_s` seconds pass on average until it does.

        The higher of what the last hour says and what the same hour of earlier days does; 0 where nothing was needed.
        It is computed once a minute.
        """
        self._pass(now)
        minute = int(now / self._bin + _TINY)
        if self._known is None or self._known[:2] != (minute, idle_s):
            recent = self._least(range(minute - 2 * self._around, minute + 1), idle_s)
            centres = range(minute - self._day, minute - self._days * self._day - 1, -self._day)
            usual = (each for at in centres for each in range(at - self._around, at + self._around + 1))
            self._known = minute, idle_s, max(recent, self._least(usual, idle_s))
        return self._known[2]

    def _least(self, minutes: Iterable[int], idle_s: float) -> int:
        rises: Counter[int] = Counter()
        spent: dict[int, float] = {}
        for number in minutes:
            minute = self._minutes.get(number)
            if minute is not None:
                rises.update(minute.rises)
                for level, seconds in minute.spent.items():
                    spent[level] = spent.get(level, 0.0) + seconds
        idle = 0.0
        for level in range(max(spent, default=0) + 1):
            idle += spent.get(level, 0.0)
            if idle > 0 and idle >= idle_s * rises[level]:
                return level
        return 0

    def _pass(self, now: float) -> None:
        """Book the time since the last call; what is needed goes on being needed."""
        at = now if self._at is None else self._at
        while True:
            number = int(at / self._bin + _TINY)
            until = min(now, (number + 1) * self._bin)
            spent = self._minute(number).spent
            spent[self._level] = spent.get(self._level, 0.0) + max(0.0, until - at)
            at = max(at, until)
            if at >= now:
                break
        self._at = at

    def _minute(self, number: int) -> Minute:
        if number not in self._minutes:
            self._minutes[number] = Minute()
            self._minutes.pop(number - self._days * self._day - self._around - 1, None)
        return self._minutes[number]


class Gaps:
    """Lengths of idle gaps of one slice, service or bucket; the latest `most` of them."""

    def __init__(self, most: int = 2000) -> None:
        self._ordered: list[float] = []
        self._latest: deque[float] = deque()
        self._most = most

    def __len__(self) -> int:
        return len(self._ordered)

    def add(self, seconds: float) -> None:
        """A gap has ended after so long."""
        if len(self._latest) == self._most:
            old = self._latest.popleft()
            del self._ordered[bisect_right(self._ordered, old) - 1]
        self._latest.append(seconds)
        insort(self._ordered, seconds)

    def lasting(self, idle_s: float, more_s: float) -> float:
        """Probability that a gap that has lasted `idle_s` lasts `more_s` more.

        One made-up gap that ends in between keeps it below 1 and, where nothing was seen that long, at 0: it is not
        known.
        """
        had = len(self._ordered) - bisect_right(self._ordered, idle_s)
        longer = len(self._ordered) - bisect_right(self._ordered, idle_s + more_s)
        return longer / (had + 1)


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

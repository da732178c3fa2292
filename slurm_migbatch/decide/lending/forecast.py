"""How long a slice will stay idle, from what was needed before: who lends idle slices has to know.

Simple on purpose, and empirical throughout; nothing is fitted: `Rises` is how often demand rose above each level, and
how long it stayed at or below it, in the last hour and around this time of day. Their quotient is how long the slice
above that level stays idle on average before it is needed. Keeping a slice free is worth more the shorter that is, so a
bound on it divides any load where a reclaim pays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

DAY_S: Final = 86_400.0
BIN_S: Final = 60.0
AROUND_S: Final = 1800.0
"""Moments of earlier days this close in time of day count as this time of day."""
_TINY: Final = 1e-6


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

"""Forecast inference's need in the next minutes from its history, for lending whole GPUs as in DeepBoot.

`Levels`: of slices that are filled in a fixed order, the n-th is needed when n are needed at once. How often this
happened within a horizon, at this time of day on earlier days, predicts the gap of the n-th. Recent needs are
expected again, and a recent rate above that time of day's raises all of it. Empirical; nothing is fitted.

migbatchd lends by `decide.lending.forecast.LevelGaps`.
"""

from __future__ import annotations

import math
from typing import Final

from slurm_migbatch.decide.lending.forecast import AROUND_S, DAY_S

BIN_S: Final = 60.0
_TINY: Final = 1e-6
RECENT_S: Final = 600.0
_MOST_RATIO: Final = 3.0
"""Largest factor by which the recent rate raises the forecast: half an hour is a small sample."""


class Levels:
    """Number of slices needed at once, minute by minute, of the last `days` days.

    `demand` may be called at any rate; time must not go backwards.
    """

    def __init__(self, days: int = 14, day_s: float = DAY_S) -> None:
        """Keep `days` of history; `day_s` is the length of a day in compressed time.

        Fixed durations here are compressed with it.
        """
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
        """Record that from now on `level` slices are needed at once; `started` of them have just begun."""
        self._reach(now)
        self._level = level
        self._peaks[-1] = max(self._peaks[-1], level)
        self._starts[-1] += started

    def needed(self, now: float, horizon_s: float, sure: float = 0.95, recent_s: float | None = None) -> int:
        """Return the least number of slices that is sufficient over the horizon with probability `sure`.

        Never less than the most of the last `recent_s` (ten minutes, of a day of 24 hours, if not given). Without a
        day of history nothing else is known.
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
        """Open the bins up to this moment; the need continues."""
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

"""Forecast inference's need in the next minutes from its history, for lending whole GPUs as in DeepBoot.

`Levels`: if slices are filled in a fixed order, the n-th is needed when n are needed at once. How often this
happened within a horizon, at this time of day on earlier days, predicts how long the n-th stays idle. Recent needs are
expected again, and a recent rate of starts above that of this time of day raises the forecast. The forecast is
empirical; nothing is fitted.

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
    """Numbers of slices needed at once in each minute of the last `days` days.

    `demand` may be called at any rate; time must not go backwards.
    """

    def __init__(self, days: int = 14, day_s: float = DAY_S) -> None:
        """Keep `days` of history; `day_s` is the length of a day in compressed time.

        The fixed durations of this module are compressed by the same factor.
        """
        self._bin = BIN_S * day_s / DAY_S
        self._keep = int(days * DAY_S / BIN_S)
        self._first = 0
        self._peaks: list[int] = []
        self._starts: list[int] = []
        self._level = 0

    @property
    def days(self) -> float:
        """Number of days of history."""
        return len(self._peaks) * BIN_S / DAY_S

    def demand(self, now: float, level: int, started: int = 0) -> None:
        """Record that from `now` on `level` slices are needed at once, `started` of them newly."""
        self._advance(now)
        self._level = level
        self._peaks[-1] = max(self._peaks[-1], level)
        self._starts[-1] += started

    def needed(self, now: float, horizon_s: float, sure: float = 0.95, recent_s: float | None = None) -> int:
        """Return the least number of slices that is sufficient over the horizon with probability `sure`.

        It is at least the maximum of the last `recent_s` seconds (by default ten minutes of a day of 24 hours). Without
        a day of history it is this maximum.
        """
        self._advance(now)
        peaks = self._peaks
        end = len(peaks)
        recent_bins = RECENT_S / BIN_S if recent_s is None else recent_s / self._bin
        recent = max(peaks[max(0, end - max(1, int(recent_bins + _TINY))) :])
        span = max(1, math.ceil(horizon_s / self._bin - _TINY))
        around, day = int(AROUND_S / BIN_S), int(DAY_S / BIN_S)
        maxima: list[int] = []
        usual = moments = 0
        centre = end - 1 - day
        while centre >= 0:
            for begin in range(max(0, centre - around), centre + around + 1, 5):
                maxima.append(max(peaks[begin : begin + span]))
            window = self._starts[max(0, centre - around) : centre + 1]
            usual, moments = usual + sum(window), moments + len(window)
            centre -= day
        if not maxima:
            return recent
        maxima.sort()
        usual_maximum = maxima[min(len(maxima) - 1, max(0, math.ceil(sure * len(maxima)) - 1))]
        latest = self._starts[max(0, end - around) :]
        ratio = 1.0
        if usual and latest:
            ratio = min(_MOST_RATIO, max(1.0, (sum(latest) / len(latest)) / (usual / moments)))
        return max(recent, math.ceil(usual_maximum * math.sqrt(ratio) - 1e-9))

    def _advance(self, now: float) -> None:
        """Add the bins up to `now`, with the current level, and drop bins that are older than the history."""
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

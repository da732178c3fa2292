"""Time bins, and how much of something was held in each of them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any, Final

import numpy as np

Reals = np.ndarray[Any, np.dtype[np.float64]]
Codes = np.ndarray[Any, np.dtype[np.int64]]

_WIDTHS_S: Final = (60, 300, 900, 1800, 3600, 3 * 3600, 6 * 3600, 12 * 3600, 86400, 7 * 86400, 28 * 86400)


#: bins wider than this begin at the same local times on days with and without daylight saving time
_CLOCK_S: Final = 3600


@dataclass(frozen=True)
class TimeBins:
    """Bins of one width that cover a window; the first and the last are cut at its ends.

    Attributes:
        start, end: the window, unix seconds; start < end.
        width: seconds; of local time in bins of more than an hour.
        origin: where the first bin would begin without the cut.
    """

    start: float
    end: float
    width: float
    origin: float

    @classmethod
    def over(cls, start: float, end: float, max_bins: int) -> TimeBins:
        """Return at most about `max_bins` bins of a round width, which begin at round local times."""
        length = max(end - start, 1.0)
        fitting = (width for width in _WIDTHS_S if length / width <= max_bins)
        width = float(next(fitting, 28 * 86400 * np.ceil(length / max_bins / (28 * 86400))))
        shift = float(time.localtime(start).tm_gmtoff)
        local = float(np.floor((start + shift) / width) * width)
        began = datetime(1970, 1, 1) + timedelta(seconds=local)
        return cls(start, start + length, width, began.timestamp() if width > _CLOCK_S else local - shift)

    @cached_property
    def edges(self) -> Reals:
        """The edges, one more than bins, within the window."""
        edges, began = [self.origin], datetime.fromtimestamp(self.origin)
        while edges[-1] < self.end:
            later = self.width * len(edges)
            edges.append(
                (began + timedelta(seconds=later)).timestamp() if self.width > _CLOCK_S else self.origin + later
            )
        return np.clip(edges, self.start, self.end)

    @property
    def count(self) -> int:
        """The number of bins."""
        return len(self.edges) - 1

    @property
    def lengths(self) -> Reals:
        """Seconds of each bin within the window."""
        return np.diff(self.edges)

    def of(self, moments: Reals) -> Codes:
        """Return the bin numbers of times in the window."""
        return np.clip(np.searchsorted(self.edges, moments, side="right") - 1, 0, self.count - 1)

    def held(self, since: Reals, until: Reals, weight: Reals, group: Codes, groups: int) -> Reals:
        """Return weight x seconds in each bin by group, shape (groups, bins).

        Args:
            since, until: begin and end of each interval, unix seconds; only the part inside the window counts.
            weight: weight of each interval.
            group: group number of each interval, below `groups`.
        """
        since, until = np.clip(since, self.start, self.end), np.clip(until, self.start, self.end)
        nonempty = until > since
        since, until, weight, group = since[nonempty], until[nonempty], weight[nonempty], group[nonempty]
        first, last = self.of(since), self.of(until)
        bins = self.count
        at_first, at_last = group * bins + first, group * bins + last
        size = groups * bins
        # each interval: from its begin to the end of the window, minus from its own end to the end of the window
        edges = self.edges
        part = np.bincount(at_first, weight * (edges[first + 1] - since), size)
        part -= np.bincount(at_last, weight * (edges[last + 1] - until), size)
        whole = np.bincount(at_first, weight, size) - np.bincount(at_last, weight, size)
        running = np.cumsum(whole.reshape(groups, bins), axis=1)
        before = np.concatenate([np.zeros((groups, 1)), running[:, :-1]], axis=1)
        held: Reals = part.reshape(groups, bins) + before * self.lengths
        return np.maximum(held, 0.0)

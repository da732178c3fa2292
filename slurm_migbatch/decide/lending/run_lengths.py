"""Estimate the remaining time of a training job of which only the expected length is known. Pure.

The ratio of a job's length to its expected length (a part of its time limit) is assumed to be log-normal, with a mean
and a deviation learned from ended jobs. The remaining time of a running job follows from that distribution beyond its
run time: a job past its expected end is expected to run for long, not to end at once. This is a reconstruction: the
papers that this package follows assume known lengths. Times are seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import NormalDist
from typing import Final

_NORMAL: Final = NormalDist()
_TINY: Final = 1e-290
"""Minimum of probabilities and ratios: below it the distribution gives no information."""


@dataclass(frozen=True)
class LengthErrors:
    """The logarithm of length over expectation: its mean and its standard deviation."""

    mean: float = 0.0
    deviation: float = 0.7

    def left_s(self, expected_s: float, ran_s: float = 0.0, part: float = 0.5) -> float:
        """Return the remaining time of a job that is not exceeded with probability `part`; 0.5: its median.

        Args:
            expected_s: its whole length, as expected at submission; above 0.
            ran_s: how long it has run.
        """
        median_s = expected_s * math.exp(self.mean)
        tail = (1 - part) * self._chance_of_longer(expected_s, ran_s)
        if tail < _TINY:
            return ran_s * self.deviation
        return max(0.0, median_s * math.exp(-self.deviation * _NORMAL.inv_cdf(tail)) - ran_s)

    def ends_within(self, expected_s: float, ran_s: float, seconds: float) -> float:
        """Return the probability that a job which has run for `ran_s` ends within `seconds` more."""
        now = self._chance_of_longer(expected_s, ran_s)
        return 1.0 - self._chance_of_longer(expected_s, ran_s + seconds) / now if now > _TINY else 1.0

    def _chance_of_longer(self, expected_s: float, seconds: float) -> float:
        """Return the probability that a job takes longer than `seconds`."""
        ratio = seconds / expected_s
        if ratio <= _TINY:
            return 1.0
        log_error = math.log(ratio) - self.mean
        return 0.5 * math.erfc(log_error / self.deviation / math.sqrt(2))


@dataclass
class LengthHistory:
    """Errors of expected lengths by user, from ended jobs; sums of logarithms and of their squares.

    A user with few jobs is assumed to err like all others, and all together like `LengthErrors()`.
    """

    weight: float = 5.0
    _sums: dict[int, tuple[int, float, float]] = field(default_factory=dict)
    _all: tuple[int, float, float] = (0, 0.0, 0.0)

    def note(self, uid: int, expected_s: float, ran_s: float) -> None:
        """Record that a job of this user has ended after `ran_s`."""
        if not (0 < expected_s < math.inf and 0 < ran_s < math.inf):
            return
        error = math.log(max(1.0, ran_s) / max(1.0, expected_s))
        self._all = _added(self._all, error)
        self._sums[uid] = _added(self._sums.get(uid, (0, 0.0, 0.0)), error)

    def errors(self, uid: int) -> LengthErrors:
        """Return the expected error of a user's next job."""
        of_all_users = _pooled(self._all, LengthErrors(), self.weight)
        return _pooled(self._sums.get(uid, (0, 0.0, 0.0)), of_all_users, self.weight)


_LEAST: Final = 0.1
"""Minimum deviation: no user's estimates are exact."""


@lru_cache(maxsize=1 << 12)
def _pooled(sums: tuple[int, float, float], prior: LengthErrors, weight: float) -> LengthErrors:
    """Return the errors by sums and a prior. Cached, because rounds repeat the query for every job of a user."""
    count, total, squares = sums
    if not count:
        return prior
    mean = (total + weight * prior.mean) / (count + weight)
    around = squares - 2 * mean * total + count * mean * mean
    variance = (around + weight * prior.deviation**2) / (count + weight)
    return LengthErrors(mean, max(_LEAST, math.sqrt(variance)))


def _added(sums: tuple[int, float, float], error: float) -> tuple[int, float, float]:
    return sums[0] + 1, sums[1] + error, sums[2] + error * error

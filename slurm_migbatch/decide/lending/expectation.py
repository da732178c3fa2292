"""What inference is expected to need, by profile: `decide.lending.forecast.Rises`, fed from the record and then live.

Each profile has its own history, and all of them together have one in compute slices. Demand for one profile is often
high while that for another is low, so less is kept than all profiles would ask for one by one: the largest first, as
smaller slices fit where a larger one would.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping

from slurm_migbatch.decide.lending.forecast import DAY_S, Rises
from slurm_migbatch.mig.profile import Profile, ProfileError


class Expectation:
    """Demand of inference by profile and in all.

    Args:
        days: of history that count.
        day_s: seconds after which demand repeats itself; another than a day's for a replay in compressed time.
    """

    def __init__(self, days: int = 14, day_s: float = DAY_S) -> None:
        self._days, self._day_s = days, day_s
        self._rises: dict[Profile, Rises] = {}
        self._all = self.rises()
        self._level: Counter[Profile] = Counter()

    def rises(self) -> Rises:
        """Return an empty history over the same days."""
        return Rises(self._days, self._day_s)

    def learn(self, uses: Iterable[tuple[str, float, float | None]], now: float) -> None:
        """Take in the past: profile, beginning and end (None: goes on) of each use of a slice."""
        changes: list[tuple[float, int, Profile]] = []
        for name, since, until in uses:
            try:
                profile = Profile.parse(name)
            except ProfileError:
                continue
            begin = min(since, now)
            changes.append((begin, 1, profile))
            if until is not None and until < now:
                changes.append((max(begin, until), -1, profile))
        for at, more, profile in sorted(changes):
            self._demand({profile: self._level[profile] + more}, at)

    def look(
        self, running: Mapping[Profile, frozenset[tuple[int, int]]], waiting: Mapping[Profile, int], now: float
    ) -> None:
        """What inference has (its runs, job and restart count) and waits for now."""
        profiles = {*running, *waiting, *self._level}
        self._demand({p: len(running.get(p, ())) + waiting.get(p, 0) for p in profiles}, now)

    def reserve(self, now: float, horizon_s: float, sure: float) -> dict[Profile, int]:
        """Slices of each profile to keep free beyond the present demand.

        So many that what is not kept stays idle for `horizon_s` seconds with probability `sure`, where demand rises at
        the rate that its history shows for its level.
        """
        idle_s = horizon_s / -math.log(sure)
        slices = self._all.enough(now, idle_s) - _slices(self._level)
        kept: dict[Profile, int] = {}
        for profile in sorted(self._rises, key=lambda one: (one.compute, one.memory_gb, one.suffix), reverse=True):
            more = self._rises[profile].enough(now, idle_s) - self._level[profile]
            count = min(more, slices // profile.compute)
            if count > 0:
                kept[profile] = count
                slices -= count * profile.compute
        return kept

    def _demand(self, level: Mapping[Profile, int], now: float) -> None:
        """From now on so many slices of these profiles are needed."""
        for profile, count in level.items():
            self._rises.setdefault(profile, self.rises()).demand(now, count)
            self._level[profile] = count
        self._all.demand(now, _slices(self._level))


def _slices(level: Mapping[Profile, int]) -> int:
    return sum(count * profile.compute for profile, count in level.items())

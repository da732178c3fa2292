"""Forecast inference's needs by profile (`decide.lending.forecast.LevelGaps`), from the record and then live data.

Each profile has its own history and its own reserve. A common reserve in compute slices was smaller if demand
alternated between profiles, but its space had the wrong shape: at high load most reclaims were for lack of a
placement, not of slices.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from slurm_migbatch.decide.lending.forecast import DAY_S, LevelGaps
from slurm_migbatch.mig.naming import reported_profile
from slurm_migbatch.mig.profile import Profile

MOST_PROFILES: Final = 256
"""Profiles of which the past is used, the usual ones: the record has what any node reported."""


class Expectation:
    """Demand of inference by profile.

    Args:
        days: of history to use.
        day_s: seconds after which demand repeats; different from a day for a replay in compressed time.
    """

    def __init__(self, days: int = 14, day_s: float = DAY_S) -> None:
        self._days, self._day_s = days, day_s
        self._gaps: dict[Profile, LevelGaps] = {}
        self._level: Counter[Profile] = Counter()

    def gaps(self) -> LevelGaps:
        """Return an empty history over the same days."""
        return LevelGaps(self._days, self._day_s)

    def learn(self, uses: Iterable[tuple[str, float, float | None]], now: float) -> None:
        """Add past uses of slices: profile, start and end (None: still running) of each."""
        parsed: dict[str, Profile | None] = {}
        changes: dict[Profile, list[tuple[float, int]]] = {}
        for name, since, until in uses:
            if name not in parsed:
                parsed[name] = reported_profile(name)
            profile = parsed[name]
            if profile is None:
                continue
            begin, of_profile = min(since, now), changes.setdefault(profile, [])
            of_profile.append((begin, 1))
            if until is not None and until < now:
                of_profile.append((max(begin, until), -1))
        for profile, of_profile in sorted(changes.items(), key=lambda item: -len(item[1]))[:MOST_PROFILES]:
            of_profile.sort()
            gaps, level = self._gaps.setdefault(profile, self.gaps()), self._level[profile]
            for at, change in of_profile:
                level += change
                gaps.demand(at, level)
            self._level[profile] = level

    def update(
        self, running: Mapping[Profile, frozenset[tuple[int, int]]], waiting: Mapping[Profile, int], now: float
    ) -> None:
        """Add inference's current runs (job and restart count) and pending demand."""
        for profile in {*running, *waiting, *self._level}:
            count = len(running.get(profile, ())) + waiting.get(profile, 0)
            self._gaps.setdefault(profile, self.gaps()).demand(now, count)
            self._level[profile] = count

    def reserve(self, now: float, horizon_s: float, sure: float) -> dict[Profile, int]:
        """Return how many slices of each profile to reserve beyond the current demand.

        Enough that the remaining ones stay idle for `horizon_s` seconds with probability `sure`, if gaps end at random
        (with the mean `horizon_s` / -ln `sure`).
        """
        idle_s = horizon_s / -math.log(sure)
        counts = {profile: gaps.enough(now, idle_s) - self._level[profile] for profile, gaps in self._gaps.items()}
        return {profile: count for profile, count in counts.items() if count > 0}

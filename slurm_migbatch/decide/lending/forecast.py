"""Predict how long idle slices will stay idle from past gaps, and what inference needs, for lending.

Empirical; nothing is fitted. `LevelGaps` records how long demand stays at or below each level before it exceeds it
again. A slice that was needed a moment ago is usually needed again soon, and one that has been idle for a while stays
idle: the expected remainder of a gap is the mean remainder of those gaps, of the last hour and around this time of day,
that lasted at least as long as this one has so far.

Each profile has its own history and its own reserve (`Expectation`). A common reserve in compute slices was smaller if
demand alternated between profiles, but its space had the wrong shape: at high load most reclaims were for lack of a
placement, not of slices.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Final

from slurm_migbatch.decide.snapshot import passed_s
from slurm_migbatch.mig.naming import reported_profile
from slurm_migbatch.mig.profile import Profile

DAY_S: Final = 86_400.0
AROUND_S: Final = 1800.0
"""Largest difference in time of day at which earlier days count."""
PART_S: Final = 600.0
"""Gaps are grouped by the part of the day in which they ended."""
LEAST: Final = 0.25
"""Minimum idle time of a slice, as a share of the time for which it should stay idle."""
MOST_PROFILES: Final = 256
"""Profiles of which the past is used, the usual ones: the record has what any node reported."""
_MOST_ON_GPU: Final = 8
"""No GPU has more slices at once."""
_TINY: Final = 1e-6
_BLOCK: Final = 16
"""Adjacent levels whose gaps are looked up together."""

Part = list[tuple[int, int, float]]
"""The gaps that ended in a part of a day: the first of the levels that they are of, the one after the last, and their
seconds. A large array that is submitted or cancelled ends or begins equal gaps of thousands of levels."""


class LevelGaps:
    """How long demand stays at or below each level before it rises above it, over the last `days` days.

    The slice above level n is needed while demand is higher than n; a gap of that level is the time between. `demand`
    may be called at any rate. A gap in which the clock was set back does not count.
    """

    def __init__(self, days: int = 14, day_s: float = DAY_S) -> None:
        """`day_s`: length of a day in compressed time; its parts are compressed with it."""
        self._part = PART_S * day_s / DAY_S
        self._day, self._around = int(DAY_S / PART_S), int(AROUND_S / PART_S)
        self._days = days
        self._parts: dict[int, Part] = {}
        self._since: list[float] = []
        self._begin: float | None = None
        self._level = 0
        self._ages: tuple[int, float, dict[int, float]] = (-1, 0.0, {})
        self._relevant: dict[int, Part] = {}

    def demand(self, now: float, level: int) -> None:
        """Record that `level` slices are needed from now on."""
        if self._begin is None:
            self._begin = now
        if level > self._level:
            self._since += [self._begin] * (level - len(self._since))
            part, first = self._part_of(now), self._level
            for above in range(first + 1, level + 1):
                if above == level or self._since[above] != self._since[first]:
                    if (gap := now - self._since[first]) >= 0:
                        part.append((first, above, gap))
                    first = above
        else:
            self._since[level : self._level] = [now] * (self._level - level)
        self._level = level

    def enough(self, now: float, idle_s: float) -> int:
        """Return the current level and how many slices above it are expected to be needed within `idle_s` seconds.

        A slice is not expected to be needed if those gaps at its level and the adjacent ones that lasted at least as
        long as it has been idle went on for `idle_s` on average. One that has been idle for less than `LEAST` *
        `idle_s` is expected to be needed; one that has been idle for longer than any known gap is not.
        """
        number = int(now / self._part + _TINY)
        if self._ages[:2] != (number, idle_s):
            self._ages, self._relevant = (number, idle_s, {}), _by_block(self._open(number))
        ages = self._ages[2]
        needed = 0
        for level in range(self._level, len(self._since)):
            idle = passed_s(self._since[level], now)
            if idle < LEAST * idle_s:
                needed += 1
                continue
            age = ages.get(level)
            if age is None:
                age = ages[level] = age_for(self._known(level), idle_s)
            needed += idle < age
        return self._level + needed

    def _known(self, level: int) -> list[float]:
        """Return the gaps of this level and the adjacent ones, of the last hour and of this time on earlier days."""
        known: list[float] = []
        for first, after, seconds in self._relevant.get(level // _BLOCK, ()):
            known += [seconds] * (min(after, level + 2) - max(first, level - 1))  # none if that is below 0
        return known

    def _open(self, number: int) -> list[Part]:
        """Return the parts of the last hour and of this time on earlier days; not the (incomplete) current one."""
        parts = [*range(number - 2 * self._around, number)]
        for centre in range(number - self._day, number - self._days * self._day - 1, -self._day):
            parts += range(centre - self._around, centre + self._around + 1)
        return [self._parts[part] for part in parts if part in self._parts]

    def _part_of(self, now: float) -> Part:
        number = int(now / self._part + _TINY)
        if number not in self._parts:
            self._parts[number] = []
            oldest = number - self._days * self._day - self._around
            for old in [part for part in self._parts if part < oldest]:
                del self._parts[old]
        return self._parts[number]


def _by_block(parts: Iterable[Part]) -> dict[int, Part]:
    """Return the gaps of the levels of each block and the adjacent ones."""
    blocks: dict[int, Part] = {}
    for gap in chain.from_iterable(parts):
        for block in range((gap[0] - 1) // _BLOCK, gap[1] // _BLOCK + 1):
            blocks.setdefault(block, []).append(gap)
    return blocks


def age_for(gaps: Iterable[float], idle_s: float) -> float:
    """Return the least age (s) from which gaps last `idle_s` longer on average; the longest gap if there is none.

    The mean remainder of a gap falls as it ages and jumps when shorter gaps drop out, so only the lengths of
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
        self._most = 0

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
        self,
        running: Mapping[Profile, frozenset[tuple[int, int]]],
        waiting: Mapping[Profile, int],
        now: float,
        gpus: int,
    ) -> None:
        """Add inference's current runs (job and restart count) and pending demand.

        What exceeds the slices that so many `gpus`, or those of an earlier call, can have is not counted: no reserve
        for it would fit, and the tasks of an array may be millions.
        """
        self._most = max(self._most, _MOST_ON_GPU * gpus)
        for profile in {*running, *waiting, *self._level}:
            count = min(len(running.get(profile, ())) + waiting.get(profile, 0), self._most)
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

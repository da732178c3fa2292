"""What inference is expected to need, by profile: `policy.forecast.Levels`, fed from the record and then live."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from heapq import heappop, heappush

from slurm_migbatch.mig.profile import Profile, ProfileError
from slurm_migbatch.policy.forecast import DAY_S, RECENT_S, Levels


class Expectation:
    """Levels of inference by profile.

    Args:
        days: of history that count.
        day_s: seconds after which demand repeats itself; another than a day's for a replay in compressed time.
    """

    def __init__(self, days: int = 14, day_s: float = DAY_S) -> None:
        self._make, self._recent_s = partial(Levels, days, day_s), RECENT_S * day_s / DAY_S
        self._levels: dict[Profile, Levels] = {}
        self._running: dict[Profile, frozenset[tuple[int, int]]] | None = None
        self._level: Mapping[Profile, int] = {}

    def learn(self, uses: Iterable[tuple[str, float, float | None]], now: float) -> None:
        """Take in the past: profile, beginning and end (None: goes on) of each use of a slice, by their beginnings."""
        by_profile: dict[Profile, list[tuple[float, float]]] = {}
        for name, since, until in uses:
            try:
                profile = Profile.parse(name)
            except ProfileError:
                continue
            by_profile.setdefault(profile, []).append((since, now if until is None else max(since, min(until, now))))
        for profile, spans in by_profile.items():
            self._learn(profile, sorted(spans), now)

    def _learn(self, profile: Profile, spans: list[tuple[float, float]], now: float) -> None:
        levels = self._of(profile)
        ends: list[float] = []
        for since, until in spans:
            since = min(since, now)
            while ends and ends[0] <= since:
                at = heappop(ends)
                levels.demand(at, len(ends))
            heappush(ends, until)
            levels.demand(since, len(ends), 1)
        while ends and ends[0] < now:
            at = heappop(ends)
            levels.demand(at, len(ends))

    def look(
        self, running: Mapping[Profile, frozenset[tuple[int, int]]], waiting: Mapping[Profile, int], now: float
    ) -> None:
        """What inference has (its runs, job and restart count) and waits for now."""
        level = {p: len(running.get(p, ())) + waiting.get(p, 0) for p in {*running, *waiting, *self._levels}}
        for profile, count in level.items():
            before = running if self._running is None else self._running  # what ran before us is in the record
            started = len(running.get(profile, frozenset()) - before.get(profile, frozenset()))
            self._of(profile).demand(now, count, started)
        self._running, self._level = dict(running), level

    def reserve(self, now: float, horizon_s: float, sure: float) -> dict[Profile, int]:
        """Slices of each profile that are expected to be needed beyond the present level within the horizon."""
        found: Counter[Profile] = Counter()
        for profile, levels in self._levels.items():
            more = levels.needed(now, horizon_s, sure, self._recent_s) - self._level.get(profile, 0)
            if more > 0:
                found[profile] = more
        return dict(found)

    def _of(self, profile: Profile) -> Levels:
        if profile not in self._levels:
            self._levels[profile] = self._make()
        return self._levels[profile]

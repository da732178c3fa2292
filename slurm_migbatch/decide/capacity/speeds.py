"""Values that policies share: how fast a workload runs on a slice, and what slices a GPU can hold together.

A policy never sees a predictor or a table, only `Seconds`: a callable or a `Speeds` value. Seconds are of one batch of
one process; a slice with `procs` processes side by side finishes `procs` batches in that time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.layout import EMPTY, Layout
from slurm_migbatch.mig.planning import plan_free
from slurm_migbatch.mig.profile import Profile


class Seconds(Protocol):
    """Seconds that one batch takes on a slice with `procs` processes beside one another; None where it does not fit."""

    def __call__(self, profile: Profile, batch: int, procs: int = 1, /) -> float | None:
        """The seconds, above 0."""
        ...


@dataclass(frozen=True, order=True)
class Setting:
    """One way to run an instance of a service: its slice, the batch, and processes on it; `seconds` of one batch."""

    profile: Profile
    batch: int
    procs: int
    seconds: float

    @property
    def rate(self) -> float:
        """Items a second of all its processes together."""
        return self.batch * self.procs / self.seconds


class Speeds:
    """A table of seconds by profile, batch and processes; implements `Seconds`."""

    def __init__(self, seconds: Mapping[tuple[Profile, int, int], float]) -> None:
        """Entries of 0 or less do not fit."""
        self._seconds = {key: value for key, value in sorted(seconds.items()) if value > 0}

    def __call__(self, profile: Profile, batch: int, procs: int = 1, /) -> float | None:
        """See `Seconds`."""
        return self._seconds.get((profile, batch, procs))

    @property
    def settings(self) -> tuple[Setting, ...]:
        """Everything that fits, in a stable order."""
        return tuple(Setting(*key, value) for key, value in self._seconds.items())


def best_settings(settings: Iterable[Setting], limit_s: float | None = None) -> dict[Profile, Setting]:
    """For each slice the setting of the highest rate whose batch takes at most `limit_s`; fewer processes, then the
    smaller batch, where rates are equal. Slices on which none keeps the limit are missing."""
    best: dict[Profile, Setting] = {}
    for setting in settings:
        if limit_s is not None and setting.seconds > limit_s:
            continue
        other = best.get(setting.profile)
        if other is None or (setting.rate, -setting.procs, -setting.batch) > (other.rate, -other.procs, -other.batch):
            best[setting.profile] = setting
    return dict(sorted(best.items()))


def plain(geometry: Geometry) -> tuple[Profile, ...]:
    """The GPU's profiles without suffix, the largest first."""
    return tuple(info.profile for info in geometry.profiles if not info.profile.suffix)


def holds(geometry: Geometry, profiles: Sequence[Profile], used: Layout = EMPTY) -> bool:
    """Whether one GPU has legal places for all these slices beside what it uses."""
    return len(plan_free(geometry, used, profiles)) == len(profiles)


@lru_cache(maxsize=1024)
def bundles(geometry: Geometry, profiles: tuple[Profile, ...], used: Layout = EMPTY) -> tuple[tuple[int, ...], ...]:
    """Every way to fill one GPU with slices of these profiles: counts in the order of `profiles`, to none of which one
    more slice could be added. Whatever the GPU can hold beside `used` is part of one of them."""

    def listed(counts: Sequence[int]) -> list[Profile]:
        return [profile for profile, count in zip(profiles, counts, strict=True) for _ in range(count)]

    found: set[tuple[int, ...]] = set()
    maximal: set[tuple[int, ...]] = set()
    frontier = [(0,) * len(profiles)]
    while frontier:
        counts = frontier.pop()
        more = False
        for i in range(len(profiles)):
            grown = (*counts[:i], counts[i] + 1, *counts[i + 1 :])
            if grown in found:
                more = True
            elif holds(geometry, listed(grown), used):
                found.add(grown)
                frontier.append(grown)
                more = True
        if not more:
            maximal.add(counts)
    return tuple(sorted(maximal, reverse=True))

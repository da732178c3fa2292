"""Describe settings of a service instance: slice, batch and processes, and their speed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.profile import Profile


@dataclass(frozen=True, order=True)
class InstanceSetting:
    """One setting of a service instance: its slice, the batch, the number of processes, and the seconds of a batch."""

    profile: Profile
    batch: int
    procs: int
    seconds: float

    @property
    def rate(self) -> float:
        """Items per second of all its processes together."""
        return self.batch * self.procs / self.seconds


def best_settings(settings: Iterable[InstanceSetting], limit_s: float | None = None) -> dict[Profile, InstanceSetting]:
    """Return for each slice the setting with the highest rate whose batch takes at most `limit_s`.

    Of equal rates, fewer processes are preferred, then the smaller batch. Slices on which no setting keeps the limit
    are left out.
    """
    best: dict[Profile, InstanceSetting] = {}
    for setting in settings:
        if limit_s is not None and setting.seconds > limit_s:
            continue
        other = best.get(setting.profile)
        if other is None or (setting.rate, -setting.procs, -setting.batch) > (other.rate, -other.procs, -other.batch):
            best[setting.profile] = setting
    return dict(sorted(best.items()))


def plain(geometry: Geometry) -> tuple[Profile, ...]:
    """Return the GPU's profiles without suffix, the largest first."""
    return tuple(info.profile for info in geometry.profiles if not info.profile.suffix)

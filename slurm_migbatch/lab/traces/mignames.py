"""Find the profile of the simulated GPU that a GRES type of a site means.

A site's types are not always the driver's names. AutoDetect=nvml of slurmd writes the memory that a slice has, in GiB,
`3g.39gb` on an A100 with 80 GB, where the driver says `3g.40gb`; drivers differ by as much between their versions.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from slurm_migbatch.mig.geometry import Geometry, ProfileInfo
from slurm_migbatch.mig.profile import Profile

ALIKE: Final = 0.03
"""Largest difference of two names of the same memory, as a share of the driver's."""
_MIB: Final = 1024


@lru_cache(maxsize=1 << 12)
def profile_on(geometry: Geometry, profile: Profile) -> Profile:
    """Return the geometry's profile that is meant; `profile` itself if it has none like it.

    That is the one with the same compute slices and suffix whose memory is the same, as its name or as its MiB say it.
    """
    if profile in geometry:
        return profile
    alike = [info for info in geometry.profiles if _alike(info, profile)]
    return min(alike, key=lambda info: abs(info.profile.memory_gb - profile.memory_gb)).profile if alike else profile


def _alike(info: ProfileInfo, profile: Profile) -> bool:
    own = info.profile
    if (own.compute, own.suffix) != (profile.compute, profile.suffix):
        return False
    nominal = abs(own.memory_gb - profile.memory_gb) <= ALIKE * own.memory_gb
    return nominal or info.memory_mib // _MIB <= profile.memory_gb <= -(-info.memory_mib // _MIB)

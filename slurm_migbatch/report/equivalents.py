"""GPU equivalent of a slice: the larger of its shares of compute slices and of memory slices."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from slurm_migbatch.mig.profile import Profile, ProfileError

WHOLE: Final = (7, 8)
"""Default compute and memory slices of a GPU (A100, H100, H200, B200)."""


@lru_cache(maxsize=4096)  # a hundred thousand runs have only a few types of slices
def gpu_equivalent(profile: str, memory_slices: int | None = None, whole: tuple[int, int] = WHOLE) -> float:
    """Return the share of a GPU, 0 to 1, that is unavailable to others while a slice of this profile exists.

    Args:
        profile: name in NVML's or GRES spelling, "3g.40gb".
        memory_slices: of the slice, from its placement (`Lease.slot_size`); default: the minimum of a profile with that
            many compute slices. `1g.20gb` has twice as many, which its name alone does not show.
        whole: compute and memory slices of the whole GPU.

    Returns:
        The larger of both shares; 0 for a text that is not a profile.
    """
    try:
        compute = Profile.parse(profile).compute
    except ProfileError:
        return 0.0
    # memory slices come in powers of two: 1g has 1, 2g has 2, 3g and 4g have 4, 7g has 8
    minimum = 1 << (compute - 1).bit_length()
    memory = minimum if memory_slices is None else memory_slices
    return min(1.0, max(compute / whole[0], memory / whole[1]))

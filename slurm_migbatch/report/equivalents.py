"""How much of a GPU a slice is: the larger of its shares of compute slices and of memory slices."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from slurm_migbatch.mig.profile import Profile, ProfileError

WHOLE: Final = (7, 8)
"""Compute and memory slices of the GPUs that MIG was made for (A100, H100, H200, B200)."""


@lru_cache(maxsize=4096)  # of a hundred thousand runs there are a few kinds of slices
def gpu_equivalent(profile: str, memory_slices: int | None = None, whole: tuple[int, int] = WHOLE) -> float:
    """Return the share of a GPU, 0 to 1, that nobody else can use while a slice of this profile exists.

    Args:
        profile: name in NVML's or GRES spelling, "3g.40gb".
        memory_slices: of the slice, as its placement says (`Lease.slot_size`); where not given, as many as a profile
            of that many compute slices has at least. `1g.20gb` has twice as many, which its name alone does not tell.
        whole: compute and memory slices of the whole GPU.

    Returns:
        The larger of both shares; 0 for a text that names no profile.
    """
    try:
        compute = Profile.parse(profile).compute
    except ProfileError:
        return 0.0
    # memory slices come in powers of two: 1g has 1, 2g has 2, 3g and 4g have 4, 7g has 8
    least = 1 << (compute - 1).bit_length()
    memory = least if memory_slices is None else memory_slices
    return min(1.0, max(compute / whole[0], memory / whole[1]))

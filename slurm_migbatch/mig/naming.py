"""Name GPU instance profiles if the driver does not.

Drivers name a profile only through the newer query, and some only while MIG is on; else the name is computed as
in NVIDIA's own tools (go-nvlib, pkg/nvlib/device/mig_profile.go): the profile's memory is rounded up to eighths of the
GPU's memory, and these are multiplied by the GPU's memory in whole GiB.
"""

from __future__ import annotations

from slurm_migbatch.mig.profile import Profile, ProfileError

_MIB = 1 << 20
_GIB = 1 << 30

# Meaning of the arguments of nvmlDeviceGetGpuInstanceProfileInfo (nvml.h, NVML_GPU_INSTANCE_PROFILE_*) that are more
# than a number of slices. REV2 (9), twice the memory, has no suffix.
_SUFFIX_OF_ENUM = {
    0x7: "+me",
    0x8: "+me",
    0xA: "+gfx",
    0xB: "+gfx",
    0xC: "+gfx",
    0xD: "-me",
    0xE: "-me",
    0xF: "+me.all",
    0x10: "+me.all",
    0x11: "+gfx",
}


def computed_profile(enum: int, compute_slices: int, memory_mib: int, total_bytes: int) -> Profile:
    """Return the profile for NVML's enum value `enum`, from its size and the GPU's whole memory."""
    eighths = -(-8 * memory_mib * _MIB // max(total_bytes, 1))
    whole = -(-total_bytes // _GIB)
    gb = (eighths * whole + 4) // 8
    return Profile(compute_slices, gb, _SUFFIX_OF_ENUM.get(enum, ""))


def reported_profile(name: str) -> Profile | None:
    """Return the profile that the driver's name states, None if it cannot be parsed."""
    try:
        return Profile.parse(name)
    except ProfileError:
        return None

"""Wrap NVML's C-style queries as functions that return Python values; failures remain pynvml.NVMLError."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import pynvml

from slurm_migbatch.mig.placement import Placement
from slurm_migbatch.mig.profile import Profile

_MAX_INSTANCES = 64
_NO_SUCH_VERSION = (
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
    pynvml.NVML_ERROR_NOT_SUPPORTED,
)


class KnownProfile(NamedTuple):
    """A profile, one of the ids that the driver has for it, and the most instances of it."""

    profile_id: int
    profile: Profile
    limit: int


def gpu_profile_info(handle: Any, enum: int) -> Any:
    """Return the named description if the driver has it, MIG on or off, else the plain one (before R470)."""
    try:
        return pynvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, enum, version=2)
    except pynvml.NVMLError as error:
        if error.value not in _NO_SUCH_VERSION:
            raise
    return pynvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, enum, version=1)


def memory(handle: Any) -> Any:
    """Return total and used bytes. What the driver keeps for itself is not used, except on drivers before R510.

    It is hundreds of MiB of a whole GPU.
    """
    try:
        return pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except pynvml.NVMLError as error:
        if error.value not in _NO_SUCH_VERSION:
            raise
    return pynvml.nvmlDeviceGetMemoryInfo(handle)


def placements(handle: Any, profile_id: int) -> list[Placement]:
    """Return every placement of the profile, free or not."""
    count = ctypes.c_uint(0)
    pynvml.nvmlDeviceGetGpuInstancePossiblePlacements(handle, profile_id, None, ctypes.byref(count))
    array = (pynvml.c_nvmlGpuInstancePlacement_t * max(count.value, 1))()
    pynvml.nvmlDeviceGetGpuInstancePossiblePlacements(handle, profile_id, array, ctypes.byref(count))
    return [Placement(int(p.start), int(p.size)) for p in array[: count.value]]


def gpu_instances(handle: Any, known: KnownProfile) -> list[Any]:
    """Return the handles of the GPU instances of one profile."""
    count = ctypes.c_uint(0)
    array = (pynvml.c_nvmlGpuInstance_t * max(known.limit, _MAX_INSTANCES))()
    pynvml.nvmlDeviceGetGpuInstances(handle, known.profile_id, array, ctypes.byref(count))
    return list(array[: count.value])


def compute_instances(gi: Any, ci_profile_id: int) -> list[Any]:
    """Return the handles of the compute instances of one compute profile in a GPU instance."""
    count = ctypes.c_uint(0)
    array = (pynvml.c_nvmlComputeInstance_t * _MAX_INSTANCES)()
    pynvml.nvmlGpuInstanceGetComputeInstances(gi, ci_profile_id, array, ctypes.byref(count))
    return list(array[: count.value])


def compute_profile_info(gi: Any, enum: int) -> Any:
    """Return the plain description of a compute profile in a GPU instance."""
    shared = pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED
    return pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(gi, enum, shared, version=1)


def mig_device(handle: Any, gi_id: int, ci_id: int) -> Any:
    """Return the handle of the MIG device of a compute instance, found by a walk over the GPU; may raise NOT_FOUND."""
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            device = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            ids = (pynvml.nvmlDeviceGetGpuInstanceId(device), pynvml.nvmlDeviceGetComputeInstanceId(device))
        except pynvml.NVMLError_NotFound:
            continue
        if ids == (gi_id, ci_id):
            return device
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)


def text(value: bytes | str) -> str:
    """Return a C string as text, whatever its bytes."""
    return value if isinstance(value, str) else value.decode("utf-8", "replace")

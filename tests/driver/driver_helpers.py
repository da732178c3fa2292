"""Short forms of NVML's C-style calls, the hardware facts that the tests hold the driver to, and child processes."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pynvml

from slurm_migbatch.testbed.simdriver import Machine

Row = tuple[int, int, int, int, int, int, tuple[int, ...], int]

# name: (device id, enum, compute slices, MiB, SMs, max instances, starts, placement size); from the MIG user guide and
# nvidia-smi listings, written down again here so that the driver's own tables are checked against something.
GPUS: dict[str, dict[str, Row]] = {
    "a30": {
        "1g.6gb": (14, 0, 1, 5952, 14, 4, (0, 1, 2, 3), 1),
        "1g.6gb+me": (21, 7, 1, 5952, 14, 1, (0, 1, 2, 3), 1),
        "2g.12gb": (5, 1, 2, 11968, 28, 2, (0, 2), 2),
        "2g.12gb+me": (6, 8, 2, 11968, 28, 1, (0, 2), 2),
        "4g.24gb": (0, 3, 4, 24064, 56, 1, (0,), 4),
    },
    "a100-40gb": {
        "1g.5gb": (19, 0, 1, 4864, 14, 7, (0, 1, 2, 3, 4, 5, 6), 1),
        "1g.5gb+me": (20, 7, 1, 4864, 14, 1, (0, 1, 2, 3, 4, 5, 6), 1),
        "1g.10gb": (15, 9, 1, 9856, 14, 4, (0, 2, 4, 6), 2),
        "2g.10gb": (14, 1, 2, 9856, 28, 3, (0, 2, 4), 2),
        "3g.20gb": (9, 2, 3, 19968, 42, 2, (0, 4), 4),
        "4g.20gb": (5, 3, 4, 19968, 56, 1, (0,), 4),
        "7g.40gb": (0, 4, 7, 40192, 98, 1, (0,), 8),
    },
    "a100-80gb": {
        "1g.10gb": (19, 0, 1, 9728, 14, 7, (0, 1, 2, 3, 4, 5, 6), 1),
        "1g.10gb+me": (20, 7, 1, 9728, 14, 1, (0, 1, 2, 3, 4, 5, 6), 1),
        "1g.20gb": (15, 9, 1, 19968, 14, 4, (0, 2, 4, 6), 2),
        "2g.20gb": (14, 1, 2, 19968, 28, 3, (0, 2, 4), 2),
        "3g.40gb": (9, 2, 3, 40192, 42, 2, (0, 4), 4),
        "4g.40gb": (5, 3, 4, 40192, 56, 1, (0,), 4),
        "7g.80gb": (0, 4, 7, 80896, 98, 1, (0,), 8),
    },
    "h100-80gb": {
        "1g.10gb": (19, 0, 1, 9984, 16, 7, (0, 1, 2, 3, 4, 5, 6), 1),
        "1g.10gb+me": (20, 7, 1, 9984, 16, 1, (0, 1, 2, 3, 4, 5, 6), 1),
        "1g.20gb": (15, 9, 1, 20096, 26, 4, (0, 2, 4, 6), 2),
        "2g.20gb": (14, 1, 2, 20096, 32, 3, (0, 2, 4), 2),
        "3g.40gb": (9, 2, 3, 40448, 60, 2, (0, 4), 4),
        "4g.40gb": (5, 3, 4, 40448, 64, 1, (0,), 4),
        "7g.80gb": (0, 4, 7, 81152, 132, 1, (0,), 8),
    },
    "h200": {
        "1g.18gb": (19, 0, 1, 16384, 16, 7, (0, 1, 2, 3, 4, 5, 6), 1),
        "1g.18gb+me": (20, 7, 1, 16384, 16, 1, (0, 1, 2, 3, 4, 5, 6), 1),
        "1g.35gb": (15, 9, 1, 33024, 26, 4, (0, 2, 4, 6), 2),
        "2g.35gb": (14, 1, 2, 33024, 32, 3, (0, 2, 4), 2),
        "3g.71gb": (9, 2, 3, 71168, 60, 2, (0, 4), 4),
        "4g.71gb": (5, 3, 4, 71168, 64, 1, (0,), 4),
        "7g.141gb": (0, 4, 7, 143104, 132, 1, (0,), 8),
    },
    "b200": {
        "1g.23gb": (19, 0, 1, 20992, 18, 7, (0, 1, 2, 3, 4, 5, 6), 1),
        "1g.23gb+me": (20, 7, 1, 20992, 18, 1, (0, 1, 2, 3, 4, 5, 6), 1),
        "1g.45gb": (15, 9, 1, 45312, 30, 4, (0, 2, 4, 6), 2),
        "2g.45gb": (14, 1, 2, 45312, 36, 3, (0, 2, 4), 2),
        "3g.90gb": (9, 2, 3, 91136, 68, 2, (0, 4), 4),
        "4g.90gb": (5, 3, 4, 91136, 72, 1, (0,), 4),
        "7g.180gb": (0, 4, 7, 182784, 148, 1, (0,), 8),
    },
    "rtx-pro-6000": {
        "1g.24gb": (14, 0, 1, 24192, 46, 4, (0, 3, 6, 9), 3),
        "1g.24gb+me": (21, 7, 1, 24192, 46, 1, (0, 3, 6, 9), 3),
        "1g.24gb+gfx": (47, 10, 1, 24192, 46, 4, (0, 3, 6, 9), 3),
        "1g.24gb+me.all": (65, 15, 1, 24192, 46, 1, (0, 3, 6, 9), 3),
        "1g.24gb-me": (67, 13, 1, 24192, 46, 4, (0, 3, 6, 9), 3),
        "2g.48gb": (5, 1, 2, 48512, 94, 2, (0, 6), 6),
        "2g.48gb+gfx": (35, 11, 2, 48512, 94, 2, (0, 6), 6),
        "2g.48gb+me.all": (64, 16, 2, 48512, 94, 1, (0, 6), 6),
        "2g.48gb-me": (66, 14, 2, 48512, 94, 2, (0, 6), 6),
        "4g.96gb": (0, 3, 4, 97408, 188, 1, (0,), 12),
        "4g.96gb+gfx": (32, 12, 4, 97408, 188, 1, (0,), 12),
    },
}


@contextmanager
def nvml(machine: Machine) -> Iterator[Any]:
    """Pynvml on `machine`, whatever this process had open before."""
    before = pynvml.nvmlLib
    pynvml.nvmlLib = ctypes.CDLL(str(machine.library))
    pynvml._nvmlGetFunctionPointer_cache.clear()
    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()
        pynvml.nvmlLib = before
        pynvml._nvmlGetFunctionPointer_cache.clear()


def gpu(index: int = 0) -> Any:
    return pynvml.nvmlDeviceGetHandleByIndex(index)


def code(call: Any, *args: Any) -> int:
    """The return code of a call."""
    try:
        call(*args)
    except pynvml.NVMLError as error:
        return int(error.value)
    return 0


def create(device: Any, profile_id: int, start: int, size: int) -> Any:
    place = pynvml.c_nvmlGpuInstancePlacement_t(start, size)
    return pynvml.nvmlDeviceCreateGpuInstanceWithPlacement(device, profile_id, ctypes.byref(place))


def create_ci(instance: Any, profile_id: int, start: int, size: int) -> Any:
    place = pynvml.c_nvmlComputeInstancePlacement_t(start, size)
    return pynvml.nvmlGpuInstanceCreateComputeInstanceWithPlacement(instance, profile_id, ctypes.byref(place))


def full_ci(instance: Any) -> Any:
    """The largest compute instance that a GPU instance can have."""
    profiles = []
    for enum in range(pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
        try:
            info = pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, enum, 0)
        except pynvml.NVMLError_NotSupported:
            continue
        profiles.append((info.sliceCount, info.multiprocessorCount, info.id))
    return pynvml.nvmlGpuInstanceCreateComputeInstance(instance, max(profiles)[2])


def slice_of(device: Any, profile_id: int, start: int, size: int) -> tuple[Any, Any, str]:
    """A GPU instance with its full compute instance, and the UUID."""
    instance = create(device, profile_id, start, size)
    compute = full_ci(instance)
    return instance, compute, pynvml.nvmlDeviceGetUUID(pynvml.nvmlComputeInstanceGetInfo_v2(compute).device)


def placements(device: Any, profile_id: int) -> list[tuple[int, int]]:
    count = ctypes.c_uint()
    pynvml.nvmlDeviceGetGpuInstancePossiblePlacements(device, profile_id, None, ctypes.byref(count))
    array = (pynvml.c_nvmlGpuInstancePlacement_t * count.value)()
    pynvml.nvmlDeviceGetGpuInstancePossiblePlacements(device, profile_id, array, ctypes.byref(count))
    return [(place.start, place.size) for place in array[: count.value]]


def instances(device: Any, profile_id: int) -> list[Any]:
    count = ctypes.c_uint()
    array = (pynvml.c_nvmlGpuInstance_t * 8)()
    pynvml.nvmlDeviceGetGpuInstances(device, profile_id, array, ctypes.byref(count))
    # an element of a pointer array is a view into it, so it is copied to stay valid on its own
    return [ctypes.cast(array[i], pynvml.c_nvmlGpuInstance_t) for i in range(count.value)]


def computes(instance: Any, profile_id: int) -> list[Any]:
    count = ctypes.c_uint()
    array = (pynvml.c_nvmlComputeInstance_t * 8)()
    pynvml.nvmlGpuInstanceGetComputeInstances(instance, profile_id, array, ctypes.byref(count))
    return [ctypes.cast(array[i], pynvml.c_nvmlComputeInstance_t) for i in range(count.value)]


PRELUDE = f"""
import ctypes, os, random, signal, sys, time
sys.path.insert(0, {os.path.dirname(__file__)!r})
import pynvml
from driver_helpers import *
"""


def child(machine: Machine, script: str, *args: str, **popen: Any) -> subprocess.Popen[str]:
    """A process that finds the machine's library by its name, as anyone's program does."""
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + script, *args],
        env={**os.environ, "LD_LIBRARY_PATH": str(machine.directory)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **popen,
    )


def run(machine: Machine, script: str, *args: str, expect: int = 0) -> str:
    """What a child process printed; `expect` is its return code."""
    process = child(machine, script, *args)
    out, err = process.communicate(timeout=300)
    assert process.returncode == expect, err
    return out

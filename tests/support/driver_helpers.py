"""Short forms of NVML's C-style calls, the hardware facts that the driver must match, and child processes."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pynvml

from slurm_migbatch.testbed.simdriver import SimulatedMachine
from tests.support.gpu_facts import FACTS

Row = tuple[int, int, int, int, int, int, tuple[int, ...], int]


def _mebibytes(gib: float) -> int:
    """Return the multiple of 64 MiB that nvidia-smi prints as `gib`."""
    (size,) = {
        mib for mib in range(0, 1 << 18, 64) if abs(mib / 1024 - gib) < 0.05 and f"{mib / 1024:.2f}" == f"{gib:.2f}"
    }
    return size


# name: (device id, enum, compute slices, MiB, SMs, max instances, starts, placement size)
GPUS: dict[str, dict[str, Row]] = {
    model: {
        row.name: (row.id, row.enum, row.slices, _mebibytes(row.gib), row.sms, row.most, row.starts, row.size)
        for row in facts.rows
    }
    for model, facts in FACTS.items()
}


class ProfileV3(ctypes.Structure):
    """nvmlGpuInstanceProfileInfo_v3_t, which is missing from nvidia-ml-py."""

    _fields_ = [
        *[field for field in pynvml.c_nvmlGpuInstanceProfileInfo_v2_t._fields_ if field[0] != "isP2pSupported"],
        ("capabilities", ctypes.c_uint),
    ]


@contextmanager
def nvml(machine: SimulatedMachine) -> Iterator[Any]:
    """Let pynvml use `machine`, whatever library this process used before."""
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
    """Return the NVML return code of a call."""
    try:
        call(*args)
    except pynvml.NVMLError as error:
        return int(error.value)
    return 0


def create(device: Any, profile_id: int, start: int, size: int) -> Any:
    placement = pynvml.c_nvmlGpuInstancePlacement_t(start, size)
    return pynvml.nvmlDeviceCreateGpuInstanceWithPlacement(device, profile_id, ctypes.byref(placement))


def create_ci(instance: Any, profile_id: int, start: int, size: int) -> Any:
    placement = pynvml.c_nvmlComputeInstancePlacement_t(start, size)
    return pynvml.nvmlGpuInstanceCreateComputeInstanceWithPlacement(instance, profile_id, ctypes.byref(placement))


def full_ci(instance: Any) -> Any:
    """Create the largest compute instance that a GPU instance can have."""
    profiles = []
    for enum in range(pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
        try:
            info = pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, enum, 0)
        except pynvml.NVMLError_NotSupported:
            continue
        profiles.append((info.sliceCount, info.multiprocessorCount, info.id))
    return pynvml.nvmlGpuInstanceCreateComputeInstance(instance, max(profiles)[2])


def slice_of(device: Any, profile_id: int, start: int, size: int) -> tuple[Any, Any, str]:
    """Create a GPU instance with its full compute instance; return both, and the UUID."""
    instance = create(device, profile_id, start, size)
    compute = full_ci(instance)
    return instance, compute, pynvml.nvmlDeviceGetUUID(pynvml.nvmlComputeInstanceGetInfo_v2(compute).device)


def placements(device: Any, profile_id: int) -> list[tuple[int, int]]:
    count = ctypes.c_uint()
    pynvml.nvmlDeviceGetGpuInstancePossiblePlacements(device, profile_id, None, ctypes.byref(count))
    array = (pynvml.c_nvmlGpuInstancePlacement_t * count.value)()
    pynvml.nvmlDeviceGetGpuInstancePossiblePlacements(device, profile_id, array, ctypes.byref(count))
    return [(placement.start, placement.size) for placement in array[: count.value]]


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
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
import pynvml
from tests.support.driver_helpers import *
"""


def child(machine: SimulatedMachine, script: str, *args: str, **popen: Any) -> subprocess.Popen[str]:
    """Start a process that finds the machine's library by its soname, like any program."""
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + script, *args],
        env={**os.environ, "LD_LIBRARY_PATH": str(machine.directory)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **popen,
    )


def run(machine: SimulatedMachine, script: str, *args: str, expect: int = 0) -> str:
    """Return the output of a child process; `expect` is its return code."""
    process = child(machine, script, *args)
    out, err = process.communicate(timeout=300)
    assert process.returncode == expect, err
    return out


def check_tree(machine: SimulatedMachine) -> None:
    """Assert that the capability files in /proc agree with the driver's state."""
    expected = {}
    for gpu_state in machine.dump()["gpus"]:
        for i in gpu_state["instances"]:
            base = f"driver/nvidia/capabilities/gpu{gpu_state['minor']}/mig/gi{i['gi_id']}"
            expected[f"{base}/access"] = 3 + 135 * gpu_state["minor"] + 9 * i["gi_id"]
            for c in i["compute_instances"]:
                expected[f"{base}/ci{c['ci_id']}/access"] = (
                    3 + 135 * gpu_state["minor"] + 9 * i["gi_id"] + 1 + c["ci_id"]
                )
    actual = {
        str(path.relative_to(machine.proc_root)): int(path.read_text().split()[1])
        for path in machine.proc_root.rglob("access")
    }
    assert actual == expected
    stale = {p for p in machine.proc_root.rglob("[gc]i[0-9]*") if not (p / "access").exists()}
    assert stale == set()

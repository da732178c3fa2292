"""Describe the one device that a program sees, through NVML and without root: its size and the memory in use.

Listing GPU instances and placements requires root. A user's job can query the MIG device itself, by its UUID, so
everything here comes from that: its attributes, its name, its parent GPU.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import pynvml

from slurm_migbatch.mig.driver import DriverError, NotFound
from slurm_migbatch.mig.naming import reported_profile
from slurm_migbatch.mig.nvml import query
from slurm_migbatch.mig.nvml.describe import SILENT, listed_profiles
from slurm_migbatch.mig.nvml.errors import translated
from slurm_migbatch.mig.nvml.library import LibraryUser
from slurm_migbatch.mig.profile import Profile

_MIB = 1 << 20
_MIG_NAME = re.compile(r".*\bMIG (?:[0-9]+c\.)?(\S+)")


class Seen(NamedTuple):
    """A GPU or MIG device.

    `gpu` is the model of the whole GPU. `profile`, `compute_slices` and `sm_count` are None for a GPU without MIG;
    if a compute instance is smaller than its GPU instance, `sm_count` is the compute instance's. `memory_share` is
    the slice's share of the memory of the GPU's largest profile, 1 for a whole GPU. `driver` is the driver's version.
    """

    uuid: str
    gpu: str
    profile: Profile | None
    compute_slices: int | None
    sm_count: int | None
    memory_mib: int
    memory_share: float
    driver: str


class MemoryUse(NamedTuple):
    """Memory in use on a device, all in MiB: `used` in total, `processes` by process id (None: unknown).

    Both are without what the driver keeps for itself, except `used` on drivers before R510.
    """

    used: float
    processes: tuple[tuple[int, float | None], ...]


class VisibleDevice(LibraryUser):
    """A device as CUDA_VISIBLE_DEVICES names it: `MIG-<uuid>`, `GPU-<uuid>` (or its beginning) or an index.

    A whole GPU in MIG mode means its first slice, as in CUDA. Raises DriverMissing if there is no driver, NotFound or
    InvalidRequest if there is no such device (drivers differ for UUIDs), else DriverError.
    """

    def __init__(self, name: str, library: str | None = None) -> None:
        super().__init__(library)
        try:
            self._handle = self._find(name)
            self.seen = self._describe()
        except DriverError:
            self.close()
            raise

    def usage(self) -> MemoryUse:
        """Return the memory in use now; raises DriverError."""
        memory = self._ask("its memory", query.memory, self._handle)
        listed: list[Any] = []
        with suppress(*SILENT):
            listed = self._ask("its processes", pynvml.nvmlDeviceGetComputeRunningProcesses, self._handle)
        return MemoryUse(
            int(memory.used) / _MIB,
            tuple((int(p.pid), None if p.usedGpuMemory is None else int(p.usedGpuMemory) / _MIB) for p in listed),
        )

    # -- internal ------------------------------------------------------------------------------------------------

    def _ask(self, operation: str, call: Callable[..., Any], *args: object) -> Any:
        try:
            return call(*args)
        except pynvml.NVMLError as error:
            raise translated(error, f"the visible GPU: {operation}") from None

    def _find(self, name: str) -> Any:
        if name.isdigit():
            handle = self._ask(f"GPU {name}", pynvml.nvmlDeviceGetHandleByIndex, int(name))
        elif name.startswith("GPU-"):
            handle = self._by_beginning(name)
        elif name.startswith("MIG-"):
            return self._ask(name, pynvml.nvmlDeviceGetHandleByUUID, os.fsencode(name))
        else:
            raise NotFound(0, f"'{name}' is not a GPU: write an index, GPU-<uuid> or MIG-<uuid>, as in nvidia-smi -L")
        try:
            on = bool(self._ask("its MIG mode", pynvml.nvmlDeviceGetMigMode, handle)[0])
        except SILENT:
            on = False
        if not on:
            return handle
        first = next(self._mig_devices(handle), None)
        if first is None:
            raise NotFound(0, f"GPU {name} is in MIG mode and has no slice: request one with --gres=mig:<profile>")
        return first

    def _by_beginning(self, name: str) -> Any:
        count = self._ask("the number of GPUs", pynvml.nvmlDeviceGetCount)
        for index in range(count):
            handle = self._ask(f"GPU {index}", pynvml.nvmlDeviceGetHandleByIndex, index)
            if str(self._ask("its UUID", pynvml.nvmlDeviceGetUUID, handle)).startswith(name):
                return handle
        raise NotFound(0, f"no {name} among the {count} GPUs of this host")

    def _mig_devices(self, gpu: Any) -> Iterator[Any]:
        for index in range(self._ask("its slices", pynvml.nvmlDeviceGetMaxMigDeviceCount, gpu)):
            with suppress(NotFound):
                yield self._ask(f"slice {index}", pynvml.nvmlDeviceGetMigDeviceHandleByIndex, gpu, index)

    def _describe(self) -> Seen:
        handle = self._handle
        uuid = str(self._ask("its UUID", pynvml.nvmlDeviceGetUUID, handle))
        driver = str(self._ask("the driver's version", pynvml.nvmlSystemGetDriverVersion))
        if not uuid.startswith("MIG-"):
            total = int(self._ask("its memory", pynvml.nvmlDeviceGetMemoryInfo, handle).total)
            name = str(self._ask("its name", pynvml.nvmlDeviceGetName, handle))
            return Seen(uuid, name, None, None, None, total // _MIB, 1.0, driver)
        attributes = self._ask("its attributes", pynvml.nvmlDeviceGetAttributes_v2, handle)
        parent = self._ask("its GPU", pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, handle)
        compute, memory = int(attributes.gpuInstanceSliceCount), int(attributes.memorySizeMB)
        profiles = list(self._profiles(parent))
        return Seen(
            uuid,
            str(self._ask("its GPU's name", pynvml.nvmlDeviceGetName, parent)),
            self._named() or _nearest(profiles, compute, memory),
            compute,
            int(attributes.multiprocessorCount),
            memory,
            memory / max((mib for _, mib in profiles), default=memory),
            driver,
        )

    def _named(self) -> Profile | None:
        """Return the profile in the device's name: `NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb`."""
        match = _MIG_NAME.fullmatch(str(self._ask("its name", pynvml.nvmlDeviceGetName, self._handle)))
        return reported_profile(match[1]) if match else None

    def _profiles(self, gpu: Any) -> Iterator[tuple[Profile, int]]:
        """Yield the profiles of the GPU, each with its memory in MiB."""

        def ask(operation: str, call: Callable[..., Any], *args: object) -> Any:
            return self._ask(operation, call, gpu, *args)

        for raw, profile in listed_profiles(ask):
            yield profile, int(raw.memorySizeMB)


def _nearest(profiles: list[tuple[Profile, int]], compute: int, memory_mib: int) -> Profile | None:
    """Return the plain profile with this many compute slices and the nearest memory."""
    same = [(abs(mib - memory_mib), profile.suffix, profile) for profile, mib in profiles if profile.compute == compute]
    return min(same)[2] if same else None

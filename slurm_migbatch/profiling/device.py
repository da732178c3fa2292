"""Describe the measured device: its columns, the environment of children, and their memory use."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from slurm_migbatch.mig.driver import DriverError, DriverMissing, InvalidRequest
from slurm_migbatch.profiling.measurement import CPU, TEXT_LENGTHS
from slurm_migbatch.workload.gpufacts import GpuModelFacts, facts_of

_NO_GPU = ("", "-1", "nodevfiles", "none", "void")
# jax and TensorFlow otherwise take most of a GPU's memory at once, whatever they need
_ALLOCATE = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
_INTERVAL_S = 0.05
_DEFAULT_MEMORY_SLICES = GpuModelFacts(0, 0).memory_slices


@dataclass(frozen=True)
class Device:
    """The measured device, in the columns of the table.

    `visible` is CUDA_VISIBLE_DEVICES of the measured program: a UUID, or empty for the CPU. Slices are None
    for a whole GPU without MIG, `sm_count` if unknown. `driver` is the version of the NVIDIA driver.
    """

    gpu: str = CPU
    visible: str = ""
    profile: str = ""
    compute_slices: int | None = None
    memory_slices: int | None = None
    sm_count: int | None = None
    memory_mib: int | None = None
    driver: str = ""

    @property
    def is_cpu(self) -> bool:
        """Whether no GPU is used."""
        return not self.visible

    @property
    def columns(self) -> dict[str, Any]:
        """Columns of a row measured here."""
        slices = {"compute_slices": self.compute_slices, "memory_slices": self.memory_slices}
        return {"gpu": self.gpu, "profile": self.profile, "sm_count": self.sm_count, **slices}

    def source(self, *parts: str) -> str:
        """Return the column `source` of a row measured here: the parts that are not empty, and the driver."""
        driver = f"driver {self.driver}" if self.driver else ""
        return " ".join(filter(None, (*parts, driver)))[: TEXT_LENGTHS["source"]]

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Return the environment for a program that sees this device only and allocates no more than it needs."""
        return {**_ALLOCATE, **base, "CUDA_VISIBLE_DEVICES": self.visible, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

    def __str__(self) -> str:
        if self.is_cpu:
            return "the CPU (a trial: not comparable to GPUs)"
        parts = [f"{self.gpu} MIG {self.profile}" if self.profile else self.gpu]
        if self.sm_count:
            parts.append(f"{self.sm_count} SMs")
        if self.memory_mib:
            parts.append(f"{self.memory_mib} MiB")
        return ", ".join(parts)


class MemoryPeak:
    """The peak of memory in use, in MiB; None before the first sample."""

    def __init__(self) -> None:
        self.mib: float | None = None

    def note(self, mib: float) -> None:
        """Update the peak."""
        if mib > 0 and (self.mib is None or mib > self.mib):
            self.mib = mib


class NvmlMeter:
    """Measure how much of a device's memory a set of processes takes: sample NVML twenty times a second.

    If no other process is on the device, the increase of its memory in use counts: that is what must fit. Otherwise
    only the processes of the sessions count, as far as NVML reports their share. The baseline is the minimum before any
    point, because memory of the last one may still be being freed.
    """

    def __init__(self, visible: str, library: str | None = None) -> None:
        self._visible = visible
        self._library = library
        self._idle = math.inf

    @contextmanager
    def watch(self, sessions: Collection[int]) -> Iterator[MemoryPeak]:
        """Keep the peak while the context is open; raises DriverError at its start. `sessions`, which may grow
        meanwhile, holds the session ids that count.
        """
        from slurm_migbatch.mig.nvml.visible import MemoryUse, VisibleDevice

        peak, over = MemoryPeak(), threading.Event()
        with VisibleDevice(self._visible, self._library) as device:
            self._idle = min(self._idle, device.usage().used)

            def note(usage: MemoryUse) -> None:
                own = [mib or 0.0 for pid, mib in usage.processes if _session(pid) in sessions]
                alone = len(own) == len(usage.processes)
                peak.note(usage.used - self._idle if alone or not sum(own) else sum(own))

            def sample() -> None:
                while not over.wait(_INTERVAL_S):
                    try:
                        note(device.usage())
                    except DriverError:
                        return  # the GPU is lost; the measured program will report it

            thread = threading.Thread(target=sample, name="memory", daemon=True)
            thread.start()
            try:
                yield peak
            finally:
                over.set()
                thread.join()


def find_device(asked: str | None, environ: Mapping[str, str], library: str | None = None) -> Device:
    """Return the device that a program started here would use.

    `asked` is `cpu`, or a device as CUDA_VISIBLE_DEVICES names it; None takes the first of that variable, or the first
    GPU, or the CPU if there is no driver. Raises DriverError if a named GPU cannot be used.
    """
    if asked == CPU:
        return Device()
    name = asked if asked is not None else environ.get("CUDA_VISIBLE_DEVICES")
    if name is not None:
        name = name.split(",")[0].strip()
        if name.lower() in _NO_GPU:
            return Device()
    try:
        from slurm_migbatch.mig.nvml.visible import VisibleDevice
    except ModuleNotFoundError:
        text = "cannot query the NVIDIA driver: install nvidia-ml-py, or use --device cpu for a trial without a GPU"
        raise DriverMissing(0, text) from None
    try:
        with VisibleDevice(name or "0", library) as device:
            description = device.seen
    except (DriverMissing, InvalidRequest):
        if name is None:  # no driver, or one without a GPU
            return Device()
        raise
    facts = facts_of(description.gpu)
    units = facts.memory_slices if facts else _DEFAULT_MEMORY_SLICES
    return Device(
        gpu=description.gpu,
        visible=description.uuid,
        profile=description.profile.name if description.profile else "",
        compute_slices=description.compute_slices,
        memory_slices=max(1, round(description.memory_share * units)) if description.profile else None,
        sm_count=description.sm_count or (facts.sm_count if facts else 0) or None,
        memory_mib=description.memory_mib,
        driver=description.driver,
    )


def _session(pid: int) -> int:
    """Return the session of a process, -1 if it is not visible (another container)."""
    try:
        return os.getsid(pid)
    except OSError:
        return -1

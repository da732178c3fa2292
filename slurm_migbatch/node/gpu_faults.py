"""Count the failed starts of each GPU, and withdraw one that fails repeatedly for some time.

Successful starts on the other GPUs of its node reset the node's own count, so the node would never be drained although
each job that Slurm places on that GPU is requeued. The counts are in RunDir, so a boot ends them, and no journal and
no driver is needed to read them.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import NamedTuple

from slurm_migbatch.mig.driver import DriverError
from slurm_migbatch.node.deadline import Deadline, TooLate, locked
from slurm_migbatch.node.paths import Paths, read, replace

NAME = "gpu-faults"
FORGET_S = 3600.0
"""Seconds after which failures of a GPU that is used are forgotten."""
FIRST_PAUSE_S = 600.0
"""How long a GPU is withdrawn; twice as long each time that it fails again after that."""
LONGEST_PAUSE_S = 86400.0
_MAX_BYTES = 65536
_LONGEST = 250


class Withdrawn(DriverError):
    """The GPU is not used for now: starts on it have failed repeatedly."""


class GpuFault(NamedTuple):
    """Failed starts of one GPU, the last at `at` (unix s) because of `what`; `pause`: seconds without use after it."""

    failures: int
    at: float
    what: str
    pause: float = 0.0

    @property
    def paused(self) -> bool:
        """Whether the GPU is withdrawn; not if the clock was set back, which would prolong it."""
        return 0.0 <= time.time() - self.at < self.pause

    def after(self, what: str, limit: int) -> GpuFault:
        """Return this with one more failure."""
        now = time.time()
        if self.pause:
            return GpuFault(self.failures + 1, now, what, min(2 * self.pause, LONGEST_PAUSE_S))
        failures = 1 + (self.failures if 0.0 <= now - self.at < FORGET_S else 0)
        return GpuFault(failures, now, what, FIRST_PAUSE_S if failures >= limit else 0.0)

    def __str__(self) -> str:
        until = time.strftime("%H:%M", time.localtime(self.at + self.pause))
        return f"{self.what}; {self.failures} starts failed, so it is not used until {until} or `migbatch node init`"


def named(failure: str) -> str:
    """Return the UUID of the GPU that a failure names (the call that failed or hangs, or its lock); empty if none."""
    match = re.search(r"GPU-[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", failure)
    return match[0] if match else ""


def withdrawn(run_dir: str) -> dict[str, Withdrawn]:
    """Return the GPUs that are not used now, with the reason as an error."""
    faults = _load(f"{run_dir}/{NAME}")
    errors = {uuid: Withdrawn(0, str(fault)) for uuid, fault in faults.items() if fault.paused}
    for uuid, error in errors.items():
        error.gpu = uuid
    return errors


def count(paths: Paths, gpu: str, what: str, limit: int, deadline: Deadline) -> GpuFault | None:
    """Count a failure of a GPU; return the fault if it is withdrawn, because of this one or already."""
    with suppress(TooLate, OSError), locked(paths.lock, [NAME], deadline):
        faults = _load(NAME, paths.run)
        fault = faults.get(gpu) or GpuFault(0, 0.0, "")
        if not fault.paused:  # else this start had begun before
            fault = faults[gpu] = fault.after(what[:_LONGEST], limit)
            _store(paths, faults)
        return fault if fault.paused else None
    return None


def clear(paths: Paths, gpus: Collection[str], deadline: Deadline) -> None:
    """Forget the failures of these GPUs."""
    if not any(gpu in gpus for gpu in _load(NAME, paths.run)):
        return
    with suppress(TooLate, OSError), locked(paths.lock, [NAME], deadline):
        _store(paths, {gpu: fault for gpu, fault in _load(NAME, paths.run).items() if gpu not in gpus})


def clear_all(paths: Paths) -> None:
    """Forget all failures."""
    with suppress(OSError):
        os.unlink(NAME, dir_fd=paths.run)


def _load(name: str, directory: int | None = None) -> dict[str, GpuFault]:
    try:
        rows = json.loads(read(name, _MAX_BYTES, directory))
        return {str(gpu): GpuFault(int(n), float(at), str(what), float(pause)) for gpu, (n, at, what, pause) in rows}
    except (OSError, ValueError, TypeError):
        return {}


def _store(paths: Paths, faults: Mapping[str, GpuFault]) -> None:
    content = json.dumps(list(faults.items())).encode()
    replace(paths.run, NAME, content, NAME, durable=False)

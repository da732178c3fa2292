"""Define the values that a GPU driver exchanges: instances, processes on them, and typed errors.

It does not import NVML, so that callers can name them before a GPU is accessed. Driver return codes are never
exposed: each failure is a DriverError, or the subclass that says what the caller can do about it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple

from slurm_migbatch.mig.layout import Slot
from slurm_migbatch.mig.placement import Placement
from slurm_migbatch.mig.profile import Profile

calling: Callable[[str], None] | None = None
"""Called before each call of the driver, if it is set, with what the call is for."""


class DriverError(RuntimeError):
    """The driver refused or failed. `code` is its return code (0 if none), `message` says what happened.

    `gpu` is the UUID of the GPU that the call was about; empty if it is not known.
    """

    gpu = ""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Busy(DriverError):
    """The instance or the GPU is still in use; try again."""


class InsufficientResources(DriverError):
    """The placement is taken or a limit of the GPU is reached."""


class InstanceExists(InsufficientResources):
    """Exactly this slot exists already; `instance` is the existing one."""

    def __init__(self, code: int, message: str, instance: Instance) -> None:
        super().__init__(code, message)
        self.instance = instance


class NoPermission(DriverError):
    """The driver requires root (or the mig/config capability)."""


class NotFound(DriverError):
    """The instance or GPU does not exist, or no longer exists."""


class NotMig(DriverError):
    """MIG is off, not supported by the GPU, or not available in this guest."""


class GpuLost(DriverError):
    """The GPU fell off the bus or needs a reset; it is unsafe to use."""


class DriverMissing(DriverError):
    """The driver's library or kernel module is missing or too old."""


class InvalidRequest(DriverError):
    """The driver does not know the profile or placement of the request."""


class Activation(enum.Enum):
    """Result of a change of the MIG mode."""

    DONE = "done"
    IN_USE = "in use"  # the GPU is in use; the change is refused, or pending
    RESET_REQUIRED = "reset required"  # the change is pending until the GPU is reset (Ampere)
    REFUSED = "refused"  # the driver could not apply it for another reason


class Instance(NamedTuple):
    """An existing GPU instance with its compute instance.

    `gi_id` and `ci_id` are opaque and reused by the driver. `ci_id` and `mig_uuid` are None if the GPU instance has
    no compute instance: it then takes space but no program can use it.
    """

    gi_id: int
    profile: Profile
    placement: Placement
    ci_id: int | None
    mig_uuid: str | None

    @property
    def slot(self) -> Slot:
        """Its profile and placement."""
        return Slot(self.profile, self.placement)

    def __str__(self) -> str:
        return f"{self.profile}@{self.placement} (instance {self.gi_id})"


class Holder(NamedTuple):
    """A process on an instance. `name` is its command as /proc shows it, empty if it is not visible."""

    pid: int
    name: str

    def __str__(self) -> str:
        return f"{self.pid} ({self.name})" if self.name else str(self.pid)


class Activity(NamedTuple):
    """Activity of an instance over some seconds: shares (0 to 1) of its SMs, of its tensor cores and of its memory
    bandwidth in use, on average.
    """

    seconds: float
    sm: float
    tensor: float
    dram: float

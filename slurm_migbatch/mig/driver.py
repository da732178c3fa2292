"""Define the interface to a GPU driver: GPUs, the instances on them, and typed errors.

`mig/nvml/` implements the protocols with NVML. Driver return codes are never exposed: each failure is a
DriverError, or the subclass that says what the caller can do about it.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from typing import NamedTuple, Protocol

from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.layout import Layout, Slot
from slurm_migbatch.mig.placement import Placement
from slurm_migbatch.mig.profile import Profile


class DriverError(RuntimeError):
    """The driver refused or failed. `code` is its return code (0 if none), `message` says what happened."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Busy(DriverError):
    """The instance or the GPU is still in use; try again."""


class NoRoom(DriverError):
    """The placement is taken or a limit of the GPU is reached."""


class AlreadyThere(NoRoom):
    """Exactly this slot exists already; `instance` is what holds it."""

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
    IN_USE = "in use"  # the GPU is in use; the change is pending
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


class Gpu(Protocol):
    """One GPU. Every call may raise DriverError."""

    @property
    def index(self) -> int:
        """NVML's index; changes with the set of visible GPUs."""

    @property
    def minor(self) -> int:
        """The number in /dev/nvidia<minor> and in the capability tree; not the index."""

    @property
    def uuid(self) -> str:
        """`GPU-...`, stable."""

    @property
    def name(self) -> str:
        """The model's name as NVML gives it."""

    def geometry(self) -> Geometry:
        """Return the profiles and placements of this GPU; raises NotMig if it has none. MIG may be off."""

    def facts(self) -> Mapping[str, str | int | float]:
        """Return other facts of the GPU; see `mig/nvml/`. Keys whose value the driver does not report are missing."""

    def mig_mode(self) -> tuple[bool, bool]:
        """Return whether MIG is on now, and after the next reset; (False, False) on GPUs without it."""

    def set_mig_mode(self, on: bool) -> Activation:
        """Switch MIG. Raises NotMig, NoPermission or Busy; the result tells if the change is pending."""

    def instances(self) -> tuple[Instance, ...]:
        """Return all instances of all profiles, ordered by placement; empty if MIG is off."""

    def layout(self) -> Layout:
        """Return the slots that the instances take."""

    def create(self, slot: Slot) -> Instance:
        """Create a GPU instance there with its full compute instance.

        If the compute instance cannot be created, the GPU instance is destroyed again. Raises NoRoom if the place is
        taken, AlreadyThere (a NoRoom) if exactly this slot exists.
        """

    def complete(self, instance: Instance) -> Instance:
        """Create the full compute instance of a GPU instance that lacks one; an instance that has one is returned as it
        is.
        """

    def destroy(self, instance: Instance) -> None:
        """Destroy the compute instance, then the GPU instance. Instances that no longer exist are no error. Raises
        Busy.

        After Busy the compute instance may already be destroyed; retry, or call `complete`.
        """

    def processes(self, instance: Instance) -> tuple[int, ...]:
        """Return the ids of the processes that use the instance, sorted."""

    def memory_used(self, instance: Instance) -> int:
        """Return the MiB in use on the instance. Raises NotFound if it does not exist or has no compute instance."""

    def activity(self, instance: Instance, holder: tuple[int, int]) -> Activity | None:
        """Return the activity of the instance since the last call for this holder; None at the first.

        Raises NotMig if the GPU does not support it (before Hopper), DriverMissing if the driver is too old.
        """

    def energy_j(self) -> float:
        """Return the joules that the whole GPU, not one instance, has used since the driver was loaded.

        Raises NotMig if the GPU does not support it, DriverMissing if the driver is too old.
        """

    def keep_activity(self, uuids: Collection[str]) -> None:
        """Drop the samples that `activity` keeps of instances other than these, by their MIG UUIDs."""

    def holders(self, instance: Instance) -> tuple[Holder, ...]:
        """Return the processes on the instance with their names, for messages."""


class Driver(Protocol):
    """The GPUs of one machine."""

    def gpus(self) -> tuple[Gpu, ...]:
        """Return the physical GPUs in NVML's order, including those without MIG."""

    def unidentified(self) -> Mapping[int, str]:
        """Return by NVML's index the errors of the GPUs that do not even tell their UUID; `gpus` asks them again."""

    def close(self) -> None:
        """Close the driver; repeated calls are harmless."""

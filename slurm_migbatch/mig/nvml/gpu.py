"""Operate one GPU through NVML."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from typing import Any

import pynvml

from slurm_migbatch.mig import driver
from slurm_migbatch.mig.driver import (
    Activation,
    Activity,
    Busy,
    DriverError,
    DriverMissing,
    Holder,
    Instance,
    InstanceExists,
    InsufficientResources,
    InvalidRequest,
    NotFound,
    NotMig,
)
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.layout import Layout, Slot
from slurm_migbatch.mig.nvml import query
from slurm_migbatch.mig.nvml.describe import read_facts, read_geometry
from slurm_migbatch.mig.nvml.errors import translated
from slurm_migbatch.mig.nvml.gpm import GpmSamples
from slurm_migbatch.mig.placement import Placement
from slurm_migbatch.mig.text import printable

_CI_ENUMS = range(16)
_MIB = 1 << 20
_MOST_NAMED = 8
"""Processes that a message names; a user may have any number."""


class NvmlGpu:
    """One physical GPU. Handles are kept between calls and looked up again after an error.

    Every call may raise DriverError.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._handle: Any = None
        self._geometry: dict[bool, tuple[Geometry, tuple[query.KnownProfile, ...]]] = {}
        self._ci_profiles: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self._samples = GpmSamples(self._call)
        self._uuid = ""
        self._uuid = str(self._ask("its UUID", pynvml.nvmlDeviceGetUUID))
        self._name = str(self._ask("its name", pynvml.nvmlDeviceGetName))
        self._minor: int | None = None

    def __repr__(self) -> str:
        return f"<GPU {self._index} {self._name} {self._uuid}>"

    @property
    def index(self) -> int:
        """NVML's index; changes with the set of visible GPUs."""
        return self._index

    @property
    def minor(self) -> int:
        """The number in /dev/nvidia<minor> and in the capability tree, not the index.

        A change of the MIG mode may change it.
        """
        if self._minor is None:
            self._minor = int(self._ask("its device minor", pynvml.nvmlDeviceGetMinorNumber))
        return self._minor

    @property
    def uuid(self) -> str:
        """`GPU-...`, stable."""
        return self._uuid

    @property
    def name(self) -> str:
        """The model's name as NVML gives it."""
        return self._name

    # -- facts -------------------------------------------------------------------------------------------------

    def geometry(self) -> Geometry:
        """Read profiles and placements; raises NotMig. For names that are not reported see `mig/naming.py`."""
        return self._known()[0]

    def facts(self) -> dict[str, str | int | float]:
        """Return other facts of the GPU; see `read_facts`."""
        facts = read_facts(self._ask)
        facts["name"] = self._name
        with suppress(NotMig):
            facts["sm_count"] = self.geometry().full.sm_count
        return facts

    # -- the MIG mode ------------------------------------------------------------------------------------------

    def mig_mode(self) -> tuple[bool, bool]:
        """Return whether MIG is on now, and after the next reset; (False, False) on GPUs without it."""
        try:
            current, pending = self._ask("the MIG mode", pynvml.nvmlDeviceGetMigMode)
        except NotMig:
            return (False, False)
        return (bool(current), bool(pending))

    def set_mig_mode(self, on: bool) -> Activation:
        """Switch MIG; return what came of it. Raises NotMig, NoPermission, or Busy if the driver is not ready."""
        operation = f"switching MIG {'on' if on else 'off'}"
        try:
            status = self._ask(operation, pynvml.nvmlDeviceSetMigMode, int(on))
        except Busy as error:  # NVML says so by its return code, by the status, or by both
            if error.code != pynvml.NVML_ERROR_IN_USE:
                raise
            status = error.code
        finally:
            self._forget()
            self._minor = None
        return {
            pynvml.NVML_SUCCESS: Activation.DONE,
            pynvml.NVML_ERROR_IN_USE: Activation.IN_USE,
            pynvml.NVML_ERROR_RESET_REQUIRED: Activation.RESET_REQUIRED,
        }.get(int(status), Activation.REFUSED)

    # -- instances ---------------------------------------------------------------------------------------------

    def instances(self) -> tuple[Instance, ...]:
        """Return all instances of all profiles, ordered by placement; empty if MIG is off."""
        if not self.mig_mode()[0]:
            return ()
        described = [self._describe(gi, info) for gi, info in self._gpu_instances()]
        return tuple(sorted(described, key=lambda instance: instance.placement))

    def create(self, slot: Slot) -> Instance:
        """Create a GPU instance in `slot` with the compute instance that fills it; raises NotMig, NoPermission.

        If the compute instance cannot be created, the GPU instance is destroyed again. Raises InsufficientResources if
        the place is taken, InstanceExists if exactly this slot exists.
        """
        operation = f"creating {slot}"
        profile_id = self._profile_id(slot)
        place = pynvml.c_nvmlGpuInstancePlacement_t(slot.placement.start, slot.placement.size)
        try:
            gi = self._ask(operation, pynvml.nvmlDeviceCreateGpuInstanceWithPlacement, profile_id, ctypes.byref(place))
        except InsufficientResources as error:
            raise self._insufficient(slot, error) from None
        try:
            return self._describe(gi, self._info(gi), create=True)
        except DriverError as error:
            self._take_back(gi, profile_id, slot, error)
            raise

    def complete(self, instance: Instance) -> Instance:
        """Create the compute instance that fills a GPU instance, unless it has one; return the instance.

        Raises NotFound if the GPU instance no longer exists.
        """
        gi, info = self._find(instance)
        return self._describe(gi, info, create=True)

    def destroy(self, instance: Instance) -> None:
        """Destroy the compute instances of an instance, then itself. Raises Busy, but not if one no longer exists.

        After Busy the compute instance may already be destroyed; retry, or call `complete`.
        """
        try:
            gi, info = self._find(instance)
        except (NotFound, NotMig):
            return
        try:
            self._remove(gi, int(info.profileId), str(instance))
        except Busy as error:
            holders = self._holders_or_none(instance)
            users = ", ".join(str(holder) for holder in holders[:_MOST_NAMED])
            users += f" and {len(holders) - _MOST_NAMED} others" if len(holders) > _MOST_NAMED else ""
            by = f"by {users}" if users else "though no process is listed (possibly DCGM or an exiting process)"
            raise Busy(error.code, f"{self!r}: {instance} is still in use {by}") from None

    def processes(self, instance: Instance) -> tuple[int, ...]:
        """Return the ids of the processes on the instance, sorted; none if it no longer exists."""
        pids: set[int] = set()
        for call in (pynvml.nvmlDeviceGetComputeRunningProcesses, pynvml.nvmlDeviceGetGraphicsRunningProcesses):
            try:
                listed = self._ask(f"listing the processes on {instance}", call)
            except NotMig:
                continue
            except DriverMissing as error:
                if error.code != pynvml.NVML_ERROR_FUNCTION_NOT_FOUND:
                    raise  # a driver that does not answer does not say that there are none
                continue
            pids.update(int(p.pid) for p in listed if getattr(p, "gpuInstanceId", None) == instance.gi_id)
        return tuple(sorted(pids))

    def memory_used(self, instance: Instance) -> int:
        """Return the MiB in use on the instance, rounded up.

        Raises NotFound if it does not exist or has no compute instance.
        """
        operation = f"the memory of {instance}"
        if instance.mig_uuid is None:
            raise NotFound(pynvml.NVML_ERROR_NOT_FOUND, f"{self!r}: {operation}: it has no compute instance")
        device = self._call(operation, pynvml.nvmlDeviceGetHandleByUUID, instance.mig_uuid)
        return -(-int(self._call(operation, pynvml.nvmlDeviceGetMemoryInfo, device).used) // _MIB)

    def activity(self, instance: Instance, holder: tuple[int, int]) -> Activity | None:
        """Return the activity of the instance since the last call for this holder; None at the first.

        Raises NotMig if the GPU does not support it (before Hopper), DriverMissing if the driver is too old.
        """
        if instance.mig_uuid is None:
            return None
        return self._samples.measure(self._known_handle(), instance, holder)

    def energy_j(self) -> float:
        """Return the joules that the whole GPU, not one instance, has used since the driver was loaded.

        Raises NotMig if the GPU does not support it, DriverMissing if the driver is too old.
        """
        return int(self._ask("its energy", pynvml.nvmlDeviceGetTotalEnergyConsumption)) / 1000

    def keep_activity(self, uuids: Collection[str]) -> None:
        """Drop the samples that `activity` keeps of instances other than these, by their MIG UUIDs."""
        self._samples.keep(uuids)

    def holders(self, instance: Instance) -> tuple[Holder, ...]:
        """Return the processes on the instance with their names, for messages."""
        return tuple(Holder(pid, _command(pid)) for pid in self.processes(instance))

    # -- internal ------------------------------------------------------------------------------------------------

    def _ask(self, operation: str, call: Callable[..., Any], *args: object) -> Any:
        """Call NVML with this GPU's handle first; `operation` names the call in messages."""
        return self._call(operation, call, self._known_handle(), *args)

    def _known_handle(self) -> Any:
        """Return this GPU's handle; another thread's failed call may discard it at any time."""
        handle = self._handle
        if handle is None:
            handle = self._handle = self._call("looking it up", self._look_up)
        return handle

    def _call(self, operation: str, call: Callable[..., Any], *args: object) -> Any:
        """Call NVML; failures become DriverErrors that name the GPU, and its handle is looked up again after them."""
        about = f"GPU {self._index} ({self._uuid or 'unknown'}): {operation}"
        if driver.calling is not None:
            driver.calling(about)
        try:
            return call(*args)
        except pynvml.NVMLError as error:
            self._handle = None
            failure = translated(error, about)
            failure.gpu = self._uuid
            raise failure from None

    def _look_up(self) -> Any:
        """Look up this GPU's handle, whatever its index is now."""
        handle = pynvml.nvmlDeviceGetHandleByIndex(self._index)
        if not self._uuid or pynvml.nvmlDeviceGetUUID(handle) == self._uuid:
            return handle
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            if pynvml.nvmlDeviceGetUUID(handle) == self._uuid:
                self._index = index
                return handle
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    def _forget(self) -> None:
        self._handle = None
        self._geometry.clear()
        self._ci_profiles.clear()

    def _known(self) -> tuple[Geometry, tuple[query.KnownProfile, ...]]:
        on = self.mig_mode()[0]
        if on not in self._geometry:
            self._geometry[on] = read_geometry(repr(self), self._name, self._ask)
        return self._geometry[on]

    def _profile_id(self, slot: Slot) -> int:
        geometry = self.geometry()
        try:
            info = geometry.info(slot.profile)
        except KeyError as error:
            raise InvalidRequest(0, f"{self!r}: {error}") from None
        if slot.placement not in info.placements:
            raise InvalidRequest(0, f"{self!r}: {geometry.why_not(Layout(), slot)}")
        return info.profile_id

    def _gpu_instances(self) -> Iterator[tuple[Any, Any]]:
        """Yield handle and info of every GPU instance; one that is destroyed in the meantime is skipped."""
        for known in self._known()[1]:
            for gi in self._ask(f"listing {known.profile} instances", query.gpu_instances, known):
                try:
                    yield gi, self._info(gi)
                except (NotFound, InvalidRequest):
                    continue

    def _info(self, gi: Any) -> Any:
        return self._call("an instance's description", pynvml.nvmlGpuInstanceGetInfo, gi)

    def _find(self, instance: Instance) -> tuple[Any, Any]:
        """Return handle and info of exactly this instance; NotFound if its id now belongs to another one."""
        operation = f"finding {instance}"
        gi = self._ask(operation, pynvml.nvmlDeviceGetGpuInstanceById, instance.gi_id)
        info = self._info(gi)
        if self._slot(info) != instance.slot:
            raise NotFound(
                pynvml.NVML_ERROR_NOT_FOUND, f"{self!r}: {instance} no longer exists; its id is now {self._slot(info)}"
            )
        return gi, info

    def _slot(self, info: Any) -> Slot:
        profile_id = int(info.profileId)
        _, listed = self._geometry.get(True) or self._known()
        profile = next((known.profile for known in listed if known.profile_id == profile_id), None)
        if profile is None:
            raise InvalidRequest(0, f"{self!r} holds an instance of profile id {profile_id}, which it does not list")
        return Slot(profile, Placement(int(info.placement.start), int(info.placement.size)))

    def _describe(self, gi: Any, info: Any, create: bool = False) -> Instance:
        """Return the instance as a value; with `create` a missing full compute instance is created."""
        slot = self._slot(info)
        full, _ = self._compute_profiles(gi, int(info.profileId))
        ci = next(iter(self._list_compute(gi, full)), None)
        if ci is None and create:
            ci = self._create_compute(gi, full, slot)
        if ci is None:
            return Instance(int(info.id), slot.profile, slot.placement, None, None)
        ci_info = self._call(f"the compute instance of {slot}", pynvml.nvmlComputeInstanceGetInfo_v2, ci)
        uuid = self._mig_uuid(ci_info, int(info.id), slot)
        return Instance(int(info.id), slot.profile, slot.placement, int(ci_info.id), uuid)

    def _create_compute(self, gi: Any, full: tuple[int, ...], slot: Slot) -> Any:
        """Create the compute instance that takes the whole GPU instance; if a profile is refused, try the next."""
        operation = f"creating the compute instance of {slot}"
        for profile_id in full[:-1]:
            with suppress(NotMig, InvalidRequest):
                return self._call(operation, pynvml.nvmlGpuInstanceCreateComputeInstance, gi, profile_id)
        return self._call(operation, pynvml.nvmlGpuInstanceCreateComputeInstance, gi, full[-1])

    def _mig_uuid(self, about: Any, gi_id: int, slot: Slot) -> str:
        """Return the UUID of a compute instance's MIG device.

        The handle in its description is the MIG device's on the drivers that were tested; nvml.h calls it the parent
        device. If it is the GPU's, the MIG devices are walked, which can take seconds.
        """
        operation = f"the UUID of {slot}"
        uuid = str(self._call(operation, pynvml.nvmlDeviceGetUUID, about.device))
        if uuid.startswith("MIG-"):
            return uuid
        device = self._ask(operation, query.mig_device, gi_id, int(about.id))
        return str(self._call(operation, pynvml.nvmlDeviceGetUUID, device))

    def _compute_profiles(self, gi: Any, profile_id: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ids of the compute profiles that take the whole GPU instance, and of all of them.

        The whole one has the most slices and, of several (a double-memory 1g has two with one slice), the most SMs.
        Several may be equal in both (7_SLICE and 7_SLICE_NVL): each makes the instance whole, in the order of NVML's
        enum, where the one for work on a single GPU comes first.
        """
        known = self._ci_profiles.get(profile_id)
        if known is None:
            sizes: dict[int, tuple[int, int]] = {}
            for enum in _CI_ENUMS:
                try:
                    raw = self._call("a compute profile", query.compute_profile_info, gi, enum)
                except NotMig:
                    continue
                except InvalidRequest:
                    if enum < pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT:
                        continue
                    break
                sizes.setdefault(int(raw.id), (int(raw.sliceCount), int(raw.multiprocessorCount)))
            if not sizes:
                raise NotMig(0, f"{self!r}: the driver lists no compute profile for profile id {profile_id}")
            largest = max(sizes.values())
            full = tuple(ci_id for ci_id, size in sizes.items() if size == largest)
            known = self._ci_profiles[profile_id] = (full, tuple(sizes))
        return known

    def _list_compute(self, gi: Any, ci_profile_ids: tuple[int, ...]) -> Iterator[Any]:
        for ci_profile_id in ci_profile_ids:
            yield from self._call("listing compute instances", query.compute_instances, gi, ci_profile_id)

    def _call_if_present(self, operation: str, call: Callable[[Any], Any], handle: Any) -> None:
        with suppress(NotFound):
            self._call(operation, call, handle)

    def _remove(self, gi: Any, profile_id: int, instance_text: str) -> None:
        """Destroy all compute instances of a GPU instance and then itself; instances already destroyed are no error."""
        for ci in list(self._list_compute(gi, self._compute_profiles(gi, profile_id)[1])):
            self._call_if_present(
                f"destroying the compute instance of {instance_text}", pynvml.nvmlComputeInstanceDestroy, ci
            )
        self._call_if_present(f"destroying {instance_text}", pynvml.nvmlGpuInstanceDestroy, gi)

    def _take_back(self, gi: Any, profile_id: int, slot: Slot, cause: DriverError) -> None:
        """Destroy a GPU instance whose compute instance could not be created."""
        try:
            self._remove(gi, profile_id, str(slot))
        except DriverError as error:
            raise DriverError(
                error.code,
                f"{cause.message}. Its GPU instance could not be destroyed and remains, possibly without a compute "
                f"instance: {error.message}",
            ) from None

    def _insufficient(self, slot: Slot, error: InsufficientResources) -> InsufficientResources:
        existing = self.instances()
        same = next((instance for instance in existing if instance.slot == slot), None)
        if same is not None:
            return InstanceExists(error.code, f"{self!r}: {same} exists already", same)
        taken = Layout(instance.slot for instance in existing)
        reason = self.geometry().why_not(taken, slot) or f"the driver has no room for it next to {taken}"
        return InsufficientResources(error.code, f"{self!r}: {slot} cannot be created: {reason}")

    def _holders_or_none(self, instance: Instance) -> tuple[Holder, ...]:
        try:
            return self.holders(instance)
        except DriverError:
            return ()


def _command(pid: int) -> str:
    """Return the command name of a process in printable form, empty if /proc does not show it."""
    from pathlib import Path  # imported only when a process blocks: the import takes as long as all others here

    try:
        name = Path(f"/proc/{pid}/comm").read_text("utf-8", "replace").removesuffix("\n")
    except OSError:
        return ""
    return printable(name)

"""Describe a GPU: its MIG profiles and placements, and the specifications used by the speed prior."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import pynvml

from slurm_migbatch.mig.driver import DriverMissing, InvalidRequest, NoPermission, NotFound, NotMig
from slurm_migbatch.mig.geometry import Geometry, ProfileInfo
from slurm_migbatch.mig.naming import computed_profile, reported_profile
from slurm_migbatch.mig.nvml import query
from slurm_migbatch.mig.profile import Profile

_LAST_ENUM = 64  # the walk over profile enums ends at the first unknown one; this only bounds it
#: errors of a driver that does not report a figure
SILENT = (NotMig, DriverMissing, NoPermission, InvalidRequest, NotFound)

_ARCHITECTURES = {
    pynvml.NVML_DEVICE_ARCH_VOLTA: "volta",
    pynvml.NVML_DEVICE_ARCH_TURING: "turing",
    pynvml.NVML_DEVICE_ARCH_AMPERE: "ampere",
    pynvml.NVML_DEVICE_ARCH_ADA: "ada",
    pynvml.NVML_DEVICE_ARCH_HOPPER: "hopper",
    10: "blackwell",  # the names of newer ones are missing in older releases of nvidia-ml-py
    13: "rubin",
}


class Ask(Protocol):
    """Callable that calls NVML for one GPU."""

    def __call__(self, operation: str, call: Callable[..., Any], /, *args: object) -> Any:
        """Call with the GPU's handle before `args`; `operation` names the call in the DriverError it may raise."""


def read_geometry(gpu: str, model: str, ask: Ask) -> tuple[Geometry, tuple[query.KnownProfile, ...]]:
    """Return the geometry of a GPU, and a map from every profile id to its profile.

    `gpu` names the card in messages, `model` is its model. Raises NotMig for GPUs without MIG and for vGPU guests.
    Names that the driver does not report are computed. Two ids of one name (none is known) are one profile in the
    geometry. A profile that the driver cannot place is left out.
    """
    if _is_vgpu(ask):
        raise NotMig(pynvml.NVML_ERROR_NOT_SUPPORTED, f"{gpu} is a vGPU guest, which cannot be partitioned")
    infos: dict[Profile, ProfileInfo] = {}
    known: list[query.KnownProfile] = []
    for raw, profile in listed_profiles(ask):
        try:
            places = sorted(ask(f"the placements of {profile}", query.placements, int(raw.id)))
        except (NotMig, InvalidRequest):
            continue
        known.append(query.KnownProfile(int(raw.id), profile, int(raw.instanceCount)))
        if profile in infos or not places:
            continue
        infos[profile] = ProfileInfo(
            profile=profile,
            profile_id=int(raw.id),
            compute_slices=int(raw.sliceCount),
            memory_slices=max(place.size for place in places),
            memory_mib=int(raw.memorySizeMB),
            sm_count=int(raw.multiprocessorCount),
            copy_engines=int(raw.copyEngineCount),
            decoders=int(raw.decoderCount),
            encoders=int(raw.encoderCount),
            jpegs=int(raw.jpegCount),
            ofas=int(raw.ofaCount),
            max_instances=int(raw.instanceCount),
            placements=tuple(places),
        )
    if not infos:
        raise NotMig(pynvml.NVML_ERROR_NOT_SUPPORTED, f"{gpu} has no MIG profiles")
    return Geometry(model, infos.values()), tuple(known)


def listed_profiles(ask: Ask) -> Iterator[tuple[Any, Profile]]:
    """Yield NVML's description of each profile of a GPU, and the profile.

    A driver may refuse values of nvml.h's enum as unsupported or as unknown, and have others after them: NVIDIA's own
    programs skip both. The GPU's memory, which some drivers do not report, is read only to compute missing names.
    """
    total_bytes = 0
    for enum in range(_LAST_ENUM):
        try:
            raw = ask("a profile", query.gpu_profile_info, enum)
        except NotMig:
            continue
        except InvalidRequest:
            if enum < pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT:
                continue
            return
        named = reported_profile(query.text(getattr(raw, "name", b"")))
        if named is None:
            total_bytes = total_bytes or int(ask("its memory", pynvml.nvmlDeviceGetMemoryInfo).total)
            named = computed_profile(enum, int(raw.sliceCount), int(raw.memorySizeMB), total_bytes)
        yield raw, named


def read_facts(ask: Ask) -> dict[str, str | int | float]:
    """Return the specifications of the whole GPU; what the driver does not report is missing.

    architecture (`ampere` ...); compute_capability (`8.0`); clock_mhz and memory_clock_mhz, the highest of SM and
    memory; memory_bus_bits; memory_mib; pci_bus_id; driver_version; virtualization (`vgpu`, only in such a guest).
    """
    facts: dict[str, str | int | float] = {}

    def add(key: str, convert: Callable[[Any], str | int | None], call: Callable[..., Any], *args: object) -> None:
        try:
            value = convert(ask(key, call, *args))
        except SILENT:
            return
        if value is not None:
            facts[key] = value

    add("architecture", _ARCHITECTURES.get, pynvml.nvmlDeviceGetArchitecture)
    add("compute_capability", lambda pair: f"{pair[0]}.{pair[1]}", pynvml.nvmlDeviceGetCudaComputeCapability)
    add("clock_mhz", int, pynvml.nvmlDeviceGetMaxClockInfo, pynvml.NVML_CLOCK_SM)
    add("memory_clock_mhz", int, pynvml.nvmlDeviceGetMaxClockInfo, pynvml.NVML_CLOCK_MEM)
    add("memory_bus_bits", int, pynvml.nvmlDeviceGetMemoryBusWidth)
    add("memory_mib", lambda memory: int(memory.total) >> 20, pynvml.nvmlDeviceGetMemoryInfo)
    add("pci_bus_id", lambda pci: query.text(pci.busId), pynvml.nvmlDeviceGetPciInfo)
    add("driver_version", str, lambda _: pynvml.nvmlSystemGetDriverVersion())
    if _is_vgpu(ask):
        facts["virtualization"] = "vgpu"
    return facts


def _is_vgpu(ask: Ask) -> bool:
    try:
        mode = ask("its virtualization mode", pynvml.nvmlDeviceGetVirtualizationMode)
    except SILENT:
        return False
    return bool(mode == pynvml.NVML_GPU_VIRTUALIZATION_MODE_VGPU)

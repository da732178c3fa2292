"""Check whether MIG is on for the GPUs of a node, and if not, which processes prevent it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

from slurm_migbatch.mig.driver import DriverError, NoPermission, NotMig
from slurm_migbatch.node import gpu_faults
from slurm_migbatch.node.config import NodeConfig
from slurm_migbatch.node.findings import FAIL, OK, UNKNOWN, WARN, Finding
from slurm_migbatch.node.open_devices import MOST, status_of
from slurm_migbatch.node.processes import user_of

if TYPE_CHECKING:
    from slurm_migbatch.mig.nvml import NvmlGpu

SLURM: Final = ("slurmd", "slurmstepd")
_MANAGER: Final = "nvidia-mig-manager"
SEARCH_S: Final = 10.0
"""Seconds for finding the processes that have GPUs open: users choose how many descriptors and mounts theirs have."""
_CURES: Final = {
    "nv-hostengine": "systemctl stop nvidia-dcgm",
    "dcgm-exporter": "systemctl stop dcgm-exporter",
    "nvidia-persiste": "systemctl stop nvidia-persistenced",
    "nvsm_core": "systemctl stop nvsm",
    "Xorg": "stop the display server",
    **dict.fromkeys(SLURM, "add Environment=HWLOC_COMPONENTS=-opencl to [Service] of slurmd and restart it"),
}
"""Advice for a process by its name, of which the kernel keeps 15 characters."""


@dataclass(frozen=True)
class CheckedGpu:
    """One GPU.

    Attributes:
        uuid, index, name: by NVML.
        device: its device file.
        managed: whether node.conf's Gpus= includes it.
        capable: whether it supports MIG.
        on, later: MIG now, and after the next reset.
        problem: the driver's error, if it could not report all of these.
        denied: whether that is because this user is not root.
    """

    uuid: str
    index: int
    name: str
    device: str
    managed: bool = True
    capable: bool = True
    on: bool = True
    later: bool = True
    problem: str = ""
    denied: bool = False

    @property
    def cut(self) -> bool:
        """Whether migbatch creates slices on it."""
        return self.managed and self.capable

    def __str__(self) -> str:
        """`GPU 0 (GPU-12345678, NVIDIA H100)`."""
        return f"GPU {self.index} ({self.uuid[:12]}, {self.name})"


@dataclass(frozen=True)
class DeviceHolder:
    """A process that has the device of a GPU open; `device` is that file."""

    pid: int
    name: str
    device: str


def gather(found: Iterable[NvmlGpu], config: NodeConfig) -> list[CheckedGpu]:
    """Read the GPUs of a host."""
    withdrawn = gpu_faults.withdrawn(config.run_dir)
    return [_gather(gpu, config, withdrawn.get(gpu.uuid)) for gpu in found]


def _gather(gpu: NvmlGpu, config: NodeConfig, withdrawn: DriverError | None) -> CheckedGpu:
    try:
        minor = gpu.minor
    except DriverError as error:
        return CheckedGpu(gpu.uuid, gpu.index, gpu.name, "", problem=str(error))
    facts = (gpu.uuid, gpu.index, gpu.name, f"{config.dev_root}/nvidia{minor}")
    managed = config.manages(gpu.uuid, minor)
    try:
        if withdrawn is not None:
            raise withdrawn
        gpu.geometry()
        on, later = gpu.mig_mode()
    except NotMig:
        return CheckedGpu(*facts, managed, capable=False, on=False, later=False)
    except DriverError as error:
        denied = isinstance(error, NoPermission) and os.geteuid() != 0
        return CheckedGpu(*facts, managed, problem=str(error), denied=denied)
    return CheckedGpu(*facts, managed, on=on, later=later)


def holders(devices: Iterable[str], names: Sequence[str] = ()) -> Iterator[DeviceHolder]:
    """Yield processes of this host that have one of these devices open; with `names` only root's processes of these
    names. migbatch's own are left out. After SEARCH_S no more are looked for.
    """
    wanted, end = {}, time.monotonic() + SEARCH_S
    for device in devices:
        try:
            wanted[_identity(os.stat(device))] = device  # noqa: PTH116
        except OSError:
            continue
    for process in sorted(Path("/proc").iterdir()) if wanted else ():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        try:
            name, by_root = (process / "comm").read_text(errors="replace").strip(), user_of(process.name) == 0
            # by name only processes that root started: a user can name one slurmd, also a setuid program, by a link
            if (names and not (name in names and by_root)) or (by_root and _is_ours(process)):
                continue
            for device in {wanted[key] for key in _opened(process, wanted.values(), end) if key in wanted}:
                yield DeviceHolder(int(process.name), name, device)
        except OSError:
            continue  # it has ended


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    """Return the identity of a device file: its device numbers, or for a plain file its location."""
    return (0, 0, status.st_rdev) if status.st_rdev else (status.st_dev, status.st_ino, 0)


def _opened(place: Path, devices: Iterable[str], end: float) -> Iterator[tuple[int, int, int]]:
    """Yield the identities of the files that a process has open and that are named like one of these devices.

    Other files are not examined, because their file system, such as a user's, may never answer.
    """
    names = {Path(device).name for device in devices}
    for entry in islice((place / "fd").iterdir(), MOST):
        if time.monotonic() > end:
            return
        try:
            if entry.readlink().name.removesuffix(" (deleted)") not in names:
                continue
            status = status_of(int(place.name), entry.name, end)
        except OSError:
            continue
        if status is not None:
            yield _identity(status)


def _is_ours(place: Path) -> bool:
    # for root's processes only: the arguments of a user's process may be in a file whose file system never answers
    words = (place / "cmdline").read_bytes().split(b"\0")
    return any(word in (b"slurm_migbatch.cli", b"node") or word.endswith(b"/migbatch") for word in words[1:4])


def check_gpus(gpus: Sequence[CheckedGpu], holding: Sequence[DeviceHolder]) -> Iterator[Finding]:
    """Check that MIG is on where slices are created, and name what blocks it."""
    if not any(gpu.managed for gpu in gpus):
        text = "the driver has no GPU that node.conf assigns to migbatch"
        yield Finding(FAIL, "GPUs", text, "check nvidia-smi -L, and Gpus= in node.conf")
    for gpu in gpus:
        if gpu.managed:
            yield from _mode(gpu, [holder for holder in holding if holder.device == gpu.device])
    for holder in holding:
        if holder.name in SLURM:
            text = (
                f"{holder.name} ({holder.pid}) has {holder.device} open, probably via hwloc's OpenCL: slices stay busy"
            )
            yield Finding(FAIL, holder.name, text, _CURES[holder.name])


def check_named(gpus: Sequence[CheckedGpu], names: Sequence[str]) -> Iterator[Finding]:
    """Check that each of node.conf's Gpus= exists: a GPU that was replaced has another UUID, and is then not used."""
    present = {word for gpu in gpus for word in (gpu.uuid, gpu.device.rpartition("/nvidia")[2])}
    if absent := [name for name in names if name not in present]:
        text = f"Gpus= in node.conf names {', '.join(absent)}, which the driver does not list"
        yield Finding(
            WARN, "GPUs", text, "correct it (nvidia-smi -L lists UUIDs), then: systemctl restart migbatch-node"
        )


def _mode(gpu: CheckedGpu, holding: Sequence[DeviceHolder]) -> Iterator[Finding]:
    subject = f"GPU {gpu.index}"
    if gpu.denied:
        yield Finding(UNKNOWN, subject, f"{gpu}: {gpu.problem}", "run migbatch doctor as root")
    elif gpu.problem:
        advice = f"check dmesg and nvidia-smi -i {gpu.uuid}; drain the node before a reset"
        yield Finding(FAIL, subject, f"{gpu}: {gpu.problem}", advice)
    elif not gpu.capable:
        yield Finding(OK, subject, f"{gpu} does not support MIG and is not used")
    elif gpu.on and gpu.later:
        yield Finding(OK, subject, f"{gpu}: MIG is on")
    elif gpu.on:
        advice = f"nvidia-smi -i {gpu.uuid} -mig 1"
        yield Finding(FAIL, subject, f"{gpu}: MIG will be off after the next reset", advice)
    elif gpu.later:
        advice = f"stop its processes, then: nvidia-smi --gpu-reset -i {gpu.uuid}"
        yield Finding(FAIL, subject, f"{gpu}: MIG needs a reset{_blocked(holding)}", _freed(holding, advice))
    else:
        text = f"{gpu}: MIG is off, so no slice can be created{_blocked(holding)}"
        yield Finding(FAIL, subject, text, _freed(holding, "migbatch node init"))


def _blocked(holding: Sequence[DeviceHolder]) -> str:
    names = ", ".join(f"{holder.name} ({holder.pid})" for holder in holding[:8])
    return f"; in use by {names}" if holding else ""


def _freed(holding: Sequence[DeviceHolder], then: str) -> str:
    cures = dict.fromkeys(_CURES.get(holder.name, f"end process {holder.pid}") for holder in holding[:8])
    return "; ".join([*cures, then])


def check_helper(path: str) -> Iterator[Finding]:
    """Check that users cannot make nvidia-modprobe reset the owners of devices; `path`: of a setuid one, or empty."""
    if path:
        text = f"{path} is setuid: users can make it open devices of other users' slices"
        yield Finding(FAIL, "nvidia-modprobe", text, f"chmod u-s {path}")
    else:
        yield Finding(OK, "nvidia-modprobe", "is not setuid")


def check_manager(units: Path = Path("/etc/systemd/system")) -> Iterator[Finding]:
    """Check that systemd does not start NVIDIA's MIG manager, by its directory of this host's units."""
    if any(link.exists() for link in units.glob(f"*.wants/{_MANAGER}.service")):
        text = "is enabled: at boot it sets MIG mode and makes slices by its own configuration"
        advice = f"systemctl disable {_MANAGER}, or leave the GPUs of migbatch out of its configuration"
        yield Finding(WARN, _MANAGER, text, advice)

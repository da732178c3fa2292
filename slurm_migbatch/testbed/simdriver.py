"""Build the simulated NVIDIA driver, and create and break machines that run it.

A machine is a directory. A process that loads ``DIR/libnvidia-ml.so.1`` (or any copy of it, with
``MIGBATCH_SIM_DIR=DIR`` at ``nvmlInit``) sees that machine's GPUs; `SimulatedMachine` injects faults into them. All
state is in ``DIR/state``, shared by all processes; this module reads and changes it only through ``DIR/libmigsim.so``.

    >>> machine = SimulatedMachine.create(tmp_path / "node1", gpus=["h100-80gb", "a100-40gb"])
    >>> machine.fail("nvmlGpuInstanceDestroy", code=19, nth=2)
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import shutil
import subprocess
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal

__all__ = ["GPU_MODELS", "REAL_LATENCY", "SimDriverError", "SimulatedMachine", "build"]

GPU_MODELS = ("a30", "a100-40gb", "a100-80gb", "h100-80gb", "h200", "b200", "rtx-pro-6000")

LIBRARY = "libnvidia-ml.so.1"
CONTROL = "libmigsim.so"
SOURCES = Path(__file__).resolve().parent / "driver"

Moment = Literal["before", "writing", "during", "after"]
_MOMENTS: dict[Moment, int] = {"before": 0, "writing": 1, "during": 2, "after": 3}

Variant = Literal["7_slice_nvl", "7_slice_nvl_swapped", "ci_names_gpu"]
_VARIANTS: dict[Variant, int] = {"7_slice_nvl": 1, "7_slice_nvl_swapped": 2, "ci_names_gpu": 4}

Event = Literal["single_bit_ecc", "double_bit_ecc", "pstate", "xid", "clock"]
_EVENTS: dict[Event, int] = {"single_bit_ecc": 0x1, "double_bit_ecc": 0x2, "pstate": 0x4, "xid": 0x8, "clock": 0x10}

_OPERATIONS = ("gi_create", "gi_destroy", "ci_create", "ci_destroy", "set_mode")

REAL_LATENCY: Mapping[str, tuple[float, float]] = {
    "gi_create": (0.130, 0.060),
    "gi_destroy": (0.150, 0.015),
    "ci_create": (0.030, 0.020),
    "ci_destroy": (0.050, 0.005),
    "set_mode": (0.500, 0.0),
}
"""Seconds for the smallest instance, and how much longer one of the whole GPU takes. A slice (GPU instance with its
compute instance) is so created in 0.16-0.24 s and destroyed in 0.20-0.22 s.
"""

Latency = float | Literal["real"] | Mapping[str, float | tuple[float, float]]


class SimDriverError(RuntimeError):
    """The simulated driver could not be built, or a machine could not perform an operation; ``errno`` says why."""

    def __init__(self, message: str, error: int = 0) -> None:
        super().__init__(message)
        self.errno = error


def _default_build_dir() -> Path:
    checkout = SOURCES.parents[2]
    if (checkout / "pyproject.toml").is_file() and os.access(checkout, os.W_OK):
        return checkout / "build" / "driver"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "slurm_migbatch" / "driver"


def build(dest: Path | None = None) -> Path:
    """Compile the driver with the system's compiler if its sources are newer; return the library's path.

    `dest` defaults to ``build/driver`` of a checkout, else a cache directory of the user. Several processes may build
    into the same directory at once.
    """
    target = dest if dest is not None else _default_build_dir()
    target.mkdir(parents=True, exist_ok=True)
    with (target / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            done = subprocess.run(
                ["make", "-s", "-C", str(SOURCES), f"BUILD={target.resolve()}"],
                check=False,
                capture_output=True,
                text=True,
                env={k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")},
            )
        except FileNotFoundError as error:
            raise SimDriverError("cannot build the simulated driver: install make and a C compiler") from error
    if done.returncode != 0:
        raise SimDriverError(f"cannot build the simulated driver in {target}:\n{done.stderr.strip()}")
    return target / LIBRARY


def _free_major(devices: str) -> int:
    """Return a device major that no driver of this host serves, so that opening its devices gives ENXIO.

    `devices` is the text of /proc/devices.
    """
    served = {line.split()[0] for line in devices.splitlines() if line[:3].strip().isdigit()}
    # for local and experimental use, from which drivers also take theirs, then what drivers take when that is full
    for major in chain(range(254, 233, -1), range(127, 119, -1), range(63, 59, -1), range(511, 383, -1)):
        if str(major) not in served:
            return major
    raise SimDriverError("no free character device major on this host, see /proc/devices")


_FUNCTIONS: dict[str, list[Any]] = {
    "migsim_create": [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_int],
    "migsim_reboot": [ctypes.c_char_p],
    "migsim_reset_gpu": [ctypes.c_char_p, ctypes.c_uint],
    "migsim_set_lost": [ctypes.c_char_p, ctypes.c_uint, ctypes.c_int],
    "migsim_set_variants": [ctypes.c_char_p, ctypes.c_uint],
    "migsim_set_latency": [ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_uint],
    "migsim_fail": [
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_int,
        ctypes.c_uint64,
        ctypes.c_uint64,
        ctypes.c_uint,
        ctypes.c_int,
    ],
    "migsim_stick": [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64],
    "migsim_reset_faults": [ctypes.c_char_p],
    "migsim_start_process": [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint64, ctypes.c_int],
    "migsim_end_process": [ctypes.c_char_p, ctypes.c_int],
    "migsim_set_load": [ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint32)],
    "migsim_post_event": [ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint64, ctypes.c_uint64],
    "migsim_calls": [ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint64), ctypes.c_int],
    "migsim_dump": [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint],
}

_REASONS = {
    errno.ENOENT: "no machine is there, or the driver serves no such function",
    errno.EPROTO: "the state file is of another version of the driver; make the machine anew",
    errno.ESTALE: "the machine was replaced meanwhile",
    errno.EEXIST: "a machine already exists",
    errno.EINVAL: "an argument is not valid",
    errno.ENODEV: "no such device",
    errno.EBUSY: "the GPU is in use",
    errno.ENOSPC: "the driver's table is full",
}


class _DriverControl:
    """The functions of ``libmigsim.so``, with errors raised."""

    def __init__(self, path: Path) -> None:
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise SimDriverError(f"no simulated machine there: cannot load {path}: {error}", errno.ENOENT) from error
        for name, arguments in _FUNCTIONS.items():
            getattr(self._library, name).argtypes = arguments
        self._library.migsim_function_name.restype = ctypes.c_char_p
        self._library.migsim_function_name.argtypes = [ctypes.c_uint]
        self._library.migsim_function_count.restype = ctypes.c_uint
        self._library.migsim_load_count.restype = ctypes.c_uint
        self._library.migsim_load_name.restype = ctypes.c_char_p
        self._library.migsim_load_name.argtypes = [ctypes.c_uint]
        self._library.migsim_load_is_share.argtypes = [ctypes.c_uint]
        count = self._library.migsim_function_count()
        self.functions: list[str] = [self._library.migsim_function_name(i).decode() for i in range(count)]
        self.loads: dict[str, bool] = {
            self._library.migsim_load_name(i).decode(): bool(self._library.migsim_load_is_share(i))
            for i in range(self._library.migsim_load_count())
        }

    def __call__(self, name: str, directory: Path, *arguments: Any) -> int:
        result: int = getattr(self._library, f"migsim_{name}")(os.fsencode(directory), *arguments)
        if result < 0:
            reason = _REASONS.get(-result, os.strerror(-result))
            raise SimDriverError(f"simulated machine {directory}: {name}: {reason}", -result)
        return result


class SimulatedMachine:
    """One simulated machine. Any number of `SimulatedMachine` objects and processes may use the same directory."""

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory).resolve()
        self._control = _DriverControl(self.directory / CONTROL)
        self.dump()  # raise an error now rather than later

    @classmethod
    def create(
        cls,
        directory: Path | str,
        gpus: Sequence[str],
        *,
        latency: Latency = 0.0,
        mig: bool = True,
        minors: Sequence[int] | None = None,
        ampere_auto_reset: bool = False,
        library: Path | None = None,
    ) -> SimulatedMachine:
        """Create a machine in `directory`, which is created if missing.

        `gpus` are names from `GPU_MODELS` in NVML index order, `minors` their device minors (0, 1, ... by default).
        `mig` is the MIG mode it starts with. On Ampere a mode change waits for `reset_gpu` or `reboot`, unless
        `ampere_auto_reset` lets the driver reset an idle GPU by itself. `library` is the result of `build`.
        """
        for gpu in gpus:
            if gpu not in GPU_MODELS:
                raise SimDriverError(f"unknown GPU model {gpu!r}; there are: {', '.join(GPU_MODELS)}", errno.EINVAL)
        device_minors = list(minors) if minors is not None else list(range(len(gpus)))
        if len(device_minors) != len(gpus) or len(set(device_minors)) != len(device_minors):
            raise SimDriverError("minors: one number per GPU, no number twice", errno.EINVAL)
        built = library if library is not None else build()
        path = Path(directory).resolve()
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o755)  # users load the library too, whatever the umask
        if (path / "state").exists():
            raise SimDriverError(f"simulated machine {path}: {_REASONS[errno.EEXIST]}", errno.EEXIST)
        for name in (LIBRARY, CONTROL):
            shutil.copyfile(built.parent / name, path / f"{name}.new")
            (path / f"{name}.new").chmod(0o755)
            (path / f"{name}.new").replace(path / name)  # never write to a file that a process may have mapped
        (path / "libnvidia-ml.so").unlink(missing_ok=True)
        (path / "libnvidia-ml.so").symlink_to(LIBRARY)
        lines = [f"{gpu} {minor} {uuid.uuid4()}" for gpu, minor in zip(gpus, device_minors, strict=True)]
        control = _DriverControl(path / CONTROL)
        major = _free_major(Path("/proc/devices").read_text())
        control("create", path, "\n".join(lines).encode(), int(mig), major, int(ampere_auto_reset))
        machine = cls(path)
        machine.set_latency(latency)
        return machine

    @property
    def library(self) -> Path:
        """Library to load as NVML to see this machine."""
        return self.directory / LIBRARY

    @property
    def proc_root(self) -> Path:
        """Stands for ``/proc``."""
        return self.directory / "proc"

    @property
    def dev_root(self) -> Path:
        """Stands for ``/dev``."""
        return self.directory / "dev"

    @property
    def boot_id_file(self) -> Path:
        """Stands for ``/proc/sys/kernel/random/boot_id``."""
        return self.directory / "boot_id"

    def set_latency(self, latency: Latency) -> None:
        """Set how long changes take: seconds for each (``0.0``), ``"real"``, or a mapping like `REAL_LATENCY`."""
        if latency == "real":
            table: Mapping[str, float | tuple[float, float]] = REAL_LATENCY
        elif isinstance(latency, Mapping):
            table = latency
        else:
            table = dict.fromkeys(_OPERATIONS, float(latency))
        for name, value in table.items():
            if name not in _OPERATIONS:
                raise SimDriverError(f"unknown operation {name!r}; there are: {', '.join(_OPERATIONS)}", errno.EINVAL)
            base, span = value if isinstance(value, tuple) else (value, 0.0)
            self._control("set_latency", self.directory, _OPERATIONS.index(name), round(base * 1e6), round(span * 1e6))

    def set_variants(self, *names: Variant) -> None:
        """Select another kind of driver; without names the default one.

        ``"7_slice_nvl"``: a GPU instance of seven slices offers two compute profiles that take all of it, 7_SLICE and
        7_SLICE_NVL; ``"7_slice_nvl_swapped"`` exchanges their ids. ``"ci_names_gpu"``: the description of a compute
        instance has the handle of the GPU, as nvml.h says, instead of that of the MIG device.
        """
        self._control("set_variants", self.directory, sum(_VARIANTS[name] for name in set(names)))

    def reboot(self) -> None:
        """Reboot: instances and processes are removed, MIG mode stays on Ampere only, ``boot_id`` changes.

        A process that had NVML open finds the driver not loaded until it calls ``nvmlInit`` again.
        """
        self._control("reboot", self.directory)

    def reset_gpu(self, index: int) -> None:
        """Reset a GPU like ``nvidia-smi --gpu-reset``: instances go, a pending MIG mode starts, a lost GPU returns."""
        self._control("reset_gpu", self.directory, index)

    def set_lost(self, index: int, lost: bool = True) -> None:
        """Make a GPU fall off the bus: every call about it fails with GPU_IS_LOST until it is reset."""
        self._control("set_lost", self.directory, index, int(lost))

    def fail(
        self,
        call: str,
        code: int = 999,
        *,
        nth: int = 1,
        times: int | None = 1,
        kill: bool = False,
        moment: Moment = "before",
    ) -> None:
        """Break calls of the NVML function `call`, counted from now: the `nth` and `times` - 1 after it (None: all).

        They return `code`, or the calling process is killed with SIGKILL if `kill`. `moment` says when: ``"before"``
        the call does anything, or ``"after"`` its effect, so that the caller does not learn of it. Calls that change
        something have two more: ``"writing"``, when the new state is written but the old one still holds, and
        ``"during"``, when the new state holds and the /proc files have not followed.
        """
        number = 2**64 - 1 if times is None else times
        try:
            self._control("fail", self.directory, call.encode(), code, nth, number, _MOMENTS[moment], int(kill))
        except SimDriverError as error:
            if error.errno == errno.ENOENT:
                raise SimDriverError(f"the simulated driver does not serve {call!r}", errno.ENOENT) from None
            raise

    def stick_destroy(self, seconds: float | None, which: Literal["gi", "ci", "both"] = "gi") -> None:
        """Let destroying instances end in IN_USE for `seconds` (None: until `reset_faults`)."""
        until = 2**63 - 1 if seconds is None else round(seconds * 1e9)
        self._control("stick", self.directory, 0 if which == "ci" else until, 0 if which == "gi" else until)

    def reset_faults(self) -> None:
        """End all faults and sticky destroys."""
        self._control("reset_faults", self.directory)

    def start_process(
        self, device_uuid: str, pid: int | None = None, *, memory_mib: int = 0, sticky: bool | None = None
    ) -> None:
        """Put a process (this one by default) on a MIG device, or on a GPU without MIG.

        It holds the device until it ends or `end_process`. A `sticky` one remains even if no such process exists, like
        a leaked context; by default a pid that no process has is sticky.
        """
        number = os.getpid() if pid is None else pid
        self._control(
            "start_process", self.directory, device_uuid.encode(), number, memory_mib, -1 if sticky is None else sticky
        )

    def end_process(self, pid: int | None = None) -> int:
        """Take a process (this one by default) off all devices; return the number of devices."""
        return self._control("end_process", self.directory, os.getpid() if pid is None else pid)

    def set_load(self, device_uuid: str, **figures: float) -> None:
        """Set the load of a MIG device, or of a GPU without MIG, from now on; shares not given are 0.

        Shares in percent, of the device: ``graphics`` (the time that anything runs), ``sm``, ``occupancy``,
        ``integer``, ``tensor`` (any kind of it), ``tensor_dfma``, ``tensor_hmma``, ``tensor_imma``, ``fp64``,
        ``fp32``, ``fp16``, ``dram``. Traffic in MiB/s, which NVML reports only for the GPU: ``pcie_tx``, ``pcie_rx``,
        ``nvlink_tx``, ``nvlink_rx``. A GPU's load is that of its MIG devices together.
        """
        for name in figures:
            if name not in self._control.loads:
                known = ", ".join(self._control.loads)
                raise SimDriverError(f"unknown load {name!r}; there are: {known}", errno.EINVAL)
        rates = [
            round(figures.get(name, 0.0) * (100 if is_share else 1)) for name, is_share in self._control.loads.items()
        ]
        if min(rates) < 0:
            raise SimDriverError("a load is not less than 0", errno.EINVAL)
        array = (ctypes.c_uint32 * len(rates))(*rates)
        self._control("set_load", self.directory, device_uuid.encode(), array)

    def post_event(self, index: int, kind: Event, data: int = 0) -> None:
        """Post a GPU event to NVML event sets; an Xid's `data` is its number.

        A GPU that falls off the bus (`set_lost`) posts Xid 79 by itself.
        """
        self._control("post_event", self.directory, index, _EVENTS[kind], data)

    def calls(self, *, reset: bool = False) -> Counter[str]:
        """Return how often each NVML function was called on this machine, by exported name.

        With `reset`, the counts start from 0 again.
        """
        counts = (ctypes.c_uint64 * len(self._control.functions))()
        self._control("calls", self.directory, counts, int(reset))
        return Counter({name: count for name, count in zip(self._control.functions, counts, strict=True) if count})

    def dump(self) -> dict[str, Any]:
        """Return the whole state of the driver.

        ``{"boot_id", "boots", "caps_major", "gpus": [{"index", "minor", "uuid", "model", "name", "mig", "mig_pending",
        "lost", "instances": [{"gi_id", "profile", "profile_id", "start", "size", "cap_minor", "state",
        "compute_instances": [{"ci_id", "profile", "profile_id", "start", "size", "cap_minor", "state", "uuid"}]}]}],
        "processes": [{"pid", "gpu", "gi_id", "ci_id", "uuid", "memory_mib", "sticky"}]}``. A ``state`` is ``"live"``,
        ``"creating"`` or ``"destroying"``; in all three states the placement is occupied.
        """
        size = 1 << 16
        while True:
            buffer = ctypes.create_string_buffer(size)
            length = self._control("dump", self.directory, buffer, size)
            if length < size:
                dumped: dict[str, Any] = json.loads(buffer.raw[:length])
                return dumped
            size = length + 4096

"""Hold the node's settings, `ETC/node.conf`, as one value.

Times are in seconds. `%n` in any value stands for the Slurm node's name, so that several slurmd on one host (test
beds) use different paths.
"""

# Hooks do not use pathlib: importing it takes longer than a warm start.
# ruff: noqa: PTH123

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from slurm_migbatch.node import conf
from slurm_migbatch.node.conf import ConfError

if TYPE_CHECKING:
    from collections.abc import Callable


class NodeConfig(NamedTuple):
    """Every key of node.conf under its Python name; the defaults are those of a production node.

    The shipped file lists the keys for administrators; the others are for tests and the test bed.
    """

    node: str
    etc: str
    state_dir: str
    run_dir: str
    nvml_library: str = ""
    proc_root: str = "/proc"
    dev_root: str = "/dev"
    boot_id_file: str = "/proc/sys/kernel/random/boot_id"
    controllers: tuple[str, ...] = ()
    auth: str = "munge"
    munge_socket: str = ""
    token_file: str = ""
    peer_uids: tuple[int, ...] = (0,)
    hook_deadline: float = 30.0
    epilog_deadline: float = 10.0
    agent_wait: float = conf.AGENT_WAIT_S
    busy_retry: float = 0.5
    warm_reuse: str = "same-user"
    check_open_files: bool = True
    on_error: str = "requeue"
    errors_before_drain: int = 5
    gpus: tuple[str, ...] = ()
    scontrol: str = "/usr/bin/scontrol"
    scontrol_timeout: float = 10.0
    slurm_conf: str = ""
    spool_dir: str = ""
    reconcile_every: float = 30.0
    ship_every: float = 1.0
    check_every: float = 60.0
    plan_wait: float = 25.0
    progress_dir: str = ""
    sample_every: float = 15.0
    progress_every: float = 120.0
    mps_partitions: tuple[str, ...] = ()
    mps_dir: str = "/tmp"  # noqa: S108 (CUDA's own default is there; TaskProlog uses only what the user owns)
    mps_percent: int = 0
    job_map_dir: str = ""
    gpustat_dir: str = ""

    @property
    def progress_path(self) -> str:
        """ProgressDir, in RunDir unless configured: a mount point for a tmpfs, not a disk that jobs could fill."""
        return self.progress_dir or f"{self.run_dir}/progress"

    def manages(self, uuid: str, minor: int) -> bool:
        """Return whether migbatch manages the GPU (Gpus=all, or listed by UUID or device minor)."""
        return not self.gpus or uuid in self.gpus or str(minor) in self.gpus


def load(etc: str, node: str) -> NodeConfig:
    """Read and check `etc`/node.conf. Raises ConfError with the key and what to write."""
    path = f"{etc}/{conf.NAME}"
    settings = conf.read(path, node)
    values: dict[str, object] = {}
    for key, text in settings.items():
        entry = _KEYS.get(key)
        if entry is None:
            raise ConfError(f"{path} line {_line_of(path, key)}: unknown key {key}; known keys are {', '.join(_KEYS)}")
        name, read = entry
        try:
            values[name] = read(text)
        except ValueError as error:
            raise ConfError(f"{path} line {_line_of(path, key)}: {key}={text}: {error}") from None
    values.setdefault("state_dir", f"/var/lib/migbatch/{node}")
    values["run_dir"] = conf.run_dir(settings, node)
    config = NodeConfig(node=node, etc=etc, **values)  # type: ignore[arg-type]
    if config.auth == "token" and config.controllers and not config.token_file:
        raise ConfError(f"{path}: Auth=token needs TokenFile=")
    return config


def _line_of(path: str, key: str) -> int:
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.partition("=")[0].strip() == key:
                return number
    return 0


def _path(text: str) -> str:
    if not text.startswith("/"):
        raise ValueError("must be an absolute path")
    return text.rstrip("/") or "/"


def _optional_path(text: str) -> str:
    return _path(text) if text else ""


def _between(number: Callable[[str], float], most: int, unit: str = "", *, zero: bool = True) -> Callable[[str], float]:
    """Return the reader of a number from 0, or with `zero` false above 0, to `most`; `unit` ends the message about
    another text.
    """
    bounds = f"0 to {most}" if zero else f"more than 0, at most {most}"

    def read(text: str) -> float:
        try:
            value = number(text)
        except ValueError:
            value = -1.0
        if not 0 <= value <= most or not (value or zero):
            raise ValueError(f"must be {'a whole number, ' if number is int else ''}{bounds}{unit}")
        return value

    return read


def _one_of(*words: str) -> Callable[[str], str]:
    """Return the reader of one of these words."""

    def read(text: str) -> str:
        if text not in words:
            raise ValueError(f"must be {', '.join(words[:-1])} or {words[-1]}")
        return text

    return read


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _yes(text: str) -> bool:
    if text.lower() not in ("yes", "no"):
        raise ValueError("must be yes or no")
    return text.lower() == "yes"


def _gpus(text: str) -> tuple[str, ...]:
    return () if text == "all" else _names(text)


def _uids(text: str) -> tuple[int, ...]:
    numbers = text.replace(" ", "").split(",")
    if not all(number.isdecimal() for number in numbers):
        raise ValueError("must be numbers of users, separated by commas (id -u slurm)")
    return tuple(map(int, numbers))


def _urls(text: str) -> tuple[str, ...]:
    urls = tuple(url.rstrip("/") for url in _names(text))
    if not all(url.startswith(("http://", "https://")) for url in urls):
        raise ValueError("must be http://host:port or https://host:port, several separated by commas")
    return urls


_seconds = _between(float, 86400, " seconds")
#: without any time a hook can do nothing, and a loop never rests
_some_seconds = _between(float, 86400, " seconds", zero=False)

_KEYS: dict[str, tuple[str, Callable[[str], object]]] = {
    "StateDir": ("state_dir", _path),
    "RunDir": ("run_dir", _path),
    "NvmlLibrary": ("nvml_library", _optional_path),
    "ProcRoot": ("proc_root", _path),
    "DevRoot": ("dev_root", _path),
    "BootIdFile": ("boot_id_file", _path),
    "Controller": ("controllers", _urls),
    "Auth": ("auth", _one_of("munge", "token")),
    "MungeSocket": ("munge_socket", _optional_path),
    "TokenFile": ("token_file", _optional_path),
    "PeerUids": ("peer_uids", _uids),
    "HookDeadline": ("hook_deadline", _some_seconds),
    "EpilogDeadline": ("epilog_deadline", _some_seconds),
    "AgentWait": ("agent_wait", _seconds),
    "BusyRetry": ("busy_retry", _seconds),
    "WarmReuse": ("warm_reuse", _one_of("any", "same-user", "never")),
    "CheckOpenFiles": ("check_open_files", _yes),
    "OnError": ("on_error", _one_of("requeue", "drain")),
    "ErrorsBeforeDrain": ("errors_before_drain", _between(int, 1000)),
    "Gpus": ("gpus", _gpus),
    "ScontrolPath": ("scontrol", _path),
    "ScontrolTimeout": ("scontrol_timeout", _some_seconds),
    "SlurmConf": ("slurm_conf", _optional_path),
    "SlurmdSpoolDir": ("spool_dir", _optional_path),
    "ReconcileEvery": ("reconcile_every", _some_seconds),
    "ShipEvery": ("ship_every", _some_seconds),
    "CheckEvery": ("check_every", _seconds),
    "PlanWait": ("plan_wait", _seconds),
    "ProgressDir": ("progress_dir", _path),
    "SampleEvery": ("sample_every", _seconds),
    "ProgressEvery": ("progress_every", _seconds),
    "MpsPartitions": ("mps_partitions", _names),
    "MpsDir": ("mps_dir", _path),
    "MpsPercent": ("mps_percent", _between(int, 100, "; 0: leave it to CUDA")),
    "JobMapDir": ("job_map_dir", _optional_path),
    "GpustatDir": ("gpustat_dir", _optional_path),
}

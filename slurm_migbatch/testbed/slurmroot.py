"""Select the Slurm programs of a test bed: those of the machine, or those of another Debian by chroot.

The chroot is prepared in a private mount namespace: the kernel removes all bind mounts when the last process in it
ends, for whatever reason, and nothing writes to the root itself.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from .errors import TestbedError

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SHARED = ("/run", "/tmp", "/var/tmp")  # noqa: S108 - the same folders inside and outside
_FILES = ("passwd", "group", "hosts", "resolv.conf")


@dataclass(frozen=True)
class SlurmRoot:
    """Location of Slurm's programs; `path` None means the machine's own."""

    path: Path | None = None

    def locate(self, program: str) -> str:
        """Return the full path of `program`, as seen inside the root."""
        for folder in PATH.split(":"):
            candidate = Path(f"{self.path or ''}{folder}/{program}")
            if candidate.exists():
                return f"{folder}/{program}"
        where = f"in {self.path}" if self.path else "on this machine"
        raise TestbedError(f"Slurm's program {program!r} is missing {where}; `make system` installs Debian's packages")

    def version(self) -> tuple[int, int]:
        """Return the release of Slurm, e.g. (22, 5)."""
        argv = [self.locate("slurmctld"), "-V"]
        if self.path:
            argv = ["chroot", str(self.path), *argv]
        text = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
        match = re.search(r"(\d+)\.(\d+)", text)
        if not match:
            raise TestbedError(f"slurmctld -V answered {text!r}, which names no version")
        return int(match[1]), int(match[2])

    def check(self, directory: Path) -> None:
        """Refuse a root that cannot serve a test bed living in `directory`."""
        if self.path is None:
            return
        if not (self.path / "usr").is_dir():
            raise TestbedError(f"{self.path} holds no Debian; `migbatch testbed root SUITE {self.path}` makes one")
        if not any(directory.is_relative_to(shared) for shared in _SHARED):
            raise TestbedError(f"with --slurm-root the test bed must live below one of {', '.join(_SHARED)}")

    def holder(self, directory: Path) -> list[str]:
        """Return the command line of the process that prepares the root and keeps its mounts; writes "ready" when done.

        Args:
            directory: the test bed's folder; it lies below a shared one and so has the same name inside.
        """
        assert self.path is not None
        etc = directory / "etc" / "root"
        etc.mkdir(parents=True, exist_ok=True)
        lines = ["set -e"]
        lines += [f'mount --rbind {folder} "$0"{folder}' for folder in ("/proc", "/sys", "/dev")]
        lines += [f'mount --rbind {folder} "$0"{folder}' for folder in _SHARED]
        for name in _FILES:
            if Path("/etc", name).exists() and (self.path / "etc" / name).exists():
                shutil.copyfile(Path("/etc", name), etc / name)
                lines.append(f'mount --bind {etc / name} "$0"/etc/{name}')
        lines += ["echo ready", 'exec chroot "$0" /bin/sleep infinity']
        return ["unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", "\n".join(lines), str(self.path)]

    def enter(self, holder: int | None, argv: list[str], cwd: str = "/") -> list[str]:
        """Return the command line that runs `argv` inside, to be started as root."""
        if self.path is None:
            return argv
        return ["nsenter", f"--target={holder}", "--mount", "--root", f"--wdns={cwd}", *argv]

    def from_anywhere(self, holder: int | None, program: str) -> str:
        """Return the shell words that run `program` inside, in the caller's directory if that exists inside too."""
        if self.path is None:
            return program
        change_directory = """'cd "$0" 2>/dev/null || cd /; exec "$@"' "$PWD" """
        return f"{shlex.join(self.enter(holder, ['/bin/sh', '-c']))} {change_directory}{program}"

"""Track all processes of a test bed, jobs and their children included, so that none outlives it.

Slurm's daemons leave their parents (slurmd's job manager is re-parented to init), rewrite their own command lines and
run jobs as other users, so neither a process tree nor a list of pids finds them all. A control group does: membership
is inherited and cannot be left by accident. If no control group hierarchy is writable (a plain container), the
processes are found by their environment, or for some daemons by their open files.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from .errors import TestbedError
from .proc import ProcessId, parent, pids

MARK = "MIGBATCH_TESTBED"
_SETTLE_S = 60.0


class ProcessGroup(Protocol):
    """Holds the processes of one test bed."""

    def create(self) -> None:
        """Create the group."""

    def enter(self, argv: Iterable[str]) -> list[str]:
        """Return the command line (for root) that runs `argv` inside the group."""

    def members(self) -> set[int]:
        """Return the pids inside now."""

    def destroy(self) -> None:
        """Kill everything inside and remove the group; repeating it is harmless."""


def _kill_all(group: ProcessGroup) -> None:
    """Kill the members until there are none; new ones may be forked in between."""
    deadline = time.monotonic() + _SETTLE_S
    while members := group.members():
        if time.monotonic() > deadline:
            raise TestbedError(f"processes {sorted(members)} do not end after SIGKILL; look at them with ps")
        for pid in members:
            with suppress(TestbedError):
                ProcessId.of(pid).signal(signal.SIGKILL)
        time.sleep(0.01)


class CgroupProcessGroup:
    """A control group for the test bed, in the v2 hierarchy or in v1's systemd, pids or freezer hierarchy."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @staticmethod
    def hierarchy() -> Path | None:
        """Return a writable hierarchy that does not affect its members otherwise, None if there is none."""
        mounts: dict[str, Path] = {}
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, mount_point, filesystem, options, *_ = line.split()
            if filesystem == "cgroup2":
                mounts["v2"] = Path(mount_point)
            elif filesystem == "cgroup":
                mounts.update(
                    (name, Path(mount_point)) for name in ("name=systemd", "pids", "freezer") if name in options
                )
        for name in ("v2", "name=systemd", "pids", "freezer"):
            if (
                name in mounts
                and os.access(mounts[name], os.W_OK)
                and not os.statvfs(mounts[name]).f_flag & os.ST_RDONLY
            ):
                return mounts[name]
        return None

    def create(self) -> None:
        """Make the group."""
        self.path.mkdir(exist_ok=True)

    def enter(self, argv: Iterable[str]) -> list[str]:
        """Return a shell command that joins the group and execs the program, so that it never runs outside."""
        return ["/bin/sh", "-c", 'echo 0 >"$0" && exec "$@"', str(self.path / "cgroup.procs"), *argv]

    def members(self) -> set[int]:
        """Return the pids in the group and in the groups below it."""
        found: set[int] = set()
        for procs in [self.path / "cgroup.procs", *self.path.glob("**/cgroup.procs")]:
            with suppress(FileNotFoundError, OSError):
                found.update(int(pid) for pid in procs.read_text().split())
        return found - {0}

    def destroy(self) -> None:
        """Kill the members and remove the group."""
        if not self.path.is_dir():
            return
        with suppress(FileNotFoundError, PermissionError):
            if (self.path / "cgroup.kill").exists():
                (self.path / "cgroup.kill").write_text("1")
        _kill_all(self)
        deadline = time.monotonic() + _SETTLE_S
        for group in sorted((p for p in [self.path, *self.path.rglob("*")] if p.is_dir()), reverse=True):
            while True:
                try:
                    group.rmdir()
                    break
                except FileNotFoundError:
                    break
                except OSError as error:  # EBUSY while the last member is exiting, or after another has joined:
                    # a process whose start was interrupted may still join
                    if time.monotonic() > deadline:
                        raise TestbedError(f"control group {group} cannot be removed: {error}") from error
                    _kill_all(self)
                    time.sleep(0.01)


class ScannedProcessGroup:
    """Without a control group: members are recognised by their environment."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def create(self) -> None:
        """Do nothing: there is no group to make."""

    def enter(self, argv: Iterable[str]) -> list[str]:
        """Return a command that sets the mark in the environment, which children inherit."""
        return ["/usr/bin/env", f"{MARK}={self.directory}", *argv]

    def members(self) -> set[int]:
        """Return the marked processes, Slurm's daemons that overwrote the mark, and all their descendants."""
        mark = f"{MARK}={self.directory}".encode()
        found: set[int] = set()
        parents: dict[int, int] = {}
        for pid in pids():
            up = parent(pid)
            if up is None or pid == os.getpid():
                continue
            parents[pid] = up
            with suppress(OSError):
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if mark in environment or self._is_daemon(pid):
                    found.add(pid)
        while grown := {pid for pid, up in parents.items() if up in found and pid not in found}:
            found |= grown
        return {pid for pid in found if _lives(pid)}

    def _is_daemon(self, pid: int) -> bool:
        # Some of Slurm's daemons overwrite their environment to show a title, but keep their log file open.
        if Path(f"/proc/{pid}/comm").read_text().strip() not in ("slurmstepd", "slurmctld", "slurmscriptd"):
            return False
        # For a process in a chroot the link begins with the path of its root.
        return any(f"{self.directory}/" in str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir())

    def destroy(self) -> None:
        """Kill the members."""
        _kill_all(self)


def _lives(pid: int) -> bool:
    with suppress(TestbedError):
        ProcessId.of(pid)
        return True
    return False


def plan(directory: Path, name: str) -> tuple[ProcessGroup, str]:
    """Return the group to `create` for the test bed in `directory`, and the text from which `reopen` finds it again."""
    hierarchy = CgroupProcessGroup.hierarchy()
    if hierarchy is None:
        return ScannedProcessGroup(directory), ""
    group = CgroupProcessGroup(hierarchy / name)
    return group, str(group.path)


def reopen(directory: Path, text: str) -> ProcessGroup:
    """Return the group that `plan` named earlier, perhaps in another process."""
    return CgroupProcessGroup(Path(text)) if text else ScannedProcessGroup(directory)

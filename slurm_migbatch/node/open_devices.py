"""Find processes that still have the devices of another user's slice open, in /proc, for the log only.

An open descriptor keeps its rights whatever happens to the owner of the device, and NVIDIA's driver compares only its
minor number (nv_cap_validate_and_dup_fd in kernel-open/nvidia/nv-caps.c), which is reused with the ids of an
instance. No job start waits for this scan or depends on it: descriptors on their way through a socket, or registered
with io_uring, are not found, and processes with many descriptors make it slow. So the agent runs it, with a time
limit, and it continues where it stopped.

Files of any process may be on a file system that does not answer (a server that is down, a user's FUSE mount), and
a stat of them blocks. So only descriptors with the name of a capability device are checked, and
of those only ones on a local file system.
"""

# Hooks do not use pathlib: importing it takes longer than a warm start.
# ruff: noqa: PTH115, PTH123, PTH208

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import NamedTuple

from slurm_migbatch.node import tmpfs
from slurm_migbatch.node.processes import user_of

MOST = 4096
"""Most descriptors of one process to check; more are held only for their number."""


_NAME = re.compile(r"/nvidia-cap[0-9]+( \(deleted\))?$")
_FDINFO = re.compile(rb"pos:\t-?[0-9]+\nflags:\t([0-7]+)\nmnt_id:\t([0-9]+)\n")
_LONGEST = 4096
_ANSWERING = ("devtmpfs", "tmpfs", "ramfs", "ext2", "ext3", "ext4", "xfs", "btrfs")
"""File systems that have device nodes and answer from memory or a disk of the machine."""


class OpenDevice(NamedTuple):
    """A process of `uid` that has the device with this minor open."""

    pid: int
    uid: int
    minor: int


class OpenDeviceScan:
    """Scan the processes of the machine, some at a time."""

    def __init__(self) -> None:
        self._after = 0

    def scan(self, major: int, owners: Mapping[int, int], seconds: float) -> list[OpenDevice]:
        """Find processes, root's excepted, that have another user's devices open; `owners`: uid by minor."""
        end = time.monotonic() + seconds
        pids = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
        ordered = [pid for pid in pids if pid > self._after] + [pid for pid in pids if pid <= self._after]
        found: list[OpenDevice] = []
        for pid in ordered if owners else ():
            try:
                uid = user_of(pid)
                if uid:
                    found += [OpenDevice(pid, uid, m) for m in _open(pid, major, end) if owners.get(m, uid) != uid]
            except OSError:
                pass  # it has ended
            self._after = pid
            if time.monotonic() > end:
                break
        return found


def _open(pid: int, major: int, end: float) -> Iterator[int]:
    """Yield the minors of the devices with this major number that a process has open, as far as found until `end`.

    The limit is needed because its user chooses how many descriptors and mounts it has. Raises OSError.
    """
    seen: set[int] = set()
    with os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in islice(entries, MOST):
            if time.monotonic() > end:
                return
            try:
                if not _NAME.search(os.readlink(entry.path)):
                    continue
                status = status_of(pid, entry.name, end)
                if status is None:
                    continue
                minor = os.minor(status.st_rdev)
                if stat.S_ISCHR(status.st_mode) and os.major(status.st_rdev) == major and minor not in seen:
                    seen.add(minor)
                    yield minor
            except OSError:
                continue


def status_of(pid: int, name: str, end: float) -> os.stat_result | None:
    """Return the status of a descriptor's file; None if it is on a file system that may not answer, or gives no access,
    or if that is not known by `end` (monotonic).

    Its user may put another file in its place at any time. So an O_PATH descriptor is opened, which accesses no file
    system, and is used only if its mount is the one that was checked. Raises OSError.
    """
    mount = _answering_mount(pid, name, end)
    if mount is None:
        return None
    handle = os.open(f"/proc/{pid}/fd/{name}", os.O_PATH | os.O_CLOEXEC)
    try:
        return os.fstat(handle) if tmpfs.mount_id(handle) == mount else None
    finally:
        os.close(handle)


def _answering_mount(pid: int, name: str, end: float) -> str | None:
    """Return the mount of a descriptor; None if its file system may not answer, or if it is an O_PATH one.

    Raises OSError.
    """
    with open(f"/proc/{pid}/fdinfo/{name}", "rb") as file:
        facts = facts_of(file.read(_LONGEST))
    if facts is None or facts[0] & os.O_PATH:
        return None
    # the process may have moved to another mount namespace, in which its file is not mounted
    fs_type = _fs_type(str(pid), facts[1], end) or _fs_type("self", facts[1], end)
    return facts[1] if fs_type in _ANSWERING else None


def _fs_type(process: str, mount: str, end: float) -> str:
    """Return the type of the file system of a mount; empty if it is not found by `end`: a user may have 100,000 mounts
    with long paths. Raises OSError.
    """
    with open(f"/proc/{process}/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            # 36 35 98:0 /root /where options tags - type source options
            head, _, tail = line.partition(" - ")
            if head.partition(" ")[0] == mount:
                return tail.partition(" ")[0]
            if time.monotonic() > end:
                break
    return ""


def facts_of(text: bytes) -> tuple[int, str] | None:
    """Return flags and mount of a descriptor's fdinfo; None if it has another form.

    The kernel's own lines come first. Text that a user chose may follow them, such as the name of a dma-buf.
    """
    match = _FDINFO.match(text)
    return (int(match[1], 8), match[2].decode("ascii")) if match is not None else None

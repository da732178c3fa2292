"""Check the free space for journal, spool, hand-offs and record."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from slurm_migbatch.node.findings import FAIL, OK, Finding

_MIB = 1 << 20
_INODES = 100


@dataclass(frozen=True)
class DiskSpace:
    """One directory: its contents, the space it needs, and the free space of its file system.

    Attributes:
        contents: what is kept there, for messages.
        path: the directory, or its nearest existing parent.
        needed: bytes.
        free: bytes for root.
        inodes: free ones; None if the file system does not count them.
        readonly: mounted read-only.
    """

    contents: str
    path: str
    needed: int
    free: int
    inodes: int | None
    readonly: bool = False


def read_disk(contents: str, path: str, needed_mib: int) -> DiskSpace:
    """Read the space of a path. Raises OSError."""
    existing = next(existing for existing in (Path(path), *Path(path).parents) if existing.exists())
    disk = os.statvfs(existing)
    inodes = disk.f_ffree if disk.f_files else None
    readonly = bool(disk.f_flag & os.ST_RDONLY)
    return DiskSpace(contents, str(existing), needed_mib * _MIB, disk.f_bfree * disk.f_frsize, inodes, readonly)


def check_disks(disks: Iterable[DiskSpace]) -> Iterator[Finding]:
    """Check that each directory is writable, with enough space."""
    for disk in disks:
        problem = ""
        if disk.readonly:
            problem, advice = "is mounted read-only", "check dmesg for disk errors, then: mount -o remount,rw"
        elif disk.free < disk.needed:
            problem, advice = f"has {disk.free // _MIB} MiB left", f"free {disk.needed // _MIB} MiB there"
        elif disk.inodes is not None and disk.inodes < _INODES:
            problem, advice = f"has {disk.inodes} inodes left", "delete files there: df -i"
        if problem:
            yield Finding(FAIL, disk.contents, f"the file system of {disk.path} {problem}", f"{advice} ({disk.path})")
        else:
            yield Finding(OK, disk.contents, f"{disk.path}: {disk.free // _MIB} MiB free")

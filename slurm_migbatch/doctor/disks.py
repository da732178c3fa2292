"""Room on the disks that journal, spool, hand-offs and record need."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from slurm_migbatch.node.findings import BAD, GOOD, Finding

_MIB = 1 << 20
_INODES = 100


@dataclass(frozen=True)
class DiskRoom:
    """One directory: what lies there, how much it needs, and what its file system has left.

    Attributes:
        what: for a reader.
        path: the directory, or the nearest one above it that is there.
        needed: bytes.
        free: bytes for root.
        inodes: that are left; None where the file system does not count them.
        readonly: mounted read-only.
    """

    what: str
    path: str
    needed: int
    free: int
    inodes: int | None
    readonly: bool = False


def look(what: str, path: str, needed_mib: int) -> DiskRoom:
    """Read the room below a path. Raises OSError."""
    place = next(place for place in (Path(path), *Path(path).parents) if place.exists())
    disk = os.statvfs(place)
    inodes = disk.f_ffree if disk.f_files else None
    readonly = bool(disk.f_flag & os.ST_RDONLY)
    return DiskRoom(what, str(place), needed_mib * _MIB, disk.f_bfree * disk.f_frsize, inodes, readonly)


def check_disks(disks: Iterable[DiskRoom]) -> Iterator[Finding]:
    """Check that each can be written, with room for what it has to keep."""
    for disk in disks:
        wrong = ""
        if disk.readonly:
            wrong, advice = "is mounted read-only", "check dmesg for disk errors, then: mount -o remount,rw"
        elif disk.free < disk.needed:
            wrong, advice = f"has {disk.free // _MIB} MiB left", f"free {disk.needed // _MIB} MiB there"
        elif disk.inodes is not None and disk.inodes < _INODES:
            wrong, advice = f"has {disk.inodes} inodes left", "delete files there: df -i"
        if wrong:
            yield Finding(BAD, disk.what, f"the file system of {disk.path} {wrong}", f"{advice} ({disk.path})")
        else:
            yield Finding(GOOD, disk.what, f"{disk.path}: {disk.free // _MIB} MiB free")

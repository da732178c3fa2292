"""Reserve disk space for the journal on a disk that others can fill.

There are three kinds, because SQLite deletes the write-ahead file with the last connection: blocks behind the end of
the database (allocated once, when it is created) and of the write-ahead file (whenever one is opened), which nobody
else can take; and empty files, RESERVE bytes in total and as many as SQLite creates at the first connection. They are
deleted when a journal cannot be opened on a disk without free blocks or inodes, and recreated with the first journal
that is opened when there is space. Unsupported operations of a file system (ZFS does not preallocate) are skipped.
"""

# Hooks do not use pathlib: importing it takes longer than a warm start.
# ruff: noqa: PTH108, PTH120

from __future__ import annotations

import os
from contextlib import suppress

from slurm_migbatch.node import effects, tmpfs

DATABASE = 1 << 20
WAL = 6 << 20
"""More than SQLite lets it grow to before it writes the database (1000 pages)."""

RESERVE = 8 << 20
_INODES = 2
"""Files that SQLite creates: the write-ahead file and its index."""


def keep(path: str) -> None:
    """Reserve space for the open journal at `path`, as far as there is any."""
    with suppress(OSError):
        _grow(f"{path}-wal", WAL, os.O_WRONLY)
    for name, size in _reserve(path):
        with suppress(OSError):
            _grow(name, size, os.O_WRONLY | os.O_CREAT)


def keep_database(path: str) -> None:
    """Reserve space for a database that no connection has open: closing the descriptor would drop SQLite's locks."""
    with suppress(OSError):
        _grow(path, DATABASE, os.O_WRONLY)


def release(path: str) -> bool:
    """Delete the reserve if the disk of the journal at `path` is full; return whether there is more space now."""
    status = os.statvfs(os.path.dirname(path))
    has_inodes = not status.f_files or status.f_ffree >= _INODES
    if status.f_bfree * status.f_frsize >= RESERVE and has_inodes:
        return False
    released = False
    for name, _ in _reserve(path):
        effects.point("unlink")
        with suppress(OSError):
            os.unlink(name)
            released = True
    return released


def _reserve(path: str) -> list[tuple[str, int]]:
    """Return the files of the reserve and their sizes."""
    return [(f"{path}-reserve", RESERVE), (f"{path}-inode-reserve", 0)]


def _grow(path: str, size: int, flags: int) -> None:
    """Allocate blocks up to `size`. Raises OSError."""
    handle = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        disk = os.fstatvfs(handle)
        has_space = disk.f_bavail * disk.f_frsize >= 2 * size  # SQLite has other files, which need some space too
        if has_space and os.fstat(handle).st_blocks * 512 < size:
            tmpfs.preallocate(handle, size)
    finally:
        os.close(handle)

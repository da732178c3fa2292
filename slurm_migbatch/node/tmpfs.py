"""Manage root's tmpfs in which each user's file has its own space, and no more: users cannot affect each other.

Its size always equals the space in use. A file gets all of its space when it is created (`reserve`), by which the file
system grows; after that no free space is left that anybody could use up. So a user can write exactly as much as root
has allocated for the file, whatever other users write, whatever names or descriptors remain, and with or without the
agent. Only in the microseconds in which space is added can another user's writes take it; then it is added again, until
the whole has grown to MAX_BYTES. (The kernel's own quota for tmpfs would be exact, but few kernels have it.)

The mount must be visible to the jobs: hooks and agent need the mount namespace of slurmd.
"""

# Hooks do not use pathlib: importing it takes longer than a warm start.
# ruff: noqa: PTH123

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager

from slurm_migbatch.node import effects
from slurm_migbatch.node.libc import last_error

MAX_BYTES = 64 << 20
"""Most memory of all files together."""

TRIES = 16

ALONE_S = 5.0
"""How long to wait for another process that mounts the file system or changes its size."""

_FLAGS = 2 | 4 | 8  # MS_NOSUID | MS_NODEV | MS_NOEXEC
_REMOUNT = 32
_DETACH, _UMOUNT_NOFOLLOW = 2, 8
_KEEP_SIZE = 1
_GET_FLAGS, _SET_FLAGS = 0x80086601, 0x40086602
_APPEND_ONLY = 0x20
_libc = ctypes.CDLL(None, use_errno=True)


def mount_id(handle: int) -> str:
    """Return the id of the mount that a descriptor is on, without accessing its file system. Raises OSError."""
    with open(f"/proc/self/fdinfo/{handle}", encoding="ascii") as file:
        for line in file:
            if line.startswith("mnt_id:"):
                return line.split()[1]
    raise OSError(errno.ENOSYS, "this kernel does not report the mount of a file")


def is_mounted(directory: int) -> bool:
    """Return whether the directory is the root of a mount. Raises OSError."""
    parent = os.open("..", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
    try:
        return mount_id(directory) != mount_id(parent)
    finally:
        os.close(parent)


def mount(directory: int, mode: int) -> None:
    """Mount a tmpfs over the directory, which then must be opened again. Raises OSError.

    The number of files is not limited: only root creates them, and extended attributes would count as files. A user who
    adds some would take space from others.
    """
    effects.point("mount")
    _mount(directory, _FLAGS, f"size={_page()},nr_inodes=0,mode={mode:o}")


def uncover(directory: int, name: str) -> None:
    """Detach what users have mounted over a file in the directory, without accessing it. Raises OSError."""
    for _ in range(TRIES):
        handle = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
        try:
            if mount_id(handle) == mount_id(directory):
                return
        finally:
            os.close(handle)
        effects.point("umount")
        if _libc.umount2(f"/proc/self/fd/{directory}/{name}".encode(), _DETACH | _UMOUNT_NOFOLLOW):
            raise last_error("umount")


@contextmanager
def alone(directory: int) -> Iterator[None]:
    """Prevent others from mounting here, or from changing the size; users cannot open the directory.

    Raises OSError if another process does so for long: it may have been stopped, and hooks must not wait for it.
    """
    until = time.monotonic() + ALONE_S
    while True:
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() >= until:
                raise OSError(errno.EBUSY, "another process changes the size for progress files") from None
        time.sleep(0.002)
    try:
        yield
    finally:
        fcntl.flock(directory, fcntl.LOCK_UN)


def reserve(directory: int, handle: int, size: int) -> None:
    """Allocate the open file's space, `size` bytes from the beginning. Raises OSError if there is no more."""
    effects.point("reserve")
    with alone(directory):
        for _ in range(TRIES):
            try:
                return preallocate(handle, size)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
            _fit(directory, size)
        raise OSError(errno.ENOSPC, f"the space for a file was taken by others {TRIES} times")


def fit(directory: int) -> None:
    """Release unused space. Raises OSError."""
    with alone(directory):
        _fit(directory, 0)


def set_append_only(handle: int, on: bool) -> None:
    """Make a file append-only (no second name, no truncation, no attributes), or undo that.

    Raises OSError. Kernels before 6.0 do not support it on a tmpfs.
    """
    flags = struct.unpack("l", fcntl.ioctl(handle, _GET_FLAGS, struct.pack("l", 0)))[0]
    flags = flags | _APPEND_ONLY if on else flags & ~_APPEND_ONLY
    fcntl.ioctl(handle, _SET_FLAGS, struct.pack("l", flags))


def preallocate(handle: int, size: int) -> None:
    """Allocate blocks for a file without changing its length. Raises OSError if that fails."""
    while _libc.fallocate(handle, _KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(size)):
        error = last_error("fallocate")
        if error.errno != errno.EINTR:
            raise error


def _fit(directory: int, more: int) -> None:
    status = os.fstatvfs(directory)
    size = (status.f_blocks - status.f_bfree) * status.f_frsize + more
    if size > MAX_BYTES:
        raise OSError(errno.ENOSPC, f"progress files already use {MAX_BYTES} bytes")
    effects.point("remount")
    _mount(directory, _FLAGS | _REMOUNT, f"size={max(size, _page())}")


def _page() -> int:
    return os.sysconf("SC_PAGESIZE")


def _mount(directory: int, flags: int, options: str) -> None:
    target = f"/proc/self/fd/{directory}".encode()
    if _libc.mount(b"migbatch", target, b"tmpfs", ctypes.c_ulong(flags), options.encode()):
        raise last_error("mount")

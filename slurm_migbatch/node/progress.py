"""Handle progress files: one for each run, created by root, written by the job's user, read by root.

    ProgressDir/<job>.<restart>      the user's, mode 0600, in a directory of root's (0711)
    ProgressDir/<job>.<restart>.steps      the same, in jobs with several slices; root does not parse it (`step_slices`)

`progressreport` describes the content.

Root never opens anything that a user could have put in the file's place:

- The directory is root's, so its names are: there can be no symbolic link, FIFO, device or other user's file.
  It is a separate file system, so the file cannot be linked into another directory either.
- fusermount lets users mount over a file of theirs. So the file is looked up without opening it (O_PATH), its mount
  compared with the directory's, and only then checked (regular, the right owner, one name) and opened through the
  same descriptor.
- Opening does not wait (O_NONBLOCK), not even for a lease (fcntl F_SETLEASE) that the user holds on the file.
- Of a file of any length at most HEAD + TAIL bytes are read, and lines are parsed by an allow-list, numbers only.

A user can only use up the file's own space: RESERVED_BYTES bytes, allocated when it is created, in a
separate tmpfs (`tmpfs.py`), of which the files of one user get half at most. The agent empties files that are half
full, except for what the running steps still need. If that file system cannot be mounted (in a container without the
privilege) there is no file.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from slurm_migbatch.node import effects, step_slices, tmpfs

HEAD = 4096
TAIL = 16384
RESERVED_BYTES = 256 << 10
"""Size limit of a file in bytes."""

MAX_BYTES = RESERVED_BYTES // 2
"""Size from which it is emptied."""

_NAME = re.compile(r"([0-9]{1,10})\.([0-9]{1,5})(?:\.steps)?")


class ProgressError(RuntimeError):
    """A progress file cannot be read now or is not the one root created; the message says why."""


class Content(NamedTuple):
    """The beginning and end of a file (`tail` is all of it if it is short), its length and last change (unix s)."""

    head: bytes
    tail: bytes
    size: int
    changed: float


# -- the file ----------------------------------------------------------------------------------------------------


def make(directory: int, job: int, restart: int, uid: int) -> None:
    """Create an empty file for a run that begins, replacing those of an interrupted start. Raises OSError."""
    if not tmpfs.is_mounted(directory):
        raise OSError(errno.EOPNOTSUPP, "no separate file system for progress files")
    remove(directory, job, restart)
    _create(directory, f"{job}.{restart}", uid, RESERVED_BYTES)


def make_steps(directory: int, job: int, restart: int, uid: int) -> None:
    """Create the file in which the steps of a run with several slices share them, after `make`. Raises OSError."""
    _create(directory, f"{job}.{restart}{step_slices.SUFFIX}", uid, step_slices.MAX_BYTES)


def _create(directory: int, name: str, uid: int, size: int) -> None:
    """Create an empty file with its own space for a user. Raises OSError."""
    _check_share(directory, uid)
    effects.point("progress make")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(name, flags, 0o600, dir_fd=directory)
    try:
        os.fchmod(handle, 0o600)
        tmpfs.reserve(directory, handle, size)
        os.fchown(handle, uid, -1)
        _protect(handle)
    except OSError:
        os.close(handle)
        _remove(directory, name)
        raise
    os.close(handle)


def remove(directory: int, job: int, restart: int) -> None:
    """Delete a run's files and free their space; do nothing if there are none."""
    for name in (f"{job}.{restart}", f"{job}.{restart}{step_slices.SUFFIX}"):
        _remove(directory, name)


def _remove(directory: int, name: str) -> None:
    """Delete a file and free its space.

    A mount that the user has placed over it is detached. While the user holds a lease on it, it stays, and the next
    cleanup tries again. A process that still has it open keeps an empty file that cannot grow.
    """
    try:
        tmpfs.uncover(directory, name)
    except FileNotFoundError:
        return
    except OSError:
        pass
    try:
        with suppress(ProgressError), _opened(directory, name, None, os.O_RDWR | os.O_APPEND) as handle:
            _empty(handle, for_good=True)
    except BlockingIOError:
        return  # without its name nobody could empty it later
    except OSError:
        pass
    effects.point("progress unlink")
    with suppress(OSError):
        os.unlink(name, dir_fd=directory)
        tmpfs.fit(directory)


def _check_share(directory: int, uid: int) -> None:
    """Raise OSError if this user has half of the space already: by leases (`remove`) files can outlive their jobs."""
    most = tmpfs.MAX_BYTES // 2 // RESERVED_BYTES
    names = os.listdir(directory)
    if len(names) >= most and sum(_owner(directory, name) == uid for name in names) >= most:
        raise OSError(errno.EDQUOT, f"uid {uid} has {most} progress files on this node")


def _owner(directory: int, name: str) -> int | None:
    """Return the owner of a file, without a mount that its user has placed over it; None if it is gone."""
    try:
        tmpfs.uncover(directory, name)
        handle = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    except OSError:
        return None
    try:
        # the file system of another mount may never answer
        return os.fstat(handle).st_uid if tmpfs.mount_id(handle) == tmpfs.mount_id(directory) else None
    finally:
        os.close(handle)


def listed(directory: int) -> Iterator[tuple[int, int]]:
    """Yield job and restart of every file; twice for a run with two."""
    for name in os.listdir(directory):
        match = _NAME.fullmatch(name)
        if match is not None:
            yield int(match[1]), int(match[2])


def read(directory: int, job: int, restart: int, uid: int) -> Content | None:
    """Read what the run's user wrote; None if there is no file. Raises ProgressError."""
    name = f"{job}.{restart}"
    try:
        with _opened(directory, name, uid, os.O_RDONLY) as handle:
            status = os.fstat(handle)
            tail = os.pread(handle, TAIL, max(0, status.st_size - TAIL))
            head = os.pread(handle, HEAD, 0) if status.st_size > TAIL else b""
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ProgressError(f"progress file {name}: {error.strerror}") from error
    return Content(head, tail, status.st_size, status.st_mtime)


def shorten(directory: int, job: int, restart: int, uid: int) -> None:
    """Empty a file that has grown too long, so that all of its space is free again. Raises ProgressError."""
    name = f"{job}.{restart}"
    try:
        with _opened(directory, name, uid, os.O_RDWR | os.O_APPEND) as handle:
            _refill(directory, handle, RESERVED_BYTES)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ProgressError(f"progress file {name}: {error.strerror}") from error


def shorten_steps(directory: int, job: int, restart: int, uid: int) -> None:
    """Remove the lines of steps that count no more once they are half of their file. Raises ProgressError.

    Nothing is done while the user holds the lock of the file.
    """
    name = f"{job}.{restart}{step_slices.SUFFIX}"
    try:
        with _opened(directory, name, uid, os.O_RDWR | os.O_APPEND) as handle:
            if os.fstat(handle).st_size <= step_slices.MAX_BYTES // 2:
                return
            if not step_slices.lock(handle, step_slices.TABLE, 0.0):
                return
            kept = step_slices.counting(os.pread(handle, step_slices.MAX_BYTES, 0))
            _refill(directory, handle, step_slices.MAX_BYTES, kept)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ProgressError(f"progress file {name}: {error.strerror}") from error


def _refill(directory: int, handle: int, size: int, content: bytes = b"") -> None:
    """Replace the content of an open file, and reserve `size` bytes for it. Raises OSError."""
    try:
        _empty(handle)
        tmpfs.reserve(directory, handle, size)
        os.write(handle, content)
    finally:
        _protect(handle)


def _protect(handle: int) -> None:
    """Make a file append-only. Raises OSError if its user has added attributes while it was not: it becomes root's."""
    with suppress(OSError):  # not supported by every kernel; it only keeps the user from shortening the file
        tmpfs.set_append_only(handle, True)
    try:
        untouched = not _attributes(handle)
    except OSError:  # more names than Linux lists
        untouched = False
    if not untouched:
        with suppress(OSError):
            _empty(handle, for_good=True)
        raise OSError(errno.EPERM, "its user has added attributes to it")


def _attributes(handle: int) -> list[str]:
    return [name for name in os.listxattr(handle) if name.startswith("user.")]


def _empty(handle: int, *, for_good: bool = False) -> None:
    """Truncate an open file to zero bytes; it is no longer append-only afterwards. Raises OSError.

    While it is not, its owner may add extended attributes (from Linux 6.6 on), also through a descriptor that he keeps.
    They take the kernel's memory, so they are removed, here and by `_protect`, and root becomes the owner `for_good`.
    """
    effects.point("progress empty")
    with suppress(OSError):
        tmpfs.set_append_only(handle, False)
    if for_good:
        os.fchown(handle, 0, 0)
        os.fchmod(handle, 0o600)
    os.ftruncate(handle, 0)
    for name in _attributes(handle):
        os.removexattr(handle, name)


@contextmanager
def _opened(directory: int, name: str, uid: int | None, flags: int) -> Iterator[int]:
    """Open a file only if root created it, and for `uid` (None: any user). Raises ProgressError, OSError."""
    path = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    try:
        if tmpfs.mount_id(path) != tmpfs.mount_id(directory):
            raise ProgressError(f"progress file {name}: a file system is mounted over it")
        status = os.fstat(path)
        foreign = uid is not None and (status.st_uid != uid or status.st_nlink != 1)
        if foreign or not stat.S_ISREG(status.st_mode):
            raise ProgressError(f"progress file {name} is not the one created for the run")
        handle = os.open(f"/proc/self/fd/{path}", flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    finally:
        os.close(path)
    try:
        yield handle
    finally:
        os.close(handle)

"""Open the node's directories RunDir (lost at reboot), StateDir and ProgressDir so that nobody can replace them.

RunDir is 0755 with `job/` (0755, hand-offs, each read by its user) and `lock/` (0700); StateDir is 0700; ProgressDir is
0711, a separate file system with files that users write (`progress.py`). All belong to root.
"""

# Hooks do not use pathlib: importing it takes longer than a warm start.
# ruff: noqa: PTH101, PTH102, PTH112, PTH115, PTH120

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import NamedTuple

from slurm_migbatch.node import effects, tmpfs
from slurm_migbatch.node.config import NodeConfig


class PathsError(RuntimeError):
    """A directory is missing, of another owner or writable by others; the message says which and what to do."""


class Paths(NamedTuple):
    """Open directories as descriptors, and the paths in StateDir."""

    run: int
    job: int
    lock: int
    progress: int
    state_dir: str
    progress_dir: str

    @classmethod
    def open(cls, config: NodeConfig) -> Paths:
        """Open the directories, creating missing ones. Raises PathsError."""
        with ExitStack() as opened:

            def kept(handle: int) -> int:
                opened.callback(os.close, handle)
                return handle

            run = kept(_directory(config.run_dir, 0o755))
            paths = cls(
                run=run,
                job=kept(_directory("job", 0o755, run)),
                lock=kept(_directory("lock", 0o700, run)),
                progress=kept(limited(config.progress_path)),
                state_dir=_checked(config.state_dir),
                progress_dir=config.progress_path,
            )
            opened.pop_all()  # `close` closes them
            return paths

    def close(self) -> None:
        """Close the descriptors."""
        for handle in (self.run, self.job, self.lock, self.progress):
            os.close(handle)


def public(path: str) -> int:
    """Open a directory that everyone may read and only root may change; create it if missing. Raises PathsError."""
    return _directory(path, 0o755)


def fresh(directory: int, name: str) -> int:
    """Create a file to write, in place of one that a killed process left. Raises OSError."""
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=directory)
    return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory)


def read(name: str, most: int, directory: int | None = None) -> bytes:
    """Read at most this many bytes of a plain file; an absolute path needs no directory. Raises OSError."""
    handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "not a plain file")
        return os.read(handle, most)
    finally:
        os.close(handle)


def replace(
    directory: int,
    name: str,
    content: bytes,
    label: str,
    prepare: Callable[[int], None] = lambda _: None,
    *,
    durable: bool = True,
) -> None:
    """Write a file atomically: with all its content, or not at all. Raises OSError.

    `label` names it in the effects; `prepare` gets the open file, mode 0600, before it is put in its place. A file that
    is not `durable` is not forced to disk: it says nothing after a crash of the host, and hooks must not wait for it.
    """
    temporary = f".{name}"
    try:
        effects.point(f"{label} write")
        with os.fdopen(fresh(directory, temporary), "wb") as file:
            file.write(content)
            file.flush()
            prepare(file.fileno())
            if durable:
                os.fsync(file.fileno())
        effects.point(f"{label} rename")
        os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError as error:
        with suppress(OSError):  # incomplete, for example on a full disk
            os.unlink(temporary, dir_fd=directory)
        if error.errno is not None:
            with suppress(OSError):  # which file: the hook that ends so may drain the node
                error.filename = f"{os.readlink(f'/proc/self/fd/{directory}')}/{name}"
        raise
    if durable:
        os.fsync(directory)


def _checked(path: str) -> str:
    os.close(_directory(path, 0o700))
    return path


def limited(path: str) -> int:
    """Open ProgressDir, with a separate file system mounted on it if possible."""
    mode = 0o711
    handle = _directory(path, mode)
    with suppress(OSError):  # on failure no progress file is created (`progress.make`)
        if not tmpfs.is_mounted(handle):
            with tmpfs.alone(handle):  # other processes wait here, and then see it at the same path
                reopened = _directory(path, mode)
                try:
                    if not tmpfs.is_mounted(reopened):
                        tmpfs.mount(reopened, mode)
                finally:
                    os.close(reopened)
            os.close(handle)
            handle = _directory(path, mode)
    return handle


def _directory(path: str, mode: int, parent: int | None = None) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        try:
            handle = os.open(path, flags, dir_fd=parent)
        except FileNotFoundError:
            above = os.path.dirname(path)
            if parent is None and not os.path.isdir(above):
                make_all(above)
            with suppress(FileExistsError):  # another hook was faster
                os.mkdir(path, mode, dir_fd=parent)
            handle = os.open(path, flags, dir_fd=parent)
    except OSError as error:
        raise PathsError(f"directory {path}: {error.strerror}; run `migbatch install --role node --apply`") from error
    status = os.fstat(handle)
    actual = stat.S_IMODE(status.st_mode)
    if status.st_uid == 0 and actual != mode and not actual & ~mode:
        with suppress(OSError):
            os.fchmod(handle, mode)  # a hook was killed after creating it under a hook's umask
    if status.st_uid != 0 or actual & 0o022 or actual & ~mode & 0o077:
        os.close(handle)
        raise PathsError(
            f"directory {path} must belong to root with mode {mode:o}, not uid {status.st_uid} "
            f"mode {actual:o}; correct it by hand"
        )
    return handle


def make_all(path: str) -> None:
    """Create a directory and those above it, for everyone to read whatever the umask. Raises OSError."""
    if not os.path.isdir(path):
        make_all(os.path.dirname(path))
        try:
            os.mkdir(path, 0o755)
            os.chmod(path, 0o755)  # noqa: S103  (RunDir is for users to read)
        except FileExistsError:
            pass

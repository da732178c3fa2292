"""Wrap the file system calls of saving a checkpoint, one method each: tests end the process at each of them."""

from __future__ import annotations

import errno
import os
from pathlib import Path


class Disk:
    """The real file system. All methods raise OSError."""

    def create(self, path: Path) -> int:
        """Create a file for writing that belongs to the user."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def write(self, handle: int, data: bytes | memoryview, offset: int) -> int:
        """Write `data` at `offset`; return the number of bytes written."""
        return os.pwrite(handle, data, offset)

    def sync(self, handle: int) -> None:
        """Wait until a file's content has reached the disk."""
        os.fsync(handle)

    def rename(self, old: Path, new: Path) -> None:
        """Rename a file into its place atomically."""
        os.rename(old, new)  # noqa: PTH104

    def unlink(self, path: Path) -> None:
        """Delete a file."""
        os.unlink(path)  # noqa: PTH108

    def sync_directory(self, path: Path) -> None:
        """Wait until names in a directory have reached the disk, if its file system can."""
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno != errno.EINVAL:  # Linux's answer for file systems that do not implement it
                raise
        finally:
            os.close(handle)

"""One migbatchd per run directory: an advisory lock that the kernel releases when the process ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class AlreadyRunning(RuntimeError):
    """Another migbatchd holds the lock."""


class InstanceLock:
    """Holds `<run_dir>/migbatchd.pid` locked as long as it exists; the file names the holder.

    No other user may open the file: whoever can read it can lock it (flock(2)) forever.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "migbatchd.pid"
        self._fd = -1

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            AlreadyRunning: another process has it.
            OSError: the run directory cannot be created or written.
        """
        self.path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
            os.close(fd)
            raise AlreadyRunning(
                f"migbatchd is already running as process {holder or '?'} (lock {self.path}); stop it first"
            ) from None
        try:
            os.fchmod(fd, 0o600)  # the file may have been created by an earlier release
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        except OSError:
            os.close(fd)
            raise
        self._fd = fd

    def release(self) -> None:
        """Release the lock; the file stays, so that no process locks a file that was just unlinked."""
        if self._fd >= 0:
            os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = -1

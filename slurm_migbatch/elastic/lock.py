"""Lock a checkpoint directory for one run at a time.

A requeued job may start while its previous run still writes its last checkpoint, on the same node or on another one.
The lock is flock(2), which Linux supports over NFS too. If the file system has no locks, or one was lost (an NFS
server was down), the name in the lock file decides: the run that wrote it last continues, and the other one notices
before it puts a checkpoint in its place.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from slurm_migbatch.elastic.errors import ElasticError, Superseded

_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
_EVERY_S = 0.2
log = logging.getLogger("migbatch.elastic")


class Lock:
    """The lock of one directory; `take` it before anything else, `give` it back at the end."""

    def __init__(self, directory: Path, environ: Mapping[str, str]) -> None:
        self._path = directory / "lock"
        self._handle = -1
        job, restart = environ.get("SLURM_JOB_ID", "none"), environ.get("SLURM_RESTART_COUNT", "0")
        self.mark = f"{socket.gethostname()}.{os.getpid()}.{time.time_ns():x}"
        self._name = f"job {job} restart {restart} process {os.getpid()} on {socket.gethostname()} {self.mark}"

    def take(self, patience_s: float, waiting: Callable[[float], object]) -> None:
        """Take the lock or wait for it; `waiting` is called with the seconds to wait, and may raise.

        Raises:
            ElasticError: another process still holds it after that time.
            OSError: the file cannot be created.
        """
        self._handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        end = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                pass
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                log.warning("%s: no locks on this file system; the newest run continues", self._path.parent)
                break
            left = end - time.monotonic()
            if left <= 0:
                holder = self._holder()
                self.give()
                raise ElasticError(
                    f"{self._path.parent} is in use by {holder or 'another run'}: two runs cannot train in one "
                    "directory. End that one, or use another directory"
                )
            waiting(min(_EVERY_S, left))
        name = self._name.encode()
        os.pwrite(self._handle, name, 0)  # in place of the previous one: on a full disk there is no other room
        os.ftruncate(self._handle, len(name))

    @property
    def held(self) -> bool:
        """Between `take` and `give`."""
        return self._handle >= 0

    def check(self) -> None:
        """Raise Superseded if another run has taken over the directory."""
        holder = self._holder()
        if holder != self._name:
            raise Superseded(f"{self._path.parent} was taken over by {holder or 'another run'}; this run stops")

    def give(self) -> None:
        """Release the lock."""
        if self._handle >= 0:
            with suppress(OSError):  # a worker that this process has forked may still hold the file open
                fcntl.flock(self._handle, fcntl.LOCK_UN)
            os.close(self._handle)
            self._handle = -1

    def _holder(self) -> str:
        return os.pread(self._handle, 1024, 0).decode("utf-8", "replace")

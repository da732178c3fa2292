"""Provide deadlines for hooks, and locks that give up in time."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager


class TooLate(RuntimeError):
    """The time for this hook is used up; the message says on what."""


class Deadline:
    """A time by which a hook must have ended; every wait counts against it. `set_at`: unix seconds when it was set."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.set_at = time.time()
        self._start = time.monotonic()

    @property
    def remaining(self) -> float:
        """Seconds left, not below 0."""
        return max(0.0, self._start + self.seconds - time.monotonic())

    @property
    def elapsed(self) -> float:
        """Seconds since it was set."""
        return time.monotonic() - self._start

    def check(self, operation: str) -> None:
        """Raise TooLate if no time is left."""
        if not self.remaining:
            raise TooLate(f"no time left after {self.seconds:g} s: {operation}")


@contextmanager
def locked(directory: int, names: Sequence[str], deadline: Deadline) -> Iterator[None]:
    """Hold the lock files `names` in the directory with this descriptor, taken in the order given.

    The kernel releases them when the process ends, however it ends. Each call opens the files again, so threads of one
    process exclude one another too. Raises TooLate.
    """
    with ExitStack() as stack:
        for name in names:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            handle = os.open(name, flags, 0o600, dir_fd=directory)
            stack.callback(os.close, handle)
            pause = 0.001
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError as error:
                    if error.errno not in (errno.EAGAIN, errno.EINTR):
                        raise
                deadline.check(f"waiting for the lock {name}")
                time.sleep(min(pause, deadline.remaining))
                pause = min(pause * 1.5, 0.02)
        yield

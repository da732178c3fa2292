"""Identify processes by pid and start time, so that a recycled pid is never signalled."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .errors import TestbedError

_PAUSE_PER_CALL = 14.0
_LONGEST_PAUSE_S = 1.0


def start_time(pid: int) -> int | None:
    """Return the start of `pid` in clock ticks since boot (/proc/PID/stat, field 22); None if dead or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field, the command in parentheses, may itself hold spaces and parentheses.
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[19])


@dataclass(frozen=True)
class ProcessId:
    """One process of this boot: a pid identifies it only with the same start time."""

    pid: int
    start: int

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """Return the identity of the live process `pid`."""
        start = start_time(pid)
        if start is None:
            raise TestbedError(f"process {pid} has ended")
        return cls(pid, start)

    @classmethod
    def own(cls) -> ProcessId:
        """Return the identity of the calling process."""
        return cls.of(os.getpid())

    @property
    def alive(self) -> bool:
        """Whether exactly this process still runs (a zombie does not)."""
        return start_time(self.pid) == self.start

    def signal(self, number: int) -> bool:
        """Send a signal to exactly this process; False if it has ended.

        The pidfd is opened before the start time is compared, so the pid cannot be recycled in between.
        """
        try:
            fd = os.pidfd_open(self.pid)
        except (ProcessLookupError, OSError):
            return False
        try:
            if not self.alive:
                return False
            signal.pidfd_send_signal(fd, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(fd)
        return True

    def wait(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for the end of this process; return whether it has ended."""
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            if start_time(self.pid) == self.start:
                poll = select.poll()
                poll.register(fd, select.POLLIN)
                poll.poll(timeout * 1000)
        finally:
            os.close(fd)
        return not self.alive

    def children_of_session(self) -> list[ProcessId]:
        """Return its children in its session; none if it has ended."""
        children = []
        with suppress(OSError, ValueError):
            for pid in map(int, Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()):
                with suppress(OSError, TestbedError):
                    if os.getsid(pid) == os.getsid(self.pid):
                        children.append(ProcessId.of(pid))
        return children

    def end(self, grace: float) -> None:
        """Terminate, and kill after `grace` seconds."""
        if self.signal(signal.SIGTERM) and not self.wait(grace):
            self.signal(signal.SIGKILL)
            self.wait(60.0)


def pids() -> Iterator[int]:
    """Yield every process of the machine."""
    for name in os.listdir("/proc"):  # noqa: PTH208 - names, not paths, are wanted
        if name.isdigit():
            yield int(name)


def parent(pid: int) -> int | None:
    """Return the parent of `pid`, None if it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        text = Path(f"/proc/{pid}/stat").read_text()
        return int(text[text.rindex(")") + 2 :].split()[1])
    return None


def wait_until(ready: object, timeout: float, event: str, every: float = 0.02) -> None:
    """Call `ready()` until it is true; TestbedError naming `event` after `timeout` seconds.

    The pause between two calls is `every` seconds, and longer if the call itself is long (for example a command that is
    started), so that a waiting test leaves the processors to the processes that it waits for.
    """
    assert callable(ready)
    deadline = time.monotonic() + timeout
    while True:
        begin = time.monotonic()
        if ready():
            return
        end = time.monotonic()
        if end > deadline:
            raise TestbedError(f"{event}: not within {timeout:g} s")
        time.sleep(max(every, min(_PAUSE_PER_CALL * (end - begin), _LONGEST_PAUSE_S)))

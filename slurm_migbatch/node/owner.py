"""Identify the process behind an unfinished change, so that others can see when it has ended.

An owner is written `<pid>.<start>.<token>`: a process id, its start time in clock ticks since boot (ids are reused),
and a token for one operation inside the process (the agent does many at once).
"""

# Hooks do not use pathlib: importing it takes longer than a warm start.
# ruff: noqa: PTH123

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager

PF_EXITING = 0x4
"""The kernel's flag of a task that is in do_exit (include/linux/sched.h), the same since Linux 2.6."""

_active: set[str] = set()
_tokens = itertools.count(1)


@contextmanager
def working() -> Iterator[str]:
    """Create a new owner id, alive until the block ends."""
    pid = os.getpid()
    name = f"{pid}.{_started(pid)}.{next(_tokens)}"
    _active.add(name)
    try:
        yield name
    finally:
        _active.discard(name)


def alive(owner: str) -> bool:
    """Return whether the owner's process still runs."""
    pid_text, _, rest = owner.partition(".")
    started, _, _ = rest.partition(".")
    if not pid_text.isdigit():
        return False
    pid = int(pid_text)
    if pid == os.getpid():
        return owner in _active
    return bool(started) and _started(pid) == started


def _started(pid: int) -> str:
    """Return the process's start time; empty if it has ended or is a zombie. Always from the real /proc.

    A killed process closes its files, and with them the connection to a hook, before it counts as a zombie.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return ""
    ended = fields[0] in (b"Z", b"X") or int(fields[6]) & PF_EXITING
    return "" if ended else fields[19].decode("ascii")

"""Record that a job is over on this node: `RunDir/ending/<job>.<restart>`, the first thing that an Epilog writes.

`client.py` writes the note before any request, so that an Epilog that is killed, or cannot get a lock or the journal
in time, is finished by the next hook, the agent or `migbatch node reconcile`. It means that all runs of the job up to
that restart count are over; its text is the exit code, if slurmd passed one. The Epilog's process holds a lock on it
while it lives, so that no other process interferes. The note is deleted once the runs have ended in the journal. It
is in RunDir because no run and no slice survives a boot.

The restart count of slurmd's Epilog may already be that of the next run. So a Prolog processes notes of its own job
before it begins.
"""

# Hooks do not use pathlib: importing it takes longer than a warm start.
# ruff: noqa: PTH208

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from slurm_migbatch.node import effects
from slurm_migbatch.node.paths import read

NAME = "ending"
ALL = 0xFFFF


class Note(NamedTuple):
    """Runs of `job` up to `restart` are over."""

    job: int
    restart: int

    @property
    def path(self) -> str:
        """Below RunDir."""
        return f"{NAME}/{self.job}.{self.restart}"


def ensure(run: int) -> None:
    """Create the directory in RunDir (an open descriptor) for notes; if RunDir is full there are none."""
    with suppress(OSError):
        os.mkdir(NAME, 0o700, dir_fd=run)


def make(run: int, job: int, restart: int | None) -> None:
    """Write the note. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    os.close(os.open(Note(job, ALL if restart is None else restart).path, flags, 0o600, dir_fd=run))


def listed(run: int, job: int | None = None) -> Iterator[Note]:
    """List every note, or those of one job."""
    try:
        handle = os.open(NAME, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=run)
    except FileNotFoundError:
        return
    try:
        names = os.listdir(handle)
    finally:
        os.close(handle)
    for name in names:
        head, _, tail = name.partition(".")
        if head.isdigit() and tail.isdigit() and job in (None, int(head)):
            yield Note(int(head), int(tail))


def abandoned(run: int) -> list[Note]:
    """List notes whose Epilog's process has ended."""
    return [note for note in listed(run) if not _held(run, note)]


def _held(run: int, note: Note) -> bool:
    try:
        handle = os.open(note.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=run)
    except FileNotFoundError:
        return True  # deleted meanwhile
    try:
        os.lockf(handle, os.F_TEST, 0)
    except PermissionError:
        return True
    finally:
        os.close(handle)
    return False


def exit_code(run: int, note: Note) -> int | None:
    """Return the exit code that the note holds, if any. Raises FileNotFoundError if the note was removed."""
    status, _, signal = read(note.path, 16, run).partition(b":")
    if not status.isdigit() or not signal.isdigit():
        return None
    return 128 + int(signal) if int(signal) else int(status)


def remove(run: int, note: Note) -> None:
    """Delete the note; do nothing if it does not exist."""
    effects.point("ending unlink")
    with suppress(FileNotFoundError):
        os.unlink(note.path, dir_fd=run)

"""Describe programs and files of a host for checks: their text, and who may run, read and change them."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from slurm_migbatch.install.files import read
from slurm_migbatch.node.conf import insecure
from slurm_migbatch.node.findings import UNKNOWN, Finding
from slurm_migbatch.slurm.users import name_of


@dataclass(frozen=True)
class HostProgram:
    """One file that root runs.

    Attributes:
        text: None if there is no such file, or it cannot be read.
        executable: whether root may run it.
        insecure: why others than root could change it, as a sentence; empty if they cannot.
        closed: whether this user may not read it, so that nothing else is known.
    """

    path: str
    text: str | None = None
    executable: bool = False
    insecure: str = ""
    closed: bool = False


def read_program(path: str) -> HostProgram:
    """Read a program of this host."""
    try:
        text, mode = read(path), Path(path).stat().st_mode
    except PermissionError:
        return HostProgram(path, closed=True)
    except OSError:
        return HostProgram(path)
    return HostProgram(path, text, bool(mode & 0o111) and stat.S_ISREG(mode), insecure(path))


@dataclass(frozen=True)
class Reader:
    """A user who must be able to read files: name, uid and groups."""

    name: str
    uid: int
    groups: frozenset[int]


def reader(user: str | int) -> Reader | None:
    """Return a user of this host by name or uid; None if there is none."""
    try:
        entry = pwd.getpwnam(name_of(user)) if isinstance(user, str) else pwd.getpwuid(user)
    except KeyError:
        return None
    groups = {entry.pw_gid, *(group.gr_gid for group in grp.getgrall() if entry.pw_name in group.gr_mem)}
    return Reader(entry.pw_name, entry.pw_uid, frozenset(groups))


def readable(*checks: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Yield the findings of these checks; one that needs a file that this user may not read does not stop the others.

    A file that several of them need is named once.
    """
    closed: dict[Finding, None] = {}
    for check in checks:
        try:
            yield from check()
        except PermissionError as error:
            closed[unreadable_file(error)] = None
    yield from closed


def unreadable_file(error: PermissionError) -> Finding:
    """Return the finding about a file that this user may not read, so that the checks of it cannot run."""
    return Finding(UNKNOWN, "files", f"{error.filename}: {error.strerror}", "run migbatch doctor as root")


def unreadable(path: str, user: Reader | None) -> str:
    """Return the part of a path that a user cannot read, with its mode; empty if all can be read. Without a user,
    only the permissions of others count.
    """
    return closed_to(path, user, 0o4)


def closed_to(path: str, user: Reader | None, wanted: int) -> str:
    """Return the part of a path that denies a user access, as `unreadable` does.

    `wanted`: the permission on the path itself, 4 to read, 2 to write.
    """
    if user is not None and user.uid == 0:
        return ""
    for part in [*reversed(Path(path).parents), Path(path)]:
        last = part == Path(path)
        try:
            status = part.stat()
        except OSError as error:
            return f"{part}: {error.strerror}"
        needed = 0o1 if not last else wanted | 0o1 if stat.S_ISDIR(status.st_mode) else wanted
        if _bits(status, user) & needed != needed:
            return f"{part} (mode {status.st_mode & 0o7777:04o}, owner {_owner(status.st_uid)})"
    return ""


def _bits(status: os.stat_result, user: Reader | None) -> int:
    if user is not None and status.st_uid == user.uid:
        return status.st_mode >> 6
    if user is not None and status.st_gid in user.groups:
        return status.st_mode >> 3
    return status.st_mode


def _owner(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)

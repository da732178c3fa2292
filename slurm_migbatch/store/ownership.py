"""Acting as the owner of a directory.

If root follows names in a directory that another user can change, that user can redirect it to any other file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def acting_as_owner(directory: Path, group: int | None = None) -> Iterator[None]:
    """Run with the rights of a directory's owner, if this is root and the owner is not; this affects the whole process.
    Created files get `group`, or else the directory's.
    """
    status = directory.stat() if directory.exists() else None
    if status is None or os.geteuid() != 0 or status.st_uid == 0:
        yield
        return
    groups, own = os.getgroups(), os.getegid()
    os.setgroups([])
    os.setegid(status.st_gid if group is None else group)
    os.seteuid(status.st_uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(own)
        os.setgroups(groups)


def changeable(directory: Path) -> str:
    """Return which user could replace files in a directory, beside root and this one, as a sentence; empty if none can.

    Groups are trusted: they are the administrator's choice.
    """
    path = directory.resolve()
    for place in (path, *path.parents):
        try:
            status = place.stat()
        except OSError:
            continue  # the file cannot be created either
        if status.st_uid not in (0, os.geteuid()):
            return f"uid {status.st_uid} owns {place}"
        if status.st_mode & 0o1002 == 0o002:
            return f"every user may write to {place}"
    return ""

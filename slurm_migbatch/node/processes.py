"""Tell whose a process is, from /proc."""

# Hooks do not use pathlib: importing it takes longer than a warm start.
# ruff: noqa: PTH116, PTH123

from __future__ import annotations

import os
import re

_REAL = re.compile(rb"^Uid:\t([0-9]+)", re.MULTILINE)
_LONGEST = 4096


def user_of(pid: int | str) -> int:
    """Return the user of a process; of one that runs as root the user who started it. Raises OSError.

    A setuid program inherits the descriptors of the user who starts it, and runs as long as that user likes.
    """
    uid = os.stat(f"/proc/{pid}").st_uid
    if uid:
        return uid
    with open(f"/proc/{pid}/status", "rb") as file:
        match = _REAL.search(file.read(_LONGEST))
    return 0 if match is None else int(match[1])

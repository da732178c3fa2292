"""Write and read hand-offs from root's Prolog to TaskProlog.

    RunDir/job/<job>.<restart>      readable by the job's user

    version 1
    job 17
    restart 0
    uid 1001
    state ready                (or: void, with a line `reason ...`, and no slices)
    progress /var/lib/migbatch/n1.progress/17.0
    cuda index                 (only if the job requested it, with the next two)
    caps 21 22                 (minors of the capability devices of its slices)
    whole 3                    (minors of the GPUs of this node without MIG; may be none)
    slice MIG-<uuid> 2g.20gb 19968 GPU-<uuid>

`progress` names the file for the job's own reports (`progress.py`), if there is one. One `slice` line for each
slice, in order. `task_prolog.py` reads it with built-in modules only. It is written under a temporary name, synced and
renamed, so that a reader sees all of it or nothing; the rebuilding of a lost journal reads it too. So root owns it,
and an entry of its access list (acl(5)) lets the user read it. If the file system has no such lists, all may.
"""

from __future__ import annotations

import errno
import os
import re
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from slurm_migbatch.node import effects
from slurm_migbatch.node.paths import read, replace

_USER_OBJ, _USER, _GROUP_OBJ, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x10, 0x20
_NOBODY = 0xFFFFFFFF
_NAME = re.compile(r"([0-9]{1,10})\.([0-9]{1,5})")


class HandoffSlice(NamedTuple):
    """One slice of a hand-off."""

    mig_uuid: str
    profile: str
    memory_mib: int
    gpu: str


class Handoff(NamedTuple):
    """One run's hand-off; without slices if the run was refused or is over: its tasks must not run.

    `caps` is None for a job that gets UUIDs; the result of `load` has none.
    """

    job: int
    restart: int
    uid: int
    slices: tuple[HandoffSlice, ...]
    reason: str = ""
    progress: str = ""
    caps: tuple[int, ...] | None = None
    whole: tuple[int, ...] = ()

    def text(self) -> str:
        """Return the file's content."""
        lines = ["version 1", f"job {self.job}", f"restart {self.restart}", f"uid {self.uid}"]
        lines.append("state ready" if self.slices else "state void")
        if self.reason:
            lines.append(f"reason {' '.join(self.reason.split())}")
        if self.progress:
            lines.append(f"progress {self.progress}")
        if self.caps is not None:
            lines.append("cuda index")
            lines += [
                f"{key} {' '.join(map(str, minors))}" for key, minors in (("caps", self.caps), ("whole", self.whole))
            ]
        lines += [f"slice {g.mig_uuid} {g.profile} {g.memory_mib} {g.gpu}" for g in self.slices]
        return "\n".join(lines) + "\n"


def write(directory: int, handoff: Handoff) -> None:
    """Write a hand-off atomically, replacing an older one. Raises OSError."""
    content = handoff.text().encode("utf-8", "backslashreplace")
    name = f"{handoff.job}.{handoff.restart}"
    replace(directory, name, content, "handoff", lambda handle: _open_to(handle, handoff.uid))


def _open_to(handle: int, uid: int) -> None:
    """Let this user read root's file, and nobody else."""
    entries = ((_USER_OBJ, 6, _NOBODY), (_USER, 4, uid), (_GROUP_OBJ, 0, _NOBODY), (_MASK, 4, _NOBODY))
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in (*entries, (_OTHER, 0, _NOBODY)))
    try:
        os.setxattr(handle, "system.posix_acl_access", acl)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        os.fchmod(handle, 0o644)


def remove(directory: int, job: int, restart: int) -> None:
    """Delete a hand-off, and leftovers of an interrupted write; do nothing if there are none."""
    for name in (f".{job}.{restart}", f"{job}.{restart}"):
        effects.point("handoff unlink")
        try:
            os.unlink(name, dir_fd=directory)
        except FileNotFoundError:
            continue


def listed(directory: int) -> Iterator[tuple[int, int]]:
    """Yield job and restart of every hand-off, half-written ones included."""
    for name in os.listdir(directory):
        match = _NAME.fullmatch(name.removeprefix("."))
        if match is not None:
            yield int(match[1]), int(match[2])


def load(directory: int, job: int, restart: int) -> Handoff | None:
    """Read a hand-off; None if it is missing or invalid."""
    try:
        text = read(f"{job}.{restart}", 65536, directory).decode("utf-8", "replace")
    except OSError:
        return None
    lines = [line.split() for line in text.splitlines()]
    fields = {words[0]: words[1] for words in lines if len(words) == 2}
    slices = _slices([words[1:] for words in lines if words and words[0] == "slice"])
    if fields.get("version") != "1" or not fields.get("uid", "").isdigit() or slices is None:
        return None
    progress = next((line[9:] for line in text.splitlines() if line.startswith("progress ")), "")
    return Handoff(job, restart, int(fields["uid"]), slices, progress=progress)


def _slices(rows: Sequence[Sequence[str]]) -> tuple[HandoffSlice, ...] | None:
    if any(len(row) != 4 or not row[2].isdigit() for row in rows):
        return None
    return tuple([HandoffSlice(row[0], row[1], int(row[2]), row[3]) for row in rows])

"""Choose the slices that a step requested among those of its job, other than those of the job's running steps.

Slurm counts the slices of a job's steps, but does not tell a task which its step requested. So the first task of a step
on a node asks slurmctld, if the job has several slices there. `srun --exact -n1 --gres=mig:1 a & srun --exact -n1
--gres=mig:1 b & wait` in a job with two slices runs each program on its own.

    /tmp/migbatch-steps-<uid>/steps      the user's, in a private directory of the user's

    <job>.<restart> <step> <pid> <start> <MIG UUID>,<MIG UUID>...       (`*` for all slices of the job)

Each task adds a line, under a lock. The lines of a step count while one of its tasks lives. The file is a user's own,
and tells only which of the user's slices a program should use: what it may open is decided by root. Without the file
(a full disk, another user's directory) a step gets the first slices that it requested. Imports only built-in modules,
because TaskProlog runs once for each task.
"""

from __future__ import annotations

import posix
import time
from collections.abc import Callable

DIRECTORY = "/tmp/migbatch-steps-"  # noqa: S108  (private: `task_prolog.is_private`)
FILE = "steps"
MAX_BYTES = 1 << 20
LOCK_S = 5.0
"""Maximum time to wait for the other tasks of the user. The first of a step holds the lock during its query."""

ALL = "*"
MAX_COUNT = 1024
PER_NODE, PER_TASK = "TresPerNode=", "TresPerTask="
GRES = "mig"
Request = list[tuple[str, int]]
"""GRES types, each with the number of slices; an empty type is any."""


def requested(shown: str, tasks: int) -> Request:
    """Parse the slices that a step requested on a node with this many of its tasks; those of a type come first.

    Empty if it requested none, and so has all slices of its job.

    Args:
        shown: the output of `scontrol show step`; the line with the name that the user gave may contain anything.
    """
    words = [word for line in shown.splitlines() if " Name=" not in line for word in line.split()]
    request: Request = []
    for key, factor in ((PER_NODE, 1), (PER_TASK, tasks)):
        for entry in ",".join([word.removeprefix(key) for word in words if word.startswith(key)]).split(","):
            name, _, count = entry.removeprefix("gres:").removeprefix("gres/").partition(":")
            if name != GRES:
                continue
            gres_type, _, number = count.rpartition(":")
            if not (number.isascii() and number.isdigit()):
                gres_type, number = count, "1"
            request.append((gres_type, min(int(number[:9]), MAX_COUNT) * factor))
    return sorted([part for part in request if part[1]], key=lambda part: not part[0])


def choose(slices: list[list[str]], request: Request, uses: dict[str, int]) -> list[list[str]]:
    """Return the slices of a request (`[MIG UUID, profile, ...]` each) in their order, those with the fewest uses.

    All of them for an empty request. Slurm has checked that the job has slices of the types. If the node has too few,
    others take their place.
    """
    if not request:
        return slices
    chosen: set[int] = set()
    for gres_type, number in request:
        free = [i for i in range(len(slices)) if i not in chosen]
        free.sort(key=lambda i: (gres_type not in ("", slices[i][1].replace("+", ".")), uses.get(slices[i][0], 0), i))
        chosen.update(free[:number])
    return [slices[i] for i in sorted(chosen)]


def of_step(
    directory: str, run: str, step: str, pid: str, slices: list[list[str]], ask: Callable[[], Request]
) -> list[list[str]]:
    """Return the slices of a step, and record them for its other tasks and for the job's other steps.

    Args:
        directory: a private directory of the user's; empty if there is none.
        run: job and restart, the name of the hand-off.
        step: the id of the step.
        pid: the process that becomes the task.
        slices: those of the job on this node.
        ask: tells what the step requested (`requested`), by a query to slurmctld.
    """
    handle = _locked(f"{directory}/{FILE}") if directory else -1
    if handle < 0:
        return choose(slices, ask(), {})
    try:
        rows = alive(_read(handle), _start_of)
        own = next((row[4] for row in rows if row[:2] == [run, step]), "")
        if not own:
            used = {(row[1], uuid) for row in rows if row[0] == run for uuid in row[4].split(",")}
            uses: dict[str, int] = {}
            for _, uuid in used:
                uses[uuid] = uses.get(uuid, 0) + 1
            chosen = choose(slices, ask(), uses)
            own = ALL if chosen == slices else ",".join([row[0] for row in chosen])
        _write(handle, [*rows, [run, step, pid, _start_of(pid), own]])
    finally:
        posix.close(handle)
    return [row for row in slices if row[0] in own.split(",")] or slices


def alive(text: str, start_of: Callable[[str], str]) -> list[list[str]]:
    """Return the rows of the steps of which a task lives: `[run, step, pid, start, UUIDs]` each."""
    steps: dict[tuple[str, str], list[list[str]]] = {}
    for line in text.splitlines():
        row = line.split(" ")
        if len(row) == 5 and row[2].isdigit() and row[3]:
            steps.setdefault((row[0], row[1]), []).append(row)
    living = [rows for rows in steps.values() if any(start_of(row[2]) == row[3] for row in reversed(rows))]
    return [row for rows in living for row in rows]


def _start_of(pid: str) -> str:
    """Return the start time of a process, in clock ticks since boot; empty if there is none."""
    try:
        handle = posix.open(f"/proc/{pid}/stat", posix.O_RDONLY | posix.O_CLOEXEC)
        try:
            text = posix.read(handle, 4096)
        finally:
            posix.close(handle)
    except OSError:
        return ""
    fields = text.rpartition(b")")[2].split()  # the name before may contain anything
    return fields[19].decode("ascii") if len(fields) > 19 and fields[0] not in (b"Z", b"X") else ""


def _locked(path: str) -> int:
    """Open and lock the file; -1 if that cannot be done, or takes too long."""
    flags = posix.O_RDWR | posix.O_CREAT | posix.O_NOFOLLOW | posix.O_NONBLOCK | posix.O_CLOEXEC
    try:
        handle = posix.open(path, flags, 0o600)
    except OSError:
        return -1
    end, pause = time.monotonic() + LOCK_S, 0.001
    while True:
        try:
            posix.lockf(handle, posix.F_TLOCK, 0)
        except (BlockingIOError, PermissionError):
            if time.monotonic() < end:
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
                continue
        except OSError:
            pass
        else:
            return handle
        posix.close(handle)
        return -1


def _read(handle: int) -> str:
    return posix.read(handle, MAX_BYTES).decode("ascii", "replace")


def _write(handle: int, rows: list[list[str]]) -> None:
    """Replace the content; a full disk loses it, which costs later steps their own slices and no task."""
    text = "".join(" ".join(row) + "\n" for row in rows).encode("ascii", "replace")
    try:
        posix.ftruncate(handle, 0)
        posix.pwrite(handle, text[:MAX_BYTES], 0)
    except OSError:
        return

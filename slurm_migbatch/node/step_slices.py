"""Choose the slices that a step requested among those of its job, other than those of the job's running steps.

Slurm counts the slices of a job's steps, but does not tell a task which its step requested. So the first task of a step
on a node asks slurmctld, if the job has several slices there. `srun --exact -n1 --gres=mig:1 a & srun --exact -n1
--gres=mig:1 b & wait` in a job with two slices runs each program on its own.

    ProgressDir/<job>.<restart>.steps      the user's, in a directory of root's (`progress.make_steps`)

    <step> <pid> <time> <slice>,<slice>...       (their numbers; `*` for all slices of the job)

Each task appends a line, under a lock: the file is append-only. The lines of a step count while one of its tasks lives,
those before an empty line no more; the agent removes these (`progress.shorten_steps`). The file tells only which of the
user's slices a program should use: what it may open is decided by root. It is not in /tmp, where another user could
take its name, or all space. Without it a step gets the first slices that it requested. Imports only built-in modules,
because TaskProlog runs once for each task.
"""

from __future__ import annotations

import posix
import time
from collections.abc import Callable

SUFFIX = ".steps"
MAX_BYTES = 256 << 10
"""Size of the file, which root has reserved for it."""

MOST_ENDED = 64
"""Lines of ended steps after which a task begins anew with those of the others."""

LOCK_S = 5.0
"""Maximum time to wait for the other tasks of the job, beside the time that the query of a step may take."""

TABLE = 0
"""Byte of the file that is locked while lines are read and written; that of each step, behind it, during its query."""

ALL = "*"
MAX_COUNT = 1024
PER_NODE, PER_TASK = "TresPerNode=", "TresPerTask="
GRES = "mig"
Request = list[tuple[str, int]]
"""GRES types, each with the number of slices; an empty type is any."""


def requested(shown: str, step: int, tasks: int) -> Request:
    """Parse the slices that a step requested on a node with this many of its tasks; those of a type come first.

    Empty if it requested none, and so has all slices of its job.

    Args:
        shown: the output of `scontrol show step`; the line with the name that the user gave may contain anything. With
            SlurmctldParameters=enable_stepmgr releases before 26.05 show all steps of the job.
        step: the id of the step.
    """
    words: list[str] = []
    own = True
    for line in shown.splitlines():
        if line.startswith("StepId="):
            own = line.split()[0].endswith(f".{step}")
        if own and " Name=" not in line:
            words += line.split()
    request: Request = []
    for key, factor in ((PER_NODE, 1), (PER_TASK, tasks)):
        for entry in ",".join([word.removeprefix(key) for word in words if word.startswith(key)]).split(","):
            name, _, count = entry.removeprefix("gres:").removeprefix("gres/").replace("=", ":").partition(":")
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
    path: str, step: int, pid: str, slices: list[list[str]], ask: Callable[[], Request], ask_s: float = 0.0
) -> list[list[str]]:
    """Return the slices of a step, and record them for its other tasks and for the job's other steps.

    Args:
        path: the file; empty if there is none.
        step: the id of the step.
        pid: the process that becomes the task.
        slices: those of the job on this node.
        ask: tells what the step requested (`requested`), by a query to slurmctld, of steps that start together at once.
        ask_s: the time that it takes at most.
    """
    handle = _open(path) if path else -1
    if handle < 0:
        return choose(slices, ask(), {})
    try:
        if not lock(handle, TABLE + 1 + step, ask_s + LOCK_S) or not lock(handle, TABLE, LOCK_S):
            return choose(slices, ask(), {})
        ended, rows = alive(_read(handle))
        own = next((row[3] for row in rows if row[0] == str(step)), "")
        if not own:
            _unlock(handle, TABLE)
            request = ask()
            if not lock(handle, TABLE, LOCK_S):
                return choose(slices, request, {})
            ended, rows = alive(_read(handle))
            used = {(row[0], number) for row in rows for number in row[3].split(",")}
            numbers = [number for _, number in used]
            chosen = choose(slices, request, {row[0]: numbers.count(str(i)) for i, row in enumerate(slices)})
            own = ALL if chosen == slices else ",".join([str(slices.index(row)) for row in chosen])
        new = [str(step), pid, str(_ticks()), own]
        _append(handle, [[], *rows, new] if ended > MOST_ENDED else [new])
    finally:
        posix.close(handle)
    return [row for i, row in enumerate(slices) if str(i) in own.split(",")] or slices


def counting(content: bytes) -> bytes:
    """Return the whole lines that may still count; none if they are so many that no steps have written them."""
    lines = content.rpartition(b"\n\n")[2]
    return lines[: lines.rfind(b"\n") + 1] if len(lines) <= MAX_BYTES // 4 else b""


def alive(text: str) -> tuple[int, list[list[str]]]:
    """Return the number of rows of ended steps, and those of steps of which a task lives: `[step, pid, time, slices]`
    each.
    """
    rows = [line.split(" ") for line in text.rpartition("\n\n")[2].splitlines()]
    rows = [row for row in rows if len(row) == 4 and row[1].isdecimal() and row[2].isdecimal()]
    steps: dict[str, list[list[str]]] = {}
    for row in rows:
        steps.setdefault(row[0], []).append(row)
    living = [ones for ones in steps.values() if any(_lives(row[1], int(row[2])) for row in reversed(ones))]
    return len(rows) - sum(map(len, living)), [row for ones in living for row in ones]


def _lives(pid: str, by: int) -> bool:
    """Return whether the process with this number lives, and had started by then (`_ticks`).

    /proc says when; with its option hidepid= not of a task that has yet to start its program.
    """
    own = True
    try:
        posix.kill(int(pid), 0)
    except PermissionError:
        own = False
    except (OSError, OverflowError):
        return False
    try:
        handle = posix.open(f"/proc/{pid}/stat", posix.O_RDONLY | posix.O_CLOEXEC)
        try:
            text = posix.read(handle, 4096)
        finally:
            posix.close(handle)
    except OSError:
        return own
    fields = text.rpartition(b")")[2].split()  # the name before may contain anything
    return fields[0] not in (b"Z", b"X") and int(fields[19]) <= by


def _ticks() -> int:
    """Return the time since boot in the units of /proc."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * posix.sysconf("SC_CLK_TCK"))


def _open(path: str) -> int:
    """Open the file; -1 if that cannot be done."""
    try:
        return posix.open(path, posix.O_RDWR | posix.O_APPEND | posix.O_NOFOLLOW | posix.O_NONBLOCK | posix.O_CLOEXEC)
    except OSError:
        return -1


def lock(handle: int, byte: int, limit: float) -> bool:
    """Lock one byte of the file; return False if that cannot be done, or takes longer than the limit, in seconds."""
    end, pause = time.monotonic() + limit, 0.001
    while True:
        try:
            posix.lseek(handle, byte, 0)
            posix.lockf(handle, posix.F_TLOCK, 1)
        except (BlockingIOError, PermissionError):
            if time.monotonic() >= end:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        except OSError:
            return False
        else:
            return True


def _unlock(handle: int, byte: int) -> None:
    posix.lseek(handle, byte, 0)
    posix.lockf(handle, posix.F_ULOCK, 1)


def _read(handle: int) -> str:
    return posix.pread(handle, MAX_BYTES, 0).decode("ascii", "replace")


def _append(handle: int, rows: list[list[str]]) -> None:
    """Add lines, while there is space: later steps do not know of this one if there is none."""
    text = "".join([" ".join(row) + "\n" for row in rows]).encode("ascii", "replace")
    try:
        posix.write(handle, text)
    except OSError:
        return

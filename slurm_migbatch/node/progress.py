"""Handle progress files: one for each run, created by root, written by the job's user, read by root.

    ProgressDir/<job>.<restart>      the user's, mode 0600, in a directory of root's (0711)
    ProgressDir/<job>.<restart>.steps      the same, in jobs with several slices; root does not parse it (`step_slices`)

    items=1200 seconds=4.5
    items=2400 seconds=9.1 batch=32 latency_ms=26 p99_ms=31 task=0 at=1790000000.5 done=1
    steps=1200 checkpoint=1790000000.4 ckpt_s=2.5 restored=800

Each line is a whole report; the last one of a task counts. TaskProlog names the file as MIGBATCH_PROGRESS, and
`migbatch progress` or any program appends to it. `items` counts from the job's start. `seconds` is the time that they
took; without it the time between a task's first and last report counts, or else the time since the job's start. Tasks
that each report their own items identify themselves by `task`; a report without one is for the whole job.

A training job that can be interrupted reports its saved state: `steps` of its optimizer over the job's whole life, the
time of its newest `checkpoint` (unix seconds; of this run, so not before its start), the time to write it (`ckpt_s`),
and the step that this run was `restored` at. These may come from the job or from its tasks, independently of
items: the batch script may report checkpoints while tasks count.

A job that fails because its slice has too little memory may report it with `oom=1`: the driver often did not see it
full.

Root never opens anything that a user could have put in the file's place:

- The directory is root's, so its names are: there can be no symbolic link, FIFO, device or other user's file.
  It is a separate file system, so the file cannot be linked into another directory either.
- fusermount lets users mount over a file of theirs. So the file is looked up without opening it (O_PATH), its mount
  compared with the directory's, and only then checked (regular, the right owner, one name) and opened through the
  same descriptor.
- Opening does not wait (O_NONBLOCK), not even for a lease (fcntl F_SETLEASE) that the user holds on the file.
- Of a file of any length at most HEAD + TAIL bytes are read, and lines are parsed by an allow-list, numbers only.

A user can only use up the file's own space: RESERVED_BYTES bytes, allocated when it is created, in a
separate tmpfs (`tmpfs.py`), of which the files of one user get half at most. The agent empties files that are half
full, except for what the running steps still need. If that file system cannot be mounted (in a container without the
privilege) there is no file. Users can report false values about their own runs, so these figures are marked as the
job's own wherever they are shown.
"""

from __future__ import annotations

import errno
import math
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from slurm_migbatch.node import effects, step_slices, tmpfs

HEAD = 4096
TAIL = 16384
RESERVED_BYTES = 256 << 10
"""Size limit of a file in bytes."""

MAX_BYTES = RESERVED_BYTES // 2
"""Size from which it is emptied."""

MAX_LINE = 400
MAX_TASKS = 1024
MIN_SPAN_S = 1.0
"""Minimum time between two reports for a speed."""

MAX_SUM = 2**53 - 1
"""Most items of all tasks; no job does as many, and the controller takes no larger number."""

CLOCKS_S = 60.0
"""Largest difference between the job's clock and the node's."""

_NAME = re.compile(r"([0-9]{1,10})\.([0-9]{1,5})(?:\.steps)?")
_NUMBER = re.compile(rb"[0-9]{1,15}(?:\.[0-9]{1,22})?(?:[eE][+-]?[0-9]{1,2})?")
_LIMITS: dict[str, tuple[float, float]] = {
    "items": (0, 1e15),
    "seconds": (1e-6, 1e9),
    "batch": (1, 1e7),
    "latency_ms": (1e-6, 1e9),
    "p99_ms": (1e-6, 1e9),
    "task": (0, 1e7),
    "at": (0, 1e11),
    "done": (0, 1),
    "steps": (0, 1e15),
    "checkpoint": (0, 1e11),
    "ckpt_s": (0, 1e6),
    "restored": (0, 1e15),
    "oom": (0, 1),
}
"""Every key of a line with its smallest and largest accepted value."""

WHOLE = ("items", "batch", "task", "done", "steps", "restored", "oom")
SPEED = ("items", "latency_ms", "p99_ms", "done")
"""Keys of a speed report; one is sufficient."""

SAFETY = ("steps", "checkpoint", "restored")
"""Keys of a checkpoint report; one is sufficient."""


class ProgressError(RuntimeError):
    """A progress file cannot be read now or is not the one root created; the message says why."""


class Content(NamedTuple):
    """The beginning and end of a file (`tail` is all of it if it is short), its length and last change (unix s)."""

    head: bytes
    tail: bytes
    size: int
    changed: float


class ProgressLine(NamedTuple):
    """One report. `task` is None if it is for the whole job."""

    items: int | None = None
    seconds: float | None = None
    batch: int | None = None
    latency_ms: float | None = None
    p99_ms: float | None = None
    task: int | None = None
    at: float | None = None
    done: int = 0
    steps: int | None = None
    checkpoint: float | None = None
    ckpt_s: float | None = None
    restored: int | None = None
    oom: int = 0

    def has_any(self, keys: Iterable[str]) -> bool:
        """Return whether the line has one of these keys."""
        return any(getattr(self, key) is not None for key in keys if key != "done") or (
            "done" in keys and self.done > 0
        )


class ProgressReport(NamedTuple):
    """Sum of all reports of a run on this node; the fields of a `progress` event.

    `items` and `throughput_per_s` are sums over tasks, `latency_ms` (of one batch) their mean, `latency_p99_ms` the
    worst. `tasks` is the number of tasks with separate reports; with `whole` one report was for the whole job.
    `refused` is the number of invalid lines.

    `steps`, `checkpoint` (unix s) and `restored` are the minimum over tasks, because a checkpoint is complete when all
    have theirs; `ckpt_s` is the longest. If absent, the previous values remain valid: a file is read at its ends only.
    `oom`: memory ran out.
    """

    items: int | None
    throughput_per_s: float | None
    latency_ms: float | None
    latency_p99_ms: float | None
    batch: int | None
    tasks: int
    whole: bool
    done: bool
    refused: int
    steps: int | None = None
    checkpoint: float | None = None
    ckpt_s: float | None = None
    restored: int | None = None
    oom: bool | None = None


# -- the file ----------------------------------------------------------------------------------------------------


def make(directory: int, job: int, restart: int, uid: int) -> None:
    """Create an empty file for a run that begins, replacing those of an interrupted start. Raises OSError."""
    if not tmpfs.is_mounted(directory):
        raise OSError(errno.EOPNOTSUPP, "no separate file system for progress files")
    remove(directory, job, restart)
    _create(directory, f"{job}.{restart}", uid, RESERVED_BYTES)


def make_steps(directory: int, job: int, restart: int, uid: int) -> None:
    """Create the file in which the steps of a run with several slices share them, after `make`. Raises OSError."""
    _create(directory, f"{job}.{restart}{step_slices.SUFFIX}", uid, step_slices.MAX_BYTES)


def _create(directory: int, name: str, uid: int, size: int) -> None:
    """Create an empty file with its own space for a user. Raises OSError."""
    _check_share(directory, uid)
    effects.point("progress make")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(name, flags, 0o600, dir_fd=directory)
    try:
        os.fchmod(handle, 0o600)
        tmpfs.reserve(directory, handle, size)
        os.fchown(handle, uid, -1)
        with suppress(OSError):  # not supported by every kernel; it only keeps the user from shortening the file
            tmpfs.set_append_only(handle, True)
    except OSError:
        os.close(handle)
        _remove(directory, name)
        raise
    os.close(handle)


def remove(directory: int, job: int, restart: int) -> None:
    """Delete a run's files and free their space; do nothing if there are none."""
    for name in (f"{job}.{restart}", f"{job}.{restart}{step_slices.SUFFIX}"):
        _remove(directory, name)


def _remove(directory: int, name: str) -> None:
    """Delete a file and free its space.

    A mount that the user has placed over it is detached. While the user holds a lease on it, it stays, and the next
    cleanup tries again. A process that still has it open keeps an empty file that cannot grow.
    """
    try:
        tmpfs.uncover(directory, name)
    except FileNotFoundError:
        return
    except OSError:
        pass
    try:
        with suppress(ProgressError), _opened(directory, name, None, os.O_RDWR | os.O_APPEND) as handle:
            _empty(handle, for_good=True)
    except BlockingIOError:
        return  # without its name nobody could empty it later
    except OSError:
        pass
    effects.point("progress unlink")
    with suppress(OSError):
        os.unlink(name, dir_fd=directory)
        tmpfs.fit(directory)


def _check_share(directory: int, uid: int) -> None:
    """Raise OSError if this user has half of the space already: by leases (`remove`) files can outlive their jobs."""
    most = tmpfs.MAX_BYTES // 2 // RESERVED_BYTES
    names = os.listdir(directory)
    if len(names) >= most and sum(_owner(directory, name) == uid for name in names) >= most:
        raise OSError(errno.EDQUOT, f"uid {uid} has {most} progress files on this node")


def _owner(directory: int, name: str) -> int | None:
    """Return the owner of a file, without a mount that its user has placed over it; None if it is gone."""
    try:
        tmpfs.uncover(directory, name)
        handle = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    except OSError:
        return None
    try:
        # the file system of another mount may never answer
        return os.fstat(handle).st_uid if tmpfs.mount_id(handle) == tmpfs.mount_id(directory) else None
    finally:
        os.close(handle)


def listed(directory: int) -> Iterator[tuple[int, int]]:
    """Yield job and restart of every file; twice for a run with two."""
    for name in os.listdir(directory):
        match = _NAME.fullmatch(name)
        if match is not None:
            yield int(match[1]), int(match[2])


def read(directory: int, job: int, restart: int, uid: int) -> Content | None:
    """Read what the run's user wrote; None if there is no file. Raises ProgressError."""
    name = f"{job}.{restart}"
    try:
        with _opened(directory, name, uid, os.O_RDONLY) as handle:
            status = os.fstat(handle)
            tail = os.pread(handle, TAIL, max(0, status.st_size - TAIL))
            head = os.pread(handle, HEAD, 0) if status.st_size > TAIL else b""
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ProgressError(f"progress file {name}: {error.strerror}") from error
    return Content(head, tail, status.st_size, status.st_mtime)


def shorten(directory: int, job: int, restart: int, uid: int) -> None:
    """Empty a file that has grown too long, so that all of its space is free again. Raises ProgressError."""
    name = f"{job}.{restart}"
    try:
        with _opened(directory, name, uid, os.O_RDWR | os.O_APPEND) as handle:
            _refill(directory, handle, RESERVED_BYTES)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ProgressError(f"progress file {name}: {error.strerror}") from error


def shorten_steps(directory: int, job: int, restart: int, uid: int) -> None:
    """Remove the lines of steps that count no more once they are half of their file. Raises ProgressError.

    Nothing is done while the user holds the lock of the file.
    """
    name = f"{job}.{restart}{step_slices.SUFFIX}"
    try:
        with _opened(directory, name, uid, os.O_RDWR | os.O_APPEND) as handle:
            if os.fstat(handle).st_size <= step_slices.MAX_BYTES // 2:
                return
            if not step_slices.lock(handle, step_slices.TABLE, 0.0):
                return
            kept = step_slices.counting(os.pread(handle, step_slices.MAX_BYTES, 0))
            _refill(directory, handle, step_slices.MAX_BYTES, kept)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ProgressError(f"progress file {name}: {error.strerror}") from error


def _refill(directory: int, handle: int, size: int, content: bytes = b"") -> None:
    """Replace the content of an open file, and reserve `size` bytes for it. Raises OSError."""
    _empty(handle)
    tmpfs.reserve(directory, handle, size)
    os.write(handle, content)
    with suppress(OSError):
        tmpfs.set_append_only(handle, True)


def _empty(handle: int, *, for_good: bool = False) -> None:
    """Truncate an open file to zero bytes; it is no longer append-only afterwards. Raises OSError.

    While it is not, its owner may add extended attributes (from Linux 6.6 on), also through a descriptor that he keeps.
    They take space from all files, so they are removed, and root becomes the owner `for_good`.
    """
    effects.point("progress empty")
    with suppress(OSError):
        tmpfs.set_append_only(handle, False)
    if for_good:
        os.fchown(handle, 0, 0)
        os.fchmod(handle, 0o600)
    os.ftruncate(handle, 0)
    for name in os.listxattr(handle):
        if name.startswith("user."):
            os.removexattr(handle, name)


@contextmanager
def _opened(directory: int, name: str, uid: int | None, flags: int) -> Iterator[int]:
    """Open a file only if root created it, and for `uid` (None: any user). Raises ProgressError, OSError."""
    path = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    try:
        if tmpfs.mount_id(path) != tmpfs.mount_id(directory):
            raise ProgressError(f"progress file {name}: a file system is mounted over it")
        status = os.fstat(path)
        foreign = uid is not None and (status.st_uid != uid or status.st_nlink != 1)
        if foreign or not stat.S_ISREG(status.st_mode):
            raise ProgressError(f"progress file {name} is not the one created for the run")
        handle = os.open(f"/proc/self/fd/{path}", flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    finally:
        os.close(path)
    try:
        yield handle
    finally:
        os.close(handle)


# -- reports -------------------------------------------------------------------------------------------------------


def understand(content: Content, started: float, *, ended: bool = False) -> ProgressReport | None:
    """Summarize a file's reports; return None if it holds none.

    Args:
        started: when the run got its slices, unix seconds.
        ended: whether all writers have ended, so that a last line without its newline is complete.
    """
    first, _ = _lines(content.head, cut=False, ended=False)
    last, refused = _lines(content.tail, cut=content.size > len(content.tail), ended=ended)
    if not last:
        return None if not refused else ProgressReport(None, None, None, None, None, 0, False, False, refused)
    first, last = ([_timed(line, started, content.changed) for line in lines] for lines in (first, last))
    _, checkpoint_lines = _by_task([], last, SAFETY)
    return _speed(first, last, started, content.changed)._replace(
        refused=refused,
        steps=min((line.steps for line in checkpoint_lines.values() if line.steps is not None), default=None),
        checkpoint=min(
            (line.checkpoint for line in checkpoint_lines.values() if line.checkpoint is not None), default=None
        ),
        ckpt_s=max((line.ckpt_s for line in checkpoint_lines.values() if line.ckpt_s is not None), default=None),
        restored=min((line.restored for line in checkpoint_lines.values() if line.restored is not None), default=None),
        oom=any(line.oom for line in last) or None,
    )


def _speed(first: list[ProgressLine], last: list[ProgressLine], started: float, changed: float) -> ProgressReport:
    """Summarize items and speed; `refused` and the checkpoint's fields are left to the caller."""
    begins, ends = _by_task(first, last, SPEED)
    rates = [
        _rate(begins[task], line, started, changed if line.at is None else line.at)
        for task, line in ends.items()
        if line.items is not None
    ]
    items = [line.items for line in ends.values() if line.items is not None]
    batches = {line.batch for line in ends.values() if line.batch is not None}
    return ProgressReport(
        items=min(sum(items), MAX_SUM) if items else None,
        throughput_per_s=None if not rates or None in rates else math.fsum(rate for rate in rates if rate is not None),
        latency_ms=_mean(line.latency_ms for line in ends.values()),
        latency_p99_ms=max((line.p99_ms for line in ends.values() if line.p99_ms is not None), default=None),
        batch=batches.pop() if len(batches) == 1 else None,
        tasks=len(ends),
        whole=None in ends,
        done=bool(ends) and all(line.done for line in ends.values()),
        refused=0,
    )


def _by_task(
    first: Iterable[ProgressLine], last: Sequence[ProgressLine], keys: Sequence[str]
) -> tuple[dict[int | None, ProgressLine], dict[int | None, ProgressLine]]:
    """Return each task's first and latest reports of `keys`; only the job's own (None) if it reported last."""
    matching = [line for line in last if line.has_any(keys)]
    begins: dict[int | None, ProgressLine] = {}
    ends: dict[int | None, ProgressLine] = {}
    if not matching:
        return begins, ends
    per_task = matching[-1].task is not None
    for line in (*first, *matching):
        if (line.task is not None) == per_task and line.has_any(keys):
            begins.setdefault(line.task, line)
    for line in matching:
        if (line.task is not None) == per_task and (line.task in ends or len(ends) < MAX_TASKS):
            ends[line.task] = _merged(ends.get(line.task), line)
    return begins, ends


def _timed(line: ProgressLine, started: float, changed: float) -> ProgressLine:
    """Return the line without times outside the run; the file's time then is the time of the report."""
    return line._replace(at=_of_run(line.at, started, changed), checkpoint=_of_run(line.checkpoint, started, changed))


def _of_run(moment: float | None, started: float, changed: float) -> float | None:
    # if the clock was set back, the file's last change appears to be before the start
    within = moment is not None and min(started, changed) - CLOCKS_S <= moment <= changed + CLOCKS_S
    return moment if within else None


def _merged(before: ProgressLine | None, line: ProgressLine) -> ProgressLine:
    """Merge a task's reports: fields missing in the later one (for example a latency) keep their values."""
    if before is None:
        return line
    kept = {
        name: value
        for name, value in before._asdict().items()
        if getattr(line, name) is None and name not in ("seconds", "at")
    }
    if line.items is None:  # the times belong to the report with the item count
        kept |= {"seconds": before.seconds, "at": before.at}
    return line._replace(**kept)


def _rate(first: ProgressLine, last: ProgressLine, started: float, moment: float) -> float | None:
    """Compute items per second of one task."""
    if last.items is None:
        return None
    if last.seconds is not None:
        return last.items / last.seconds
    if first.at is not None and first.items is not None and moment - first.at >= MIN_SPAN_S:
        return max(0, last.items - first.items) / (moment - first.at)
    return last.items / (moment - started) if moment - started >= MIN_SPAN_S else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def _lines(text: bytes, *, cut: bool, ended: bool) -> tuple[list[ProgressLine], int]:
    """Parse the reports in a part of a file; count invalid lines. `cut`: it begins in the middle of a line."""
    rows = text.split(b"\n")
    if cut:
        rows = rows[1:]
    if rows and not (ended and rows[-1]):
        rows = rows[:-1]
    parsed = [parse(row) for row in rows if row.strip()]
    valid = [line for line in parsed if line is not None]
    return valid, len(parsed) - len(valid)


def parse(row: bytes) -> ProgressLine | None:
    """Parse one line; None unless it is known keys with plausible numbers, each once."""
    if len(row) > MAX_LINE:
        return None
    values: dict[str, float | int] = {}
    for token in row.split():
        name, equals, text = token.partition(b"=")
        key = name.decode("ascii", "replace")
        if not equals or key not in _LIMITS or key in values or not _NUMBER.fullmatch(text):
            return None
        number = float(text)
        low, high = _LIMITS[key]
        if not low <= number <= high or (key in WHOLE and not number.is_integer()):
            return None
        values[key] = int(number) if key in WHOLE else number
    if not {*SPEED, *SAFETY, "oom"} & set(values):
        return None
    return ProgressLine(**values)  # type: ignore[arg-type]  # the keys are its fields, whole numbers where they must be

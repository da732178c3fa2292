"""Parse progress reports, and sum up those of a run on one node.

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

Users can report false values about their own runs, so these figures are marked as the job's own wherever they are
shown.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from slurm_migbatch.node.progress import Content

MAX_LINE = 400
MAX_TASKS = 1024
MIN_SPAN_S = 1.0
"""Minimum time between two reports for a speed."""
MAX_SUM = 2**53 - 1
"""Most items of all tasks; no job does as many, and the controller takes no larger number."""
CLOCKS_S = 60.0
"""Largest difference between the job's clock and the node's."""
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

"""Selection of runs for a report: sacct's filters and its rules for a default time window."""

from __future__ import annotations

from datetime import datetime

from slurm_migbatch.report.errors import ReportError
from slurm_migbatch.slurm.taskexpr import count_tasks, expand_tasks
from slurm_migbatch.slurm.times import TimeFormError, parse_duration, parse_time, time_formatter
from slurm_migbatch.store.runquery import JobId, RunFilter
from slurm_migbatch.values import TYPE_CHECKING, Pattern, Value

if TYPE_CHECKING:
    from collections.abc import Sequence

#: commas inside brackets do not separate
_COMMA = Pattern(r",(?![^\[]*\])")
_JOB = Pattern(
    r"(\d{1,18})(?:_(\d{1,9})|_\[([\d,:-]{1,200}(?:\.\.\.)?(?:%\d{1,9})?)\]|\+(\d{1,6}))?(?:\.[A-Za-z0-9_+-]{1,32})?\Z"
)
#: the end of a long list that squeue cuts, maybe within a number
_CUT = Pattern(r"[,-]?\d*\.\.\.\Z")
#: array tasks that one id may name, and all of them together
_MAX_TASKS, _MAX_ALL = 10000, 50000


class Selection(Value):
    """The filter, and a remark for stderr if the window may be unexpected ("" for none)."""

    wanted: RunFilter
    remark: str = ""


def parse_jobs(text: str) -> tuple[JobId, ...]:
    """Parse `12,34_5,7+1,8.s0,9_[1-3]` into job ids; a slice or step means its job.

    Raises:
        ReportError: one of them is not a job id, or they are too many array tasks.
    """
    jobs: dict[JobId, None] = {}
    task_count = 0
    # the two plain cases need no pattern, which takes longer to compile than finding the runs
    words = _COMMA.made.split(text) if "[" in text else text.split(",")
    for word in filter(None, map(str.strip, words)):
        if word.isdecimal() and word.isascii() and len(word) <= 18:
            jobs[JobId(int(word))] = None
            continue
        match = _JOB.match(word)
        if not match or int(match[1]) > 2**63 - 1:
            raise ReportError(
                f"Bad job/step specified: {word}; write 12, 12_3 (array task), 12+1 (component) or 12.s0 (slice)"
            )
        job = int(match[1])
        if match[3]:
            tasks = _tasks(match[3], word)
            task_count += len(tasks)
            if task_count > _MAX_ALL:
                raise ReportError(f"Bad array task list: more than {_MAX_ALL} tasks in all; name the jobs alone")
            jobs.update((JobId(job, task=task), None) for task in tasks)
            if "%" in match[3] or "." in match[3]:  # as squeue prints the tasks that wait, which share one run
                jobs[JobId(job, task=match[3])] = None
        else:
            jobs[JobId(job, task=match[2], offset=None if match[4] is None else int(match[4]))] = None
    return tuple(jobs)


def _tasks(text: str, word: str) -> Sequence[str]:
    listed = _CUT.made.sub("", text.partition("%")[0])
    try:
        count = count_tasks(listed)
    except ValueError:
        count = 0
    if not 0 < count <= _MAX_TASKS:
        raise ReportError(
            f"Bad job array element specified: {word} does not name up to {_MAX_TASKS} array tasks; write 12_[1-5,9]"
        )
    return list(map(str, expand_tasks(listed)))


def is_number(text: str) -> bool:
    """Return whether a text is a plain number, as of a user, a group or a job."""
    return text.isascii() and text.isdigit()


def limits(least: str, greatest: str) -> tuple[int | None, int | None] | None:
    """Return the time limits given by -k and -K, in seconds: -k alone is that exact limit, -K alone has no effect.

    Raises:
        ReportError: one of them is not a time limit.
    """
    try:
        low = parse_duration(least) if least else None
        high = parse_duration(greatest) if greatest else low
    except TimeFormError:
        forms = "minutes, hours:minutes:seconds, days-hours or UNLIMITED"
        raise ReportError(f"Invalid time limit specification: write {forms} after -k and -K") from None
    if not least:
        return None
    # Slurm keeps whole minutes
    minutes = (None if value is None else int(-(-value // 60)) * 60 for value in (low, high))
    return next(minutes), next(minutes)


def window(now: float, with_jobs: bool, with_states: bool, start: str, end: str) -> tuple[float, float, str]:
    """Return the window as sacct chooses it ("DEFAULT TIME WINDOW" in sacct(1)), and a remark if that is unexpected.

    Raises:
        ReportError: a time has an invalid format, or the window ends before it begins.
    """
    remark = ""
    try:
        since = parse_time(start, now) if start else None
        until = parse_time(end, now) if end else None
    except TimeFormError as error:
        raise ReportError(str(error)) from None
    if since is None:
        midnight = datetime.fromtimestamp(now).replace(hour=0, minute=0, second=0, microsecond=0).timestamp()
        since = 0.0 if with_jobs else now if with_states else midnight
        if with_states and not with_jobs and until is None:
            remark = "-s alone shows the current moment only; add -S and -E (-S today -E now) for the past"
        elif with_states and not with_jobs and until is not None:
            since = min(since, until)
    if until is None:
        until = since if with_states and start else now
        if with_states and start:
            remark = f"-s with -S but no -E shows one moment only; add -E now for everything since {start}"
    if until < since:
        shown = time_formatter(None)
        raise ReportError(
            f"Start time ({shown(since)}) requested is after end time ({shown(until)}); -E must be later than -S"
        )
    return since, until, remark

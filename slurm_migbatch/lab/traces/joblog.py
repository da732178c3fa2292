"""Read public job logs of GPU clusters: CSV files with one line for each job.

The names of the columns determine whose log it is: SenseTime's Helios (`cluster_log.csv`), Shanghai AI Laboratory's
Acme (`trace_seren.csv`, `trace_kalos.csv`), Alibaba's PAI of 2020 in the form of its simulator (`pai_job_*_100K.csv`)
or as published (`pai_task_table.csv` below the line of its `.header`), Alibaba's recommendation models of 2025
(`disaggregated_DLRM_trace.csv`) and spot GPUs of 2026 (`job_info_df.csv`), CINECA's PM100 and M100 (job tables in
Parquet, written as CSV), NREL's Eagle and Kestrel, or Microsoft's Philly as the CSV of two public artifacts.

Note: durations are those on the GPUs of the source, and those of Philly's jobs include one attempt only. Without a
column of durations they are the times from `start_time` to `end_time`; a notice tells if most of them differ from
these. A share of a GPU is a number below 1, or in `gpu_milli` or `gpu_percent` beside the number 1. If a log has no
users, the virtual cluster or organization is used instead, because a scheduler would consider its share. The times
of submission are either all dates, in UTC if they name no zone, or all seconds. Lines with a wrong value are skipped,
with a notice; a log with as many of them as jobs is refused.

With `eligible_time` a job arrives when it became eligible, as with `sacct`. PAI's table of tasks has no submissions:
each task is a job that arrives when it started, with a notice. Time limits are durations such as `1-02:03:04`; numbers
are minutes in CINECA's tables, which are Slurm's, and seconds in NREL's.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from slurm_migbatch.lab.sim.job import Kind, SimulatedJob
from slurm_migbatch.lab.traces.csvlines import CsvLine, Skipped, TraceError, UnusedRows, lines, names_of
from slurm_migbatch.lab.traces.held import HeldGpus, held_in
from slurm_migbatch.lab.traces.openb import slice_of
from slurm_migbatch.lab.traces.trace import Trace
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.profile import Profile, ProfileError
from slurm_migbatch.slurm.gres import GresError
from slurm_migbatch.slurm.times import parse_duration
from slurm_migbatch.values.digest import digest_of
from slurm_migbatch.workload.refusal import show

SUBMITTED: Final = ("submit_time", "timestamp")
ELIGIBLE: Final = "eligible_time"
DURATION: Final = ("duration", "run_time")
START: Final = "start_time"
END: Final = "end_time"
GPUS: Final = ("gpu_num", "num_gpus", "num_gpu", "gpu_request", "num_gpus_alloc")
"""GPUs of a job, or of each of its instances."""
TRES: Final = "tres_alloc_str"
"""What a job had, as Slurm writes it: `cpu=8,gres/gpu=2`."""
PERCENT: Final = "plan_gpu"
"""GPUs of each instance, times 100."""
LIMIT: Final = ("time_limit", "wallclock_req")
_UNIT_UNKNOWN: Final = f"have a number as {LIMIT[0]}, whose unit is not known: it is not read; write 1-02:03:04"
_ALSO: Final = {
    "creation_time": SUBMITTED[0],
    "scheduled_time": START,
    "deletion_time": END,
    "gpus_requested": GPUS[0],
    "gpus_req": GPUS[0],
    "inst_num": "num_inst",
    "instance_sn": "job_name",
    "app_name": "organization",
    "role": "job_type",
}
"""Names of columns in some logs, and those under which they are read."""
SHARES: Final = {"gpu_milli": 1000, "gpu_percent": 100}
"""Columns with the share of one GPU, and what is a whole one."""
_OTHER_SHARE: Final = re.compile(
    r"(?!.*util)(?:(?:.*_)?(?:mps|shards?)(?:_.*)?|.*gpu.*(?:share|fraction|ratio|percent|milli).*)", re.IGNORECASE
)
"""Names of columns that may have shares of a GPU in an unknown unit."""
INSTANCES: Final = ("worker_num", "num_inst")
USER: Final = ("user", "user_id", "vc", "cluster", "organization")
NAME: Final = ("job_id", "job_name")
STATE: Final = ("state", "job_state")
COLUMNS: Final = (SUBMITTED[0], DURATION[0], START, END, GPUS[0], NAME[0], USER[0], STATE[0], ELIGIBLE, LIMIT[0])
"""Names for columns of other names."""
GROUPS: Final = ("job_type", "type", "vc", "cluster", "organization")
"""What may say that a job is inference."""
MOST_GPUS: Final = 10**6
"""More GPUs or instances of one job are a typing error."""
COMPONENTS: Final = "are components of heterogeneous jobs: each is simulated as a job of its own"
"""A remark on jobs, which Slurm starts together."""
LATER: Final = "arrive when they became eligible: they were held, had dependencies or a begin time"
"""A remark on jobs."""
_AT_ONCE_S: Final = 1.0
"""Slurm notes the submission of a job and its eligibility from then on in up to two seconds."""
_UNFINISHED: Final = frozenset({"RUNNING", "PENDING", "SUSPENDED", "COMPLETING", "CONFIGURING"})
"""As in `sacct`: a run that ended in a requeue is REQUEUED."""
_UNKNOWN: Final = frozenset({"", "nan", "nat", "none", "null", "\\n"})
"""Unknown numbers and times as CSV, pandas, Python and databases write them."""
_NO_LIMIT: Final = 0xFFFFFFFE
"""From here, Slurm's number of a time limit is not set or infinite (`NO_VAL`, `INFINITE`)."""
_NO_LIMITS: Final = frozenset({*_UNKNOWN, "infinite", "unlimited", "partition_limit"})
_SECONDS: Final = re.compile(r"[0-9]+(\.[0-9]*)?", re.ASCII)
_CLOCK: Final = re.compile(r"(?:([0-9]{1,6})(?:-| days? ))?([0-9]{1,6}:[0-9]{2}:[0-9]{2}(?:\.[0-9]*)?)", re.ASCII)
"""A duration as Slurm and pandas print it: `1-02:03:04`, `1 days 02:03:04`."""
_COMPARED: Final = 1000
"""Number of jobs whose duration is compared with their start and end."""


class LoggedJob(NamedTuple):
    """One job of a log; jobs submitted at the same moment are in the order of the log."""

    submitted_at: float
    order: int
    name: str
    duration: float
    gpus: int
    user: str
    kind: Kind = "train"
    profile: Profile | None = None
    estimate: float | None = None


class _Columns(NamedTuple):
    """The columns of one file."""

    submitted: str
    eligible: str | None
    #: None: the time from start to end
    duration: str | None
    limit: str | None
    gpus: str
    share: str | None
    instances: str | None
    user: str | None
    name: str | None
    state: str | None
    groups: tuple[str, ...]

    @classmethod
    def of(cls, line: CsvLine) -> _Columns:
        duration, gpus = line.first_of(DURATION), line.first_of((TRES, PERCENT, *GPUS))
        submitted = line.first_of((*SUBMITTED, START))
        assert submitted is not None
        assert gpus is not None
        if duration is None and not line.has(START):
            raise TraceError(line.path, 1, f"lacks the column {START}, or one with durations")
        if unread := [name for name in line.columns if name not in (*SHARES, *GPUS) and _OTHER_SHARE.fullmatch(name)]:
            text = f"has the column {show(unread[0])}, which is not read: write shares of a GPU into {gpus}"
            raise TraceError(line.path, 1, f"{text}, 0.5 for half of one, and leave it out")
        return cls(
            submitted,
            line.first_of((ELIGIBLE,)),
            duration,
            line.first_of(LIMIT),
            gpus,
            line.first_of(tuple(SHARES)),
            line.first_of(INSTANCES),
            line.first_of(USER),
            line.first_of(NAME),
            line.first_of(STATE),
            tuple(column for column in GROUPS if line.has(column)),
        )


def read(
    path: Path,
    geometry: Geometry | None = None,
    infer: Collection[str] = (),
    columns: Mapping[str, str] = MappingProxyType({}),
) -> Trace:
    """Read the jobs that had GPUs and ran; time 0 is the first submission. Raises TraceError.

    Args:
        geometry: a job with a share of a GPU requests its smallest profile with that much compute and memory; None: a
            whole GPU.
        infer: job types, virtual clusters or organizations whose jobs are inference.
        columns: the names under which columns of the file are read.
    """
    names: _Columns | None = None
    in_seconds: bool | None = None
    jobs: list[LoggedJob] = []
    unused, differing = UnusedRows(), list[str]()
    remarks: Counter[str] = Counter()
    seen = set[bytes]()
    for line in _lines(path, unused, columns):
        names = names or _Columns.of(line)
        with unused:
            held = _held(line, names, geometry)
            duration = _elapsed(line) if names.duration is None else _duration(line, names.duration)
            if not held.gpus:
                raise Skipped(f"jobs {held.remark}")
            if not duration or (names.state and line.text(names.state).upper() in _UNFINISHED):
                raise Skipped("jobs that have not run or not ended")
            instances = line.count_of(names.instances, 1, MOST_GPUS) if names.instances else 1
            served = any(line.text(column) in infer for column in names.groups)
            if in_seconds is None:  # jobs that have not run may lack a time
                in_seconds = _SECONDS.fullmatch(line.text(names.submitted)) is not None
            arrived, later = _arrival(line, names, in_seconds)
            limit_s, limit_remark = _limit(line, names)
            job = LoggedJob(
                arrived,
                line.number,
                line.text(names.name) if names.name else f"job-{line.number}",
                duration,
                instances * held.gpus,
                line.text(names.user) if names.user else "",
                "infer" if served else "train",
                held.profile,
                limit_s,
            )
            run = digest_of(repr(job[:1] + job[2:]).encode("utf-8", "surrogatepass"), 16)
            if run in seen:  # without a column of names the number of the line is the name
                raise Skipped("repeated lines")
            seen.add(run)
            if names.duration and len(jobs) < _COMPARED and (other := _other_duration(line, duration)):
                differing.append(other)
            remarks.update(filter(None, (held.remark, limit_remark, LATER if later else "")))
            jobs.append(job)
    trace = trace_of(jobs, unused)
    notices = [*trace.notices, *(f"{count} jobs {remark}" for remark, count in remarks.items())]
    if names and 2 * len(differing) > min(len(jobs), _COMPARED):
        notice = f"{names.duration} is used, which is mostly not the time from {START} to {END}"
        notices.append(f"{notice} ({differing[0]}): it must be in seconds")
    if names and names.submitted == START:
        notices.append(f"jobs arrive at their {START}, as the log has no times of submission")
    return replace(trace, notices=tuple(notices))


def _lines(path: Path, unused: UnusedRows, columns: Mapping[str, str]) -> Iterator[CsvLine]:
    found = names_of(path)
    if absent := sorted(columns.keys() - set(found)):
        text = f"lacks the columns {', '.join(absent)} of workload.columns; found {show(', '.join(found))}"
        raise TraceError(path, 1, text)
    rename = {old: new for old, new in _ALSO.items() if new not in found} | dict(columns)
    submitted = START if PERCENT in found else "|".join(SUBMITTED)
    gpus = next((name for name in (TRES, PERCENT) if name in found), "|".join(GPUS))
    return lines(path, (submitted, "|".join((*DURATION, END)), gpus), unused=unused, rename=rename)


def _arrival(line: CsvLine, columns: _Columns, in_seconds: bool) -> tuple[float, bool]:
    """Return when a job arrived, and whether that was later than its submission."""
    read_time = line.seconds_of if in_seconds else line.moment
    submitted = read_time(columns.submitted)
    known = columns.eligible and line.text(columns.eligible).lower() not in _UNKNOWN
    return arrival(submitted, read_time(columns.eligible) if columns.eligible and known else submitted)


def _limit(line: CsvLine, columns: _Columns) -> tuple[float | None, str]:
    """Return the time limit in seconds, None without any, and a remark if it is not read."""
    text = line.text(columns.limit).lower() if columns.limit else ""
    if columns.limit is None or text in _NO_LIMITS:
        return None, ""
    if ":" in text:
        return _duration(line, columns.limit) or None, ""
    number = line.number_of(columns.limit, 0)
    in_minutes = columns.limit == LIMIT[0]
    if in_minutes and columns.gpus not in (TRES, GPUS[-1]):
        return None, _UNIT_UNKNOWN
    return number * (60 if in_minutes else 1) if 0 < number < _NO_LIMIT else None, ""


def _held(line: CsvLine, columns: _Columns, geometry: Geometry | None) -> HeldGpus:
    """Return what each instance of a job is replayed on."""
    if columns.gpus == TRES:
        try:
            return held_in(line.text(TRES), geometry)
        except (GresError, ProfileError) as error:
            raise line.wrong(f"{TRES} cannot be parsed: {error}") from None
    gpus = _gpus(line, columns)
    if not 0 < gpus < 1:
        return HeldGpus(None, int(gpus), "" if gpus else "without a GPU")
    if geometry is None:
        return HeldGpus(None, 1, "with a share of a GPU are replayed on whole GPUs")
    return HeldGpus(slice_of(geometry, gpus), 1)


def _gpus(line: CsvLine, columns: _Columns) -> float:
    """Return the number of GPUs of a job, or its share of one; 0 if it is unknown."""
    gpus = _known(line, columns.gpus, MOST_GPUS) / (100 if columns.gpus == PERCENT else 1)
    if gpus > 1 and gpus != int(gpus):
        raise line.wrong(f"{columns.gpus} must be a share of one GPU or a whole number, not {gpus:g}")
    if not gpus or columns.share is None or line.text(columns.share).lower() in _UNKNOWN:
        return gpus
    whole = SHARES[columns.share]
    part = line.number_of(columns.share, 0, whole) / whole
    if gpus != 1 and part != 1:
        raise line.wrong(f"{columns.share} must be {whole} for a job with {gpus:g} GPUs, not {part * whole:g}")
    return gpus * part


def _duration(line: CsvLine, column: str) -> float:
    """Return a duration, seconds or `1-02:03:04`; 0 if it is unknown."""
    text = line.text(column)
    if ":" not in text:
        return _known(line, column)
    match = _CLOCK.fullmatch(text)
    if match is None:
        raise line.wrong(f"{column} must be seconds, or a duration such as 1-02:03:04, not '{show(text)}'")
    return 86400 * int(match[1] or 0) + (parse_duration(match[2]) or 0.0)


def _elapsed(line: CsvLine) -> float:
    """Return the seconds from start to end; 0 if one of them is unknown."""
    if any(not line.has(column) or line.text(column).lower() in _UNKNOWN for column in (START, END)):
        return 0.0
    started, ended = (
        line.seconds_of(column) if _SECONDS.fullmatch(line.text(column)) else line.moment(column)
        for column in (START, END)
    )
    if ended < started:
        raise line.wrong(f"{END} is before {START}")
    return ended - started


def _other_duration(line: CsvLine, duration: float) -> str:
    """Tell of a duration that differs from the time from start to end; empty if it does not, or that is unknown."""
    elapsed = 0.0
    with suppress(TraceError):
        elapsed = _elapsed(line)
    if not elapsed or abs(elapsed - duration) <= 60 + elapsed / 10:
        return ""
    return f"line {line.number}: {duration:g} and {elapsed:g} s"


def _known(line: CsvLine, column: str, most: float = math.inf) -> float:
    """Return a cell as a number, 0 if it is unknown."""
    return line.number_of(column, 0, most) if line.text(column).lower() not in _UNKNOWN else 0.0


def arrival(submitted: float, eligible: float) -> tuple[float, bool]:
    """Return when a job was submitted and could start, and whether that was later than its submission; see `LATER`."""
    return max(submitted, eligible), eligible > submitted + _AT_ONCE_S


def trace_of(jobs: list[LoggedJob], unused: UnusedRows) -> Trace:
    """Return the trace of these jobs by submission. Raises TraceError if as many rows are wrong as were read."""
    jobs.sort()
    begin = jobs[0].submitted_at if jobs else 0.0
    return Trace(
        tuple(
            SimulatedJob(
                number,
                job.name,
                job.submitted_at - begin,
                job.duration,
                job.kind,
                gpus=job.gpus,
                profile=job.profile,
                user=job.user,
                estimate=job.estimate,
            )
            for number, job in enumerate(jobs)
        ),
        unused.notices(len(jobs)),
    )

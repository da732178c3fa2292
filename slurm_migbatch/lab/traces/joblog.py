"""Read public job logs of GPU clusters: CSV files with one line for each job.

The names of the columns determine whose log it is: SenseTime's Helios (`cluster_log.csv`), Shanghai AI Laboratory's
Acme (`trace_seren.csv`, `trace_kalos.csv`), Alibaba's PAI of 2020 in the form of its simulator (`pai_job_*_100K.csv`),
Alibaba's spot GPUs of 2026 (`job_info_df.csv`), CINECA's PM100 (`job_table.parquet`, written as CSV), or Microsoft's
Philly as the CSV of two public artifacts.

Note: durations are those on the GPUs of the source, and those of Philly's jobs include one attempt only. Without a
column of durations they are the times from `start_time` to `end_time`; a notice tells if most of them differ from
these. A share of a GPU is a number below 1, or in `gpu_milli` or `gpu_percent` beside the number 1. If a log has no
users, the virtual cluster or organization is used instead, because a scheduler would consider its share. The times
of submission are either all dates, in UTC if they name no zone, or all seconds. Lines with a wrong value are skipped,
with a notice; a log with as many of them as jobs is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from slurm_migbatch.lab.sim.job import Kind, SimulatedJob
from slurm_migbatch.lab.traces.csvlines import CsvLine, Skipped, TraceError, UnusedRows, lines
from slurm_migbatch.lab.traces.openb import slice_of
from slurm_migbatch.lab.traces.trace import Trace
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm.times import parse_duration
from slurm_migbatch.values.digest import digest_of
from slurm_migbatch.workload.refusal import show

SUBMITTED: Final = ("submit_time", "timestamp")
DURATION: Final = ("duration", "run_time")
START: Final = "start_time"
END: Final = "end_time"
GPUS: Final = ("gpu_num", "num_gpus", "num_gpu", "gpu_request", "num_gpus_alloc")
"""GPUs of a job, or of each of its instances."""
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
_UNKNOWN: Final = frozenset({"", "nan", "none", "null", "\\n"})
"""Unknown numbers as CSV, pandas, Python and databases write them."""
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
    #: None: the time from start to end
    duration: str | None
    gpus: str
    share: str | None
    instances: str | None
    user: str | None
    name: str | None
    state: str | None
    groups: tuple[str, ...]

    @classmethod
    def of(cls, line: CsvLine) -> _Columns:
        submitted, duration, gpus = line.first_of(SUBMITTED), line.first_of(DURATION), line.first_of(GPUS)
        assert submitted is not None
        assert gpus is not None
        if duration is None and not line.has(START):
            raise TraceError(line.path, 1, f"lacks the column {START}, or one with durations")
        if unread := [name for name in line.columns if name not in (*SHARES, *GPUS) and _OTHER_SHARE.fullmatch(name)]:
            text = f"has the column {show(unread[0])}, which is not read: write shares of a GPU into {gpus}"
            raise TraceError(line.path, 1, f"{text}, 0.5 for half of one, and leave it out")
        return cls(
            submitted,
            duration,
            gpus,
            line.first_of(tuple(SHARES)),
            line.first_of(INSTANCES),
            line.first_of(USER),
            line.first_of(NAME),
            line.first_of(STATE),
            tuple(column for column in GROUPS if line.has(column)),
        )


def read(path: Path, geometry: Geometry | None = None, infer: Collection[str] = ()) -> Trace:
    """Read the jobs that had GPUs and ran; time 0 is the first submission. Raises TraceError.

    Args:
        geometry: a job with a share of a GPU requests its smallest profile with that much compute and memory; None: a
            whole GPU.
        infer: job types, virtual clusters or organizations whose jobs are inference.
    """
    columns: _Columns | None = None
    in_seconds: bool | None = None
    jobs: list[LoggedJob] = []
    unused, differing = UnusedRows(), list[str]()
    seen, shares = set[bytes](), 0
    needed = ("|".join(SUBMITTED), "|".join((*DURATION, END)), "|".join(GPUS))
    for line in lines(path, needed, unused=unused):
        columns = columns or _Columns.of(line)
        with unused:
            gpus = _gpus(line, columns)
            duration = _elapsed(line) if columns.duration is None else _duration(line, columns.duration)
            if not gpus:
                raise Skipped("jobs without a GPU")
            if not duration or (columns.state and line.text(columns.state).upper() in _UNFINISHED):
                raise Skipped("jobs that have not run or not ended")
            instances = line.count_of(columns.instances, 1, MOST_GPUS) if columns.instances else 1
            served = any(line.text(column) in infer for column in columns.groups)
            if in_seconds is None:  # jobs that have not run may lack a time
                in_seconds = _SECONDS.fullmatch(line.text(columns.submitted)) is not None
            job = LoggedJob(
                line.seconds_of(columns.submitted) if in_seconds else line.moment(columns.submitted),
                line.number,
                line.text(columns.name) if columns.name else f"job-{line.number}",
                duration,
                instances * math.ceil(gpus),
                line.text(columns.user) if columns.user else "",
                "infer" if served else "train",
                slice_of(geometry, gpus) if geometry is not None and gpus < 1 else None,
            )
            run = digest_of(repr(job[:1] + job[2:]).encode("utf-8", "surrogatepass"), 16)
            if run in seen:  # without a column of names the number of the line is the name
                raise Skipped("repeated lines")
            seen.add(run)
            if columns.duration and len(jobs) < _COMPARED and (other := _other_duration(line, duration)):
                differing.append(other)
            shares += gpus < 1
            jobs.append(job)
    trace = trace_of(jobs, unused)
    if shares and geometry is None:
        trace = replace(
            trace, notices=(*trace.notices, f"{shares} jobs with a share of a GPU are replayed on whole GPUs")
        )
    if 2 * len(differing) > min(len(jobs), _COMPARED):
        notice = f"{columns and columns.duration} is used, which is mostly not the time from {START} to {END}"
        trace = replace(trace, notices=(*trace.notices, f"{notice} ({differing[0]}): it must be in seconds"))
    return trace


def _gpus(line: CsvLine, columns: _Columns) -> float:
    """Return the number of GPUs of a job, or its share of one; 0 if it is unknown."""
    gpus = _known(line, columns.gpus, MOST_GPUS)
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

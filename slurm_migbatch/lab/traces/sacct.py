"""Read a site's own history: the output of `sacct -P`.

    sacct -aPX -S 2026-01-01 -o JobID,User,Partition,Submit,Eligible,Start,End,Elapsed,Timelimit,State,ReqTRES,AllocTRES

The first line must name the columns; others are ignored. Steps, jobs that got no GPU, jobs that have not run or not
ended, and lines that repeat an earlier one (of two exports that overlap) are skipped, with a notice. A requeued job has
one line for each run (with -D): each is a separate job here, as is each component of a heterogeneous job (`500+0`),
with a notice; `JobIDRaw` does not tell these.

`JobIDRaw`, `ElapsedRaw` (seconds) and `TimelimitRaw` (minutes) are read if the columns without "Raw" are missing.

Other delimiters (`--delimiter`) are recognized in the first line, and `sacct --json` is read as well, and so is the log
of slurmctld without accounting, jobcomp/filetxt, which has the requested GPUs.

JobName is text from users and no model's name, so it is not read. sacct does not escape a `|` or a newline in it: the
cells of such a line are joined again, if no other column has users' text, or else the line is skipped, with a notice.

With the column Eligible a job arrives when it became eligible: while it was held, waited for another job or for its
begin time, no policy could have started it. Without the column all jobs arrive when they were submitted.

Note: `Elapsed` is used as the work, that is at the speed on the allocated resources. Times are the site's local
ones and are read in the reader's time zone, so an hour may be off after a clock change, unless they name a zone
(SLURM_TIME_FORMAT). `gres/gpu=2` and `gres/gpu:a100=2` are the same GPUs. Slices are recognized by the profile in their
GRES type: `gres/mig:1g.10gb` with slurm_migbatch, `gres/gpu:a100_1g.10gb` with Slurm's own MIG support,
`gres/gpu:a100-1g.10gb` at some sites. AutoDetect's names differ from the driver's (`gres/gpu:a100_3g.39gb`): a slice
has the simulated GPU's profile with as many compute slices and, within 3 %, as much memory. Of types without memory
(`gres/gpu:1g`) it has the least, with a notice. A job that held slices and whole GPUs is replayed on as many whole
GPUs, with a notice; jobs with shares of a GPU (`gres/shard`) or slices of unknown size are skipped, with a notice.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Final

from slurm_migbatch.lab.sim.job import Kind
from slurm_migbatch.lab.traces import sacctlines
from slurm_migbatch.lab.traces.csvlines import CsvLine, Skipped, UnusedRows
from slurm_migbatch.lab.traces.held import HeldGpus, held_in
from slurm_migbatch.lab.traces.joblog import COMPONENTS, LATER, LoggedJob, arrival, trace_of
from slurm_migbatch.lab.traces.trace import Trace
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.profile import ProfileError
from slurm_migbatch.slurm import gres
from slurm_migbatch.slurm.times import TimeFormError, parse_duration
from slurm_migbatch.values.digest import digest_of
from slurm_migbatch.workload.refusal import show

COLUMNS: Final = ("JobID|JobIDRaw", "User", "Submit", "Start", "Elapsed|ElapsedRaw", "State", "AllocTRES")
_RUN: Final = tuple(tuple(names.split("|")) for names in COLUMNS)
COMMAND: Final = (
    "sacct -aPX -o JobID,User,Partition,Submit,Eligible,Start,End,Elapsed,Timelimit,State,ReqTRES,AllocTRES"
)
UNTRACKED: Final = "Slurm records GPUs in AllocTRES only while slurm.conf has gres/gpu in AccountingStorageTRES"
_UNKNOWN: Final = frozenset({"", "Unknown", "None", "N/A", "INVALID"})
_UNFINISHED: Final = frozenset({"PENDING", "RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING"})
"""States of a run that has not ended: one that ended in a requeue or a change of size is REQUEUED or RESIZING."""
_MOMENT: Final = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:(Z)|([+-]\d\d):?(\d\d))?", re.ASCII)
"""Date and time of day as sacct prints them, and the zone."""
_SECONDS: Final = re.compile(r"[0-9]{9,10}", re.ASCII)
"""The same with SLURM_TIME_FORMAT=%s."""


def read(path: Path, infer: Collection[str] = (), geometry: Geometry | None = None) -> Trace:
    """Read jobs that held GPUs or slices. Raises TraceError.

    Args:
        infer: partitions whose jobs are inference.
        geometry: of the GPU whose profiles the slices have by other names; None: the names of the export.
    """
    remarks: Counter[str] = Counter()
    jobs: list[LoggedJob] = []
    ran_in: set[str] = set()
    seen: set[bytes] = set()
    columns = (*COLUMNS, "Partition") if infer else COLUMNS
    unused = UnusedRows()
    for line in sacctlines.read(path, columns, COMMAND, unused):
        with unused:
            run = [line.text(column) for names in _RUN if (column := line.first_of(names))]
            if "." in run[0]:
                raise Skipped("steps of jobs")
            # the cells themselves would be half of the memory that a file of a million lines takes
            digest = digest_of("\0".join(run).encode("utf-8", "surrogatepass"), 16)
            if digest in seen:
                raise Skipped("repeated lines")
            seen.add(digest)
            state = line.text("State").split(" ")[0].rstrip("+")
            ended = not line.has("End") or line.text("End") not in _UNKNOWN
            if state in _UNFINISHED or not ended or line.text("Start") in _UNKNOWN:
                raise Skipped("jobs that have not run or not ended")
            held = _held(line, geometry)
            if not held.gpus:
                raise Skipped(f"jobs {held.remark}")
            work = _seconds(line, "Elapsed", 1)
            if not work:
                raise Skipped(f"jobs {'whose run time is not known' if work is None else 'that ended within a second'}")
            partition = line.text("Partition") if infer else ""
            ran_in.add(partition)
            arrived, later = _arrival(line)
            remarks.update(filter(None, (held.remark, COMPONENTS if "+" in run[0] else "", LATER if later else "")))
            user = sys.intern(line.text("User"))  # few users have a million lines
            kind: Kind = "infer" if partition in infer else "train"
            limit_s = _seconds(line, "Timelimit", 60)
            jobs.append(LoggedJob(arrived, line.number, run[0], work, held.gpus, user, kind, held.profile, limit_s))
    trace = trace_of(jobs, unused)
    notices = list(trace.notices)
    if not jobs and unused.skipped["jobs without a GPU"]:
        notices.append(UNTRACKED)
    notices += [f"{count} jobs {remark}" for remark, count in remarks.items()]
    if absent := sorted(set(infer) - ran_in):
        notices.append(f"no job with a GPU ran in {', '.join(absent)}, which should do inference")
    return replace(trace, notices=tuple(notices))


def _held(line: CsvLine, geometry: Geometry | None) -> HeldGpus:
    text = line.text("AllocTRES")
    if not text and line.has("ReqTRES"):
        text = line.text("ReqTRES")
    try:
        return held_in(text, geometry)
    except gres.GresError as error:
        raise line.wrong(f"AllocTRES cannot be parsed: {error}") from None
    except ProfileError as error:
        raise line.wrong(f"AllocTRES: {error}") from None


def _arrival(line: CsvLine) -> tuple[float, bool]:
    """Return when a job arrived, and whether that was later than its submission; without Eligible it was not."""
    submitted = _moment(line, "Submit")
    known = line.has("Eligible") and line.text("Eligible") not in _UNKNOWN
    return arrival(submitted, _moment(line, "Eligible") if known else submitted)


def _moment(line: CsvLine, column: str) -> float:
    text = line.text(column)
    if _SECONDS.fullmatch(text):
        return float(text)
    match = _MOMENT.fullmatch(text)
    try:
        if match is None:
            raise ValueError(text)
        day, clock, utc, hours, minutes = match.groups()
        zone = "+00:00" if utc else f"{hours}:{minutes}" if hours else ""
        return datetime.fromisoformat(f"{day}T{clock}{zone}").timestamp()
    except (ValueError, OverflowError):
        wrong = f"{column} must be a time such as 2026-01-31T12:00:00, not '{show(text)}'"
        raise line.wrong(f"{wrong}: export it with SLURM_TIME_FORMAT=standard") from None


def _seconds(line: CsvLine, name: str, raw_unit: int) -> float | None:
    """Return a duration in seconds; None if it is unknown.

    It is read from the column `name` or, if that is missing, from its "Raw" form, whose unit is `raw_unit` seconds.
    """
    column = line.first_of((name, f"{name}Raw"))
    text = line.text(column) if column else ""
    if column is None or text in _UNKNOWN or text == "Partition_Limit":
        return None
    if column != name and text.isdecimal():
        return line.number_of(column) * raw_unit
    try:
        if name == "Elapsed" and text.isdecimal():  # sacct prints no bare number, parse_duration takes it for minutes
            raise line.wrong(f"{column} must be a duration such as 1-02:03:04; name a column of numbers {name}Raw")
        return _duration(text)
    except TimeFormError:
        raise line.wrong(f"{column} must be a duration such as 1-02:03:04, not '{show(text)}'") from None


_duration: Final = lru_cache(maxsize=1 << 12)(parse_duration)

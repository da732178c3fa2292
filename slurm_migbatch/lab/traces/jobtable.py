"""Read a dump of slurmdbd's job table as CSV, such as the log of MIT's Supercloud, or as `mysql -B` prints it.

    SELECT id_job, id_user, `partition`, state, timelimit, time_submit, time_eligible, time_start, time_end,
    time_suspended, tres_alloc FROM CLUSTER_job_table

The first line must name the columns; others are ignored. The table has TRES by number: 1 to 8 are Slurm's own, those
of a site begin with 1001. Their names are shown by `sacctmgr show tres`; without names, each TRES of the site is taken
for GPUs. Jobs that got none, jobs that have not run or not ended, and lines that repeat an earlier one (of two dumps
that overlap) are skipped, with a notice. A requeued job has one line for each run: each is a separate job here, as is
each component of a heterogeneous job (with `het_job_id`, if that is dumped), with a notice.

With `time_eligible` a job arrives when it became eligible, as with `sacct`.

Note: the time from start to end, without suspensions, is used as the work, so the work is relative to the speed on the
allocated resources. Names of jobs are free text and no model's name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from slurm_migbatch.lab.sim.job import Kind
from slurm_migbatch.lab.traces.csvlines import CsvLine, Skipped, UnusedRows, lines
from slurm_migbatch.lab.traces.held import HeldGpus, held_in
from slurm_migbatch.lab.traces.joblog import COMPONENTS, LATER, LoggedJob, arrival, trace_of
from slurm_migbatch.lab.traces.trace import Trace
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.profile import ProfileError
from slurm_migbatch.slurm.gres import GresError
from slurm_migbatch.workload.refusal import show

COLUMNS: Final = ("id_job", "id_user", "state", "time_submit", "time_start", "time_end", "tres_alloc|tres_req")
FIRST_OF_SITE: Final = 1001
"""Slurm numbers the TRES that a site adds from here (`TRES_OFFSET`)."""
_TRES: Final = re.compile(r"([0-9]{1,10})=([0-9]{1,20})", re.ASCII)
_STATE_BASE: Final = 0xFF
"""Bits of a state that are not flags (`JOB_STATE_BASE`)."""
_SUSPENDED: Final = 2
"""The last state, after pending and running, of jobs that have not ended (`enum job_states`)."""
_ENDED_RUN: Final = 0x400 | 0x2000
"""The flags alone that are the state of a run that ended in a requeue or a change of size (`JOB_REQUEUE`,
`JOB_RESIZING`).
"""
_NO_LIMIT: Final = 0xFFFFFFFE
"""From here, a time limit is not set or infinite (`NO_VAL`, `INFINITE`)."""


def read(
    path: Path,
    tres: Mapping[int, str] | None = None,
    infer: Collection[str] = (),
    geometry: Geometry | None = None,
) -> Trace:
    """Read the jobs that held GPUs or slices; time 0 is the first submission. Raises TraceError.

    Args:
        tres: names of TRES by their numbers, `gres/gpu:a100`, `gres/mig:1g.10gb`; None: all of the site's are GPUs.
        infer: partitions whose jobs are inference.
        geometry: of the GPU whose profiles the slices have by other names; None: the names in `tres`.
    """
    remarks: Counter[str] = Counter()
    unnamed: set[int] = set()
    seen: set[tuple[str, float, float, float, int]] = set()
    jobs: list[LoggedJob] = []
    unused = UnusedRows()
    for line in lines(path, (*COLUMNS, "partition") if infer else COLUMNS, unused=unused):
        with unused:
            started, ended = line.seconds_of("time_start"), line.seconds_of("time_end")
            work = ended - started - (line.number_of("time_suspended", 0) if line.has("time_suspended") else 0.0)
            state = line.count_of("state")
            ended_run = state & _STATE_BASE > _SUSPENDED or state & _ENDED_RUN
            if not ended_run or not started or work <= 0:
                raise Skipped("jobs that have not run or not ended")
            run = line.text("id_job"), line.seconds_of("time_submit"), started, ended, state
            if run in seen:
                raise Skipped("jobs that repeat an earlier line")
            seen.add(run)
            counts = _counts(line)
            held = _largest(counts, unnamed) if tres is None else _named(line, counts, tres, geometry)
            if not held.gpus:
                raise Skipped(f"jobs {held.remark}")
            if held.remark:
                remarks[held.remark] += 1
            if line.has("het_job_id") and line.text("het_job_id") not in ("", "0", "NULL"):
                remarks[COMPONENTS] += 1
            eligible = line.number_of("time_eligible", 0) if line.has("time_eligible") else 0.0
            arrived, later = arrival(run[1], eligible if eligible <= started else 0.0)
            if later:
                remarks[LATER] += 1
            user, limit_s = line.text("id_user"), _limit(line)
            kind: Kind = "infer" if infer and line.text("partition") in infer else "train"
            jobs.append(LoggedJob(arrived, line.number, run[0], work, held.gpus, user, kind, held.profile, limit_s))
    trace = trace_of(jobs, unused)
    notices = [f"{count} jobs {remark}" for remark, count in remarks.items()]
    if unnamed:
        notices.append(f"TRES {', '.join(map(str, sorted(unnamed)))} are taken for GPUs, as they have no names")
    return replace(trace, notices=(*trace.notices, *notices))


def _counts(line: CsvLine) -> dict[int, int]:
    """Return how many of each TRES a job had, by number; the table has `1=4,2=8000,1001=2`."""
    column = "tres_alloc" if line.has("tres_alloc") and line.text("tres_alloc") else "tres_req"
    counts = {}
    for entry in line.text(column).split(",") if line.has(column) and line.text(column) else ():
        match = _TRES.fullmatch(entry)
        if match is None:
            raise line.wrong(f"{column} must have entries such as 1001=2, not '{show(entry)}'")
        counts[int(match[1])] = int(match[2])
    return counts


def _largest(counts: Mapping[int, int], unnamed: set[int]) -> HeldGpus:
    """Return the GPUs of a job if TRES have no names: the largest count of a TRES of the site.

    Several TRES may count the same GPUs, with and without their type. Add their numbers to `unnamed`.
    """
    of_site = {number: count for number, count in counts.items() if number >= FIRST_OF_SITE and count}
    unnamed.update(of_site)
    return HeldGpus(None, max(of_site.values())) if of_site else HeldGpus(None, 0, "without a GPU")


def _named(line: CsvLine, counts: Mapping[int, int], tres: Mapping[int, str], geometry: Geometry | None) -> HeldGpus:
    held = ",".join(f"{tres[number]}={count}" for number, count in counts.items() if number in tres)
    try:
        return held_in(held, geometry)
    except (GresError, ProfileError) as error:
        raise line.wrong(f"TRES cannot be parsed: {error}") from None


def _limit(line: CsvLine) -> float | None:
    """Return the time limit in seconds; the table has minutes."""
    minutes = line.number_of("timelimit", 0) if line.has("timelimit") and line.text("timelimit") else 0.0
    return minutes * 60 if 0 < minutes < _NO_LIMIT else None

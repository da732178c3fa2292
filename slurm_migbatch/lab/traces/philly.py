"""Read Microsoft Philly's log as it was published: `cluster_job_log`, one JSON list of all jobs.

Note: a job has a list of attempts, each with its GPUs; here it is one job on the GPUs of its first attempt, as long as
all attempts together that have ended. Times have no zone and are read as UTC. The CSV form of two public artifacts is
read by `joblog`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from slurm_migbatch.lab.traces import joblog
from slurm_migbatch.lab.traces.csvlines import Skipped, TraceError, UnusedRows, moment, opened
from slurm_migbatch.lab.traces.joblog import LoggedJob
from slurm_migbatch.lab.traces.trace import Trace

_UNKNOWN: Final = frozenset({None, "", "None"})


def read(path: Path) -> Trace:
    """Read the jobs that had GPUs and ran, from JSON or CSV; time 0 is the first submission. Raises TraceError."""
    if ".csv" in path.suffixes:
        return joblog.read(path)
    try:
        with opened(path) as file:
            log = json.load(file)
    except TraceError:
        raise
    except (ValueError, RecursionError) as error:
        raise TraceError(path, 0, f"is not JSON ({error}); name a CSV file .csv or .csv.gz") from None
    if not isinstance(log, list):
        raise TraceError(path, 0, "must be a list of jobs")
    jobs = []
    unused = UnusedRows()
    for number, entry in enumerate(log):
        with unused:
            try:
                job = _job(number, entry)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                text = f"lacks {error}" if isinstance(error, KeyError) else str(error)
                raise TraceError(path, 0, f"job {number} of the list: {text}") from None
            if not job.gpus or job.duration <= 0:
                raise Skipped("jobs that have not run or not ended" if job.gpus else "jobs without a GPU")
            jobs.append(job)
    return joblog.trace_of(jobs, unused)


def _job(number: int, entry: dict[str, Any]) -> LoggedJob:
    attempts = entry["attempts"]
    ended_attempts = [run for run in attempts if not {run.get("start_time"), run.get("end_time")} & _UNKNOWN]
    seconds = sum(moment(run["end_time"]) - moment(run["start_time"]) for run in ended_attempts)
    gpus = sum(len(node["gpus"]) for node in attempts[0]["detail"]) if attempts else 0
    user = str(entry.get("user") or entry["vc"])
    return LoggedJob(moment(entry["submitted_time"]), number, str(entry["jobid"]), seconds, gpus, user)

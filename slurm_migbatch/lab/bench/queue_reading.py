"""Measure the cost of reading the queue before a round: reading it, and checks of all jobs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final

from slurm_migbatch.daemon.audit import Auditor, OrphanWatch
from slurm_migbatch.daemon.garbage import uncollected
from slurm_migbatch.daemon.poll import KeptRows, UnsavedJobs
from slurm_migbatch.decide.capacity.facts import NodeFacts
from slurm_migbatch.slurm.client import JobRow, merge_partitions
from slurm_migbatch.slurm.listing import SQUEUE_FIELDS, JobReader, new_mark

_SAMPLE: Final = 50_000
"""Rows that are read; the time is that of all."""
_REPEATS: Final = 4


def reading_s(jobs: Sequence[JobRow]) -> tuple[float, float]:
    """Return the seconds of processor time of reading squeue's output: the first time, and unchanged a second later.

    The latter is the median.
    """
    sample = jobs[:_SAMPLE]
    if not sample:
        return 0.0, 0.0
    reader, spent = JobReader(), []
    for _ in range(_REPEATS):
        mark = new_mark()
        output = "".join(_printed(row, mark) for row in sample)
        begun = time.thread_time()
        with uncollected():  # like the poller
            merge_partitions(reader.read(output, mark))
        spent.append((time.thread_time() - begun) * len(jobs) / len(sample))
    return spent[0], median(spent[1:])


def checks_s(jobs: Sequence[JobRow], facts: Mapping[str, NodeFacts]) -> float:
    """Return the seconds of processor time of the service's checks of a known queue; the median."""
    kept, unsaved, auditor, orphans = KeptRows(), UnsavedJobs(), Auditor(), OrphanWatch()
    spent = []
    for now in range(_REPEATS):
        begun = time.thread_time()
        with uncollected():  # like the service
            rows = kept.of(jobs)
            unsaved.update(rows)
            auditor.check(facts, rows)
            orphans.check(facts, rows, float(now))
        spent.append(time.thread_time() - begun)
    return median(spent[1:])


def _printed(row: JobRow, mark: str) -> str:
    """Return a row in squeue's form."""
    throttle = "" if row.throttle is None else f"%{row.throttle}"
    values = {
        "JobID": row.job_id,
        "ArrayJobID": row.array_job or row.job_id,
        "ArrayTaskID": "N/A" if row.array_task is None else row.array_task + throttle,
        "HetJobID": row.het_job or 0,
        "RestartCnt": row.restarts,
        "UserID": row.uid,
        "State": row.state,
        "Reason": row.reason,
        "Partition": row.partition,
        "PriorityLong": row.priority,
        "SubmitTime": int(row.submit),
        "EligibleTime": int(row.eligible or 0),
        "StartTime": int(row.start or 0),
        "EndTime": int(row.end or 0),
        "TimeLimit": f"{(row.time_limit_s or 60) // 60}:00",
        "NodeList": ",".join(row.nodes),
        "NumNodes": row.num_nodes,
        "tres-per-node": row.gres,
        "NumCPUs": row.cpus,
        "Comment": row.comment,
        "Dependency": "(null)",
        "MinMemory": f"{row.memory_per_node}M",
        "tres-alloc": f"cpu={row.cpus},mem={row.memory_per_node * row.num_nodes}M,node={row.num_nodes}",
    }
    return "".join(f"{values.get(field, '')}{mark}" for field in SQUEUE_FIELDS) + "\n"

"""Input of dispatch from the record: runs of array tasks, and recent use of slices."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from sqlalchemy import Connection, func, literal_column, select

from slurm_migbatch.decide.snapshot import TaskRun
from slurm_migbatch.store.lifecycle import CLOCKS_DIFFER_S
from slurm_migbatch.store.models import Run, StoredLoan
from slurm_migbatch.store.queries import among, overlapping


class PastRuns(NamedTuple):
    """Equal runs: of one bucket (empty: none), with so many slices of `profile` each, and their durations."""

    bucket: str
    profile: str
    slices: int
    runs: int
    seconds: float


def array_runs(connection: Connection, arrays: Collection[int]) -> dict[int, list[TaskRun]]:
    """Return the runs of these arrays' tasks in the order of their ends, running ones last.

    If Slurm reused an id, those of the newest array: first runs of the tasks of one array have one time of submission.
    """
    by_array: dict[int, list[TaskRun]] = {array: [] for array in arrays}
    statement = select(Run.array_job, Run.restart, Run.submitted, Run.started, Run.ended, Run.state).where(
        among(Run.array_job, arrays)
    )
    rows = connection.execute(statement).all()
    submitted: dict[int, float] = {}
    for row in rows:
        if not row.restart:
            submitted[row.array_job] = max(row.submitted or 0.0, submitted.get(row.array_job, 0.0))
    for row in rows:
        if row.started is not None and row.started >= submitted.get(row.array_job, 0.0) - CLOCKS_DIFFER_S:
            by_array[row.array_job].append(TaskRun(float(row.started), row.ended, row.state))
    for runs in by_array.values():
        runs.sort(key=lambda run: (run.ended is None, run.ended or run.started))
    return by_array


def past_work(connection: Connection, since: float) -> list[PastRuns]:
    """Return work other than loans that ended at that time (unix seconds) or later, the most runs first."""
    lent = select(StoredLoan.id).where(StoredLoan.job_id == Run.job_id, StoredLoan.restart == Run.restart).exists()
    count, seconds = func.count(), func.avg(Run.ended - Run.started)
    # PostgreSQL does not recognize a repeated expression with a parameter
    bucket = func.coalesce(Run.bucket, literal_column("''"))
    statement = (
        select(bucket, Run.profile, Run.slice_count, count, seconds)
        .where(overlapping(since, None), Run.ended.is_not(None), Run.started.is_not(None), Run.slice_count > 0, ~lent)
        .group_by(bucket, Run.profile, Run.slice_count)
        .order_by(count.desc(), Run.profile)
    )
    return [PastRuns(*row) for row in connection.execute(statement) if row[1] and row[4] is not None]

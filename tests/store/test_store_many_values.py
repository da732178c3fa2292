"""Long lists of jobs and nodes, with the 999 values in a statement that SQLite before 3.32 accepts."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.orm import Session

from slurm_migbatch.store.capacity import gpu_seconds
from slurm_migbatch.store.db import Store, open_store
from slurm_migbatch.store.models import Run, StoredLease
from slurm_migbatch.store.queries import RunFilter
from slurm_migbatch.store.reader import open_reader
from slurm_migbatch.store.runquery import JobId, select_runs
from slurm_migbatch.store.usage import held_slices
from slurm_migbatch.store.work import array_runs
from tests.support.stores import prepared

pytestmark = pytest.mark.sqlite
JOBS = range(1, 1201)
NODES = tuple(f"gpu-{number}.example" for number in JOBS)


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    connect = sqlite3.connect

    def limited(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection = connect(*arguments, **options)
        if sys.version_info >= (3, 11):
            connection.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 999)
        return connection

    url = prepared(f"sqlite:///{tmp_path}/store/migbatch.db")
    monkeypatch.setattr(sqlite3, "connect", limited)
    return url


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    """A run with a slice of each job, each a task of one array, and on a node of its own."""
    with open_store(url) as opened:
        with Session(opened.engine) as session, session.begin():
            session.add_all(
                Run(
                    id=job, job_id=job, restart=0, reuse=0, latest=True, state="COMPLETED", state_from="node", uid=job,
                    array_job=5000, array_task=str(job), slice_count=1, submitted=1.0, began=1.0, started=10.0,
                    ended=20.0,
                )
                for job in JOBS
            )  # fmt: skip
            session.flush()
            session.add_all(
                StoredLease(
                    run_id=job, job_id=job, restart=0, node=node, journal="j", position=0, gpu=f"GPU-{job}",
                    profile="1g.10gb", slot_start=0, slot_size=1, since=10.0, until=20.0, outcome="ended",
                )
                for job, node in zip(JOBS, NODES, strict=True)
            )  # fmt: skip
        yield opened


@pytest.mark.slow
@pytest.mark.parametrize(
    "wanted",
    [
        RunFilter(jobs=tuple(JobId(job) for job in JOBS)),
        RunFilter(jobs=tuple(JobId(5000, str(job)) for job in JOBS)),
        RunFilter(uids=tuple(JOBS)),
        RunFilter(nodes=NODES),
    ],
)
def test_runs_of_more_jobs_tasks_users_or_nodes_than_a_statement_accepts_values(
    url: str, store: Store, wanted: RunFilter
) -> None:
    assert len(store.runs(wanted)) == len(JOBS)
    with closing(open_reader(url)) as record:
        assert len(list(select_runs(record.rows, wanted, ("job_id",), ("node",)))) == len(JOBS)
    with store.reading() as connection:
        (held,) = held_slices(connection, wanted, (), 0.0, 100.0, 100.0)
    assert (held.runs, held.seconds) == (len(JOBS), 10.0 * len(JOBS))


def test_tasks_of_more_arrays_than_a_statement_accepts_conditions(url: str, store: Store) -> None:
    wanted = RunFilter(jobs=tuple(JobId(array, "7") for array in range(4000, 8000)))
    assert [row.run["job_id"] for row in store.runs(wanted)] == [7]
    with closing(open_reader(url)) as record:
        assert record.has_run(wanted)


def test_loans_progress_and_arrays_of_many_jobs(store: Store) -> None:
    store.save_loans(
        [{"job_id": job, "restart": 0, "profile": "1g.10gb", "state": "waiting", "decided": 5.0} for job in JOBS]
    )
    assert len(store.loans(JOBS)) == len(JOBS)
    assert store.actions(JOBS) == []
    assert len(store.job_progress(JOBS)) == len(JOBS)
    with store.reading() as connection:
        assert len(array_runs(connection, range(4000, 5200))[5000]) == len(JOBS)
        assert gpu_seconds(connection, 0.0, 100.0, NODES) == {}


def test_names_that_are_no_plain_words_remain_values(store: Store) -> None:
    odd = ("it's", "a b", "x);--", "", *NODES)
    assert len(store.runs(RunFilter(nodes=odd))) == len(JOBS)


def test_all_runs_of_the_past_are_removed(store: Store) -> None:
    place, removed = None, 0
    while True:
        step = store.prune(1e9, 100, place)
        removed += step.rows.get("runs", 0)
        place = step.place
        if place is None:
            break
    assert removed == len(JOBS) - 1, "the newest keeps its number"

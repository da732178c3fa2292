"""Runs of array tasks, and what slices were used for."""

from __future__ import annotations

from slurm_migbatch.decide.snapshot import TaskRun
from slurm_migbatch.store.db import Store, open_store
from slurm_migbatch.store.work import PastRuns, array_runs, past_work


def slice_entry(start: int, profile: str = "1g.10gb") -> dict[str, object]:
    return {"gpu": "GPU-1", "profile": profile, "start": start, "size": 1, "gi": 1, "ci": 0, "mig_uuid": "MIG-1"}


def ran(db: Store, job: int, began: float, ended: float | None, slices: int = 1, **fields: object) -> None:
    slice_entries = [slice_entry(i) for i in range(slices)]
    common = {"job": job, "restart": 0, "uid": 1, "slices": slice_entries}
    seq = 2 * job - 1
    start = {"seq": seq, "ts": began, "kind": "start", **common}
    db.upsert_jobs([{"job_id": job, "state": "RUNNING", "submit": began - 1, "start": began, **fields}])
    db.ingest("n1", f"j{job}", "b", [{**start, "seq": 1}])
    if ended is not None:
        db.ingest("n1", f"j{job}", "b", [{**start, "seq": 2, "ts": ended, "kind": "stop", "exit_code": 0}])


def test_array_task_runs_are_in_the_order_of_their_ends(database: str) -> None:
    with open_store(database) as db:
        ran(db, 11, 100, 160, array_job=10, array_task="1")
        ran(db, 12, 100, 130, array_job=10, array_task="2")
        ran(db, 13, 130, None, array_job=10, array_task="3")
        ran(db, 14, 100, 110)
        db.upsert_jobs([{"job_id": 10, "array_job": 10, "array_task": "4-9", "state": "PENDING", "submit": 99.0}])
        found = db.read(array_runs, [10, 77])
    assert found[77] == []
    assert found[10] == [
        TaskRun(100, 130, "COMPLETED"), TaskRun(100, 160, "COMPLETED"), TaskRun(130, None, "RUNNING")
    ]  # fmt: skip


def test_array_runs_are_not_those_of_an_earlier_array_with_the_same_id(database: str) -> None:
    with open_store(database) as db:
        ran(db, 11, 100, 160, array_job=10, array_task="1")
        pending = {"job_id": 10, "array_job": 10, "array_task": "1-9", "state": "PENDING", "restarts": 0}
        db.upsert_jobs([{**pending, "submit": 99.0}])
        assert db.read(array_runs, [10])[10] == [TaskRun(100, 160, "COMPLETED")]
        db.upsert_jobs([{**pending, "submit": 9000.0}])
        assert db.read(array_runs, [10])[10] == []
        ran(db, 12, 9100, None, array_job=10, array_task="1")
        assert db.read(array_runs, [10])[10] == [TaskRun(9100, None, "RUNNING")]


def test_past_work_is_summed_by_requested_slices(database: str) -> None:
    with open_store(database) as db:
        ran(db, 1, 100, 160)
        ran(db, 2, 100, 120)
        ran(db, 3, 100, 120, slices=2)
        ran(db, 4, 10, 20)
        ran(db, 5, 100, None)
        assert db.read(past_work, 50.0) == [PastRuns("", "1g.10gb", 1, 2, 40.0), PastRuns("", "1g.10gb:2", 2, 1, 20.0)]


def test_past_work_excludes_loans(database: str) -> None:
    with open_store(database) as db:
        ran(db, 1, 100, 160)
        db.save_loans([{"job_id": 1, "restart": 0, "decided": 99.0, "profile": "1g.10gb", "state": "ended"}])
        assert db.read(past_work, 50.0) == []

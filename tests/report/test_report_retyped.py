"""What migacct shows of jobs that were given another profile while they were pending."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slurm_migbatch.cli import migacct
from slurm_migbatch.store.db import Store, open_store

WHY = "no room for 1g.10gb, and 3g.40gb is idle on n1"


def retype(job: int, before: str, after: str, **changes: Any) -> dict[str, Any]:
    row = {"ts": 5.0, "job_id": job, "restart": 0, "kind": "retype", "before": before, "after": after, "why": WHY}
    return {**row, "dry_run": False, "outcome": None, **changes}


def started(store: Store, job: int, profile: str, slices: int = 1, **fields: Any) -> None:
    held = {"gpu": "GPU-a", "profile": profile, "size": 1, "gi": 1, "ci": 0, "mig_uuid": f"MIG-{job}"}
    slice_rows = [{**held, "start": 10 * job + i} for i in range(slices)]
    comment = "migbatch: model=resnet-50 [mig:3g.40gb:1#abc12345]"
    base = {
        "job_id": job,
        "state": "RUNNING",
        "user": "ann",
        "uid": 0,
        "submit": 1.0,
        "start": 10.0,
        "comment": comment,
    }
    store.upsert_jobs([{**base, "state": "PENDING", "start": None, **fields}])
    store.ingest(
        "n1", f"j{job}", "b", [{"seq": 1, "ts": 10.0, "kind": "start", "job": job, "restart": 0, "slices": slice_rows}]
    )


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path}/x.db"
    candidates = [
        {"profile": "1g.10gb", "latency_ms": 50.0, "throughput_per_s": 20.0, "memory_mib": 900.0},
        {"profile": "3g.40gb", "latency_ms": 20.0, "throughput_per_s": 50.0, "memory_mib": 950.0},
    ]
    with open_store(url) as store:
        store.record_decisions([{"id": "abc12345", "chosen": "mig:1g.10gb:1", "candidates": candidates, "asked": "x"}])
        started(store, 1, "3g.40gb")
        started(store, 2, "1g.10gb")
        started(store, 31, "3g.40gb", array_job=30, array_task="1")
        started(store, 32, "1g.10gb", array_job=30, array_task="2")
        started(store, 4, "3g.40gb", 2)
        started(store, 5, "1g.10gb")
        store.save_loans(
            (),
            [
                retype(1, "1g.10gb", "2g.20gb", why="first"), retype(1, "2g.20gb", "3g.40gb"),
                retype(2, "1g.10gb", "3g.40gb", dry_run=True), retype(2, "1g.10gb", "3g.40gb", outcome="refused"),
                retype(2, "1g.10gb", "3g.40gb", kind="throttle"), retype(30, "1g.10gb", "3g.40gb"),
                retype(4, "1g.10gb:2", "3g.40gb:2"), retype(5, "1g.10gb", "3g.40gb"), retype(5, "3g.40gb", "1g.10gb"),
                retype(2, "1g.10gb", "3g.40gb", ts=-1e6),
            ],
        )  # fmt: skip
    return url


def migacct_output(url: str, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert migacct.called(["-a", "-S", "1970-01-01", "--db", url, *options]) == 0
    return capsys.readouterr().out


def test_retyped_columns_show_both_profiles_and_the_reason(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = migacct_output(url, capsys, "-X", "-n", "-P", "-o", "jobid,profile,retyped,retypedwhy")
    assert out.splitlines() == [
        f"1|3g.40gb|1g.10gb>3g.40gb|{WHY}",
        "2|1g.10gb||",
        f"4|3g.40gb:2|1g.10gb:2>3g.40gb:2|{WHY}",
        "5|1g.10gb||",
        f"30_1|3g.40gb|1g.10gb>3g.40gb|{WHY}",
        "30_2|1g.10gb||",
    ]


def test_json_shows_both_profiles_and_the_reason(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row["job"]: row["retyped"] for row in json.loads(migacct_output(url, capsys, "--json"))["jobs"]}
    moved = {"from": "1g.10gb", "to": "3g.40gb", "why": WHY}
    assert rows == {"1": moved, "2": None, "30_1": moved, "30_2": None, "5": None, "4": {
        "from": "1g.10gb:2", "to": "3g.40gb:2", "why": WHY,
    }}  # fmt: skip


def test_prediction_is_that_of_the_profile_after_retyping(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {
        row["job"]: row["predicted_throughput_per_s"]
        for row in json.loads(migacct_output(url, capsys, "--json"))["jobs"]
    }
    assert (rows["1"], rows["2"], rows["4"]) == (50.0, 20.0, 50.0)

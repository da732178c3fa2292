"""Events as nodes send them, numbered in the order of their creation."""

from __future__ import annotations

from typing import Any

from sqlalchemy import select

from slurm_migbatch.store.db import Store
from slurm_migbatch.store.models import StoredLease
from slurm_migbatch.store.queries import RunFilter, RunRow


def slice_entry(start: int = 0, size: int = 1, profile: str = "1g.10gb", gpu: str = "GPU-a") -> dict[str, Any]:
    """Return one slice of an event."""
    return {
        "gpu": gpu, "profile": profile, "start": start, "size": size, "gi": start + 1, "ci": 0,
        "mig_uuid": f"MIG-{gpu}-{start}",
    }  # fmt: skip


class Node:
    """A node with a journal that creates events and sends them."""

    def __init__(self, store: Store, name: str = "n1", journal: str = "aa") -> None:
        self.store, self.name, self.journal, self.boot_id, self.seq = store, name, journal, "boot-1", 0

    def event(self, kind: str, ts: float, **fields: Any) -> dict[str, Any]:
        """Create the next event of the journal, without sending it."""
        self.seq += 1
        return {"seq": self.seq, "ts": float(ts), "kind": kind, **fields}

    def start(self, ts: float, job: int, *slices: dict[str, Any], restart: int = 0, **fields: Any) -> dict[str, Any]:
        """Create a start event of a job of alice."""
        identity = {"uid": 1001, "user": "alice", "account": "ml", "partition": "gpu", "decision": "", "warm": False}
        held_slices = list(slices or [slice_entry()])
        return self.event(
            "start", ts, job=job, restart=restart, slices=held_slices, elapsed_ms=5.0, **{**identity, **fields}
        )

    def stop(
        self, ts: float, job: int, *slices: dict[str, Any], restart: int = 0, exit_code: int | None = 0, **fields: Any
    ) -> dict[str, Any]:
        """Create a stop event of a job."""
        held_slices = list(slices or [slice_entry()])
        return self.event("stop", ts, job=job, restart=restart, exit_code=exit_code, slices=held_slices, **fields)

    def send(self, *events: dict[str, Any]) -> int:
        """Send events; return the number that the store acknowledges."""
        return self.store.ingest(self.name, self.journal, self.boot_id, list(events)).acked


def run_of(store: Store, job: int, restart: int = 0) -> RunRow:
    """Return the run (job, restart)."""
    runs = [row for row in store.runs() if (row.run["job_id"], row.run["restart"]) == (job, restart)]
    assert len(runs) == 1, runs
    return runs[0]


def states(store: Store, wanted: RunFilter | None = None) -> list[tuple[int, int, str]]:
    """Return (job, restart, state) of every run."""
    return [(row.run["job_id"], row.run["restart"], row.run["state"]) for row in store.runs(wanted)]


def lease_times(store: Store) -> list[tuple[int, float | None, float | None]]:
    """Return (job, since, until) of every lease; `until` is None while it is held."""
    statement = select(StoredLease.job_id, StoredLease.since, StoredLease.until).order_by(StoredLease.id)
    return store.read(lambda connection: [(job, since, until) for job, since, until in connection.execute(statement)])


def job(job_id: int, state: str = "PENDING", **fields: Any) -> dict[str, Any]:
    """Return Slurm's fields of a job of alice."""
    return {
        "job_id": job_id, "state": state, "uid": 1001, "user": "alice", "account": "ml", "partition": "gpu",
        "name": "train", "submit": 50.0, "restarts": 0, "gres": "gres:mig:1g.10gb:1", "comment": "", **fields,
    }  # fmt: skip

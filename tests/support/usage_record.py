"""A record of two accounts over an autumn, for `migbatch usage` and `migbatch waste`."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from slurm_migbatch.store.db import Store
from tests.support.gpu_kinds import H100
from tests.support.store_events import Node, slice_entry

H = 3600.0


def at(text: str) -> float:
    """Return the unix seconds of a local time of 2026, such as `10-02T12:00`."""
    return datetime.fromisoformat(f"2026-{text}").timestamp()


def describe(node: Node, ts: float, count: int = 2) -> dict[str, Any]:
    """Create an inventory event of H100s."""
    geometry = H100.geometry.to_dict()
    gpus = [
        {
            "uuid": f"GPU-{node.name}-{n}",
            "index": n,
            "minor": n,
            "name": "NVIDIA H100",
            "mig": True,
            "geometry": geometry,
        }
        for n in range(count)
    ]
    return node.event("inventory", ts, gpus=gpus)


def run(
    store: Store,
    node: Node,
    job: int,
    start: float,
    end: float | None,
    *slices: dict[str, Any],
    account: str = "chemistry",
    user: str = "alice",
    uid: int = 1001,
    partition: str = "gpu",
    waited: float = 60.0,
    state: str = "COMPLETED",
    **stop: Any,
) -> None:
    """Record a job from its submission to its end, by Slurm and by its node."""
    held_slices = list(slices or [slice_entry(gpu=f"GPU-{node.name}-0")])
    identity: dict[str, Any] = {"user": user, "uid": uid, "account": account, "partition": partition}
    row = {"job_id": job, "restarts": 0, "name": f"job{job}", "submit": start - waited, "start": start, **identity}
    store.upsert_jobs([{**row, "state": "RUNNING"}], now=start)
    node.send(node.start(start + 2.0, job, *held_slices, **identity))
    if end is not None:
        # the Epilog releases slices after Slurm has ended the job
        node.send(node.stop(end + 3.0, job, *held_slices, **stop))
        store.upsert_jobs([{**row, "state": state, "end": end}], now=end)

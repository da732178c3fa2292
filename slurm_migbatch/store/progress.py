"""Saved state of training jobs: the newest checkpoint of a run, its step and cost; and runs by their latest reports.

A `progress` event of a node has, besides job, restart, seq and ts (unix s), `final`, and the fields of
`node.progress.Report` that are known: items, throughput_per_s, latency_ms, latency_p99_ms, batch, tasks, whole, done,
refused; and for training jobs

| field | |
|---|---|
| steps | optimizer steps done over all runs of the job |
| checkpoint | when its newest checkpoint of this run was complete, unix s by the node's clock |
| ckpt_s | seconds spent writing it |
| restored | steps from which this run continued; absent if it started from the beginning |

A new `checkpoint` is reported within a second or two, the rest every ProgressEvery seconds and at the end (`final`). If
an event omits one of these four, the last value remains valid; other omitted fields do not. All values are reported by
the job, within the bounds of `node.progress` (a checkpoint is never older than the run nor later than the event, except
for a minute between clocks). `Run.measured_facts["safe"]` stores it, for each node in `["nodes"][node]["safe"]`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select

from slurm_migbatch.decide.snapshot import RunProgress
from slurm_migbatch.store import clean
from slurm_migbatch.store.models import Run
from slurm_migbatch.store.queries import among

CLOCKS_S = 60.0
_LARGEST = {"steps": 1e15, "checkpoint": 1e11, "ckpt_s": 1e6, "restored": 1e15}


@dataclass(frozen=True)
class RunProgressRow(RunProgress):
    """Progress of a run, with more figures. `steps`: done over all runs of the job; `restored`: those it began with."""

    started: float | None = None
    ended: float | None = None
    reported: float | None = None
    batch: float | None = None
    steps: int | None = None
    restored: int | None = None


def safe_of(
    event: Mapping[str, Any], ts: float, started: float | None, before: Any, doubts: list[str]
) -> dict[str, float | int]:
    """Return the saved state after `before` and this event of a node; implausible fields go to `doubts`."""
    safe: dict[str, float | int] = dict(before) if isinstance(before, dict) else {}
    for name, maximum in _LARGEST.items():
        value = event.get(name)
        number = clean.real(value)
        if value is None:
            continue
        early = name == "checkpoint" and started is not None and number is not None and number < started - CLOCKS_S
        late = name == "checkpoint" and number is not None and number > ts + CLOCKS_S
        if number is None or not 0 <= number <= maximum or early or late:
            doubts.append(f"{name}={str(value)[:40]} is impossible")
        else:
            safe[name] = int(number) if name in ("steps", "restored") else number
    return safe


def together(nodes: Iterable[Mapping[str, Any]]) -> dict[str, float | int]:
    """Merge the saved states of a run's nodes: the minimum of all that report one, but the maximum of `ckpt_s`."""
    reports = [node["safe"] for node in nodes if isinstance(node.get("safe"), dict)]
    merged: dict[str, float | int] = {}
    for name in _LARGEST:
        values = [safe[name] for safe in reports if name in safe]
        if values:
            merged[name] = max(values) if name == "ckpt_s" else min(values)
    return merged


def reports(connection: Connection, jobs: Collection[int]) -> list[RunProgressRow]:
    """Return the runs of these jobs, each job's in order.

    If Slurm reused an id, those of the newest job.
    """
    statement = (
        select(
            Run.job_id, Run.restart, Run.profile, Run.started, Run.ended, Run.measured_items,
            Run.measured_throughput_per_s, Run.measured_facts, Run.reuse,
        )
        .where(among(Run.job_id, jobs))
        .order_by(Run.job_id, Run.reuse, Run.restart)
    )  # fmt: skip
    rows = connection.execute(statement).all()
    newest = {row.job_id: row.reuse for row in rows}
    return [_row(row) for row in rows if row.reuse == newest[row.job_id]]


def _row(row: Any) -> RunProgressRow:
    facts = row.measured_facts if isinstance(row.measured_facts, dict) else {}
    nodes = facts.get("nodes") or {}
    safe = facts.get("safe") or {}
    reported = max((node["ts"] for node in nodes.values() if node.get("ts") is not None), default=None)
    return RunProgressRow(
        row.job_id, row.restart, row.profile, safe.get("checkpoint"), safe.get("ckpt_s"), row.measured_items,
        row.measured_throughput_per_s, facts.get("shared") is True, row.started, row.ended, reported,
        facts.get("batch"), safe.get("steps"), safe.get("restored"),
    )  # fmt: skip

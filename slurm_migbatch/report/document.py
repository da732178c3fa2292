"""Runs as a JSON or YAML document: raw numbers, with their units in the names, under a schema version."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from slurm_migbatch.report.columns import (
    busy,
    elapsed_s,
    energy_j,
    gpu_hours,
    hours_of,
    job_id,
    measured_by,
    prediction_error,
    queue_wait_s,
    slice_hours,
)
from slurm_migbatch.report.yamltext import item_lines, mapping_lines
from slurm_migbatch.store.runquery import RunFilter

#: incremented when a name changes its meaning or is removed, not when a name is added
SCHEMA_VERSION = 1

RUN_FIELDS = (
    "job_id", "restart", "array_job", "array_task", "het_job", "het_offset", "uid", "user", "account", "partition",
    "gid", "qos", "wckey", "comment",
    "name", "nodes", "state", "reason", "exit_code", "signal", "submitted", "started", "ended", "time_limit_s", "asked",
    "bucket", "decision", "source", "profile", "slice_count", "warm", "setup_ms", "predicted_latency_ms",
    "predicted_throughput_per_s", "predicted_memory_mib", "measured_latency_ms", "measured_throughput_per_s",
    "measured_memory_mib", "measured_items", "measured_facts", "retyped_before", "retyped_after", "retyped_why",
)  # fmt: skip
SLICE_FIELDS = (
    "node", "gpu", "gpu_index", "profile", "slot_start", "slot_size", "gi", "ci", "mig_uuid", "since", "until",
    "outcome",
)  # fmt: skip

_RENAMED = {
    "restart": "restarts",
    "submitted": "submitted_unix_s",
    "started": "started_unix_s",
    "ended": "ended_unix_s",
    "array_job": "array_job_id",
    "array_task": "array_task_id",
    "het_job": "het_job_id",
    "het_offset": "het_job_offset",
    "gpu": "gpu_uuid",
    "slot_start": "placement_start",
    "slot_size": "placement_size",
    "gi": "gpu_instance_id",
    "ci": "compute_instance_id",
    "since": "since_unix_s",
    "until": "until_unix_s",
}


Wholes = Mapping[str, tuple[int, int]]


def render(runs: Iterable[tuple[Any, Any]], wanted: RunFilter, now: float, wholes: Wholes) -> Iterator[str]:
    """Yield the lines of the document in JSON: one per run, so that large ones stay readable and fast.

    `wholes`: see `columns.Context`.
    """
    yield json.dumps(_head(wanted, now))[:-1] + ', "jobs": ['
    previous = None
    for run, slices in runs:
        if previous is not None:
            yield previous + ","
        previous = json.dumps(_job(run, slices, now, wholes))
    if previous is not None:
        yield previous
    yield "]}"


def render_yaml(runs: Iterable[tuple[Any, Any]], wanted: RunFilter, now: float, wholes: Wholes) -> Iterator[str]:
    """Yield the lines of the same document in YAML."""
    yield from mapping_lines(_head(wanted, now))
    has_jobs = False
    for run, slices in runs:
        if not has_jobs:
            yield "jobs:"
            has_jobs = True
        yield from item_lines([_job(run, slices, now, wholes)])
    if not has_jobs:
        yield "jobs: []"


def _head(wanted: RunFilter, now: float) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "generated_unix_s": now,
        "window": {"start_unix_s": wanted.start, "end_unix_s": wanted.end},
    }


def _job(run: Any, slices: Any, now: float, wholes: Wholes) -> dict[str, Any]:
    job: dict[str, Any] = {"job": job_id(run)}
    job.update((_RENAMED.get(name, name), getattr(run, name)) for name in RUN_FIELDS)
    job["measured_by"] = measured_by(job.pop("measured_facts"))
    job.update((f"{name}_active", busy(run, name)) for name in ("sm", "tensor", "dram"))
    job["consumed_energy_j"] = energy_j(run)
    before, after, why = (job.pop(f"retyped_{name}") for name in ("before", "after", "why"))
    job["retyped"] = {"from": before, "to": after, "why": why} if before and before != after else None
    job["prediction_error"] = prediction_error(run)
    job["elapsed_s"], job["queue_wait_s"] = elapsed_s(run, now), queue_wait_s(run, now)
    job["slice_hours"] = hours_of(slices, lambda row: slice_hours(row, now))
    job["gpu_hours"] = hours_of(slices, lambda row: gpu_hours(row, now, wholes))
    job["nodes"] = run.nodes.split(",") if run.nodes else []
    job["slices"] = [
        {_RENAMED.get(name, name): getattr(mig_slice, f"slice_{name}") for name in SLICE_FIELDS} for mig_slice in slices
    ]
    return job

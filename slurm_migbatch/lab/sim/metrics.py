"""Compute figures of a simulation: times, service level, use of the GPUs, disturbance, fairness."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from slurm_migbatch.lab.bars import mean_with_interval
from slurm_migbatch.lab.sim.engine import SimulationResult
from slurm_migbatch.lab.sim.job import SimulatedJob
from slurm_migbatch.lab.sim.run import SimulatedRun
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.profile import Profile

QUANTILES: Final = (50, 95, 99)


def summarise(result: SimulationResult, compared: Collection[int] | None = None) -> dict[str, Any]:
    """Return all figures of one simulation, as plain values.

    `all`, `train` and `infer` hold those of jobs (`of_jobs`), if there are any; `compared` has the same of the jobs
    with the ids `compared`, if these are given. Of the cluster:

    - `makespan_s`: from the first arrival to the last event, or to the end of the simulated time if jobs are left then;
    - `held`: compute-slice seconds that were held, as a share of the cluster's in the makespan; `busy_of_held`: the
      share of them with progress (in the rest, jobs start, wait for a checkpoint or for their instance); `busy`: the
      product of both;
    - `fragmentation`: mean over GPUs and time;
    - `waiting`: mean length of the queue;
    - `reconfigurations`: instances created and destroyed;
    - `actions`: changes of jobs through Slurm, by kind (only for `migbatch`).
    """
    capacity = result.slices * (result.end - result.begin)
    figures: dict[str, Any] = {
        "makespan_s": result.end - result.begin,
        "gpus": result.gpus,
        "held": _share(result.held, capacity),
        "busy_of_held": _share(result.busy, result.held),
        "busy": _share(result.busy, capacity),
        "fragmentation": result.fragmentation,
        "waiting": result.waiting,
        "created": result.created,
        "destroyed": result.destroyed,
        "reconfigurations": result.created + result.destroyed,
    }
    of_kind = {"all": list(result.runs)}
    for kind in ("train", "infer"):
        if found := [run for run in result.runs if run.job.kind == kind]:
            of_kind[kind] = found
    figures |= {kind: of_jobs(runs, result.end) for kind, runs in of_kind.items()}
    if compared is not None:
        figures["compared"] = {
            kind: of_jobs([run for run in runs if run.job.id in compared], result.end) for kind, runs in of_kind.items()
        }
    if result.actions:
        figures["actions"] = dict(result.actions)
    return figures


def of_workload(jobs: Sequence[SimulatedJob], geometry: Geometry) -> dict[str, Any]:
    """Return figures of what arrives, whatever the policy; times are in seconds.

    - `span_s`: from the first arrival to the last;
    - `work_s`: median of the jobs' lengths on what they request;
    - `gpus`: GPU equivalents that they need on average in the span; None if all arrive at once;
    - `without_limit`: number of jobs whose length stands for their time limit, because the trace has none.
    """
    arrivals = [job.arrival for job in jobs]
    span = max(arrivals) - min(arrivals)
    needed = sum(job.work * job.gpus * _equivalent(geometry, job.profile) for job in jobs)
    return {
        "jobs": len(jobs),
        "span_s": span,
        "work_s": float(np.median([job.work for job in jobs])),
        "gpus": needed / span if span else None,
        "without_limit": sum(job.estimate is None for job in jobs),
    }


def _equivalent(geometry: Geometry, profile: Profile | None) -> float:
    """Return the part of a GPU that a slice is; None is the whole GPU. Of another model's, the part of its compute."""
    if profile is None or profile not in geometry:
        return 1.0 if profile is None else min(1.0, profile.compute / geometry.compute_slices)
    info = geometry.info(profile)
    return max(info.compute_slices / geometry.compute_slices, info.memory_slices / geometry.memory_slices)


def of_jobs(runs: Sequence[SimulatedRun], end: float) -> dict[str, Any]:
    """Return figures of some jobs; a figure without any values is None.

    - `jct_s`: time from arrival to completion, of jobs that ended by `end`;
    - `queue_s`: time until they first held slices; `delay_s`: time until their first progress; of jobs that did;
    - `slo`: number of jobs with a limit on their end or their start that can be judged, number that exceeded one (too
      late, or not ended or started when the limit passed), and the share;
    - `restarts`: how often a job was interrupted or moved (`interrupted` plus `moved`), mean and maximum;
    - `lost_s`: work that had to be repeated; `paused_s`: time on slices without progress;
    - `jain`: fairness over users, from each user's mean of work / JCT (1: all are slowed down equally); None for fewer
      than two users.
    """
    ended = [run for run in runs if run.ended is not None]
    jct = np.array([run.ended - run.job.arrival for run in ended if run.ended is not None])
    queue = np.array([run.started - run.job.arrival for run in runs if run.started is not None])
    delay = np.array([run.began - run.job.arrival for run in runs if run.began is not None])
    restarts = np.array([run.preempted + run.moves for run in runs])
    count = len(runs)
    return {
        "jobs": count,
        "done": len(ended),
        "jct_s": _spread(jct),
        "queue_s": _spread(queue),
        "delay_s": _spread(delay),
        "slo": _slo(runs, end),
        "interrupted": sum(run.preempted for run in runs),
        "moved": sum(run.moves for run in runs),
        "restarts": {"mean": float(restarts.mean()) if count else None, "max": int(restarts.max(initial=0))},
        "lost_s": sum(run.lost for run in runs),
        "paused_s": sum(run.paused for run in runs),
        "jain": jain(shares) if len(shares := _by_user(ended)) > 1 else None,
    }


def jain(shares: Iterable[float]) -> float | None:
    """Return Jain's index, (sum x)^2 / (n sum x^2): 1 if all are equal, 1/n if one has everything.

    None without values, or if all are 0.
    """
    values = list(shares)
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else None


def over_seeds(figures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a tree like those of the seeds, with `{"mean", "low", "high"}` (95 %, Student's t) for each number.

    A number that a seed lacks is None. For one seed low and high are None.
    """
    merged: dict[str, Any] = {}
    for name, value in figures[0].items():
        column = [row.get(name) for row in figures]
        if isinstance(value, Mapping):
            merged[name] = over_seeds([entry if isinstance(entry, Mapping) else {} for entry in column])
            continue
        numbers = [float(entry) for entry in column if isinstance(entry, int | float)]
        if len(numbers) < len(column):
            merged[name] = None
            continue
        mean, low, high = mean_with_interval(numbers)
        merged[name] = {
            "mean": mean,
            "low": low if math.isfinite(low) else None,
            "high": high if math.isfinite(high) else None,
        }
    return merged


def _spread(values: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, float | None]:
    if not len(values):
        return dict.fromkeys(("mean", *(f"p{q}" for q in QUANTILES), "max"))
    quantiles = np.percentile(values, QUANTILES, method="inverted_cdf")
    return {
        "mean": float(values.mean()),
        **{f"p{q}": float(value) for q, value in zip(QUANTILES, quantiles, strict=True)},
        "max": float(values.max()),
    }


def _slo(runs: Sequence[SimulatedRun], end: float) -> dict[str, Any]:
    limited = broken = 0
    for run in runs:
        exceeded = [
            (end if moment is None else moment) - run.job.arrival > limit
            for moment, limit in ((run.ended, run.job.slo_s), (run.began, run.job.start_slo_s))
            if limit is not None and (moment is not None or end - run.job.arrival > limit)
        ]
        limited += bool(exceeded)
        broken += any(exceeded)
    return {"jobs": limited, "broken": broken, "share": broken / limited if limited else None}


def _by_user(done: Iterable[SimulatedRun]) -> list[float]:
    users: dict[str, list[float]] = {}
    for run in done:
        assert run.ended is not None
        if not run.job.user:
            continue
        jct_s = run.ended - run.job.arrival
        users.setdefault(run.job.user, []).append(run.job.work / jct_s if jct_s > 0 else 1.0)
    return [sum(values) / len(values) for values in users.values()]


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None

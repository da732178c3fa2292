"""Measure lending (E7) with default settings: migbatchd's decisions, other rules and a bound (`lendruns`).

Inference is synthetic, because no public trace has both it and training. Requests have the burst shape of a measured
LLM trace (`lab.traces.requests`): its arrivals, one stream for each application from a random point, are stretched
in time to a rate that follows the day (highest over lowest hour 4, as in Twitter's) and, about once an hour, is four
times as high for three minutes. Request times are log-normal. Number of requests, applications and mean times are those
of DeepBoot's three workloads. Three days before are drawn in the same way and are the history for the forecast.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from slurm_migbatch.decide.lending.forecast import DAY_S
from slurm_migbatch.lab.bars import NotMeasurable, mean_with_interval
from slurm_migbatch.lab.progress import Progress, silent
from slurm_migbatch.lab.sim.metrics import of_jobs
from slurm_migbatch.lab.sim.run import SimulatedRun
from slurm_migbatch.lab.traces import requests as requests_trace
from slurm_migbatch.lab.traces.files import below

SPAN_S: Final = 55_400.0
HISTORY_DAYS: Final = 3
OPENING_S: Final = 8 * 3600.0
"""Time of day of the first training jobs."""
DAY_SWING: Final = 0.6
BURST: Final = 4.0
BURST_EVERY_S: Final = 3600.0
BURST_S: Final = 180.0
SPREAD: Final = 0.67
"""Of the logarithm of a request's time: Alibaba's image generation has a median of 23 s and a 95th percentile of 69."""
TARGET_DELAY_S: Final = 8.0
TARGET_RESTARTS: Final = 3.0


@dataclass(frozen=True)
class Load:
    """Amount of inference.

    Attributes:
        requests: in `SPAN_S`, as far as the measured stream lasts. `mean_s`: mean seconds of one.
        whole: whether all jobs have whole GPUs, as slices of the full one (`lendslices` only).
        site: whether inference is jobs of a Slurm site, of minutes to hours (`lendslices` only); then `requests` and
            `mean_s` are unused.
    """

    name: str
    requests: int
    apps: int
    mean_s: float
    whole: bool = False
    site: bool = False


def requests(load: Load, shape: np.ndarray[Any, np.dtype[np.float64]], seed: int) -> list[tuple[float, int, float]]:
    """Return the requests of the history and the run in order: when, application, seconds.

    The run begins after the history.
    """
    rng = np.random.Generator(np.random.PCG64([seed, load.requests]))
    before = HISTORY_DAYS * DAY_S
    grid = np.arange(0.0, before + SPAN_S + 60.0, 60.0)
    hours = (grid + OPENING_S) / DAY_S * 2 * math.pi
    usual = 1.0 - DAY_SWING * np.cos(hours - 2 * math.pi * 2 / 24)
    share = 1.0 / np.arange(1, load.apps + 1)
    share /= share.sum()
    events: list[tuple[float, int, float]] = []
    gaps = np.diff(shape)
    gaps = gaps / gaps.mean()
    for app in range(load.apps):
        whole_run = _with_bursts(usual, grid, rng)
        per_unit = load.requests / (whole_run[-1] - np.interp(before, grid, whole_run))
        count = int(whole_run[-1] * per_unit * share[app])
        turns = np.take(gaps, np.arange(count) + int(rng.integers(len(gaps))), mode="wrap")
        at = np.interp(np.cumsum(turns) / (per_unit * share[app]), whole_run, grid, right=math.inf)
        times = rng.lognormal(math.log(load.mean_s) - SPREAD**2 / 2, SPREAD, count)
        events += [(t, app, s) for t, s in zip(at.tolist(), times.tolist(), strict=True) if t < before + SPAN_S]
    events.sort()
    return events


def _with_bursts(
    usual: np.ndarray[Any, np.dtype[np.float64]],
    grid: np.ndarray[Any, np.dtype[np.float64]],
    rng: np.random.Generator,
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the sum of a rate up to each moment of `grid`, with bursts at random moments."""
    rate = usual.copy()
    for begin in np.cumsum(rng.exponential(BURST_EVERY_S, int(2 * grid[-1] / BURST_EVERY_S))).tolist():
        rate[(grid >= begin) & (grid < begin + max(60.0, rng.exponential(BURST_S)))] *= BURST
    return np.concatenate([[0.0], np.cumsum(rate)[:-1] * 60.0])


def complete(values: dict[str, float]) -> dict[str, float]:
    """Return the figures of a simulation in which every job ended; raises NotMeasurable if one did not."""
    if values.pop("unfinished"):
        raise NotMeasurable("a job never ended: this is a bug in the simulation")
    return values


def figures(runs: Sequence[SimulatedRun], end: float, reclaims: int) -> dict[str, float]:
    """Return the kept figures of a simulation of training and inference; `unfinished` are jobs that did not end."""
    train = of_jobs([run for run in runs if run.job.kind == "train"], end)
    infer = of_jobs([run for run in runs if run.job.kind == "infer"], end)
    return {
        "jct_s": train["jct_s"]["mean"],
        "jct_p50_s": train["jct_s"]["p50"],
        "jct_p99_s": train["jct_s"]["p99"],
        "restarts": train["restarts"]["mean"],
        "restarts_max": train["restarts"]["max"],
        "delay_mean_s": infer["delay_s"]["mean"],
        "delay_p95_s": infer["delay_s"]["p95"],
        "delay_p99_s": infer["delay_s"]["p99"],
        "delay_max_s": infer["delay_s"]["max"],
        "reclaimed": reclaims,
        "paused_s": train["paused_s"],
        "unfinished": train["jobs"] + infer["jobs"] - train["done"] - infer["done"],
    }


def measure(
    data: Path, seeds: int = 10, loads: Sequence[Load] | None = None, progress: Progress = silent, processes: int = 1
) -> dict[str, Any]:
    """Run the experiment on a directory with Pollux's and MISO's data and a measured request trace.

    Seed n takes the arrivals of workload n (cyclically) and its own requests. `loads` None: those of `lendslices`.
    `processes` is that of `lendruns.measure`. Raises NotMeasurable, TraceError, OSError.
    """
    from slurm_migbatch.lab.experiments import lendruns, lendslices  # imports this module

    origin, moments, miso = lendslices.inputs(data, seeds)
    results = lendruns.measure(
        miso, moments, seeds, lendslices.LOADS if loads is None else loads, progress=progress, processes=processes
    )
    settings = lendruns.settings()
    notes = [
        "MISO's jobs on one slice each, at the moments of Pollux's workloads; each application of inference has bursts "
        f"of its own; limit of inference: 95 of 100 start within {lendslices.PROMISE_S:g} s",
        f"inference: synthetic, bursts from {origin}, day pattern, {HISTORY_DAYS} days of history",
        f"{settings['decides']} decides, with the shipped configuration {settings['configuration']}",
    ]
    return {
        "bench": "lending",
        "data": str(data),
        "seeds": seeds,
        "nodes": lendslices.NODES,
        "gpus": lendslices.NODES * lendslices.PER_NODE,
        **settings,
        "notes": notes,
        "results": results,
        "bars": [bar.to_dict() for result in results for bar in lendruns.bars(result)],
    }


def pollux_files(data: Path) -> tuple[Path, list[Path]]:
    """Return the directory of Pollux's profiles and its workloads. Raises NotMeasurable."""
    traces = next((path.parent.parent for path in below(data, "cifar10/placements.csv*")), None)
    workloads = below(data, "workloads/workload-*.csv")
    if traces is None or not workloads:
        raise NotMeasurable(f"{data} has no Pollux data (cifar10/placements.csv, workloads/workload-1.csv) below it")
    return traces, workloads


def request_shape(data: Path) -> tuple[str, np.ndarray[Any, np.dtype[np.float64]]]:
    """Return the name of a measured request stream and its moments, seconds. Raises NotMeasurable, TraceError."""
    trace = requests_trace.first_below(data)
    if trace is None:
        raise NotMeasurable(f"{data} has no request trace (Azure's, Mooncake's as CSV, or BurstGPT) below it")
    return trace[0], np.array(trace[1])


def summary(load: Load, figures: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """Compute means over seeds of each way, and its ratio to *half* seed by seed."""
    base = [row["jct_s"] for row in figures["half"]]
    ways = {}
    for name, runs in figures.items():
        ratio = [run["jct_s"] / half for run, half in zip(runs, base, strict=True)]
        ways[name] = {
            "jct_ratio": [round(value, 4) for value in _interval(ratio)],
            **{key: round(statistics.fmean(run[key] for run in runs), 3) for key in runs[0]},
            "restarts_interval": [round(value, 3) for value in _interval([run["restarts"] for run in runs])],
        }
    return {
        "load": load.name,
        "requests": load.requests,
        "seeds": len(base),
        "apps": load.apps,
        "mean_s": load.mean_s,
        "ways": ways,
    }


def _interval(values: Sequence[float]) -> list[float]:
    return [value for value in mean_with_interval(values) if math.isfinite(value)]

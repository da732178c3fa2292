"""Lending (E7): as it ships (`lendslices`), and a study of DeepBoot's policy on whole GPUs, which has no bar of ours.

The study: 16 nodes of four GPUs, half of them inference's. migbatchd lends no job several GPUs; what decides here is
`decide.lending.allocation.allocate`, with settings of the study's own.

Training jobs are Pollux's workloads (160 each), elastic between 1 and 64 GPUs. Their speed is the goodput model fitted
to Pollux's measured steps, with the noise scale that explains its measured iterations to the target at several batches;
the same model decides and is the truth, so the gain is one of scheduling only. How much the other half is worth hangs
on that scale: with less noise jobs gain less from more GPUs, whoever lends them.

Inference is made up, since no public trace has both. Requests come with the burst shape of a measured LLM trace (Azure
2023, or Mooncake): its arrivals, one stream for each application from a point of its own, are stretched in time to a
rate that follows the day (highest over lowest hour 4, as Twitter's) and, about once an hour, is four times as high for
three minutes. Request times are log-normal. Number of requests, applications and mean times are those of DeepBoot's
three workloads; costs of starts and restarts are the authors' table. Three days before are drawn in the same way and
are the history that the forecast has.

- *half*: our rules for training on its own half, inference on the other. *half, ATS*: DeepBoot's rules there.
- *servers*: whole idle nodes are lent and called back (Lyra's loans; a reconstruction). *no forecast*: ours, lending
  whatever is idle. *DeepBoot*: its rules throughout. *ours*.
- Not ways to run a cluster: *restless* uses every idle GPU every minute, however many restarts that takes; *free* does
  so with restarts that cost nothing, and stands for a bound (placing and sizes are decided as for the others).

Idle replicas are protected as DeepBoot does on a dedicated half and in its own way, and nowhere else.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from slurm_migbatch.decide.lending.allocation import Hysteresis, RestartCosts
from slurm_migbatch.decide.lending.forecast import DAY_S
from slurm_migbatch.lab.bars import NotMeasurable, mean_with_interval
from slurm_migbatch.lab.papers.forecast import Levels
from slurm_migbatch.lab.papers.goodput import Goodput, GoodputError, Observed, fit
from slurm_migbatch.lab.say import Say, silent
from slurm_migbatch.lab.sim.cluster import SimulatedCluster
from slurm_migbatch.lab.sim.engine import Simulation
from slurm_migbatch.lab.sim.gpus import whole
from slurm_migbatch.lab.sim.job import JobCosts, SimulatedJob
from slurm_migbatch.lab.sim.metrics import of_jobs
from slurm_migbatch.lab.sim.policies.lending import SIZES, GoodputSpeeds, Way, WholeGpuLending
from slurm_migbatch.lab.sim.run import SimulatedRun
from slurm_migbatch.lab.traces import azure, mooncake, pollux

NODES: Final = 16
PER_NODE: Final = 4
MOST: Final = SIZES[-1]
SPAN_S: Final = 55_400.0
HISTORY_DAYS: Final = 3
OPENING_S: Final = 8 * 3600.0
"""Time of day at which the training jobs begin to come."""
DAY_SWING: Final = 0.6
BURST: Final = 4.0
BURST_EVERY_S: Final = 3600.0
BURST_S: Final = 180.0
SPREAD: Final = 0.67
"""Of the logarithm of a request's time: Alibaba's image generation has a median of 23 s and a 95th percentile of 69."""
TARGET_DELAY_S: Final = 8.0
TARGET_RESTARTS: Final = 3.0

AFE: Final[Mapping[str, RestartCosts]] = {
    "bert": RestartCosts(103, 5),
    "cifar10": RestartCosts(24, 3),
    "ncf": RestartCosts(25, 2),
    "deepspeech2": RestartCosts(18, 1),
    "yolov3": RestartCosts(26, 3),
    "imagenet": RestartCosts(35, 3),
}
FREE: Final[Mapping[str, RestartCosts]] = dict.fromkeys(AFE, RestartCosts(0.0, 0.0))
COLD_S: Final = (8.0, 6.0, 6.0, 6.0, 4.0, 4.0)
"""Cold starts of the authors' six inference applications."""

_RESTLESS: Final = Hysteresis(first_s=0.0, growth=1.0, most_s=0.0, idle_s=0.0, rest_s=0.0, gain=1.2)
WAYS: Final[Mapping[str, Way]] = {
    "half": Way(lend=False, calm=Hysteresis(), protect=1.0),
    "half, ATS": Way(lend=False, calm=None, protect=1.0),
    "servers": Way(servers=True, forecast=False),
    "no forecast": Way(forecast=False),
    "DeepBoot": Way(forecast=False, calm=None, protect=1.0, surge=1.0),
    "ours": Way(),
    "restless": Way(forecast=False, calm=_RESTLESS, surge=1.0),
    "free": Way(forecast=False, calm=replace(_RESTLESS, gain=1.0), surge=1.0),
}


@dataclass(frozen=True)
class Load:
    """How much inference there is.

    Attributes:
        requests: in `SPAN_S`, as far as the measured stream reaches. `mean_s`: mean seconds of one.
        apart: whether each application has bursts of its own; else all have them together.
        whole: whether everybody has whole GPUs, as slices of the full one (`lendslices` only).
        site: whether inference is jobs of a Slurm site, of minutes to hours (`lendslices` only); then `requests` and
            `mean_s` say nothing.
    """

    name: str
    requests: int
    apps: int
    mean_s: float
    apart: bool = False
    whole: bool = False
    site: bool = False


LOADS: Final = (Load("small", 3200, 6, 5.0), Load("middle", 16_000, 18, 10.0), Load("large", 32_000, 30, 15.0))


def goodputs(folder: Path) -> dict[str, Goodput]:
    """Fit the model of each application in a folder of Pollux's traces. Raises TraceError, GoodputError."""
    models = {}
    for app, profile in pollux.profiles(folder).items():
        rows = [
            Observed(nodes, replicas, step.batch, step.seconds - step.sync, step.seconds)
            for (nodes, replicas), steps in profile.steps.items()
            for step in steps
            if step.seconds > step.sync
        ]
        batches = [batch for batch, _ in profile.iterations]
        local = [row.local for row in rows]
        models[app] = Goodput(
            fit(rows), _noise(profile.iterations), batches[0], batches[-1], int(min(local)), int(max(local))
        )
    return models


def _noise(iterations: Sequence[tuple[int, float]]) -> float:
    """Return the noise scale that explains best how many more items larger batches took to the same target.

    Least squares of the logarithms, over a grid from a tenth of the smallest batch to a thousand of the largest.
    """
    batches = np.array([batch for batch, _ in iterations], dtype=np.float64)
    items = batches * np.array([count for _, count in iterations])
    grid = np.geomspace(batches[0] / 10, batches[-1] * 1000, 400)[:, None]
    expected = np.log((grid + batches) / (grid + batches[0]))
    errors = np.square(expected - np.log(items / items[0])).sum(axis=1)
    return float(grid[int(errors.argmin()), 0])


def training(
    path: Path, known: dict[str, pollux.ApplicationProfile], models: Mapping[str, Goodput]
) -> list[SimulatedJob]:
    """Return a workload's jobs, elastic; work is seconds on one GPU at its best batch."""
    jobs = []
    for job in pollux.read(path, known).jobs:
        model = models[job.app]
        best = model.best(1)
        if best is None or job.app not in AFE:
            raise NotMeasurable(f"{path}: {job.app} cannot be trained on one GPU, or its restarts are not known")
        items = known[job.app].iterations_of(model.first_batch) * model.first_batch
        max_gpus = max(size for size in SIZES if size <= MOST and model.speedup(size, -(-size // PER_NODE)) > 0)
        costs = JobCosts(AFE[job.app].full, AFE[job.app].full, AFE[job.app].resize)
        jobs.append(replace(job, work=items / best.goodput, gpus=1, least=1, most=max_gpus, costs=costs))
    return jobs


def inference(load: Load, shape: np.ndarray[Any, np.dtype[np.float64]], seed: int) -> tuple[list[SimulatedJob], Levels]:
    """Return the requests of the run, and the history before it; see the module."""
    return _split(requests(load, shape, seed), HISTORY_DAYS * DAY_S)


def requests(load: Load, shape: np.ndarray[Any, np.dtype[np.float64]], seed: int) -> list[tuple[float, int, float]]:
    """Return the requests of the history and the run in order: when, application, seconds.

    The run begins after the history.
    """
    rng = np.random.Generator(np.random.PCG64([seed, load.requests]))
    before = HISTORY_DAYS * DAY_S
    grid = np.arange(0.0, before + SPAN_S + 60.0, 60.0)
    hours = (grid + OPENING_S) / DAY_S * 2 * math.pi
    usual = 1.0 - DAY_SWING * np.cos(hours - 2 * math.pi * 2 / 24)
    whole_run = _with_bursts(usual, grid, rng)
    share = 1.0 / np.arange(1, load.apps + 1)
    share /= share.sum()
    events: list[tuple[float, int, float]] = []
    gaps = np.diff(shape)
    gaps = gaps / gaps.mean()
    for app in range(load.apps):
        if load.apart and app:
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


def _split(events: Sequence[tuple[float, int, float]], before: float) -> tuple[list[SimulatedJob], Levels]:
    levels = Levels()
    changes = sorted(
        change for at, _, seconds in events if at < before for change in ((at, 1), (min(at + seconds, before), -1))
    )
    level = 0
    for at, by in changes:
        level += by
        levels.demand(at, level, max(by, 0))
    jobs = [
        SimulatedJob(
            1_000_000 + number,
            f"infer{app}-{number}",
            at - before,
            max(seconds, 0.1),
            kind="infer",
            app=f"infer{app}",
            costs=JobCosts(cold_start_s=COLD_S[app % len(COLD_S)]),
        )
        for number, (at, app, seconds) in enumerate(events)
        if at >= before
    ]
    return jobs, levels


def simulate(
    jobs: Sequence[SimulatedJob],
    load: Load,
    shape: np.ndarray[Any, np.dtype[np.float64]],
    learning: GoodputSpeeds,
    way: Way,
    seed: int,
    costs: Mapping[str, RestartCosts] = AFE,
) -> dict[str, float]:
    """Run one simulation and return its figures; `costs` of restarts by application."""
    requests, levels = inference(load, shape, seed)
    half = NODES // 2 * PER_NODE
    policy = WholeGpuLending(range(half), range(half, 2 * half), learning, costs, way, levels, HISTORY_DAYS * DAY_S)
    cluster = SimulatedCluster.of(whole("a100-80gb"), NODES * PER_NODE, PER_NODE)
    result = Simulation(cluster, [*jobs, *requests], policy, learning, seed=seed).run()
    return complete(figures(result.runs, result.end, policy.reclaims))


def complete(values: dict[str, float]) -> dict[str, float]:
    """Return the figures of a simulation in which every job was done; raises NotMeasurable where one was not."""
    if values.pop("unfinished"):
        raise NotMeasurable("a job never ended: this is a bug in the simulation")
    return values


def figures(runs: Sequence[SimulatedRun], end: float, reclaims: int) -> dict[str, float]:
    """Return what is kept of a simulation of training and inference; `unfinished` are jobs that were never done."""
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
    data: Path,
    seeds: int = 10,
    loads: Sequence[Load] = LOADS,
    ways: Mapping[str, Way] = WAYS,
    slices: Sequence[Load] | None = None,
    study: bool = True,
    say: Say = silent,
    processes: int = 1,
) -> dict[str, Any]:
    """Run the whole experiment on a folder with Pollux's data and a measured request trace.

    Seed n takes workload n (in turn) and requests of its own. `slices` are the loads of the part on MIG slices
    (`lendslices`; its own where not given), which is measured where MISO's data is there. Without `study` the study on
    whole GPUs is left out. `processes` is that of `lendruns.measure`.

    Raises:
        NotMeasurable: something is missing.
        TraceError, OSError: a file cannot be read.
    """
    traces, workloads = pollux_files(data)
    try:
        models = goodputs(traces)
    except GoodputError as error:
        raise NotMeasurable(f"{traces}: {error}") from None
    known = pollux.profiles(traces)
    origin, shape = request_shape(data)
    learning = GoodputSpeeds(models, PER_NODE)
    jobs = [training(path, known, models) for path in workloads[:seeds]]
    results = []
    for load in loads if study else ():
        of: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
        for seed in range(seeds):
            for name, way in ways.items():
                say(f"the study, {load.name}: seed {seed}, {name}", len(loads) * seeds * len(ways))
                costs = FREE if name == "free" else AFE
                of[name].append(simulate(jobs[seed % len(jobs)], load, shape, learning, way, seed, costs))
        results.append(summary(load, of))
    for result in results:
        result["study"] = True
    from slurm_migbatch.lab.experiments import lendruns, lendslices  # which are made of this module

    notes = (
        []
        if not study
        else [
            f"study of DeepBoot's policy: {len(jobs)} Pollux workloads of {len(jobs[0])} jobs, elastic on whole GPUs; "
            "decide.lending.allocation.allocate decides, with settings of the study's own; migbatchd does not lend so",
            f"inference: synthetic, bursts from {origin}, day pattern, {HISTORY_DAYS} days of history",
            "restless uses every idle GPU every minute at any cost; free does so at no cost, as a bound",
            "Lyra's loans of whole servers are a reconstruction; all ways of one load share jobs, requests and costs",
        ]
    )
    miso = lendslices.miso(data)
    shipped: list[dict[str, Any]] = []
    if miso is None:
        notes.append("nothing on slices: the data has no MISO (job_models.json, exp_100.json, miso_*_step_times.csv)")
    else:
        arrivals = [[job.arrival for job in workload] for workload in jobs]
        moments = lendslices.Moments(arrivals, shape, lendslices.philly_jobs(data))
        of_slices = lendslices.LOADS if slices is None else slices
        shipped = lendruns.measure(miso, moments, seeds, of_slices, say=say, processes=processes)
        notes.append(
            "slices: MISO's jobs on one slice each; each application of inference has bursts of its own; limit of "
            f"inference: 95 of 100 start within {lendslices.PROMISE_S:g} s"
        )
    settings = lendruns.settings()
    notes.append(f"slices: {settings['decides']} decides, with the shipped configuration {settings['configuration']}")
    return {
        "bench": "lending",
        "data": str(data),
        "seeds": seeds,
        "nodes": NODES,
        "gpus": NODES * PER_NODE,
        **settings,
        "notes": notes,
        "results": [*shipped, *results],
        "bars": [bar.to_dict() for result in shipped for bar in lendruns.bars(result)],
    }


def pollux_files(data: Path) -> tuple[Path, list[Path]]:
    """Return the folder of Pollux's profiles and its workloads. Raises NotMeasurable."""
    traces = next((path.parent.parent for path in sorted(data.rglob("cifar10/placements.csv*"))), None)
    workloads = sorted(data.rglob("workloads/workload-*.csv"))
    if traces is None or not workloads:
        raise NotMeasurable(f"{data} has no Pollux data (cifar10/placements.csv, workloads/workload-1.csv) below it")
    return traces, workloads


def request_shape(data: Path) -> tuple[str, np.ndarray[Any, np.dtype[np.float64]]]:
    """Return the name of a measured request stream and its moments, seconds. Raises NotMeasurable, TraceError."""
    readers: tuple[tuple[str, str, Callable[[Path], Any]], ...] = (
        ("Azure 2023", "AzureLLMInferenceTrace_conv.csv*", azure.read),
        ("Mooncake", "mooncake_conversation_1h.csv*", mooncake.read),
    )
    for name, pattern, read in readers:
        for path in sorted(data.rglob(pattern)):
            times = np.array([request.time for request in read(path).requests])
            if len(times) > 2 and times[-1] > times[0]:
                return name, times
    raise NotMeasurable(f"{data} has no request trace (Azure's of 2023 or Mooncake's) below it")


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

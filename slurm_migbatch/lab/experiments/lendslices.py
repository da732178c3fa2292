"""Define the jobs of `migbatch bench lending`: training with one slice each, and inference with varying load.

Four nodes of four GPUs, half of them inference's. Training jobs have one slice each, of any size that they fit on.
Their models, batches and run times are those of MISO's 100 jobs, drawn with replacement; their speeds on
slices are MISO's table; they arrive like the jobs of one of Pollux's workloads, plus every second one of another.
Inference is jobs of Slurm, each on a slice of its own whose profile depends on its application. All starts, restarts
and checkpoints cost time.

Inference is synthetic, because no public trace has both it and training. Requests have the burst shape of a measured
LLM trace (`lab.traces.requests`): its arrivals, one stream for each application from a random point, are stretched in
time to a rate that follows the day (highest over lowest hour 4, as in Twitter's) and, about once an hour, is four times
as high for three minutes. Request times are log-normal. Three days before are drawn in the same way and are the history
for the forecast.

Inference's limit is that 95 of 100 requests start within `PROMISE_S` of their arrival. Every load keeps it without
lending (mean of ten seeds): each application has its own bursts, because common bursts exceeded it from
the medium load on, and the large load is the largest one that keeps it. The load of whole GPUs gives every request and
every training job a slice of the full GPU (7g).

The load of a Slurm site has no synthetic requests: inference is the jobs of one GPU and one minute to four hours of the
Philly trace, with its arrivals and run times, of which so many are drawn that `SITE_BUSY` slices would be in use on
average; each seed begins on another day. A virtual cluster has at most `SITE_LIMIT` of them at once, like with Slurm's
limits: a job beyond them arrives when one has ended. Without that, a virtual cluster that submits hundreds at once
fills inference's half for hours. Training has twice as many jobs, so that some are always queued. (Helios contains the
number of GPUs in use but not their jobs, so it cannot be used.)
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, Final

import numpy as np

from slurm_migbatch.decide.lending.forecast import DAY_S
from slurm_migbatch.lab.bars import NotMeasurable
from slurm_migbatch.lab.sim.curves import Curves, RateTable
from slurm_migbatch.lab.sim.gpus import geometry
from slurm_migbatch.lab.sim.job import JobCosts, SimulatedJob
from slurm_migbatch.lab.traces import joblog, pollux
from slurm_migbatch.lab.traces import requests as requests_trace
from slurm_migbatch.lab.traces.files import below
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.profiling.table import read_folder
from slurm_migbatch.workload.refusal import show

GPU: Final = "a100-80gb"
NODES: Final = 4
PER_NODE: Final = 4
TRAINING: Final = "train"
"""The partition of training, which has the first half of the nodes to itself."""
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
PROFILES: Final = tuple(
    Profile.parse(name) for name in ("1g.10gb", "2g.20gb", "1g.10gb", "3g.40gb", "1g.10gb", "2g.20gb", "1g.10gb")
)
"""Of inference applications, in turn; the first applications have the most requests."""


@dataclass(frozen=True)
class Load:
    """Amount of inference.

    Attributes:
        requests: in `SPAN_S`, as far as the measured stream lasts. `mean_s`: mean seconds of one.
        whole: whether all jobs have whole GPUs, as slices of the full one.
        site: whether inference is jobs of a Slurm site, of minutes to hours; then `requests` and
            `mean_s` are unused.
    """

    name: str
    requests: int
    apps: int
    mean_s: float
    whole: bool = False
    site: bool = False


LOADS: Final = (
    Load("slices, small", 5200, 6, 60.0),
    Load("slices, middle", 13_000, 18, 60.0),
    Load("slices, large", 17_500, 30, 60.0),
    Load("whole GPUs as 7g, middle", 1700, 18, 60.0, whole=True),
    Load("slices, Slurm site", 0, 7, 0.0, site=True),
)
"""The first three: about a tenth, a quarter and four tenths of the capacity of inference's half, over the day."""
SITE_BUSY: Final = 9.0
SITE_LIMIT: Final = 6
"""Jobs of one virtual cluster at once."""
SITE_SHORTEST_S: Final = 60.0
SITE_LONGEST_S: Final = 4 * 3600.0
SITE_FIRST_DAY: Final = 36
"""Part of the trace after its quiet beginning."""
SITE_DAYS: Final = 3
"""Between the beginnings of two seeds."""
PROMISE_S: Final = 15.0
"""Time within which 95 of 100 requests must start, including a cold start of six."""
INFER: Final = JobCosts(cold_start_s=6.0)
TRAIN: Final = JobCosts(cold_start_s=25.0, restart_s=25.0, checkpoint_s=5.0)
"""30 s for checkpoint, new slice and restart are MISO's budget."""

_MISO: Final = {
    "bert": "bert-base",
    "mobilenet": "mobilenet-v2",
    "resnet": "resnet50",
    "embedding": "miso-embedding",
    "gnn": "miso-gnn",
    "transformer": "miso-transformer",
}
"""Models by their names in MISO's list of jobs, if the table has another."""


@dataclass(frozen=True)
class Moments:
    """Arrivals.

    Attributes:
        arrivals: of training, by workload, used cyclically.
        shape: moments of a measured request stream.
        site: the inference jobs of a Slurm site; empty without its trace (then its load is skipped).
    """

    arrivals: Sequence[Sequence[float]]
    shape: np.ndarray[Any, np.dtype[np.float64]]
    site: Sequence[SimulatedJob] = ()


@dataclass(frozen=True)
class Miso:
    """MISO's data: speeds, and the model, batch and run time (s on the whole GPU) of its jobs."""

    speeds: Curves
    jobs: tuple[tuple[str, int, float], ...]


def miso(data: Path) -> Miso | None:
    """Read MISO's data below a directory; None if they are missing. Raises NotMeasurable, TableError, OSError."""
    models = next(iter(below(data, "job_models.json")), None)
    times = next(iter(below(data, "exp_100.json")), None)
    steps = next(iter(below(data, "miso_*_train_step_times.csv")), None)
    if models is None or times is None or steps is None:
        return None
    gpu = geometry(GPU)
    table = RateTable(read_folder(steps.parent), gpu)
    seconds = _by_number(times, (int, float), "seconds")
    jobs = []
    for number, name in _by_number(models, (str,), "a model").items():
        model, _, batch = name.partition("_train")
        app = _MISO.get(model, model)
        if app in table.apps("train") and batch.isdecimal() and 0 < seconds.get(number, 0) < math.inf:
            jobs.append((app, int(batch), float(seconds[number])))
    if not jobs:
        raise NotMeasurable(f"{models}: none of its models is in {steps}")
    return Miso(Curves(table, gpu), tuple(jobs))


def _by_number(path: Path, kinds: tuple[type, ...], what: str) -> dict[str, Any]:
    """Read values by the number of a job. Raises NotMeasurable, OSError."""
    try:
        values_by_number = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise NotMeasurable(f"{path} is not JSON: {error}") from None
    if not isinstance(values_by_number, dict):
        raise NotMeasurable(f"{path} must have one object with {what} for each job")
    for number, value in values_by_number.items():
        if not isinstance(value, kinds):
            raise NotMeasurable(f"{path}: job {show(number)} must have {what}, not {show(str(value))}")
    return values_by_number


def inputs(data: Path, workloads: int) -> tuple[str, Moments, Miso]:
    """Read everything from a directory with Pollux's and MISO's data and a request trace; also the trace's name.

    `workloads`: how many of Pollux's workloads to read. Raises NotMeasurable, TraceError, TableError, OSError.
    """
    traces, paths = pollux_files(data)
    miso_data = miso(data)
    if miso_data is None:
        raise NotMeasurable(f"{data} has no MISO data (job_models.json, exp_100.json, miso_*_step_times.csv) below it")
    known = pollux.profiles(traces)
    origin, shape = request_shape(data)
    arrivals = [[job.arrival for job in pollux.read(path, known).jobs] for path in paths[:workloads]]
    return origin, Moments(arrivals, shape, philly_jobs(data)), miso_data


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
        raise NotMeasurable(f"{data} has no request trace (Azure's, Mooncake's, or BurstGPT) below it")
    return trace[0], np.array(trace[1])


def training(miso_data: Miso, arrivals: Sequence[float], seed: int, whole: bool = False) -> list[SimulatedJob]:
    """Return jobs with these arrivals, drawn from MISO's; `whole`: only the full GPU is allowed."""
    profile = geometry(GPU).full.profile if whole else None
    rng = np.random.Generator(np.random.PCG64([seed, len(arrivals)]))
    picks = rng.integers(len(miso_data.jobs), size=len(arrivals)).tolist()
    jobs = []
    for n, (at, pick) in enumerate(zip(sorted(arrivals), picks, strict=True)):
        app, batch, seconds = miso_data.jobs[pick]
        jobs.append(SimulatedJob(n, f"{app}-{n}", at, seconds, app=app, batch=batch, profile=profile, costs=TRAIN))
    return jobs


def philly_jobs(data: Path) -> tuple[SimulatedJob, ...]:
    """Read the jobs of one GPU and one minute to four hours; none if the trace is not below `data`.

    Raises TraceError, OSError.
    """
    path = next(iter(below(data, "philly_jobs.csv*")), None)
    if path is None:
        return ()
    return tuple(
        job for job in joblog.read(path).jobs if job.gpus == 1 and SITE_SHORTEST_S <= job.work <= SITE_LONGEST_S
    )


def synthetic(
    load: Load, shape: np.ndarray[Any, np.dtype[np.float64]], seed: int, *, together: bool = False
) -> list[tuple[float, int, float]]:
    """Return the requests of the history and the run in order: when, application, seconds.

    The run begins after the history. `together`: all applications have the same bursts.
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
        if not (app and together):
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


def requests(load: Load, moments: Moments, seed: int) -> list[tuple[float, int, float]]:
    """Return inference of the previous days and of the run, in order: time, application, seconds."""
    if not load.site:
        return synthetic(load, moments.shape, seed)
    span = HISTORY_DAYS * DAY_S + SPAN_S
    end = moments.site[-1].arrival if moments.site else 0.0
    first = (SITE_FIRST_DAY + SITE_DAYS * seed) * DAY_S % max(DAY_S, end - span)
    jobs = [job for job in moments.site if first <= job.arrival < first + span]
    if not jobs:
        raise NotMeasurable("the site's trace has no jobs of a few minutes to hours on the days of a seed")
    rng = np.random.Generator(np.random.PCG64([seed, len(jobs)]))
    chosen = rng.random(len(jobs)) < SITE_BUSY * span / sum(job.work for job in jobs)
    apps = dict(zip([job.id for job in jobs], rng.integers(load.apps, size=len(jobs)).tolist(), strict=True))
    arrivals = _limited([job for job, keep in zip(jobs, chosen.tolist(), strict=True) if keep], SITE_LIMIT)
    return [(at - first, apps[job.id], job.work) for at, job in arrivals if at < first + span]


def _limited(jobs: Sequence[SimulatedJob], limit: int) -> list[tuple[float, SimulatedJob]]:
    """Return when each job may start, in order, if a user has at most `limit` at once."""
    ends: dict[str, list[float]] = {}
    starts = []
    for job in jobs:
        running = ends.setdefault(job.user, [])
        at = job.arrival if len(running) < limit else max(job.arrival, heappop(running))
        heappush(running, at + job.work)
        starts.append((at, job))
    return sorted(starts, key=lambda pair: (pair[0], pair[1].id))


def inference(
    load: Load, moments: Moments, seed: int
) -> tuple[list[SimulatedJob], list[tuple[str, float, float | None]]]:
    """Return the inference jobs of the run, and the uses of slices in the previous days.

    The uses are in the form of migbatchd's record.
    """
    before = HISTORY_DAYS * DAY_S
    jobs: list[SimulatedJob] = []
    uses: list[tuple[str, float, float | None]] = []
    full = geometry(GPU).full.profile
    for number, (at, app, seconds) in enumerate(requests(load, moments, seed)):
        profile = full if load.whole else PROFILES[app % len(PROFILES)]
        if at < before:
            uses.append((str(profile), at, min(at + seconds + INFER.cold_start_s, before)))
        else:
            work = max(seconds, 0.1)
            name = f"infer{app}-{number}"
            jobs.append(
                SimulatedJob(1_000_000 + number, name, at - before, work, "infer", profile=profile, costs=INFER)
            )
    return jobs, uses


class _Speeds(Curves):
    """Inference runs at 1 on its requested slice."""

    def speed(self, job: SimulatedJob, places: Sequence[Any]) -> float:
        """See `sim.speeds.Speeds`."""
        return 1.0 if job.kind == "infer" else super().speed(job, places)


def speeds_of(miso_data: Miso) -> Curves:
    """Return MISO's speeds of training; inference runs at 1."""
    return _Speeds(miso_data.speeds.source, miso_data.speeds.geometry)


def arrivals_of(load: Load, arrivals: Sequence[Sequence[float]], seed: int) -> list[float]:
    """Return the arrivals of training jobs: of one workload, and of half (for a site's load: all) of the next."""
    next_workload = arrivals[(seed + 1) % len(arrivals)]
    return [*arrivals[seed % len(arrivals)], *(next_workload if load.site else next_workload[::2])]

"""Study the simulator's speed under DeepBoot's lending policy: the Philly trace, half of the 550 GPUs inference's.

Decisions are by `decide.lending.allocation.allocate`, which migbatchd does not use; nothing here is a figure of lending
with default settings (`lendslices` has those, including a load of Philly's jobs).

Philly is a trace of training without models. So that there is lending, the missing parts are **synthetic**:

- each job is one of Pollux's six applications, drawn evenly, with the goodput model fitted to its measured steps; a job
  of n GPUs is elastic from n / 2 to 2 n, and its work is what it does on n in the trace's time;
- training owns 272 GPUs (whole nodes), less than its load, and inference the other 278. Inference arrives as sessions,
  as many as there are training jobs, at a rate that follows the day, exponential in length, and needs `BUSY` of its
  half on average.

Only the simulation is timed, in processor seconds of this process. The growth of the time is measured on one day
(`GROWTH_DAYS` from `GROWTH_FROM_S` on), with so many copies of everything on so many times the GPUs: the whole trace
eight times would take hours, because a round's knapsack takes jobs times GPUs.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from slurm_migbatch.decide.lending.forecast import DAY_S
from slurm_migbatch.lab.bars import Bar, NotMeasurable, exponent
from slurm_migbatch.lab.experiments.lending import DAY_SWING
from slurm_migbatch.lab.papers.forecast import Levels
from slurm_migbatch.lab.papers.goodput import Goodput, GoodputError
from slurm_migbatch.lab.say import Say, silent
from slurm_migbatch.lab.sim.cluster import SimulatedCluster
from slurm_migbatch.lab.sim.engine import Simulation
from slurm_migbatch.lab.sim.gpus import whole
from slurm_migbatch.lab.sim.job import JobCosts, SimulatedJob
from slurm_migbatch.lab.sim.policies.lending import GoodputSpeeds, Way, WholeGpuLending
from slurm_migbatch.lab.studies.deepboot import AFE, COLD_S, goodputs
from slurm_migbatch.lab.traces.trace import Trace

OWN: Final = 272
LENT: Final = 278
PER_NODE: Final = 8
BUSY: Final = 0.3
TARGET_S: Final = 600.0
GROWTH_FROM_S: Final = 50 * DAY_S
GROWTH_DAYS: Final = 1.0
_SEED: Final = 7


@dataclass(frozen=True)
class Case:
    """Jobs of both kinds, and when the simulation is stopped."""

    train: tuple[SimulatedJob, ...]
    infer: tuple[SimulatedJob, ...]
    until_s: float = math.inf


def case(trace: Trace, learning: GoodputSpeeds, until_s: float = math.inf) -> Case:
    """The trace's jobs with models, and inference; see the module."""
    rng = np.random.Generator(np.random.PCG64(_SEED))
    apps = sorted(set(learning.models) & set(AFE))
    jobs = []
    for job, pick in zip(trace.jobs, rng.integers(len(apps), size=len(trace.jobs)).tolist(), strict=True):
        app = apps[pick]
        able = [n for n in range(1, 2 * job.gpus + 1) if learning.of(app, n) > 0]
        asked = min(job.gpus, able[-1])
        costs = JobCosts(AFE[app].full, AFE[app].full, AFE[app].resize)
        jobs.append(
            replace(
                job,
                app=app,
                work=job.work * learning.of(app, asked),
                gpus=asked,
                least=max(able[0], asked // 2, 1),
                most=able[-1],
                costs=costs,
            )
        )
    end = min(until_s, trace.jobs[-1].arrival)
    count = len(trace.jobs)
    at = _by_day(rng, count, end)
    lasting = rng.exponential(BUSY * LENT * end / count, count)
    infer = tuple(
        SimulatedJob(
            10_000_000 + n,
            f"infer{n}",
            arrival,
            max(1.0, seconds),
            "infer",
            app=f"infer{n % 30}",
            costs=JobCosts(cold_start_s=COLD_S[n % len(COLD_S)]),
        )
        for n, (arrival, seconds) in enumerate(zip(at, lasting.tolist(), strict=True))
    )
    return Case(tuple(jobs), infer, until_s)


def _by_day(rng: np.random.Generator, count: int, end: float) -> list[float]:
    """Arrivals at a rate that is highest in the afternoon and lowest at night, `DAY_SWING` around its mean."""
    grid = np.arange(0.0, end + 600.0, 600.0)
    rate = 1.0 - DAY_SWING * np.cos(2 * math.pi * grid / DAY_S)
    total = np.concatenate([[0.0], np.cumsum(rate)[:-1]])
    found: list[float] = np.interp(np.sort(rng.uniform(0.0, np.interp(end, grid, total), count)), total, grid).tolist()
    return found


def play(case: Case, learning: GoodputSpeeds, scale: int = 1) -> dict[str, Any]:
    """One simulation with this many copies of all, timed."""
    own, lent = scale * OWN, scale * LENT
    train, infer = (Trace("", jobs).copies(scale).jobs if scale > 1 else jobs for jobs in (case.train, case.infer))
    infer = tuple(replace(job, id=job.id % 10_000_000 + 10_000_000) for job in infer)
    policy = WholeGpuLending(range(own), range(own, own + lent), learning, AFE, Way(), Levels())
    cluster = SimulatedCluster.of(whole("a100-80gb"), own + lent, learning.per_node)
    simulation = Simulation(cluster, [*train, *infer], policy, learning)
    gc.collect()
    cpu, wall = time.process_time(), time.perf_counter()
    result = simulation.run(case.until_s)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    trained = [run for run in result.runs if run.job.kind == "train"]
    span, slices = result.end - result.begin, result.slices / (own + lent)
    return {
        "scale": scale,
        "jobs": len(trained),
        "sessions": len(result.runs) - len(trained),
        "gpus": own + lent,
        "moments": result.steps,
        "days": round(span / DAY_S, 2),
        "restarts_per_job": round(sum(run.preempted + run.moves for run in trained) / max(1, len(trained)), 3),
        "called_back": policy.reclaims,
        "trained_on": round(sum(run.service for run in trained) / slices / span, 1) if span else 0.0,
        "cpu_s": round(cpu, 3),
        "wall_s": round(wall, 3),
    }


def measure(data: Path, trace: Trace, scales: Sequence[int], say: Say = silent) -> dict[str, Any]:
    """The whole trace once, and one day at each scale.

    Returns:
        {"notes", "whole", "growth", "exponent", "bars"}; a run has "jobs" and "sessions" (of training and inference),
        "gpus", "moments", "days", "restarts_per_job", "called_back" (reclaimed GPUs), "trained_on" (GPUs that training
        held
        on average), "cpu_s" and "wall_s".

    Raises:
        NotMeasurable: Pollux's profiles are missing.
        TraceError: they cannot be read.
    """
    folder = next((path.parent.parent for path in sorted(data.rglob("cifar10/placements.csv*"))), None)
    if folder is None:
        raise NotMeasurable(f"{data} has no Pollux data (cifar10/placements.csv) below it, from which jobs get models")
    try:
        models: Mapping[str, Goodput] = goodputs(folder)
    except GoodputError as error:
        raise NotMeasurable(f"{folder}: {error}") from None
    learning = GoodputSpeeds(models, PER_NODE)
    say(f"lending: {len(trace.jobs)} jobs on {OWN + LENT} GPUs", 0)
    whole_run = play(case(trace, learning), learning)
    end = GROWTH_DAYS * DAY_S
    window = trace.window(GROWTH_FROM_S, GROWTH_FROM_S + end)
    growth = []
    for scale in scales if window.jobs else ():
        say(f"lending: {scale} x {len(window.jobs)} jobs of a day on {scale * (OWN + LENT)} GPUs", 0)
        growth.append(play(case(window, learning, end), learning, scale))
    bars = [Bar(f"{whole_run['jobs']} Philly jobs under the full lending policy [s]", whole_run["cpu_s"], TARGET_S)]
    return {
        "notes": [
            "under lending (a study): Philly names no models, so they are drawn from Pollux's; inference is synthetic",
        ],
        "whole": whole_run,
        "growth": growth,
        "exponent": exponent([(run["jobs"], run["cpu_s"]) for run in growth]),
        "bars": [bar.to_dict() for bar in bars],
    }

"""Study SJF-BSBF: share or wait on whole GPUs (E6), mean completion time by rule.

migbatchd uses `decide.lending.pairs` on slices, which `bench sharing` measures. Here the paper's rule and the
simulation of the whole queue (`decide.lending.lookahead`) are compared in the paper's own setting: gangs on whole GPUs,
known lengths, no limit on steps. So there are no targets.

Jobs:

- Muri's 400-job trace on 64 GPUs, unchanged and resampled: its arrivals kept, its jobs drawn with replacement;
- 30 jobs on 16 GPUs and 61 jobs on 32, in the style of the traces of "wise resource sharing" (arXiv 2407.13088), which
  are not available: their numbers of GPUs (of 30: 10 x 1, 8 x 2, 6 x 4, 4 x 8, 2 x 16), application and work drawn from
  Pollux's workloads with its measured profiles, arrivals from a stretch of consecutive Philly submissions, scaled so
  that the work offered until the last of them is `LOADS` times the GPUs' capacity.

Slowdowns: the same for all pairs; drawn for each pair of applications from Gavel's pairs as measured on a V100 (both
sides of one measured pair together); uniform between 1 and 2.2, each side independently. Schedulers know them, and the
work of each job, exactly. GPUs are whole, memory is sufficient for two jobs, and starts are free: as in the paper.

- *FIFO* and *SJF* do not share; *SJF-FFS* shares always; *BSBF* by the pair test of the authors' code (these two take
  partners like their code); *ours* by `decide.lending.lookahead.plan`.

A ratio is of mean completion times in the same draw; its interval is over draws (95 %, Student's t). Without draws
there is one run and no interval.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from slurm_migbatch.decide.lending.lookahead import PAIR, RULES
from slurm_migbatch.lab.bars import NotMeasurable, finite_interval
from slurm_migbatch.lab.progress import Progress, silent
from slurm_migbatch.lab.sim.cluster import SimulatedCluster
from slurm_migbatch.lab.sim.engine import Simulation
from slurm_migbatch.lab.sim.gpus import whole
from slurm_migbatch.lab.sim.job import SimulatedJob
from slurm_migbatch.lab.sim.policies.ffs import SjfFfs
from slurm_migbatch.lab.sim.policies.queued import Fifo, Sjf
from slurm_migbatch.lab.sim.policies.sharing import BsbfSharing
from slurm_migbatch.lab.sim.policy import Policy
from slurm_migbatch.lab.sim.speeds import Paired, Whole
from slurm_migbatch.lab.traces import gavel, joblog, muri, pollux
from slurm_migbatch.lab.traces.files import below, first_below

GPU: Final = "a100-80gb"
FIXED: Final = (1.1, 1.3, 1.5, 1.8)
WIDEST: Final = 2.2
LOADS: Final = (0.8, 2.0)
MIXES: Final[Mapping[int, Mapping[int, int]]] = {
    16: {1: 10, 2: 8, 4: 6, 8: 4, 16: 2},
    32: {1: 20, 2: 17, 4: 12, 8: 8, 16: 4},
}
"""GPUs of the cluster -> GPUs of a job -> how many jobs."""
QUANTILES: Final = tuple(n / 40 for n in range(1, 41))
"""Of the completion times in the first draw of a cell, for plots."""
_SEED: Final = 4000
_DATA: Final = "Muri, Philly, Pollux and Gavel"
_MURI_GPUS: Final = 64
POLICIES: Final[Mapping[str, Callable[[], Policy]]] = {
    "FIFO": Fifo,
    "SJF": Sjf,
    "SJF-FFS": SjfFfs,
    "BSBF": lambda: BsbfSharing((PAIR,)),
    "ours": lambda: BsbfSharing(RULES),
}
BASELINES: Final = ("SJF", "SJF-FFS", "BSBF")


@dataclass(frozen=True)
class StudySource:
    """Sources of the draws.

    Attributes:
        muri: its jobs. `pool`: application and work of Pollux's jobs. `gaps`: seconds between Philly's submissions.
        measured: slowdowns of both sides of each pair that Gavel measured.
    """

    muri: tuple[SimulatedJob, ...]
    pool: tuple[tuple[str, float], ...]
    gaps: tuple[float, ...]
    measured: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class TraceKind:
    """A kind of trace: `draw` makes one; `drawn` says whether it differs from draw to draw."""

    name: str
    gpus: int
    draw: Callable[[np.random.Generator], list[SimulatedJob]]
    drawn: bool = True


@dataclass(frozen=True)
class Slowdowns:
    """A kind of slowdowns: `draw` makes them for these applications."""

    name: str
    draw: Callable[[np.random.Generator, Sequence[str]], dict[tuple[str, str], float]]
    drawn: bool = True


def source(data: Path) -> StudySource:
    """Read all data below a directory. Raises NotMeasurable, TraceError."""
    # the published schedulers count in iterations, so a job's estimate is its work
    jobs = tuple(replace(job, estimate=None) for job in muri.read(first_below(data, "cluster_trace.csv*", _DATA)).jobs)
    known = pollux.profiles(first_below(data, "placements.csv*", _DATA).parent.parent)
    pool = tuple(
        (job.app, job.work) for path in below(data, "workload-*.csv*") for job in pollux.read(path, known).jobs
    )
    if not pool:
        raise NotMeasurable(f"{data} holds no workload-*.csv of Pollux")
    arrivals = [job.arrival for job in joblog.read(first_below(data, "philly_jobs.csv*", _DATA)).jobs]
    gaps = tuple(float(gap) for gap in np.diff(arrivals))
    slowdown_of = gavel.pairs(first_below(data, "physical_cluster_throughputs.csv*", _DATA))
    measured = tuple((xi, slowdown_of[other, app]) for (app, other), xi in sorted(slowdown_of.items()) if app <= other)
    if max(sum(mix.values()) for mix in MIXES.values()) > len(gaps) or not measured:
        raise NotMeasurable(f"{data} holds too few submissions of Philly or no pairs of Gavel")
    return StudySource(jobs, pool, gaps, measured)


def populations(found: StudySource) -> list[TraceKind]:
    """Return all kinds of traces."""

    def again(rng: np.random.Generator) -> list[SimulatedJob]:
        picks = rng.integers(len(found.muri), size=len(found.muri))
        return [
            replace(found.muri[int(pick)], id=job.id, name=job.name, arrival=job.arrival)
            for job, pick in zip(found.muri, picks, strict=True)
        ]

    result = [
        TraceKind("Muri", _MURI_GPUS, lambda rng: list(found.muri), drawn=False),
        TraceKind("Muri, resampled", _MURI_GPUS, again),
    ]
    for gpus, mix in MIXES.items():
        for load in LOADS:
            name = f"{sum(mix.values())} jobs, load {load:g}"
            result.append(TraceKind(name, gpus, _small(found, gpus, mix, load)))
    return result


def _small(
    found: StudySource, gpus: int, mix: Mapping[int, int], load: float
) -> Callable[[np.random.Generator], list[SimulatedJob]]:
    def draw(rng: np.random.Generator) -> list[SimulatedJob]:
        needs = rng.permutation([need for need, count in mix.items() for _ in range(count)])
        picks = [found.pool[int(pick)] for pick in rng.integers(len(found.pool), size=len(needs))]
        first = int(rng.integers(len(found.gaps) - len(needs) + 2))
        arrivals = np.concatenate(([0.0], np.cumsum(found.gaps[first : first + len(needs) - 1])))
        offered = sum(int(need) * work for need, (_, work) in zip(needs, picks, strict=True))
        last = offered / (gpus * load)
        times = arrivals * last / arrivals[-1] if arrivals[-1] > 0 else np.linspace(0.0, last, len(needs))
        return [
            SimulatedJob(number, f"{app}-{number}", float(time), work, gpus=int(need), app=app)
            for number, (time, need, (app, work)) in enumerate(zip(times, needs, picks, strict=True))
        ]

    return draw


def slowdowns(found: StudySource) -> list[Slowdowns]:
    """Return all kinds of slowdowns."""

    def same(value: float) -> Slowdowns:
        return Slowdowns(
            f"{value:g}", lambda rng, apps: {(app, other): value for app in apps for other in apps}, drawn=False
        )

    def gavel(rng: np.random.Generator, apps: Sequence[str]) -> dict[tuple[str, str], float]:
        xi = {}
        for number, app in enumerate(apps):
            for other in apps[number:]:
                sides = found.measured[int(rng.integers(len(found.measured)))]
                flip = int(rng.integers(2))
                xi[app, other], xi[other, app] = sides[flip], sides[1 - flip]
        return xi

    def uniform(rng: np.random.Generator, apps: Sequence[str]) -> dict[tuple[str, str], float]:
        return {(app, other): float(rng.uniform(1.0, WIDEST)) for app in apps for other in apps}

    return [*map(same, FIXED), Slowdowns("Gavel", gavel), Slowdowns(f"uniform 1 to {WIDEST:g}", uniform)]


def completion(
    jobs: Sequence[SimulatedJob], gpus: int, policy: Policy, xi: Mapping[tuple[str, str], float]
) -> list[float]:
    """Simulate; return the seconds from arrival to end of each job."""
    result = Simulation(SimulatedCluster.of(whole(GPU), gpus, 4), jobs, policy, Paired(Whole(), xi)).run()
    ends = [run.ended - run.job.arrival for run in result.runs if run.ended is not None]
    if len(ends) < len(jobs):
        raise NotMeasurable(f"{len(jobs) - len(ends)} of {len(jobs)} jobs need more than {gpus} GPUs")
    return ends


def measure(data: Path, seeds: int = 10, progress: Progress = silent) -> dict[str, Any]:
    """Run the whole experiment on a directory with the data sets of Muri, Philly, Pollux and Gavel.

    Raises NotMeasurable, TraceError, OSError.
    """
    source_data = source(data)
    cells = []
    drawn_from, kinds = list(populations(source_data)), list(slowdowns(source_data))
    for number, population in enumerate(drawn_from):
        for kind in kinds:
            progress(f"{population.name}, slowdown {kind.name}", len(drawn_from) * len(kinds))
            cells.append(_cell(population, kind, number, seeds))
    return {
        "bench": "sharing",
        "data": str(data),
        "seeds": seeds,
        "rules": [rule.name for rule in RULES],
        "notes": [
            "whole GPUs, at most two jobs on each, work and slowdowns known exactly, starts are free",
            "30 and 61 jobs: a reconstruction of unavailable traces, from Pollux's jobs and Philly's arrivals",
            f"{len(source_data.measured)} pairs measured by Gavel on a V100: median slowdown "
            f"{statistics.median(xi for pair in source_data.measured for xi in pair):.2f}",
        ],
        "cells": cells,
        "bars": [],
    }


def _cell(population: TraceKind, kind: Slowdowns, number: int, seeds: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {name: [] for name in POLICIES}
    spread: dict[str, list[float]] = {}
    for seed in range(seeds if population.drawn or kind.drawn else 1):
        jobs = population.draw(np.random.Generator(np.random.PCG64((_SEED + seed, number))))
        xi = kind.draw(np.random.Generator(np.random.PCG64(_SEED + seed)), sorted({job.app for job in jobs}))
        for name, make in POLICIES.items():
            ends = completion(jobs, population.gpus, make(), xi)
            times[name].append(statistics.fmean(ends))
            spread.setdefault(name, np.quantile(ends, QUANTILES, method="inverted_cdf").round(1).tolist())
    ratios = {
        name: finite_interval([sharing / other for sharing, other in zip(times["ours"], times[name], strict=True)])
        for name in POLICIES
        if name != "ours"
    }
    return {
        "jobs": population.name,
        "gpus": population.gpus,
        "slowdown": kind.name,
        "draws": len(times["ours"]),
        "jct_s": {name: round(statistics.fmean(seconds), 1) for name, seconds in times.items()},
        "ours_over": ratios,
        "quantiles_s": spread,
    }

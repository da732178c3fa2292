"""Measure two training jobs on one slice (E6): mean completion time by migbatchd's rule, and without sharing.

Decisions are by `decide.lending.pairs` (`pairs`, `partings`, `renewals`) with the rules that migbatchd derives from a
`LendingConfig`. Sharing is off by default (`[lending] share`), so that key is on here; all others are at their
defaults. *pairs*: no pair was measured beforehand, and migbatchd learns from jobs' reports while they run; a
bad pair is ended at the cost of a restart. *pairs, measured*: every pair was measured and is in the configured file.
*pair test, measured* is the latter without the simulation of the whole queue, as SJF-BSBF is published.

Jobs are those of Muri's trace, drawn with replacement, with its arrivals stretched to an offered load of `LOADS`. Each
has one slice of `PROFILE`, for any number of requested GPUs: migbatchd shares only jobs of one slice and one user. A
job's estimate is the trace's own, or that times a log-normal error; its time limit is `MARGIN` times the estimate,
which is migbatchd's assumption about users. No limit ends a job here; jobs that reached theirs only because they shared
are counted. Memory is sufficient for two. All write checkpoints on a signal.

Slowdowns: the same for all pairs, or drawn for each pair of applications from Gavel's pairs as measured on a V100.
Busy slices on the same GPU cost what MLPerf measured (`lab.sim.speeds.Neighbours`). Jobs of one application and user
are assumed to have one rate alone, by which a guest that was never alone is judged.

The order of the queue is Slurm's (first come first), or the shortest estimate first, which migbatchd does not control:
every sharing rule is compared with no sharing, and with sharing the first possible slice (FFS), in the same order.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from slurm_migbatch.config import Config, LendingConfig
from slurm_migbatch.daemon.settings import lending_settings
from slurm_migbatch.decide.lending.pairs import SharingRules
from slurm_migbatch.lab.bars import Bar, NotMeasurable, finite_interval
from slurm_migbatch.lab.processes import pool
from slurm_migbatch.lab.progress import Progress, silent
from slurm_migbatch.lab.shipped import provenance
from slurm_migbatch.lab.sim.cluster import SimulatedCluster
from slurm_migbatch.lab.sim.engine import Simulation
from slurm_migbatch.lab.sim.gpus import geometry
from slurm_migbatch.lab.sim.job import JobCosts, SimulatedJob
from slurm_migbatch.lab.sim.policies.slicesharing import (
    DECIDES,
    FirstFitSharing,
    LivePairs,
    Order,
    SliceQueue,
    by_arrival,
    by_claim,
)
from slurm_migbatch.lab.sim.run import SimulatedRun
from slurm_migbatch.lab.sim.speeds import Neighbours, Paired, Whole
from slurm_migbatch.lab.traces import gavel, muri
from slurm_migbatch.lab.traces.files import first_below
from slurm_migbatch.mig.profile import Profile

GPU: Final = "a100-80gb"
GPUS: Final = 4
PROFILE: Final = Profile.parse("2g.20gb")
MEMORY_MIB: Final = 8000.0
"""Memory need that every job states: two fit on a slice."""
JOBS: Final = 160
LOADS: Final = (0.8, 2.0)
FIXED: Final = (1.1, 1.3, 1.5, 1.8, 2.0)
ERRORS: Final = (0.0, 0.5, 1.0)
"""Standard deviations of the logarithm of the error of estimates; 0: the trace's own (0.21 in its data)."""
USERS: Final = 1
RESTART: Final = JobCosts(restart_s=LendingConfig().restart_s, checkpoint_s=LendingConfig().checkpoint_s)
"""migbatchd's default assumption."""
MARGIN: Final = 1 / SharingRules().of_limit
TARGET: Final = 1.01
"""Largest allowed loss of sharing relative to not sharing, or to sharing always."""
ORDERS: Final[Mapping[str, Order]] = {"FIFO": by_arrival, "SJF": by_claim}
BASES: Final = ("alone", "FFS")
PAIRS: Final = ("pairs", "pairs, measured")
"""migbatchd's rules, without measured pairs and with a table of all pairs."""
PAIR_TEST: Final = "pair test, measured"
"""The same without the simulation of the whole queue, as SJF-BSBF is published."""
WAYS: Final = (*BASES, *PAIRS, PAIR_TEST)
_SEED: Final = 4000
_DATA: Final = "Muri and Gavel"

Slowdowns = Mapping[tuple[str, str], float]


def config() -> Config:
    """Return the default configuration with sharing enabled."""
    return replace(Config(), lending=LendingConfig(share=True))


def rules(slowdowns: Slowdowns | None = None) -> SharingRules:
    """Return the rules that migbatchd derives from the configuration; `slowdowns`: the content of `[lending] pairs`."""
    settings = lending_settings(config().lending)
    assert settings.share
    if slowdowns is None:
        return SharingRules(measured=settings.pair_slowdowns)
    return SharingRules(measured={(*pair, ""): slowdown for pair, slowdown in slowdowns.items()})


def settings() -> dict[str, str]:
    """Return the decision function, and the digest of its configuration."""
    return provenance(DECIDES, config())


@dataclass(frozen=True)
class SharingSource:
    """Sources of the draws: Muri's jobs, and slowdowns of both sides of each pair that Gavel measured."""

    jobs: tuple[SimulatedJob, ...]
    measured: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Cell:
    """One setting of the experiment: offered load, the slowdown (None: Gavel's pairs), and the error of estimates."""

    load: float
    slowdown: float | None
    error: float

    @property
    def name(self) -> str:
        """The setting as text."""
        claims = "the trace's estimates" if not self.error else f"estimates off by sigma {self.error:g}"
        return f"load {self.load:g}, slowdown {'Gavel' if self.slowdown is None else f'{self.slowdown:g}'}, {claims}"


def source(data: Path) -> SharingSource:
    """Read the data below a directory. Raises NotMeasurable, TraceError."""
    jobs = muri.read(first_below(data, "cluster_trace.csv*", _DATA)).jobs
    slowdown_of = gavel.pairs(first_below(data, "physical_cluster_throughputs.csv*", _DATA))
    sides = tuple((xi, slowdown_of[other, app]) for (app, other), xi in sorted(slowdown_of.items()) if app <= other)
    if not sides or not jobs:
        raise NotMeasurable(f"{data} holds no pairs of Gavel or no jobs of Muri")
    return SharingSource(jobs, sides)


def draw(found: SharingSource, cell: Cell, chance: np.random.Generator) -> list[SimulatedJob]:
    """Draw jobs of one slice each, with their estimates."""
    picks = chance.integers(len(found.jobs), size=JOBS).tolist()
    errors = np.exp(cell.error * chance.standard_normal(JOBS)).tolist()
    begin = int(chance.integers(max(1, len(found.jobs) - JOBS + 1)))
    moments = [job.arrival for job in found.jobs[begin : begin + JOBS]]
    moments += [moments[-1]] * (JOBS - len(moments))
    slices = GPUS * geometry(GPU).info(PROFILE).max_instances
    offered = sum(found.jobs[pick].work for pick in picks)
    span, target_span = moments[-1] - moments[0], offered / (slices * cell.load)
    jobs = []
    for n, (pick, error, moment) in enumerate(zip(picks, errors, moments, strict=True)):
        job = found.jobs[pick]
        at = (moment - moments[0]) / span * target_span if span > 0 else target_span * n / JOBS
        jobs.append(
            SimulatedJob(
                n,
                f"{job.app}-{n}",
                at,
                job.work,
                profile=PROFILE,
                app=job.app,
                user=str(n % USERS),
                costs=RESTART,
                estimate=job.claimed * error,
            )
        )
    return jobs


def slowdowns(
    found: SharingSource, cell: Cell, apps: Sequence[str], chance: np.random.Generator
) -> dict[tuple[str, str], float]:
    """Draw the slowdowns of every pair of applications."""
    if cell.slowdown is not None:
        return {(app, other): cell.slowdown for app in apps for other in apps}
    xi = {}
    for number, app in enumerate(apps):
        for other in apps[number:]:
            sides = found.measured[int(chance.integers(len(found.measured)))]
            flip = int(chance.integers(2))
            xi[app, other], xi[other, app] = sides[flip], sides[1 - flip]
    return xi


def policy(way: str, order: Order, slowdown: Slowdowns) -> SliceQueue:
    """Return the policy for one of `WAYS` in an order of the queue."""
    if way == "alone":
        return SliceQueue(PROFILE, order)
    if way == "FFS":
        return FirstFitSharing(PROFILE, order)
    known = rules() if way == "pairs" else rules(slowdown)
    if way == PAIR_TEST:
        known = replace(known, depth=0)
    return LivePairs(known, limit, MEMORY_MIB, config().cluster.poll_s, PROFILE, order)


def limit(job: SimulatedJob) -> float:
    """Return a job's time limit, seconds."""
    return MARGIN * job.claimed


def play(jobs: Sequence[SimulatedJob], decides: SliceQueue, slowdown: Slowdowns, seed: int) -> dict[str, float]:
    """Simulate; return mean completion time, jobs that shared, and jobs past their limit only because they shared.

    For migbatchd's rules also the pairs that were ended, and the jobs that were given a new limit.
    """
    cluster = SimulatedCluster.of(geometry(GPU), GPUS, 4)
    speeds = Paired(Whole(), slowdown)
    runs = Simulation(cluster, jobs, decides, speeds, neighbours=Neighbours(), seed=seed).run().runs
    ends = [run.ended - run.job.arrival for run in runs if run.ended is not None]
    if len(ends) < len(jobs):
        raise NotMeasurable(f"{len(jobs) - len(ends)} of {len(jobs)} jobs never end")
    if isinstance(decides, LivePairs):
        late, ended = decides.late, {"parted": float(decides.parted), "renewed": float(decides.renewed)}
    else:
        late, ended = sum(_is_late_by_sharing(run) for run in runs), {}
    return {"jct_s": statistics.fmean(ends), "joined": float(decides.joined), "late": float(late), **ended}


def _is_late_by_sharing(run: SimulatedRun) -> bool:
    """Return whether a job that ran without a stop reached its limit only because it shared."""
    assert run.started is not None and run.ended is not None
    return run.ended - run.started > limit(run.job) >= run.job.work


def measure(
    data: Path,
    seeds: int = 10,
    cells: Sequence[Cell] | None = None,
    progress: Progress = silent,
    processes: int = 1,
) -> dict[str, Any]:
    """Run the whole experiment on a directory with the data sets of Muri and Gavel, `processes` cells at once.

    Raises NotMeasurable, TraceError, OSError.
    """
    source_data = source(data)
    rows = []
    chosen = list(all_cells() if cells is None else cells)
    with pool(processes, source_data) as submit:
        runs = [submit(_measured, cell, number, seeds) for number, cell in enumerate(chosen)]
        for cell, run in zip(chosen, runs, strict=True):
            progress(cell.name, len(chosen))
            rows.append(run())
    return {
        "bench": "sharing",
        "data": str(data),
        "seeds": seeds,
        **settings(),
        "notes": [
            "[lending] share is off by default and on here; everything else is at its default",
            f"{GPUS} GPUs divided into {PROFILE}, a slice for each of {JOBS} jobs of Muri's trace, all of one user; "
            f"starts are free, {RESTART.checkpoint_s + RESTART.restart_s:g} s for a restart; "
            "time limits do not end jobs",
            f"{len(source_data.measured)} pairs measured by Gavel on a V100: median slowdown "
            f"{statistics.median(xi for pair in source_data.measured for xi in pair):.2f}; 1.5 is assumed "
            "until something was measured",
        ],
        "cells": rows,
        "bars": [bar.to_dict() for bar in bars(rows)],
    }


def all_cells() -> list[Cell]:
    """Return every combination of load, slowdown and error of estimates."""
    return [Cell(load, xi, error) for load in LOADS for xi in (*FIXED, None) for error in ERRORS]


def _measured(found: SharingSource, cell: Cell, number: int, seeds: int) -> dict[str, Any]:
    names = [f"{order}, {way}" for order in ORDERS for way in WAYS]
    runs_by_name: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for seed in range(seeds):
        jobs = draw(found, cell, np.random.Generator(np.random.PCG64((_SEED + seed, number))))
        apps = sorted({job.app for job in jobs})
        xi = slowdowns(found, cell, apps, np.random.Generator(np.random.PCG64(_SEED + seed)))
        for order, key in ORDERS.items():
            for way in WAYS:
                runs_by_name[f"{order}, {way}"].append(play(jobs, policy(way, key, xi), xi, seed))
    figures = {
        name: {key: round(statistics.fmean(run[key] for run in runs), 2) for key in runs[0]}
        for name, runs in runs_by_name.items()
    }
    over = {}
    for order in ORDERS:
        for way, base in _compared():
            runs, base_runs = runs_by_name[f"{order}, {way}"], runs_by_name[f"{order}, {base}"]
            ratio = [a["jct_s"] / b["jct_s"] for a, b in zip(runs, base_runs, strict=True)]
            over[f"{order}, {way} over {base}"] = finite_interval(ratio)
    return {
        "cell": cell.name,
        "load": cell.load,
        "slowdown": "Gavel" if cell.slowdown is None else cell.slowdown,
        "error": cell.error,
        "ways": figures,
        "over": over,
    }


def bars(rows: Sequence[Mapping[str, Any]]) -> list[Bar]:
    """Return the bars: completion times over both baselines in the worst cell, and jobs late because of sharing."""
    found = []
    for way in PAIRS:
        for order in ORDERS:
            for base in BASES:
                key = f"{order}, {way} over {base}"
                worst = max(rows, key=lambda row: float(row["over"][key][0]))
                found.append(Bar(f"{key}, mean, worst: {worst['cell']}", worst["over"][key][0], TARGET))
    late, cell = max((row["ways"][f"{order}, pairs"]["late"], row["cell"]) for order in ORDERS for row in rows)
    found.append(Bar(f"jobs of {JOBS} past their time limit only because they shared, worst: {cell}", late, 0.0))
    return found


def _compared() -> list[tuple[str, str]]:
    """Return the pairs of compared rules."""
    return [(way, base) for way in (*PAIRS, PAIR_TEST) for base in BASES]

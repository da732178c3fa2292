"""Study DeepBoot's policy (DeepBoot, E7): training jobs of several whole GPUs on inference's idle ones.

16 nodes of four GPUs, half of them inference's. migbatchd lends no job several GPUs; decisions here are by
`lab.papers.deepboot.allocate` and `decide.lending.allocation.reclaim`, with settings of the study's own.

Training jobs are Pollux's workloads (160 each), elastic between 1 and 64 GPUs. Their speed is the goodput model fitted
to Pollux's measured steps, with the noise scale that explains its measured iterations to the target at several batches;
the same model is used for decisions and as the truth, so only scheduling gains. The value of the other half depends
on that scale: with less noise jobs gain less from more GPUs, under any policy.

Inference is that of `experiments.lendslices`, with bursts that all applications have together; its history is for the
forecast. Costs of starts and restarts are the authors' table.

- *half*: our rules for training on its own half, inference on the other. *half, ATS*: DeepBoot's rules there.
- *servers*: whole idle nodes are lent and reclaimed (Lyra's loans; a reconstruction). *no forecast*: ours, lending
  all idle GPUs. *DeepBoot*: its rules everywhere. *ours*.
- Not realistic policies: *restless* uses every idle GPU every minute, with any number of restarts; *free* does
  so with free restarts, as a bound (placement and sizes are decided as for the others).

Idle replicas are protected as in DeepBoot on a dedicated half and under its own rules, and nowhere else.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from slurm_migbatch.decide.lending.allocation import Hysteresis
from slurm_migbatch.decide.lending.forecast import DAY_S
from slurm_migbatch.lab.bars import NotMeasurable
from slurm_migbatch.lab.experiments.lending import figures, over_half
from slurm_migbatch.lab.experiments.lendslices import HISTORY_DAYS, Load, pollux_files, request_shape, synthetic
from slurm_migbatch.lab.papers.deepboot import RestartCosts
from slurm_migbatch.lab.papers.forecast import Levels
from slurm_migbatch.lab.papers.goodput import Goodput, GoodputError, Observed, fit
from slurm_migbatch.lab.progress import Progress, silent
from slurm_migbatch.lab.sim.cluster import SimulatedCluster
from slurm_migbatch.lab.sim.engine import Simulation
from slurm_migbatch.lab.sim.gpus import whole
from slurm_migbatch.lab.sim.job import JobCosts, SimulatedJob
from slurm_migbatch.lab.sim.policies.lending import SIZES, GoodputSpeeds, LendingOptions, WholeGpuLending
from slurm_migbatch.lab.traces import pollux

NODES: Final = 16
PER_NODE: Final = 4
MOST: Final = SIZES[-1]
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
WAYS: Final[Mapping[str, LendingOptions]] = {
    "half": LendingOptions(lend=False, hysteresis=Hysteresis(), protect=1.0),
    "half, ATS": LendingOptions(lend=False, hysteresis=None, protect=1.0),
    "servers": LendingOptions(servers=True, forecast=False),
    "no forecast": LendingOptions(forecast=False),
    "DeepBoot": LendingOptions(forecast=False, hysteresis=None, protect=1.0, surge=1.0),
    "ours": LendingOptions(),
    "restless": LendingOptions(forecast=False, hysteresis=_RESTLESS, surge=1.0),
    "free": LendingOptions(forecast=False, hysteresis=replace(_RESTLESS, gain=1.0), surge=1.0),
}


LOADS: Final = (Load("small", 3200, 6, 5.0), Load("middle", 16_000, 18, 10.0), Load("large", 32_000, 30, 15.0))


def goodputs(folder: Path) -> dict[str, Goodput]:
    """Fit the model of each application in a directory of Pollux's traces. Raises TraceError, GoodputError."""
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
    """Return the noise scale that best explains how many more items larger batches took to the same target.

    Least squares of the logarithms, over a grid from a tenth of the smallest batch to a thousand times the largest.
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
    """Return the requests of the run, and the history before it."""
    return _split(synthetic(load, shape, seed, together=True), HISTORY_DAYS * DAY_S)


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
    served: tuple[Sequence[SimulatedJob], Levels],
    learning: GoodputSpeeds,
    way: LendingOptions,
    seed: int,
    costs: Mapping[str, RestartCosts] = AFE,
) -> dict[str, float]:
    """Run one simulation and return its figures.

    Args:
        served: inference and its history, which remains as it is.
        costs: of restarts by application.
    """
    half = NODES // 2 * PER_NODE
    levels = copy.deepcopy(served[1])
    policy = WholeGpuLending(range(half), range(half, 2 * half), learning, costs, way, levels, HISTORY_DAYS * DAY_S)
    cluster = SimulatedCluster.of(whole("a100-80gb"), NODES * PER_NODE, PER_NODE)
    result = Simulation(cluster, [*jobs, *served[0]], policy, learning, seed=seed).run()
    return figures(result.runs, result.end, policy.reclaims)


def measure(
    data: Path,
    seeds: int = 10,
    loads: Sequence[Load] = LOADS,
    ways: Mapping[str, LendingOptions] = WAYS,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Run the study on a directory with Pollux's data and a measured request trace.

    Seed n takes workload n (cyclically) and its own requests. Raises NotMeasurable, TraceError, OSError.
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
    for load in loads:
        figures_by_way: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
        for seed in range(seeds):
            served = inference(load, shape, seed)
            for name, way in ways.items():
                progress(f"{load.name}: seed {seed}, {name}", len(loads) * seeds * len(ways))
                costs = FREE if name == "free" else AFE
                figures_by_way[name].append(simulate(jobs[seed % len(jobs)], served, learning, way, seed, costs))
        row = {"load": load.name, "requests": load.requests, "seeds": seeds, "apps": load.apps, "mean_s": load.mean_s}
        results.append({**row, "ways": over_half(figures_by_way)})
    notes = [
        f"{len(jobs)} Pollux workloads of {len(jobs[0])} jobs, elastic on whole GPUs; migbatchd does not lend so",
        f"inference: synthetic, bursts from {origin}, day pattern, {HISTORY_DAYS} days of history",
        "restless uses every idle GPU every minute at any cost; free does so at no cost, as a bound",
        "Lyra's loans of whole servers are a reconstruction; all ways of one load share jobs, requests and costs",
    ]
    return {
        "bench": "study deepboot",
        "data": str(data),
        "seeds": seeds,
        "nodes": NODES,
        "gpus": NODES * PER_NODE,
        "notes": notes,
        "results": results,
        "bars": [],
    }

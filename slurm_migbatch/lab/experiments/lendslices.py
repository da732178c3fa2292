"""Training on idle MIG slices of inference (E7 on slices): four nodes of four GPUs, half of them inference's.

Training jobs have one slice each, of any size that they fit on. Their models, batches and run times are those of MISO's
100 jobs, drawn with replacement; how fast each is on which slice is MISO's table; they come when the jobs of one of
Pollux's workloads do, and every second one of another. Inference comes as `bench.lending` makes it up, with fewer and
longer requests: jobs of Slurm, each on a slice of its own whose profile goes by its application. Every start, restart
and checkpoint is charged.

- *half*: training on slices of its own half. *no forecast*: what is free is lent. *ours*.
- *free* is a bound: ours with restarts and checkpoints that cost nothing, however many there are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from slurm_migbatch.lab.bars import NotMeasurable
from slurm_migbatch.lab.experiments import lending
from slurm_migbatch.lab.experiments.lending import Load
from slurm_migbatch.lab.sim.cluster import Cluster
from slurm_migbatch.lab.sim.curves import Curves, Table
from slurm_migbatch.lab.sim.engine import Simulation
from slurm_migbatch.lab.sim.gpus import geometry
from slurm_migbatch.lab.sim.job import Costs, Job
from slurm_migbatch.lab.sim.policies.slicelending import SliceLending, SliceWay
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.policy.forecast import DAY_S, Levels
from slurm_migbatch.policy.lending import Calm
from slurm_migbatch.profiling.table import read_folder

GPU: Final = "a100-80gb"
NODES: Final = 4
PER_NODE: Final = 4
PROFILES: Final = tuple(
    Profile.parse(name) for name in ("1g.10gb", "2g.20gb", "1g.10gb", "3g.40gb", "1g.10gb", "2g.20gb", "1g.10gb")
)
"""Of inference applications, in turn; the first applications have the most requests."""
LOADS: Final = (
    Load("slices, small", 5200, 6, 60.0),
    Load("slices, middle", 13_000, 18, 60.0),
    Load("slices, large", 21_000, 30, 60.0),
)
"""About a tenth, a quarter and four tenths of what inference's half could do, on average over the day."""
INFER: Final = Costs(cold_start_s=6.0)
TRAIN: Final = Costs(cold_start_s=25.0, restart_s=25.0, checkpoint_s=5.0)
"""30 s for checkpoint, new slice and restart are MISO's budget."""
FREE: Final = Costs()
_RESTLESS: Final = Calm(first_s=0.0, growth=1.0, most_s=0.0, loan_s=600.0, idle_s=0.0, rest_s=0.0, gain=1.0)

WAYS: Final[Mapping[str, SliceWay]] = {
    "half": SliceWay(lend=False),
    "no forecast": SliceWay(forecast=False),
    "ours": SliceWay(),
    "free": SliceWay(forecast=False, calm=_RESTLESS, spared=1 << 30),
}
_MISO: Final = {
    "bert": "bert-base",
    "mobilenet": "mobilenet-v2",
    "resnet": "resnet50",
    "embedding": "miso-embedding",
    "gnn": "miso-gnn",
    "transformer": "miso-transformer",
}
"""Models by their names in MISO's list of jobs, where the table has another."""


@dataclass(frozen=True)
class Miso:
    """What MISO left: speeds, and the model, batch and run time (s on the whole GPU) of its jobs."""

    speeds: Curves
    jobs: tuple[tuple[str, int, float], ...]


def miso(data: Path) -> Miso | None:
    """Read it from a folder below which it lies; None where it does not. Raises TableError, OSError."""
    models = next(iter(sorted(data.rglob("job_models.json"))), None)
    times = next(iter(sorted(data.rglob("exp_100.json"))), None)
    steps = next(iter(sorted(data.rglob("miso_*_train_step_times.csv"))), None)
    if models is None or times is None or steps is None:
        return None
    gpu = geometry(GPU)
    table = Table(read_folder(steps.parent), gpu)
    seconds = json.loads(times.read_text(encoding="utf-8"))
    jobs = []
    for number, name in json.loads(models.read_text(encoding="utf-8")).items():
        model, _, batch = name.partition("_train")
        app = _MISO.get(model, model)
        if app in table.apps("train") and batch.isdigit() and number in seconds:
            jobs.append((app, int(batch), float(seconds[number])))
    if not jobs:
        raise NotMeasurable(f"{models}: none of its models is in {steps}")
    return Miso(Curves(table, gpu), tuple(jobs))


def training(found: Miso, arrivals: Sequence[float], seed: int, costs: Costs = TRAIN) -> list[Job]:
    """Jobs that come at these moments, drawn from MISO's."""
    rng = np.random.Generator(np.random.PCG64([seed, len(arrivals)]))
    picks = rng.integers(len(found.jobs), size=len(arrivals)).tolist()
    jobs = []
    for n, (at, pick) in enumerate(zip(sorted(arrivals), picks, strict=True)):
        app, batch, seconds = found.jobs[pick]
        jobs.append(Job(n, f"{app}-{n}", at, seconds, app=app, batch=batch, costs=costs))
    return jobs


def inference(
    load: Load, shape: np.ndarray[Any, np.dtype[np.float64]], seed: int
) -> tuple[list[Job], dict[Profile, Levels]]:
    """The inference jobs of the run, and what each profile was needed for in the days before."""
    before = lending.HISTORY_DAYS * DAY_S
    jobs: list[Job] = []
    changes: dict[Profile, list[tuple[float, int]]] = {profile: [] for profile in PROFILES}
    for number, (at, app, seconds) in enumerate(lending.requests(load, shape, seed)):
        profile = PROFILES[app % len(PROFILES)]
        if at < before:
            changes[profile] += [(at, 1), (min(at + seconds + INFER.cold_start_s, before), -1)]
        else:
            work = max(seconds, 0.1)
            name = f"infer{app}-{number}"
            jobs.append(Job(1_000_000 + number, name, at - before, work, "infer", profile=profile, costs=INFER))
    levels: dict[Profile, Levels] = {}
    for profile, moments in changes.items():
        levels[profile] = Levels()
        level = 0
        for at, by in sorted(moments):
            level += by
            levels[profile].demand(at, level, max(by, 0))
    return jobs, levels


class _Speeds(Curves):
    """Inference runs at 1 on the slice that it asks for."""

    def speed(self, job: Job, places: Sequence[Any], steps: int = 1) -> float:
        """See `sim.speeds.Speeds`."""
        return 1.0 if job.kind == "infer" else super().speed(job, places, steps)


def simulate(
    jobs: Sequence[Job], load: Load, shape: np.ndarray[Any, np.dtype[np.float64]], found: Miso, way: SliceWay, seed: int
) -> dict[str, float]:
    """One simulation and its figures, named as those of `bench.lending`."""
    requests, levels = inference(load, shape, seed)
    half = NODES // 2 * PER_NODE
    policy = SliceLending(range(half), range(half, 2 * half), way, levels, lending.HISTORY_DAYS * DAY_S)
    cluster = Cluster.of(geometry(GPU), NODES * PER_NODE, PER_NODE)
    speeds = _Speeds(found.speeds.source, found.speeds.geometry)
    result = Simulation(cluster, [*jobs, *requests], policy, speeds, seed=seed).run()
    return lending.complete(lending.figures(result, policy.reclaims))


def measure(
    found: Miso,
    arrivals: Sequence[Sequence[float]],
    shape: np.ndarray[Any, np.dtype[np.float64]],
    seeds: int,
    loads: Sequence[Load] = LOADS,
    ways: Mapping[str, SliceWay] = WAYS,
    say: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """Results by load, as those of `bench.lending`; `arrivals` are of whole workloads, taken in turn."""
    results = []
    for load in loads:
        of: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
        for seed in range(seeds):
            moments = [*arrivals[seed % len(arrivals)], *arrivals[(seed + 1) % len(arrivals)][::2]]
            jobs = training(found, moments, seed)
            for name, way in ways.items():
                say(f"{load.name}: seed {seed}, {name}")
                played = [replace(job, costs=FREE) for job in jobs] if name == "free" else jobs
                of[name].append(simulate(played, load, shape, found, way, seed))
        results.append(lending.summary(load, of))
    return results

"""Measure jobs on slices of any size with default settings (E8): waits, and slices accepted at once.

Jobs arrive at random times (Poisson), each a pod of Alibaba's openb trace drawn with its share of a GPU and its
duration; the share becomes the smallest sufficient slice. Arrivals and jobs are the same for all rules of one seed.

- **planner**: `decide.core.decide` with the default configuration, on the simulated Slurm and its nodes. Slurm starts
  jobs in its order with backfilling, migbatchd sets the offers; all delays of both are included. Time limits are
  `LIMIT` times the run time. Pods of the trace that are not latency sensitive are training jobs that can be restarted
  (`role=train signal=usr1`), so migbatchd may move them; a move costs `CHECKPOINT_S` and `RESTART_S`.
- **planner, nothing moved**: the same with `[moves] enabled = false`.
- **first fit**, **best fit**, **FGD** (Weng et al., USENIX ATC 2023): the job is placed at once on the first GPU with
  room, on the fullest, or where the mix loses least; with a queue, all pending jobs are tried in their order whenever a
  job ends, and nothing is reserved for one that does not fit. They have neither Slurm nor delays, so they are stronger
  than on any real site. They move nothing.
- **GRMU** (`lab.papers.grmu`): baskets for whole GPUs and for shares, and running jobs are moved, inference too, at no
  cost; of the quotas of its baskets the one that is best for the draw. No real site can have it: it is not a target.
- **pool**: the same without placements: all compute and memory slices together. It bounds the gain from placement.

At `QUEUED` loads jobs wait until they start (like in Slurm); at `TURNED_AWAY` a job that has not started within
`PATIENCE_S` is withdrawn, and accepted jobs and slices are counted. Interference of slices is not modelled here: a
slice's speed is independent in the simulated nodes.
"""

from __future__ import annotations

import heapq
import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from slurm_migbatch.config import Config
from slurm_migbatch.decide.paris_elsa.preference import HORIZON_S, Class
from slurm_migbatch.lab.bars import Bar, rounded_interval
from slurm_migbatch.lab.papers.grmu import Grmu
from slurm_migbatch.lab.papers.placement import BestFit, Fgd, FirstFit, mix
from slurm_migbatch.lab.processes import pool
from slurm_migbatch.lab.progress import Progress, silent
from slurm_migbatch.lab.shipped import DECIDES, learned, pace, provenance
from slurm_migbatch.lab.sim.gpus import geometry
from slurm_migbatch.lab.slurm.controller import ServiceController
from slurm_migbatch.lab.slurm.run import SimulatedSite, SlurmSimulation, Submission, WorkloadOutcome
from slurm_migbatch.lab.slurm.work import Fixed, SimulatedTraining, Work
from slurm_migbatch.lab.studies.placement import Place, PlacementCluster, PodKind, SlicePool, populations
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.profile import Profile

GPU: Final = "a100-80gb"
NODES: Final = 2
PER_NODE: Final = 8
QUEUED: Final = (0.85, 0.95)
TURNED_AWAY: Final = 1.5
ARRIVALS: Final = 1200
WARM: Final = 200
"""Arrivals that are not counted: the cluster fills up."""
LIMIT: Final = 2.0
RESTARTABLE: Final = "migbatch: role=train signal=usr1"
"""Comment of a training job that may be moved."""
PATIENCE_S: Final = 20.0
CHECKPOINT_S: Final = 5.0
RESTART_S: Final = 30.0
"""Seconds of a restarted training job without progress."""
OURS, STILL, FIRST, BEST, FGD = "planner", "planner, nothing moved", "first fit", "best fit", "FGD"
GRMU, POOL = "GRMU, moves anything at no cost", "pool"
SIMPLE: Final = (FIRST, BEST, FGD)
WAIT_TARGET: Final = 0.80
SLICES_TARGET: Final = 1.15


@dataclass(frozen=True)
class Draw:
    """Jobs of one seed, and their arrivals (seconds)."""

    times: tuple[float, ...]
    kinds: tuple[PodKind, ...]


@dataclass(frozen=True)
class ServedJob:
    """Result of a served job: seconds from its arrival to its start and to its end, and restarts."""

    wait_s: float
    jct_s: float
    restarts: int = 0


Outcome = list[ServedJob | None]
"""By job; None: it was withdrawn."""
Inputs: TypeAlias = tuple[Sequence[PodKind], Config]
"""A population, and the settings of a site that has received its jobs."""


def draw(
    kinds: Sequence[PodKind], load: float, seed: int, gpus: int | None = None, arrivals: int | None = None
) -> Draw:
    """Draw Poisson arrivals with this offered load on all GPUs; None: `NODES` of `PER_NODE`, `ARRIVALS` jobs."""
    gpus, arrivals = gpus or NODES * PER_NODE, arrivals or ARRIVALS
    work = statistics.fmean(kind.profile.compute * kind.seconds for kind in kinds)
    rate = load * gpus * geometry(GPU).compute_slices / work
    rng = np.random.Generator(np.random.PCG64(seed))
    drawn = tuple(kinds[i] for i in rng.integers(0, len(kinds), arrivals).tolist())
    return Draw(tuple(np.cumsum(rng.exponential(1.0 / rate, arrivals)).tolist()), drawn)


def at_once(found: Draw, place: Place, queued: bool) -> Outcome:
    """Place without any delay; `queued`: jobs that do not fit wait, and are tried again in order as jobs end."""
    outcome: Outcome = [None] * len(found.times)
    ends: list[tuple[float, int, Callable[[], None]]] = []
    number = itertools.count()
    queue: list[int] = []

    def start(now: float, job: int) -> bool:
        give_back = place(found.kinds[job])
        if give_back is None:
            return False
        wait_s = now - found.times[job]
        outcome[job] = ServedJob(wait_s, wait_s + found.kinds[job].seconds)
        heapq.heappush(ends, (now + found.kinds[job].seconds, next(number), give_back))
        return True

    def end_next() -> None:
        now, _, give_back = heapq.heappop(ends)
        give_back()
        hopeless: set[Profile] = set()
        for job in list(queue):
            profile = found.kinds[job].profile
            if profile not in hopeless and start(now, job):
                queue.remove(job)
            else:
                hopeless.add(profile)

    for job, now in enumerate(found.times):
        while ends and ends[0][0] <= now:
            end_next()
        if not start(now, job) and queued:
            queue.append(job)
    while queue:
        end_next()
    return outcome


def config_of(kinds: Sequence[PodKind], given_shares: Mapping[Profile, float] | None = None) -> Config:
    """Return the default settings of a site that has received these jobs for a while.

    `given_shares`: by profile, the run time that the site has learned over the true one; 1 if not named.
    """
    shares = given_shares or {}
    counts: Counter[Profile] = Counter(kind.profile for kind in kinds)
    seconds = {p: statistics.fmean(kind.seconds for kind in kinds if kind.profile == p) for p in counts}
    work = sum(profile.compute * seconds[profile] * count for profile, count in counts.items())
    gpus = NODES * PER_NODE
    rate = gpus * geometry(GPU).compute_slices / work
    classes = [
        Class(count * rate * HORIZON_S, seconds[profile] * shares.get(profile, 1.0), profile)
        for profile, count in sorted(counts.items())
    ]
    return learned({geometry(GPU): gpus}, classes)


def usual_limits(found: Draw) -> list[int | None]:
    """Return the jobs' time limits (s): `LIMIT` times the run time."""
    return [int(LIMIT * kind.seconds) + 60 for kind in found.kinds]


def shipped(found: Draw, config: Config, queued: bool, limits: Sequence[int | None] | None = None) -> Outcome:
    """Run migbatchd's decisions on the simulated Slurm; `limits`: of each job (s), None: `usual_limits`."""
    site = SimulatedSite.of(geometry(GPU), NODES, PER_NODE)
    simulation = SlurmSimulation(site, workload(found, usual_limits(found) if limits is None else limits, _work))
    if not queued:
        for n, at in enumerate(found.times):
            simulation.clock.at(simulation.begin + at + PATIENCE_S, partial(_give_up, simulation, f"job{n}"))
    return of_jobs(found, simulation.run(ServiceController(simulation, config), pace(config)))


def workload(found: Draw, limits: Sequence[int | None], work: Callable[[PodKind], Work]) -> list[Submission]:
    """Return the jobs as the submit filter leaves them, with these time limits (s); `work`: the jobs' work."""
    return [
        Submission(
            at,
            f"mig:{kind.profile.gres_type}:1",
            partial(work, kind),
            limit_s=limit_s,
            name=f"job{n}",
            fields={"cpus": 1, "comment": "" if kind.served else RESTARTABLE},
        )
        for n, (at, kind, limit_s) in enumerate(zip(found.times, found.kinds, limits, strict=True))
    ]


def of_jobs(found: Draw, ended: WorkloadOutcome) -> Outcome:
    """Return the result of each job of a `workload`."""
    outcome: Outcome = []
    for number, at in zip(ended.submissions, found.times, strict=True):
        job = None if number is None else ended.jobs[number]
        if job is None or job.start is None or job.state != "COMPLETED":
            outcome.append(None)
        else:
            outcome.append(ServedJob(job.start - ended.begin - at, job.end - ended.begin - at, job.restarts))
    return outcome


def _work(kind: PodKind) -> Work:
    if kind.served:
        return Fixed(kind.seconds)
    return SimulatedTraining(kind.seconds, full_speed, start_s=0.0, restart_s=RESTART_S, checkpoint_s=CHECKPOINT_S)


def full_speed(_profile: Profile) -> float:
    """Return the speed of a training job on the one profile that it may have."""
    return 1.0


def _give_up(simulation: SlurmSimulation, name: str) -> None:
    for row in list(simulation.slurm.queue.values()):
        if row.name == name and row.pending:
            simulation.slurm.cancel(row.job_id)


def grmu(found: Draw, queued: bool) -> Outcome:
    """Run GRMU's rules with the best quota for this draw, among every other number of GPUs."""
    gpu, gpus = geometry(GPU), NODES * PER_NODE
    whole = {kind.profile == gpu.full.profile for kind in found.kinds}
    quotas = range(1, gpus, 2) if len(whole) == 2 else [gpus if True in whole else 0]

    def served(quota: int) -> Outcome:
        rules = Grmu(gpu, gpus, quota)
        return at_once(found, lambda kind: rules.place(kind.profile), queued)

    def worth(outcome: Outcome) -> float:
        result = figures(found, outcome, gpu, queued)
        return -result["wait_s"] if queued else result["slices"]

    return max(map(served, quotas), key=worth)


def ways(config: Config, asked: Mapping[Profile, int]) -> dict[str, Callable[[Draw, bool], Outcome]]:
    """Return all placement rules."""
    gpu, gpus = geometry(GPU), NODES * PER_NODE
    still = replace(config, moves=replace(config.moves, enabled=False))
    fgd = Fgd(mix(asked))
    return {
        FIRST: lambda found, queued: at_once(found, PlacementCluster(gpu, gpus, FirstFit()).place, queued),
        BEST: lambda found, queued: at_once(found, PlacementCluster(gpu, gpus, BestFit()).place, queued),
        FGD: lambda found, queued: at_once(found, PlacementCluster(gpu, gpus, fgd).place, queued),
        OURS: lambda found, queued: shipped(found, config, queued),
        STILL: lambda found, queued: shipped(found, still, queued),
        GRMU: grmu,
        POOL: lambda found, queued: at_once(found, SlicePool(gpu, gpus).place, queued),
    }


def measure(data: Path, seeds: int = 10, progress: Progress = silent, processes: int = 1) -> dict[str, Any]:
    """Run all rules at all loads for both populations, in `processes` at once.

    `data` is openb's directory, or one that holds it. Raises NotMeasurable, TraceError.
    """
    results, notices = of_populations(data, progress, partial(_population, seeds=seeds, processes=processes))
    return {
        "bench": "fragmentation",
        "data": str(data),
        "gpu": GPU,
        "gpus": NODES * PER_NODE,
        "seeds": seeds,
        "notes": [
            *notices,
            "pods of several GPUs are skipped; long ones count as a day",
            "interference of slices is not modelled; first fit, best fit and the pool have no delay and no Slurm",
            "offers for free space are derived from the population, as migbatchd derives them from its record",
        ],
        "populations": results,
        "bars": [bar.to_dict() for bar in bars(results)],
    }


def of_populations(
    data: Path, progress: Progress, result_of: Callable[[str, Sequence[PodKind], Progress], dict[str, Any]]
) -> tuple[dict[str, dict[str, Any]], Sequence[str]]:
    """Return the result for each population below `data`, by its name, and the notices on the trace."""
    kinds_by_population, notices = populations(data, geometry(GPU))

    def tell(text: str, of: int) -> None:
        progress(text, len(kinds_by_population) * of)

    return {name: result_of(name, kinds, tell) for name, kinds in kinds_by_population.items()}, notices


def _population(name: str, kinds: Sequence[PodKind], progress: Progress, seeds: int, processes: int) -> dict[str, Any]:
    config = config_of(kinds)
    requests = Counter(kind.profile for kind in kinds)
    found_by_load = run_cases(run_way, (kinds, config), name, seeds, list(ways(config, requests)), progress, processes)
    loads = [
        {
            "load": load,
            "queued": load in QUEUED,
            "ways": {way: row(found, by_way[FIRST]) for way, found in by_way.items()},
        }
        for load, by_way in found_by_load.items()
    ]
    return {
        "jobs": len(kinds),
        "mix": {profile.name: round(count / len(kinds), 4) for profile, count in sorted(requests.items())},
        **provenance(DECIDES, config),
        "preference": list(config.supply.preference),
        "loads": loads,
    }


def run_cases(
    run: Callable[[Inputs, float, int, str], dict[str, float]],
    inputs: Inputs,
    population: str,
    seeds: int,
    ways: Sequence[str],
    progress: Progress,
    processes: int,
) -> dict[float, dict[str, list[dict[str, float]]]]:
    """Return the figures of every way by load, in the order of the seeds; `processes` cases run at once."""
    cases = list(itertools.product((*QUEUED, TURNED_AWAY), range(seeds), ways))
    found: dict[float, dict[str, list[dict[str, float]]]] = {}
    with pool(processes, inputs) as submit:
        waiting = [submit(run, *case) for case in cases]
        for (load, seed, way), result in zip(cases, waiting, strict=True):
            progress(f"{population}, load {load:g}: seed {seed}, {way}", len(cases))
            found.setdefault(load, {}).setdefault(way, []).append(result())
    return found


def run_way(inputs: Inputs, load: float, seed: int, way: str) -> dict[str, float]:
    """Return the figures of one rule on one draw."""
    kinds, config = inputs
    drawn, queued = draw(kinds, load, seed), load in QUEUED
    place = ways(config, Counter(kind.profile for kind in kinds))[way]
    return figures(drawn, place(drawn, queued), geometry(GPU), queued)


def figures(drawn: Draw, outcome: Outcome, gpu: Geometry, queued: bool, warm: int | None = None) -> dict[str, float]:
    """Return waits and completion times with a queue, else the shares of accepted jobs and slices; of all
    but the first `warm` jobs (None: `WARM`).
    """
    counted = list(zip(drawn.kinds, outcome, strict=True))[WARM if warm is None else warm :]
    if queued:
        started = [served for _, served in counted if served is not None]
        waits = [served.wait_s for served in started]
        whole = [served.wait_s for kind, served in counted if served is not None and kind.profile == gpu.full.profile]
        assert len(started) == len(counted)
        return {
            "wait_s": statistics.fmean(waits),
            "wait_p95_s": float(np.quantile(waits, 0.95)),
            "wait_max_s": max(waits),
            "wait_whole_s": statistics.fmean(whole) if whole else 0.0,
            "jct_s": statistics.fmean(served.jct_s for served in started),
            "restarts": statistics.fmean(served.restarts for served in started),
        }
    accepted = [kind for kind, served in counted if served is not None]
    return {
        "jobs": len(accepted) / len(counted),
        "slices": sum(kind.profile.compute for kind in accepted) / sum(kind.profile.compute for kind, _ in counted),
    }


def row(runs: Sequence[Mapping[str, float]], base: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return the means over seeds, and the mean ratios to first fit (`base`) by seed with their intervals."""
    keys = ("wait_s", "jct_s") if "wait_s" in runs[0] else ("jobs", "slices")
    over = {key: rounded_interval(ratios(runs, base, key)) for key in keys}
    return {**{key: round(statistics.fmean(run[key] for run in runs), 4) for key in runs[0]}, "over_first_fit": over}


def ratios(runs: Sequence[Mapping[str, float]], base: Sequence[Mapping[str, float]], key: str) -> list[float]:
    """Return a figure relative to that of `base`, seed by seed."""
    return [ratio(a[key], b[key]) for a, b in zip(runs, base, strict=True)]


def ratio(value: float, baseline: float) -> float:
    """Return a figure relative to a baseline; infinite if only the baseline is 0."""
    return value / baseline if baseline else 1.0 if not value else float("inf")


def bars(results: Mapping[str, Mapping[str, Any]]) -> list[Bar]:
    """Compare the planner with first fit, by its mean ratio over the draws, and with the best of the simple rules."""
    found = []
    for name, population in results.items():
        for entry in population["loads"]:
            rows, label = entry["ways"], f"{name}, load {entry['load']:g}"
            over = rows[OURS]["over_first_fit"]
            if entry["queued"]:
                found.append(Bar(f"{label}: mean wait over first fit", over["wait_s"][0], WAIT_TARGET))
                for key, what in (("wait_s", "mean wait"), ("jct_s", "mean completion time")):
                    over_best = ratio(rows[OURS][key], min(rows[way][key] for way in SIMPLE))
                    found.append(Bar(f"{label}: {what} over the best simple rule", over_best, 1.0))
                continue
            found.append(
                Bar(f"{label}: accepted slices over first fit", over["slices"][0], SLICES_TARGET, at_least=True)
            )
            for key in ("jobs", "slices"):
                over_best = ratio(rows[OURS][key], max(rows[way][key] for way in SIMPLE))
                found.append(Bar(f"{label}: accepted {key} over the best simple rule", over_best, 1.0, at_least=True))
    return found

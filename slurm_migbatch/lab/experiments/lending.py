"""Measure lending with default settings (E7): migbatchd's whole decision on a simulated Slurm, and simpler rules.

The jobs are those of `lendslices`. They go through Slurm's queue: supply plans the offers of every node, Slurm starts
and preempts, nodes apply plans, create slices and report, and `decide.core.decide` runs as often as in migbatchd. The
configuration is the default one with lending enabled (`config`), the speeds of training are known, and the record
holds the previous days. Slurm itself may preempt training that has run for PreemptExemptTime, as installed.

A run takes the training jobs that arrive within `WINDOW_S`, and the inference of an equally long part of the day, which
begins later with every seed, so that ten of them cover the whole day. It continues until the last job has ended; jobs
left after the window have no more inference next to them, under every rule alike.

- *Slurm alone*: every training job has a whole GPU of its own half, in the order of submission, until it ends.
- *half*: training on slices of its own half, which migbatchd divides as usual.
- *ours*: default settings.
- *idle*: the same with `horizon_s` 0: nothing is reserved for expected inference, so all idle slices are lent.
- *servers*: whole nodes without inference are lent, and reclaimed as a whole (Lyra's loans; a
  reconstruction, `WholeServers`).

For comparison: a bound for any schedule (`lendbound`), and the mean completion time if every training job had a
whole GPU to itself at once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from slurm_migbatch.config import Config
from slurm_migbatch.decide.lending.forecast import DAY_S
from slurm_migbatch.decide.lending.loan import Cause
from slurm_migbatch.decide.snapshot import LendingPast, NoPredictions, Predictions
from slurm_migbatch.lab.bars import Bar, NotMeasurable, mean_with_interval
from slurm_migbatch.lab.experiments import lendbound, lendslices
from slurm_migbatch.lab.experiments.lendslices import HISTORY_DAYS, LOADS, PROMISE_S, TRAINING, Load
from slurm_migbatch.lab.processes import pool
from slurm_migbatch.lab.progress import Progress, silent
from slurm_migbatch.lab.shipped import DECIDES, provenance
from slurm_migbatch.lab.sim.gpus import geometry
from slurm_migbatch.lab.sim.job import SimulatedJob
from slurm_migbatch.lab.sim.metrics import of_jobs
from slurm_migbatch.lab.sim.run import SimulatedRun
from slurm_migbatch.lab.slurm.controller import ServiceController, pace_of
from slurm_migbatch.lab.slurm.records import SimulatedPartition, SlurmSettings
from slurm_migbatch.lab.slurm.run import (
    Controller,
    ControllerInput,
    RoundTiming,
    SimulatedSite,
    SiteNode,
    SlurmSimulation,
    Submission,
)
from slurm_migbatch.lab.slurm.tracejobs import Course, course_of
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm.client import JobRow
from slurm_migbatch.workload.loans import LoanHints

WINDOW_S: Final = 2 * 3600.0
TARGETS: Final[Mapping[str, float]] = {"slices, small": 0.55, "slices, middle": 0.62, "slices, large": 0.80}
"""Mean completion time relative to no lending."""
TARGET_DELAY_S: Final = 8.0
TARGET_RESTARTS: Final = 3.0
INFERENCE: Final = "gpu"
_BEGIN: Final = 100 * DAY_S
"""Unix seconds of the day of a run: a whole number of days, as in the history of `lendslices`."""
_SPREAD: Final = 10
"""Seeds whose windows begin at equal distances over the day."""
_IDLE_S: Final = 60.0
"""Longest pause between rounds while nothing happens."""
_GROWTH: Final = 2.0
_TIERS: Final = (10, 1)
_SETTLE_S: Final = 3.0
"""From the end of the loans of a returned node until it is offered to inference."""


Inputs = tuple[lendslices.Moments, lendslices.Miso]
"""What every simulation of an experiment reads."""


@dataclass(frozen=True)
class LendingVariant:
    """How inference's nodes are lent.

    Attributes:
        lend: whether they are.
        forecast: whether the expected need of inference is reserved.
        servers: only whole nodes without inference are.
        rigid: whether training jobs have whole GPUs and keep them.
    """

    lend: bool = True
    forecast: bool = True
    servers: bool = False
    rigid: bool = False


WAYS: Final[Mapping[str, LendingVariant]] = {
    "Slurm alone": LendingVariant(lend=False, rigid=True),
    "half": LendingVariant(lend=False),
    "idle": LendingVariant(forecast=False),
    "servers": LendingVariant(forecast=False, servers=True),
    "ours": LendingVariant(),
}


def config(way: LendingVariant = WAYS["ours"]) -> Config:
    """Return the default configuration with lending enabled, and training's own half as training-only."""
    shipped = Config()
    lent = replace(shipped.lending, enabled=True, partitions=(TRAINING,), training_only=(TRAINING,))
    return replace(shipped, lending=lent if way.forecast else replace(lent, horizon_s=0.0))


def settings() -> dict[str, str]:
    """Return the decision function, and the digest of its configuration as rendered."""
    return provenance(DECIDES, config())


def pace() -> RoundTiming:
    """Return the times of rounds: as often as migbatchd's while there are events."""
    return replace(pace_of(config()), idle_s=_IDLE_S, growth=_GROWTH)


class KnownSpeeds(NoPredictions):
    """Predictions of a site that has measured its training jobs."""

    version = "measured"

    def __init__(self, found: lendslices.Miso) -> None:
        self._speeds = found.speeds

    def training_speeds(self, hints: LoanHints, _partition: str, /) -> Mapping[Profile, float]:
        """See Predictions."""
        job = SimulatedJob(0, hints.model or "", 0.0, 1.0, app=hints.model or "", batch=hints.batch or 0)
        profiles = [info.profile for info in self._speeds.geometry.profiles if not info.profile.suffix]
        return {p: speed for p in profiles if (speed := self._speeds.relative(job, p)) > 0}


@dataclass(frozen=True)
class PlayedLoad:
    """The simulated jobs of a load and a seed.

    Attributes:
        training, inference: those that arrive within the window; arrivals are seconds after its begin.
        uses: of slices before, in seconds after the begin of their days; see `lendslices.inference`.
        begin_s: when the window begins, seconds into the day.
        limits: --time of training jobs by id, seconds; missing: no limit.
    """

    training: Sequence[SimulatedJob]
    inference: Sequence[SimulatedJob]
    uses: Sequence[tuple[str, float, float | None]]
    begin_s: float = 0.0
    limits: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls, load: Load, moments: lendslices.Moments, found: lendslices.Miso, seed: int, window_s: float
    ) -> PlayedLoad:
        """Return the jobs of `lendslices` that arrive within the window."""
        begin_s = seed % _SPREAD / _SPREAD * max(0.0, lendslices.SPAN_S - window_s)
        arrivals = lendslices.arrivals_of(load, moments.arrivals, seed)
        jobs = lendslices.training(found, arrivals, seed, load.whole)
        requests, uses = lendslices.inference(load, moments, seed)
        days = HISTORY_DAYS * DAY_S
        earlier = [
            (str(job.profile), days + job.arrival, days + min(begin_s, job.arrival + job.work + job.costs.cold_start_s))
            for job in requests
            if job.arrival < begin_s
        ]
        within = [
            replace(job, arrival=job.arrival - begin_s)
            for job in requests
            if begin_s <= job.arrival < begin_s + window_s
        ]
        return cls([job for job in jobs if job.arrival < window_s], within, [*uses, *earlier], begin_s)


def _submission(job: SimulatedJob, course: Course, limit_s: int | None) -> Submission:
    """Return one sbatch as the submit filter leaves it."""
    if job.kind == "infer":
        return Submission(job.arrival, f"mig:{job.profile}:1", lambda: course, INFERENCE, name="infer")
    minimum = "" if job.profile is None else f" min={job.profile.gres_type}"
    hints = f"migbatch: role=train model={job.app} batch={job.batch}{minimum} signal=usr1 [mig:loan:1#loan0001]"
    fields = {"comment": hints}
    return Submission(job.arrival, "mig:loan:1", lambda: course, TRAINING, limit_s, name="train", fields=fields)


def site(way: LendingVariant) -> SimulatedSite:
    """Return the cluster of `lendslices`: the first half of the nodes is training's."""
    gpus = (geometry(lendslices.GPU),) * lendslices.PER_NODE
    shared = (INFERENCE, TRAINING) if way.lend and not way.servers else (INFERENCE,)
    half = lendslices.NODES // 2
    nodes = [SiteNode(f"n{n + 1}", gpus, (TRAINING,) if n < half else shared) for n in range(lendslices.NODES)]
    partitions = (
        SimulatedPartition(INFERENCE, _TIERS[0]),
        SimulatedPartition(TRAINING, _TIERS[1], preempted=True),
    )
    return SimulatedSite(tuple(nodes), partitions, SlurmSettings(listing_s=0.02, update_s=0.004))


class WholeServers:
    """Lend whole nodes without inference and reclaim them as a whole, next to another controller.

    Like a script next to migbatchd: a lent node moves from inference's partition to that of training. If
    inference waits that the last plan has no place for, the lent node with the fewest loans returns, one at a time.
    """

    def __init__(self, simulation: SlurmSimulation, service: ServiceController) -> None:
        self._slurm, self._service = simulation.slurm, service
        self._nodes = [name for name, node in self._slurm.machines.items() if node.partitions == (INFERENCE,)]
        self._nodes = [name for name in self._nodes if self._slurm.machines[name].open]
        self._settled = 0.0  # the effect of a returned node is known from then on

    def __call__(self, observation: ControllerInput) -> bool:
        """Run one round of the other controller, then move nodes. See `run.Controller`."""
        again = self._service(observation)
        return self._move(observation.now) or again

    def _move(self, now: float) -> bool:
        inference, loans = self._active(INFERENCE), self._active(TRAINING)
        lent = [name for name in self._nodes if self._slurm.machines[name].partitions == (TRAINING,)]
        waiting = [row for row in self._slurm.queue.values() if row.pending and row.partition == INFERENCE]
        if not waiting:
            free = [name for name in self._nodes if name not in lent and not inference[name] and not loans[name]]
            for name in free:
                self._slurm.set_node(name, partitions=(TRAINING,))
            return bool(free)
        if any(loans[name] for name in self._nodes if name not in lent):
            self._settled = now + _SETTLE_S
        placed = self._placed()
        if not lent or now < self._settled or all(row.job_id in placed or row.submit >= now for row in waiting):
            return False
        node = min(lent, key=lambda name: (len(loans[name]), name))
        self._slurm.set_node(node, partitions=(INFERENCE,))
        running = [row.job_id for row in loans[node] if row.state == "RUNNING"]
        if running:
            self._slurm.requeue_all(running)
        self._settled = now + _SETTLE_S
        return True

    def _active(self, partition: str) -> dict[str, list[JobRow]]:
        """Return the jobs of a partition that are on each of inference's nodes."""
        rows = [row for row in self._slurm.queue.values() if row.active and row.partition == partition]
        return {name: [row for row in rows if name in row.nodes] for name in self._nodes}

    def _placed(self) -> Collection[int]:
        """Return the jobs that the last plan has a place for."""
        decision = self._service.controller.decision
        return () if decision is None or decision.supply is None else decision.supply.plan.placed


def play(
    case: PlayedLoad, found: lendslices.Miso, way: LendingVariant, predictions: Predictions | None = None
) -> dict[str, float]:
    """Simulate with migbatchd's controller; return the figures of `lending.figures` and further ones.

    Args:
        predictions: migbatchd's predictions of training; None: the true speeds.

    Returns:
        "requests": inference jobs; "preempted": loans that Slurm itself ended; "rounds" of the controller; and those of
        `lending.figures`.

    Raises:
        Stuck: jobs are left that can never start.
        NotMeasurable: a job did not end.
    """
    speeds = lendslices.speeds_of(found)
    trainings = case.training
    if way.rigid:
        trainings = [replace(job, profile=geometry(lendslices.GPU).full.profile) for job in trainings]
    jobs = sorted([*trainings, *case.inference], key=lambda job: (job.arrival, job.id))
    courses = [course_of(job, speeds, speeds.geometry) for job in jobs]
    begin = _BEGIN + case.begin_s
    workload = [_submission(job, course, case.limits.get(job.id)) for job, course in zip(jobs, courses, strict=True)]
    simulation = SlurmSimulation(site(way), workload, begin)
    before = _BEGIN - HISTORY_DAYS * DAY_S
    uses = [(name, before + at, None if until is None else before + until) for name, at, until in case.uses]
    predictions = predictions or KnownSpeeds(found)
    service = ServiceController(simulation, config(way), predictions, past=LendingPast(uses=uses))
    controller: Controller = WholeServers(simulation, service) if way.servers else service
    outcome = simulation.run(controller, pace())
    runs = []
    for job, course, number in zip(jobs, courses, outcome.submissions, strict=True):
        ended = None if number is None else outcome.jobs.get(number)
        run = SimulatedRun(job)
        if ended is not None and ended.state == "COMPLETED":
            course.settle(ended.end)
            run.ended, run.preempted = ended.end - begin, ended.restarts
        run.began = None if course.began is None else course.began - begin
        runs.append(run)
    causes = service.record.ended
    end = max((run.ended for run in runs if run.ended is not None), default=0.0)
    return {
        "requests": float(len(case.inference)),
        "preempted": causes[Cause.SLURM.value],
        "rounds": outcome.rounds,
        **figures(runs, end, causes[Cause.RECLAIM.value]),
    }


def figures(runs: Sequence[SimulatedRun], end: float, reclaims: int) -> dict[str, float]:
    """Return the figures of a simulation of training and inference. Raises NotMeasurable if a job did not end."""
    train = of_jobs([run for run in runs if run.job.kind == "train"], end)
    infer = of_jobs([run for run in runs if run.job.kind == "infer"], end)
    if train["done"] < train["jobs"] or infer["done"] < infer["jobs"]:
        raise NotMeasurable("a job never ended: this is a bug in the simulation")
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
    }


def measure(
    data: Path, seeds: int = 10, loads: Sequence[Load] | None = None, progress: Progress = silent, processes: int = 1
) -> dict[str, Any]:
    """Run the experiment on a directory with Pollux's and MISO's data and a measured request trace.

    Seed n takes the arrivals of workload n (cyclically) and its own requests. `loads` None: those of `lendslices`.
    `processes` is that of `results_of`. Raises NotMeasurable, TraceError, OSError.
    """
    origin, moments, miso = lendslices.inputs(data, seeds)
    results = results_of(miso, moments, seeds, LOADS if loads is None else loads, WAYS, progress, processes=processes)
    decider = settings()
    notes = [
        "MISO's jobs on one slice each, at the moments of Pollux's workloads; each application of inference has bursts "
        f"of its own; limit of inference: 95 of 100 start within {PROMISE_S:g} s",
        f"inference: synthetic, bursts from {origin}, day pattern, {HISTORY_DAYS} days of history",
        f"{decider['decides']} decides, with the shipped configuration {decider['configuration']}",
    ]
    return {
        "bench": "lending",
        "data": str(data),
        "seeds": seeds,
        "nodes": lendslices.NODES,
        "gpus": lendslices.NODES * lendslices.PER_NODE,
        **decider,
        "notes": notes,
        "results": results,
        "bars": [bar.to_dict() for result in results for bar in bars(result)],
    }


def results_of(
    found: lendslices.Miso,
    moments: lendslices.Moments,
    seeds: int,
    loads: Sequence[Load] = LOADS,
    ways: Mapping[str, LendingVariant] = WAYS,
    progress: Progress = silent,
    window_s: float = WINDOW_S,
    processes: int = 1,
) -> list[dict[str, Any]]:
    """Simulate every load, seed and rule; a site's load is skipped if its jobs are missing.

    Args:
        processes: how many simulations run at once.

    Returns:
        Results by load.
    """
    loads = [load for load in loads if moments.site or not load.site]
    with pool(processes, (moments, found)) as submit:
        runs = {
            (load.name, seed, name): submit(_case, load, seed, window_s, way)
            for load in loads
            for seed in range(seeds)
            for name, way in ways.items()
        }
        bounds = {(load.name, seed): submit(_bounds, load, seed, window_s) for load in loads for seed in range(seeds)}
        found_figures = {}
        for (load_name, seed, name), run in runs.items():
            progress(f"{load_name}: seed {seed}, {name}", len(runs))
            found_figures[load_name, seed, name] = run()
        bound_figures = {key: run() for key, run in bounds.items()}
    results = []
    for load in loads:
        figures_by_way = {name: [found_figures[load.name, seed, name] for seed in range(seeds)] for name in ways}
        bound = _bound_over_half([bound_figures[load.name, seed] for seed in range(seeds)], figures_by_way["half"])
        row = {
            "load": load.name,
            "requests": load.requests,
            "seeds": seeds,
            "apps": load.apps,
            "mean_s": load.mean_s,
            "ways": over_half(figures_by_way),
            **settings(),
            "promise_s": PROMISE_S,
            "window_s": window_s,
            "bound": bound,
        }
        results.append(row)
    return results


def over_half(figures_by_way: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, dict[str, Any]]:
    """Return means over seeds of each way, and its ratio to *half* seed by seed."""
    base = [row["jct_s"] for row in figures_by_way["half"]]
    ways = {}
    for name, runs in figures_by_way.items():
        ratio = [run["jct_s"] / half for run, half in zip(runs, base, strict=True)]
        ways[name] = {
            "jct_ratio": [round(value, 4) for value in _interval(ratio)],
            **{key: round(fmean(run[key] for run in runs), 3) for key in runs[0]},
            "restarts_interval": [round(value, 3) for value in _interval([run["restarts"] for run in runs])],
        }
    return ways


def _interval(values: Sequence[float]) -> list[float]:
    return [value for value in mean_with_interval(values) if math.isfinite(value)]


def _bounds(inputs: Inputs, load: Load, seed: int, window_s: float) -> dict[str, float]:
    moments, miso = inputs
    case, gpus = PlayedLoad.of(load, moments, miso, seed, window_s), lendslices.NODES * lendslices.PER_NODE
    alone_s = lendbound.alone_jct_s(case.training)
    return {
        "jct_s": max(alone_s, lendbound.least_jct_s(case.training, case.inference, miso, gpus)),
        "alone_s": alone_s,
    }


def _bound_over_half(bounds: Sequence[Mapping[str, float]], half: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return mean ratios to *half* by seed: the bound for any schedule, and a whole GPU for each job at once."""
    pairs = list(zip(bounds, half, strict=True))
    return {
        "jct_ratio": round(fmean(bound["jct_s"] / run["jct_s"] for bound, run in pairs), 4),
        "alone_ratio": round(fmean(bound["alone_s"] / run["jct_s"] for bound, run in pairs), 4),
    }


def _case(inputs: Inputs, load: Load, seed: int, window_s: float, way: LendingVariant) -> dict[str, float]:
    moments, miso = inputs
    return play(PlayedLoad.of(load, moments, miso, seed, window_s), miso, way)


def bars(result: Mapping[str, Any]) -> list[Bar]:
    """Return the bars of the default settings at one load."""
    ours, half, servers, idle = (result["ways"][name] for name in ("ours", "half", "servers", "idle"))
    load, target = result["load"], TARGETS.get(result["load"])
    over = ours["delay_p95_s"] - half["delay_p95_s"]
    found = [
        Bar(f"{load}: p95 start delay beyond a dedicated half [s]", over, TARGET_DELAY_S),
        Bar(f"{load}: restarts per training job", ours["restarts"], TARGET_RESTARTS),
        Bar(f"{load}: mean JCT over lending whole free servers", ours["jct_s"] / servers["jct_s"], 1.0),
        Bar(f"{load}: mean JCT over lending all idle slices", ours["jct_s"] / idle["jct_s"], 1.0),
    ]
    if target is not None:
        found.insert(0, Bar(f"{load}: mean JCT over training half only", ours["jct_ratio"][0], target))
    found.append(Bar(f"{load}: p95 start delay without lending [s]", half["delay_p95_s"], PROMISE_S))
    return found

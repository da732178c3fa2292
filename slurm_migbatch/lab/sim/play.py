"""Run a scenario: read its files once, then simulate it for each seed.

The seed determines the model of each job if models are drawn, the sensitivity of each job to neighbours, and the shift
of the copies' arrivals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np

from slurm_migbatch.config.reader import ConfigError, Problem
from slurm_migbatch.lab.sim import gpus, registry
from slurm_migbatch.lab.sim.cluster import SimulatedCluster
from slurm_migbatch.lab.sim.curves import Curves, Predicted, RateSource, RateTable
from slurm_migbatch.lab.sim.job import JobCosts, Kind, SimulatedJob
from slurm_migbatch.lab.sim.registry import Setup
from slurm_migbatch.lab.sim.result import SimulationResult
from slurm_migbatch.lab.sim.scenario import Scenario
from slurm_migbatch.lab.sim.speeds import Linear, Neighbours, Paired, Speeds, Whole
from slurm_migbatch.lab.traces import joblog, jobtable, mignames, mixed, muri, openb, philly, pollux, sacct
from slurm_migbatch.lab.traces.trace import Trace
from slurm_migbatch.predict.learned import LearnedPredictor
from slurm_migbatch.predict.training import learn
from slurm_migbatch.profiling import pairs
from slurm_migbatch.profiling.measurement import Measurement
from slurm_migbatch.profiling.table import read_folder

NO_MODELS: Final = (
    "no job of the trace names a model, so speeds of kind {kind} apply to none: each job is as fast as its share of "
    'the compute slices; workload.models = "draw" draws a model for each job'
)
"""What is told if a table of speeds is given and the trace has no models."""
UNIX_TIMES: Final = "the trace has Unix times: all times are counted from its first job"
_UNIX_S: Final = 1e8
"""No trace is three years long."""


class ScenarioData:
    """Files of a scenario, read once and used for every seed."""

    def __init__(self, scenario: Scenario) -> None:
        """Read the scenario's files. Raises TraceError, TableError and OSError."""
        self.scenario = scenario
        self.measured = _measured(scenario)
        self.source = _source(scenario, self.measured)
        trace = _trace(scenario)
        if self.source is not None and scenario.workload.models == "keep" and not any(job.app for job in trace.jobs):
            trace = replace(trace, notices=(*trace.notices, NO_MODELS.format(kind=scenario.speeds.kind)))
        self.trace = trace

    def jobs(self, seed: int) -> tuple[SimulatedJob, ...]:
        """Return the jobs for one seed. Raises ConfigError if the speeds lack a job's model."""
        workload = self.scenario.workload
        trace = self.trace.copies(workload.copies, seed=seed) if workload.copies > 1 else self.trace
        costs = self.scenario.costs
        of_kind = {
            "train": JobCosts(costs.train_start_s, costs.train_restart_s, costs.train_checkpoint_s),
            "infer": JobCosts(costs.infer_start_s, costs.infer_restart_s),
        }
        end_slo, start_slo = workload.slo_s or None, workload.start_slo_s or None
        jobs = tuple(
            replace(job, costs=of_kind["infer"], slo_s=end_slo, start_slo_s=start_slo)
            if job.kind == "infer"
            else replace(job, costs=of_kind["train"])
            for job in trace.jobs
        )
        if self.source is None:
            return jobs
        return self._drawn(jobs, self.source, seed) if workload.models == "draw" else self._known(jobs, self.source)

    def _drawn(self, jobs: tuple[SimulatedJob, ...], source: RateSource, seed: int) -> tuple[SimulatedJob, ...]:
        rng = np.random.Generator(np.random.PCG64([seed, 1]))
        apps: dict[Kind, list[str]] = {"train": self._fitting(source, "train"), "infer": self._fitting(source, "infer")}
        if missing := {job.kind for job in jobs if not apps[job.kind]}:
            kinds = " or ".join(sorted(missing))
            others = ", ".join(kind for kind, known in apps.items() if known) or "none"
            raise self._error(
                f"the trace has jobs of kind {kinds}, and the speeds know no model of this kind that fits on a whole "
                f"{self.scenario.geometry.name}: give a table with such a model (of this one fit: {others})"
            )
        draws = rng.random((len(jobs), 2)).tolist()
        drawn = []
        for job, (first, second) in zip(jobs, draws, strict=True):
            app = apps[job.kind][int(first * len(apps[job.kind]))]
            batches = source.batches(app, job.kind)
            drawn.append(replace(job, app=app, batch=job.gpus * batches[int(second * len(batches))]))
        return tuple(drawn)

    def _fitting(self, source: RateSource, kind: Kind) -> list[str]:
        """Return the applications of a kind that fit on the whole GPU with their smallest usual batch."""
        full = self.scenario.geometry.full.profile
        return [app for app in source.apps(kind) if full in source.rates(app, source.batches(app, kind)[0], kind)]

    def _known(self, jobs: tuple[SimulatedJob, ...], source: RateSource) -> tuple[SimulatedJob, ...]:
        for kind in ("train", "infer"):
            if missing := sorted({job.app for job in jobs if job.kind == kind and job.app} - set(source.apps(kind))):
                raise self._error(
                    f'there are no {kind} speeds of {", ".join(missing[:5])}; set workload.models = "draw" or give a '
                    f"table that has them (it has {', '.join(source.apps(kind)) or 'none'})"
                )
        return jobs

    def _error(self, text: str) -> ConfigError:
        return ConfigError(str(self.scenario.path), [Problem(0, text)])


def play(
    scenario: Scenario,
    workload: ScenarioData,
    seed: int,
    *,
    log: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> SimulationResult:
    """Simulate the scenario with one seed.

    Raises PlaceError and SimulationError if cluster, workload and policy are incompatible.
    """
    part, until = scenario.cluster, scenario.run.until_s
    cluster = SimulatedCluster.of(scenario.geometry, part.nodes * part.gpus, part.gpus)
    setup = Setup(
        geometry=scenario.geometry,
        nodes=part.nodes,
        per_node=part.gpus,
        jobs=workload.jobs(seed),
        speeds=_speeds(scenario, cluster, workload.source),
        neighbours=Neighbours(part.neighbours, part.neighbours_worst) if part.mig else None,
        measured=workload.measured,
        seed=seed,
        until=until if until < 1e12 else float("inf"),
        log=log,
        progress=progress,
    )
    return registry.find(scenario.policy).play(scenario.params, setup)


def _speeds(scenario: Scenario, cluster: SimulatedCluster, source: RateSource | None) -> Speeds:
    part = scenario.speeds
    speeds: Speeds = Whole()
    if source is not None:
        speeds = Curves(source, scenario.geometry, shared=part.shared)
    elif part.kind == "linear":
        speeds = Linear(cluster, exponent=part.exponent, shared=part.shared)
    if not part.pairs:
        return speeds
    table = pairs.read(scenario.near(part.pairs))
    everywhere = {(app, other): slowdown for (app, other, profile), slowdown in table.items() if not profile}
    return Paired(speeds, everywhere, part.shared)


def _measured(scenario: Scenario) -> tuple[Measurement, ...]:
    part = scenario.speeds
    return tuple(read_folder(scenario.near(part.path))) if part.kind in ("table", "predictor") else ()


def _source(scenario: Scenario, measured: tuple[Measurement, ...]) -> RateSource | None:
    part = scenario.speeds
    if part.kind not in ("table", "predictor"):
        return None
    if part.kind == "table":
        return RateTable(measured, scenario.geometry)
    predictor = LearnedPredictor()
    return Predicted(LearnedPredictor(learn(measured, predictor.knowledge)), scenario.geometry, scenario.cluster.gpu)


def _trace(scenario: Scenario) -> Trace:
    part, trace = scenario.workload, _from_first_job(_read(scenario))
    if part.begin_s or part.end_s < 1e12:
        trace = trace.window(part.begin_s, part.end_s)
    trace = trace.first(part.limit)
    if scenario.cluster.mig:
        with_slices = mignames.on_nearest if part.slices == "nearest" else mignames.with_notice
        trace = with_slices(trace, scenario.geometry)
    if part.load != 1.0:
        trace = trace.faster(part.load)
    if not trace.jobs:
        why = f": {'; '.join(trace.notices)}" if trace.notices else ""
        raise ConfigError(str(scenario.path), [Problem(0, f"no jobs are left of {scenario.near(part.path)}{why}")])
    return trace


def _from_first_job(trace: Trace) -> Trace:
    """Return a trace of Unix times with times since the first job: policies add seconds too small for such numbers."""
    first = min((job.arrival for job in trace.jobs), default=0.0)
    if first < _UNIX_S:
        return trace
    return replace(trace.window(first), notices=(*trace.notices, UNIX_TIMES))


def _read(scenario: Scenario) -> Trace:
    """Return the whole trace. Raises TraceError."""
    part = scenario.workload
    path = scenario.near(part.path)
    geometry = scenario.geometry if scenario.cluster.mig else None
    app_profiles = pollux.profiles(scenario.near(part.profiles)) if part.profiles else None
    if part.trace == "openb":
        return openb.read(path, gpus.geometry(scenario.cluster.gpu))
    if part.trace == "joblog":
        return joblog.read(path, geometry, part.infer, part.renamed_columns)
    if part.trace == "sacct":
        return sacct.read(path, part.infer, geometry)
    if part.trace == "jobtable":
        return jobtable.read(path, part.named_tres, part.infer, geometry)
    if part.trace == "mixed":
        return mixed.read(path, app_profiles)
    if part.trace == "pollux":
        return pollux.read(path, app_profiles or {})
    return {"philly": philly.read, "muri": muri.read}[part.trace](path)

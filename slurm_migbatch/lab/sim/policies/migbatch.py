"""Simulate migbatchd: the trace's jobs on a simulated Slurm, and `decide.core.decide` with a site's migbatch.toml.

Slurm is `lab.slurm`: it orders the queue, backfills, starts and requeues. The rounds, the submit filter and the record
are migbatchd's own code. The simulation assumes: durations of Slurm's actions and of Prolog and Epilog
(`slurm.nodes.NodeDelays`), partitions (one for everybody, and one with a lower tier for elastic training), priority by
age, as many catalog nodes as the job with the most nodes has nodes, and time limits that guide backfill but end no job
(OverTimeLimit=UNLIMITED), because a trace does not contain limits for slices. Two loops of migbatchd are omitted: the
predictor does not learn during the simulation, and free space is offered by `[supply] preference` or as one slice of
each size, not by the history of requests (`daemon.offer_tuner`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final, cast

import numpy as np

from slurm_migbatch.config import Config, ConfigError, Problem, load
from slurm_migbatch.config.keys import between, key, one_of
from slurm_migbatch.daemon.facts import chooser_of, known_models
from slurm_migbatch.lab.shipped import DECIDES, provenance
from slurm_migbatch.lab.sim.cluster import PlaceError
from slurm_migbatch.lab.sim.job import SimulatedJob
from slurm_migbatch.lab.sim.registry import NamedPolicy, Setup
from slurm_migbatch.lab.sim.result import SimulationResult
from slurm_migbatch.lab.sim.run import SimulatedRun
from slurm_migbatch.lab.slurm.booking import Booking, Played
from slurm_migbatch.lab.slurm.controller import ServiceController, pace_of
from slurm_migbatch.lab.slurm.records import SimulatedPartition, SlurmSettings
from slurm_migbatch.lab.slurm.run import ControllerInput, RoundTiming, SimulatedSite, SiteNode, SlurmSimulation
from slurm_migbatch.lab.slurm.tracejobs import (
    Auto,
    Hindrances,
    Manner,
    course_of,
    partitions_of,
    submission_of,
    users_of,
)
from slurm_migbatch.predict.learned import LearnedPredictor
from slurm_migbatch.predict.selection import Chooser
from slurm_migbatch.predict.state import Learned
from slurm_migbatch.predict.training import learn
from slurm_migbatch.profiling.measurement import Measurement
from slurm_migbatch.slurm.nodelist import expand

_TIERS: Final = (10, 1)
"""PriorityTier of ordinary jobs and of elastic training."""

_GROWTH: Final = 2.0
"""Growth of the pause between rounds without events: work that waits for a time is seen at most that much later, as
a share of the time since the last event.
"""

_QUIET_S: Final = 3600.0
"""Longest pause between rounds without lending: then no decision depends on the time of day."""


@dataclass(frozen=True)
class MigbatchParams:
    """migbatchd's decision function."""

    config: str = key("", "The site's migbatch.toml; relative to this file; empty: the shipped defaults.")
    auto: str = key(
        "no",
        "Jobs whose slice the submit filter chooses (mig:auto), among jobs of one GPU without a profile.",
        one_of("no", "infer", "all"),
    )
    elastic: bool = key(
        False, "Whether training on one slice or GPU may wait for idle slices, be stopped and continued ([lending])."
    )
    train_share: float = key(
        0.0, "Share of the nodes, the last ones, that only elastic training may use.", between(0.0, 0.99)
    )
    idle_s: float = key(
        300.0,
        "Longest pause between rounds without events in the queue and on nodes, in seconds; without lending, an hour "
        "if that is more. 0: rounds are always cluster.poll_s apart, as in migbatchd.",
        between(0.0, 86_400.0),
    )


def play(params: MigbatchParams, config: Config, setup: Setup, *, decides: bool = True) -> SimulationResult:
    """Run the jobs of a setup on a simulated Slurm with this configuration of migbatchd. Raises PlaceError, Stuck.

    `decides`: whether migbatchd runs; otherwise only its submit filter does.
    """
    return _Play(params, config, setup, decides=decides).run()


class _Play:
    """One simulation of a setup."""

    def __init__(self, params: MigbatchParams, config: Config, setup: Setup, *, decides: bool = True) -> None:
        self.params, self.config, self.setup, self.decides = params, config, setup, decides
        serving, lending = partitions_of(config)
        self.manner = Manner(
            setup.nodes,
            setup.per_node,
            setup.geometry,
            auto=cast(Auto, params.auto),
            elastic=params.elastic,
            serving=serving,
            lending=lending,
        )
        self.jobs = sorted(setup.jobs, key=lambda job: (job.arrival, job.id))
        self.origin = self.jobs[0].arrival if self.jobs else 0.0
        courses = [course_of(job, setup.speeds, setup.geometry) for job in self.jobs]
        self.played = [
            Played(SimulatedRun(job, sensitivity), course)
            for job, sensitivity, course in zip(self.jobs, self._sensitivities(), courses, strict=True)
        ]
        users = users_of(self.jobs)
        workload = [
            submission_of(job, job.arrival - self.origin, users[job.user], course, self.manner)
            for job, course in zip(self.jobs, courses, strict=True)
        ]
        widths = [int(submission.fields["num_nodes"]) for submission in workload]
        #: number of nodes of each job of several that the cluster can hold
        self.wide = [width for width in widths if 1 < width <= setup.nodes]
        self.simulation = SlurmSimulation(self._site(), workload)
        self.simulation.processes.neighbourhood = self._hindrances()
        self.service = ServiceController(self.simulation, config, chooser=_chooser(config, setup.measured, params))
        self.events: list[Mapping[str, Any]] = []
        self.rounds = 0
        ingest = self.simulation.nodes.on_events

        def tell(node: str, events: Sequence[Mapping[str, Any]]) -> None:
            self.events += events
            ingest(node, events)

        self.simulation.nodes.on_events = tell

    def run(self) -> SimulationResult:
        """Run the simulation and return its result."""
        pace = pace_of(self.config)
        if not self.decides:
            pace = RoundTiming(every_s=_QUIET_S, soon_s=_QUIET_S, idle_s=_QUIET_S)
        elif self.params.idle_s > pace.every_s:
            lent = self.config.lending.enabled
            idle_s = self.params.idle_s if lent else max(self.params.idle_s, _QUIET_S)
            pace = replace(pace, idle_s=idle_s, growth=_GROWTH, rests=not lent)
        outcome = self.simulation.run(self._round, pace, self.setup.until - self.origin)
        self.simulation.nodes.report()
        by_job: dict[int, Played] = {}
        for played, job in zip(self.played, outcome.submissions, strict=True):
            if job is not None:
                by_job[job] = played
                played.ended = outcome.jobs.get(job)
        left = any(job.ended is None for job in self.played)
        end = self.setup.until if left and self.setup.until < math.inf else self.origin
        present = [job.run for job in self.played if job.run.job.arrival <= self.setup.until]
        booking = Booking(self.setup.cluster(), self._places(), by_job, self._moment, log=self.setup.log)
        runs = sorted(present, key=lambda run: run.job.id)
        result = booking.book(runs, self.events, end, outcome.rounds, self.service.record.actions)
        failed = [job.run.job for job in self.played if job.course.failed]
        return replace(
            result,
            notices=tuple(self._notices(outcome.refusals, failed, outcome.misfits)),
            without_run=len(outcome.refusals) + len(failed),
        )

    def _round(self, observation: ControllerInput) -> bool:
        again = self.decides and self.service(observation)
        self.rounds += 1
        if self.setup.progress is not None and (not self.decides or self.rounds % 64 == 0):
            self.setup.progress(len(self.simulation.slurm.ended_jobs), len(self.jobs))
        return again

    def _moment(self, ts: float) -> float:
        """Return a unix time of the simulation as seconds on the trace's clock."""
        return ts - self.simulation.begin + self.origin

    # -- the site --------------------------------------------------------------------------------------------------

    def _site(self) -> SimulatedSite:
        manner, setup = self.manner, self.setup
        reserved = round(setup.nodes * self.params.train_share) if manner.elastic else 0
        if reserved == setup.nodes:
            raise PlaceError(
                f"policy.train_share: {setup.nodes} nodes leave none for other jobs: increase cluster.nodes"
            )
        nodes = []
        for number in range(setup.nodes):
            names = [] if number >= setup.nodes - reserved else [manner.serving]
            names += [manner.lending] if manner.elastic else []
            nodes.append(SiteNode(f"n{number + 1}", (setup.geometry,) * setup.per_node, tuple(names)))
        partitions = [SimulatedPartition(manner.serving, _TIERS[0])]
        if manner.elastic:
            partitions.append(SimulatedPartition(manner.lending, _TIERS[1], preempted=True))
        slurm = SlurmSettings(listing_s=0.02, update_s=0.004, over_limit_s=math.inf)
        return SimulatedSite(tuple(nodes), tuple(partitions), slurm, catalog_nodes=max(self.wide, default=1))

    def _places(self) -> dict[str, int]:
        uuids = (uuid for gpus in self.simulation.nodes.gpus.values() for uuid in gpus)
        return {uuid: index for index, uuid in enumerate(uuids)}

    def _sensitivities(self) -> list[float]:
        """Draw sensitivities as `sim.engine` does."""
        rng = np.random.Generator(np.random.PCG64(self.setup.seed))
        count = len(self.jobs)
        return [0.0] * count if self.setup.neighbours is None else self.setup.neighbours.draw(count, rng)

    def _hindrances(self) -> Hindrances:
        numbers = self.simulation.numbers
        return Hindrances(
            self.setup.speeds,
            lambda job: self.played[numbers[job]].run,
            dict.fromkeys(self._places(), self.setup.geometry),
            any(job.run.sensitivity for job in self.played),
        )

    # -- notes for the user ------------------------------------------------------------------------------------------

    def beyond_catalog(self) -> list[str]:
        """Return a note if jobs have more nodes than the configuration has catalog nodes."""
        listed = len(expand(self.config.cluster.catalog_nodes))
        count = sum(width > listed for width in self.wide)
        if not count:
            return []
        return [
            f"{count} jobs have more nodes than the configuration has catalog nodes ([cluster] catalog_nodes: "
            f"{listed}): a real Slurm refuses them while no nodes offer their profile; here are {max(self.wide)} "
            "catalog nodes"
        ]

    def _notices(
        self, refusals: Mapping[int, str], failed: Sequence[SimulatedJob], misfits: tuple[int, ...]
    ) -> list[str]:
        notices = []
        if refusals:
            number, why = min(refusals.items())
            notices.append(f"{len(refusals)} jobs were refused; the first, {_named(self.jobs[number])}: {why}")
        if failed:
            notices.append(
                f"{len(failed)} jobs did not fit on the slices that they got; the first is {_named(failed[0])}"
            )
        if misfits:
            notices.append(f"{len(misfits)} starts found no slice on their node, and the jobs were requeued")
        return notices


def _named(job: SimulatedJob) -> str:
    asks = f"{job.gpus} x {job.profile}" if job.profile is not None else f"{job.gpus} GPUs"
    return f"{job.name} ({asks})"


def _config(params: MigbatchParams) -> Config:
    """Read the configuration that a scenario names. Raises ConfigError."""
    config = load(params.config) if params.config else Config()
    if params.elastic and not (config.lending.enabled and config.lending.partitions):
        path = params.config or "the shipped defaults"
        raise ConfigError(
            path, [Problem(0, "policy.elastic needs [lending] with enabled = true and partitions in migbatch.toml")]
        )
    if not config.supply.enabled:
        text = "[supply] enabled = false keeps the slices of slurm.conf, and simulated nodes have none: set it to true"
        raise ConfigError(params.config, [Problem(0, text)])
    return config


def _chooser(config: Config, measured: tuple[Measurement, ...], params: MigbatchParams) -> Chooser:
    """Return the site's predictor.

    It is learned from the scenario's measurements; without any, it is read from the configuration's directory.
    """
    if params.config and not measured:
        return chooser_of(config)
    learned = _learned(measured) if measured else None
    return Chooser(LearnedPredictor(learned, known_models(config), confidence=config.learning.confidence))


@lru_cache(maxsize=1)
def _learned(measured: tuple[Measurement, ...]) -> Learned:
    return learn(measured, LearnedPredictor().knowledge)


def _settings(params: MigbatchParams) -> Mapping[str, str]:
    return {**provenance(DECIDES, _config(params)), "file": params.config or "shipped defaults"}


def _configured(params: MigbatchParams, setup: Setup) -> SimulationResult:
    config = _config(params)
    if len(setup.geometry.profiles) < 2:
        raise PlaceError("policy migbatch divides GPUs into slices: set cluster.mig = true, or choose another policy")
    simulation = _Play(params, config, setup)
    result = simulation.run()
    return replace(result, notices=(*result.notices, *simulation.beyond_catalog()))


MIGBATCH: Final = NamedPolicy(
    "what migbatchd runs, on a simulated Slurm: decide.core.decide with a site's migbatch.toml",
    MigbatchParams,
    _configured,
    _settings,
)

"""Lending by all that migbatchd decides: `decide.core.decide` on a simulated Slurm, beside what `lendslices` measures.

`lendslices` runs the round of lending alone, on GPUs where inference starts as soon as there is room. Here the same
jobs go through Slurm's queue: supply plans what every node offers, Slurm starts and preempts, nodes take plans, make
slices and report, and the whole decision is taken as often as migbatchd takes it. To simulate that takes ten times as
long and more, so that the jobs of the first `WINDOW_S` seconds of a few seeds have to do, run to the end of the last
one; the round alone is measured on the same jobs.

As in `lendslices` the configuration is the shipped one with lending switched on (`lendslices.config`), the speeds of
training are known, and the record holds the days before. Training may be preempted by Slurm itself, as the
documentation asks for.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from slurm_migbatch.decide.lending.forecast import DAY_S
from slurm_migbatch.decide.snapshot import LendingPast, NoPredictions
from slurm_migbatch.lab.experiments import lending, lendslices
from slurm_migbatch.lab.experiments.lending import Load
from slurm_migbatch.lab.experiments.lendslices import TRAINING, config
from slurm_migbatch.lab.shipped import DECIDES, provenance
from slurm_migbatch.lab.sim.gpus import geometry
from slurm_migbatch.lab.sim.job import SimulatedJob
from slurm_migbatch.lab.sim.metrics import of_jobs
from slurm_migbatch.lab.sim.run import SimulatedRun
from slurm_migbatch.lab.slurm.controller import ServiceController, pace_of
from slurm_migbatch.lab.slurm.records import SimulatedPartition, SlurmSettings
from slurm_migbatch.lab.slurm.run import RoundTiming, SimulatedSite, SiteNode, SlurmSimulation, Submission
from slurm_migbatch.lab.slurm.tracejobs import Course, course_of
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.workload.loans import LoanHints

WINDOW_S: Final = 2 * 3600.0
INFERENCE = "gpu"
_BEGIN: Final = 100 * DAY_S
"""Unix seconds at which a run begins: a whole number of days, as in the history of `lendslices`."""
_IDLE_S: Final = 60.0
"""Longest pause between rounds while nothing happens."""
_GROWTH: Final = 2.0
_TIERS: Final = (10, 1)
WAYS: Final[Mapping[str, bool]] = {"half": False, "ours": True}
"""Whether inference's nodes are lent."""


def settings() -> dict[str, str]:
    """What decides, and the digest of its configuration."""
    return provenance(DECIDES, config())


def pace() -> RoundTiming:
    """When rounds are run: as often as migbatchd's for as long as anything happens."""
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


def _submission(job: SimulatedJob, course: Course) -> Submission:
    """One sbatch as the submit filter leaves it; nobody names a time limit."""
    if job.kind == "infer":
        return Submission(job.arrival, f"mig:{job.profile}:1", lambda: course, INFERENCE, name="infer")
    least = "" if job.profile is None else f" min={job.profile.gres_type}"
    hints = f"migbatch: role=train model={job.app} batch={job.batch}{least} signal=usr1 [mig:loan:1#loan0001]"
    return Submission(job.arrival, "mig:loan:1", lambda: course, TRAINING, name="train", fields={"comment": hints})


def site(lend: bool) -> SimulatedSite:
    """The cluster of `lendslices`: the first half of the nodes is training's."""
    gpus = (geometry(lendslices.GPU),) * lendslices.PER_NODE
    shared = (INFERENCE, TRAINING) if lend else (INFERENCE,)
    half = lendslices.NODES // 2
    nodes = [SiteNode(f"n{n + 1}", gpus, (TRAINING,) if n < half else shared) for n in range(lendslices.NODES)]
    partitions = (SimulatedPartition(INFERENCE, _TIERS[0]), SimulatedPartition(TRAINING, _TIERS[1], preempted=True))
    return SimulatedSite(tuple(nodes), partitions, SlurmSettings(listing_s=0.02, update_s=0.004))


@dataclass(frozen=True)
class PlayedLoad:
    """The jobs of a load and a seed that are played.

    Attributes:
        training, inference: those that come within the window.
        uses: of slices in the days before; see `lendslices.inference`.
    """

    training: Sequence[SimulatedJob]
    inference: Sequence[SimulatedJob]
    uses: Sequence[tuple[str, float, float | None]]

    @classmethod
    def of(
        cls, load: Load, moments: lendslices.Moments, found: lendslices.Miso, seed: int, window_s: float
    ) -> PlayedLoad:
        """The jobs of `lendslices`, as far as they come within the window."""
        arrivals = lendslices.arrivals_of(load, moments.arrivals, seed)
        jobs = lendslices.training(found, arrivals, seed, load.whole)
        requests, uses = lendslices.inference(load, moments, seed)
        early = [[job for job in some if job.arrival < window_s] for some in (jobs, requests)]
        return cls(early[0], early[1], uses)


def play(case: PlayedLoad, found: lendslices.Miso, lend: bool) -> dict[str, float]:
    """Play it with migbatchd's controller; the figures of `lending.figures` that both kinds of simulation have.

    Raises:
        Stuck: jobs are left that nothing will ever start.
        NotMeasurable: a job was not done.
    """
    speeds = lendslices.speeds_of(found)
    jobs = sorted([*case.training, *case.inference], key=lambda job: (job.arrival, job.id))
    courses = [course_of(job, speeds, speeds.geometry) for job in jobs]
    simulation = SlurmSimulation(site(lend), [_submission(*pair) for pair in zip(jobs, courses, strict=True)], _BEGIN)
    before = _BEGIN - lending.HISTORY_DAYS * DAY_S
    uses = [(name, before + at, None if until is None else before + until) for name, at, until in case.uses]
    controller = ServiceController(simulation, config(), KnownSpeeds(found), past=LendingPast(uses=uses))
    outcome = simulation.run(controller, pace())
    runs = []
    for job, course, number in zip(jobs, courses, outcome.submissions, strict=True):
        ended = None if number is None else outcome.jobs.get(number)
        run = SimulatedRun(job)
        if ended is not None:
            course.settle(ended.end)
            run.ended, run.preempted = ended.end - _BEGIN, ended.restarts
        run.began = None if course.began is None else course.began - _BEGIN
        runs.append(run)
    end = max((run.ended for run in runs if run.ended is not None), default=0.0)
    train, infer = (of_jobs([run for run in runs if run.job.kind == kind], end) for kind in ("train", "infer"))
    taken = controller.record.actions["requeue"]
    return lending.complete(
        {
            "jct_s": train["jct_s"]["mean"],
            "restarts": train["restarts"]["mean"],
            "delay_mean_s": infer["delay_s"]["mean"],
            "delay_p95_s": infer["delay_s"]["p95"],
            "preempted": train["interrupted"] - taken,
            "rounds": outcome.rounds,
            "unfinished": train["jobs"] + infer["jobs"] - train["done"] - infer["done"],
        }
    )


def check(
    load: Load,
    moments: lendslices.Moments,
    found: lendslices.Miso,
    seeds: int,
    window_s: float = WINDOW_S,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Both ways on the same jobs by the whole decision and by its round of lending alone; means over seeds.

    Returns:
        {"seeds", "window_s", "decides", "configuration", "whole", "round", "ratio", "difference"}: "whole" and "round"
        have figures by way, "ratio" (of both) is the mean completion time with lending over that without, and
        "difference" the ratio of "whole" over that of "round", less one.
    """
    rows: dict[str, dict[str, list[dict[str, float]]]] = {"whole": {}, "round": {}}
    for seed in range(seeds):
        case = PlayedLoad.of(load, moments, found, seed, window_s)
        for name, lend in WAYS.items():
            say(f"{load.name}: seed {seed}, {name}, the whole decision")
            rows["whole"].setdefault(name, []).append(play(case, found, lend))
            way = lendslices.WAYS[name]
            alone = lendslices.play(case.training, case.inference, case.uses, found, way, seed)
            rows["round"].setdefault(name, []).append(alone)
    ratio = {
        name: statistics.fmean(
            lending_run["jct_s"] / half["jct_s"] for lending_run, half in zip(ways["ours"], ways["half"], strict=True)
        )
        for name, ways in rows.items()
    }
    figures = {name: {way: _means(runs) for way, runs in ways.items()} for name, ways in rows.items()}
    difference = ratio["whole"] / ratio["round"] - 1.0
    rounded = {name: round(value, 4) for name, value in ratio.items()}
    return {
        "seeds": seeds,
        "window_s": window_s if math.isfinite(window_s) else None,
        **settings(),
        **figures,
        "ratio": rounded,
        "difference": round(difference, 4),
    }


def _means(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: round(statistics.fmean(run[name] for run in runs), 3) for name in runs[0]}

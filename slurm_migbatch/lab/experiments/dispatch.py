"""Measure batch jobs without a profile with default settings (E4): completion times on eight GPUs, and limits kept.

Jobs of Slurm: each runs one measured model at its user's batch for some minutes, and has a limit for one batch
(`slo=`) or for the whole job (`deadline=`). The submit filter's rule grants the smallest slice that keeps it, here
by the measured table, without a predictor. Jobs arrive at random times (Poisson).

- **migbatchd**: `decide.core.decide` with the default configuration on the simulated Slurm: free space is divided by
  `decide.paris_elsa.preference` (PARIS for a live site), pending jobs are re-typed by `decide.dispatch.retype`
  (ELSA's two ideas). All delays of Slurm, nodes and migbatchd are included.
- *without re-typing*, *without the preference*: the same with one of the two off.
- **best equal slices**: every GPU divided into as many slices of one profile as it holds. **best static cut**:
  some whole GPUs, the others all divided in one way. Both are chosen in hindsight for each load, over all seeds, among
  those on which every job keeps its limit; a job takes the smallest idle slice that keeps it, at once, and waits in
  order if there is none. They have neither Slurm nor delays.
- **granted, at once**: every job starts at its arrival on the slice that the filter grants: the bound for any
  rule that keeps the grant. A static layout can be below it, where jobs get larger slices than they need.

`bench study paris-elsa` has the papers' own setting: one model, single batches, latency-bounded rates.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final

import numpy as np

from slurm_migbatch.config import Config
from slurm_migbatch.decide.paris_elsa.partition import ways
from slurm_migbatch.decide.snapshot import WeighedProfile
from slurm_migbatch.lab.bars import Bar, NotMeasurable, rounded_interval
from slurm_migbatch.lab.progress import Progress, silent
from slurm_migbatch.lab.shipped import DECIDES, learned_from, pace, provenance
from slurm_migbatch.lab.sim.gpus import geometry
from slurm_migbatch.lab.slurm.controller import ServiceController
from slurm_migbatch.lab.slurm.run import SimulatedSite, SlurmSimulation, Submission
from slurm_migbatch.lab.slurm.work import Fixed
from slurm_migbatch.lab.studies.dstack import settings_of
from slurm_migbatch.lab.studies.pariselsa import GPU, kinds_of
from slurm_migbatch.mig.grant import Grant
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.profiling.table import read_folder
from slurm_migbatch.workload.hints import Hints
from slurm_migbatch.workload.loans import LoanHints

NODES: Final = 2
PER_NODE: Final = 4
JOBS: Final = 400
WARM: Final = 50
LOADS: Final = (0.7, 0.9)
"""Slice-seconds of all jobs on the slices first granted, relative to the GPUs' capacity."""
BATCHES: Final = (1, 2, 4, 8, 16, 32)
MEDIAN_S: Final = 120.0
LONGEST_S: Final = 1800.0
"""Of a job on the whole GPU; log-normal with a sigma of 1."""
SLACK: Final = (1.1, 6.0)
"""A limit as a multiple of the time on the whole GPU, at random (uniform in the logarithm)."""
TARGET: Final = 1.0
OURS, NO_RETYPE, NO_PREFERENCE = "migbatchd", "without re-typing", "without the preference"
EQUAL, STATIC = "best equal slices", "best static cut"
AT_ONCE: Final = "granted, at once"

Seconds = Mapping[tuple[str, int], Mapping[Profile, float]]
"""Of one batch: by model and batch, on each profile where it fits."""


@dataclass(frozen=True)
class Auto:
    """A job without a profile.

    Attributes:
        at: its arrival, seconds.
        seconds: of the whole job on each profile that keeps its limit; `granted` is the smallest of them.
        hints: as its user writes them.
    """

    at: float
    seconds: Mapping[Profile, float]
    hints: str

    @property
    def granted(self) -> Profile:
        """Profile that the filter grants."""
        return min(self.seconds)


@dataclass
class OnSlice(Fixed):
    """A job whose time depends on its slice; `seconds` of a slice that is not named are the default ones."""

    by_profile: Mapping[Profile, float] = field(default_factory=dict)

    def begin(self, now: float, slices: Sequence[Profile], restart: int) -> None:
        """See Work."""
        self.seconds = self.by_profile[slices[0]]
        super().begin(now, slices, restart)


class MeasuredTable:
    """Predictions equal to the measurements; implements `decide.snapshot.Predictions`."""

    version = "measured"

    def __init__(self, seconds: Seconds) -> None:
        self._seconds = seconds

    def training_speeds(self, _hints: LoanHints, _partition: str, /) -> Mapping[Profile, float]:
        """Return no speeds: there are no training jobs."""
        return {}

    def rates(self, hints: Hints, _partition: str, /) -> Mapping[Profile, float]:
        """Return the items per second at the batch of the hints."""
        batch = hints.batch or 1
        return {profile: batch / s for profile, s in self._seconds.get((hints.model or "", batch), {}).items()}

    def candidates(self, hints: Hints, partition: str, /) -> tuple[Profile, Sequence[WeighedProfile]] | None:
        """Return the filter's grant, and its candidates from the smallest, each with whether it keeps the limits."""
        gpu = geometry(GPU)
        weighed = []
        for profile, rate in sorted(self.rates(hints, partition).items()):
            keeps_limits = hints.slo_us is None or 1e6 * (hints.batch or 1) / rate <= hints.slo_us
            keeps_limits = keeps_limits and (hints.deadline_s is None or (hints.items or 0) / rate <= hints.deadline_s)
            weighed.append(WeighedProfile(profile, gpu.info(profile).memory_mib, rate, keeps_limits))
        granted = next((candidate.profile for candidate in weighed if candidate.ok), None)
        return None if granted is None else (granted, weighed)


def table(data: Path) -> Seconds:
    """Return the models measured on all sizes of slices, at `BATCHES`. Raises NotMeasurable, TableError, OSError."""
    kinds = kinds_of(geometry(GPU))
    seconds_of: dict[tuple[str, int], dict[Profile, float]] = {}
    for model, settings in settings_of(read_folder(data), kinds).items():
        for setting in settings:
            if setting.batch in BATCHES:
                seconds_of.setdefault((model, setting.batch), {})[setting.profile] = setting.seconds
    seconds_of = {key: seconds for key, seconds in seconds_of.items() if kinds[-1] in seconds}
    if not seconds_of:
        raise NotMeasurable(f"{data} has no model that was measured on {', '.join(k.name for k in kinds)} of an {GPU}")
    return seconds_of


def draw(seconds: Seconds, load: float, seed: int) -> list[Auto]:
    """Draw the jobs of one seed, in the order of their arrival."""
    chance = np.random.Generator(np.random.PCG64(seed))
    keys, full = sorted(seconds), geometry(GPU).full.profile
    shapes = []
    for _ in range(JOBS):
        model, batch = keys[int(chance.integers(len(keys)))]
        seconds_of = seconds[model, batch]
        whole_s = min(LONGEST_S, MEDIAN_S * math.exp(float(chance.standard_normal())))
        slack = math.exp(float(chance.uniform(*np.log(SLACK))))
        items = max(batch, round(whole_s / seconds_of[full] * batch))
        if chance.integers(2):
            limit_us = math.ceil(slack * seconds_of[full] * 1e6)
            kept = {kind for kind, s in seconds_of.items() if s * 1e6 <= limit_us}
            limit = f"slo={limit_us}us"
        else:
            deadline_s = math.ceil(slack * items / batch * seconds_of[full])
            kept = {kind for kind, s in seconds_of.items() if items / batch * s <= deadline_s}
            limit = f"deadline={deadline_s}s"
        hints = f"migbatch: model={model} batch={batch} items={items} {limit}"
        shapes.append(({kind: items / batch * seconds_of[kind] for kind in kept}, hints))
    work = statistics.fmean(min(times).compute * times[min(times)] for times, _ in shapes)
    rate = load * NODES * PER_NODE * geometry(GPU).compute_slices / work
    moments = np.cumsum(chance.exponential(1.0 / rate, JOBS)).tolist()
    return [Auto(at, times, hints) for at, (times, hints) in zip(moments, shapes, strict=True)]


Ends = list[float]
"""Seconds from arrival to end of each job."""


def shipped(jobs: Sequence[Auto], config: Config, seconds: Seconds) -> Ends:
    """Run migbatchd's decisions on the simulated Slurm."""
    site = SimulatedSite.of(geometry(GPU), NODES, PER_NODE)
    simulation = SlurmSimulation(site, [_submission(job) for job in jobs])
    controller = ServiceController(simulation, config, MeasuredTable(seconds))
    outcome = simulation.run(controller, pace(config))
    ends = []
    for number, job in zip(outcome.submissions, jobs, strict=True):
        if number is None:
            raise NotMeasurable(f"the simulated Slurm refuses {job.hints}")
        ends.append(outcome.jobs[number].end - outcome.begin - job.at)
    return ends


def _submission(job: Auto) -> Submission:
    grant = Grant([(job.granted, 1)], "auto")
    longest = max(job.seconds.values())
    return Submission(
        job.at,
        grant.gres,
        partial(OnSlice, longest, by_profile=job.seconds),
        limit_s=2 * math.ceil(longest) + 60,
        fields={"comment": grant.attach(job.hints), "cpus": 1},
    )


def static(jobs: Sequence[Auto], slices: Mapping[Profile, int]) -> Ends | None:
    """Simulate a static layout without any delay; None if a job keeps its limit on none of its slices."""
    kinds = sorted(kind for kind, n in slices.items() if n)
    idle = Counter({kind: slices[kind] for kind in kinds})
    if any(not job.seconds.keys() & idle.keys() for job in jobs):
        return None
    ends: Ends = [0.0] * len(jobs)
    busy: list[tuple[float, int, Profile]] = []
    number = count()
    queue: list[int] = []

    def start(job: int, kind: Profile, now: float) -> None:
        idle[kind] -= 1
        end = now + jobs[job].seconds[kind]
        ends[job] = end - jobs[job].at
        heapq.heappush(busy, (end, next(number), kind))

    def end_next() -> None:
        now, _, kind = heapq.heappop(busy)
        idle[kind] += 1
        following = next((job for job in queue if kind in jobs[job].seconds), None)
        if following is not None:
            queue.remove(following)
            start(following, kind, now)

    for job, arrival in enumerate(jobs):
        while busy and busy[0][0] <= arrival.at:
            end_next()
        kind = next((kind for kind in kinds if idle[kind] and kind in arrival.seconds), None)
        if kind is None:
            queue.append(job)
        else:
            start(job, kind, arrival.at)
    while queue:
        end_next()
    return ends


def cuts() -> dict[str, dict[str, dict[Profile, int]]]:
    """Return the static layouts of all GPUs, by kind and name: slices of each profile."""
    gpu, gpus = geometry(GPU), NODES * PER_NODE
    kinds = kinds_of(gpu)
    equal = {str(kind): {kind: gpus * gpu.info(kind).max_instances} for kind in kinds}
    mixed = {}
    for counts in ways(gpu, kinds):
        slices_per_gpu = {kind: n for kind, n in zip(kinds, counts, strict=True) if n}
        for whole in range(gpus + 1):
            slices = Counter({kind: n * (gpus - whole) for kind, n in slices_per_gpu.items()}) + Counter(
                {kinds[-1]: whole}
            )
            name = " + ".join(f"{n} x {kind}" for kind, n in sorted(slices.items()))
            mixed[name] = dict(slices)
    return {EQUAL: equal, STATIC: mixed}


def config_of(jobs: Sequence[Auto]) -> Config:
    """Return the default settings of a site that has received these jobs for a while, as granted by the filter."""
    granted = [(job.granted, job.seconds[job.granted]) for job in jobs]
    return learned_from(granted, jobs[-1].at - jobs[0].at, {geometry(GPU): NODES * PER_NODE})


def configs(config: Config) -> dict[str, Config]:
    """Return migbatchd's settings, and the same with parts disabled."""
    return {
        OURS: config,
        NO_RETYPE: replace(config, dispatch=replace(config.dispatch, enabled=False)),
        NO_PREFERENCE: replace(config, supply=Config().supply),
    }


def measure(data: Path, seeds: int = 10, progress: Progress = silent) -> dict[str, Any]:
    """Run the whole experiment on a folder with measured tables. Raises NotMeasurable, TableError, OSError."""
    seconds = table(data)
    results = [_load(seconds, load, seeds, progress) for load in LOADS]
    return {
        "bench": "dispatch",
        "data": str(data),
        "gpu": GPU,
        "gpus": NODES * PER_NODE,
        "seeds": seeds,
        "notes": [
            f"{len({model for model, _ in seconds})} models as measured, one process on a slice, no predictor; "
            f"{JOBS} jobs, the first {WARM} not counted",
            "static layouts are chosen in hindsight and have no delay; no job's limit is exceeded on them",
            "interference of slices is not modelled; offers for free space are derived from the jobs themselves",
        ],
        "results": results,
        "bars": [bar.to_dict() for result in results for bar in bars(result)],
    }


def _load(seconds: Seconds, load: float, seeds: int, progress: Progress) -> dict[str, Any]:
    drawn = [draw(seconds, load, seed) for seed in range(seeds)]
    config = config_of(drawn[0])
    ends_by_way: dict[str, list[Ends]] = {}
    variants = configs(config)
    steps = len(LOADS) * (len(variants) * seeds + len(cuts()))
    for name, variant in variants.items():
        for seed, jobs in enumerate(drawn):
            progress(f"load {load:g}: seed {seed}, {name}", steps)
            ends_by_way.setdefault(name, []).append(shipped(jobs, variant, seconds))
    chosen = {}
    for cut, layouts in cuts().items():
        progress(f"load {load:g}: {cut}", steps)
        best = _best_layout(drawn, layouts)
        if best is None:
            raise NotMeasurable(f"{cut}: with none of them all jobs keep their limits")
        chosen[cut], ends_by_way[cut] = best
    ends_by_way[AT_ONCE] = [[job.seconds[job.granted] for job in jobs] for jobs in drawn]
    means = {name: [_mean(ends) for ends in runs] for name, runs in ends_by_way.items()}
    return {
        "load": load,
        **provenance(DECIDES, config),
        "preference": list(config.supply.preference),
        "cuts": chosen,
        "ways": {
            name: {
                "jct_s": round(statistics.fmean(values), 1),
                "p95_s": round(
                    statistics.fmean(float(np.quantile(ends[WARM:], 0.95)) for ends in ends_by_way[name]), 1
                ),
                "over_equal": _ratio_interval(values, means[EQUAL]),
                "over_static": _ratio_interval(values, means[STATIC]),
            }
            for name, values in means.items()
        },
    }


def _best_layout(
    drawn: Sequence[Sequence[Auto]], layouts: Mapping[str, Mapping[Profile, int]]
) -> tuple[str, list[Ends]] | None:
    """Return the layout with the lowest mean completion time over all seeds, of those that keep every limit."""
    lowest: tuple[float, str, list[Ends]] | None = None
    for name, slices in layouts.items():
        runs = [ends for jobs in drawn if (ends := static(jobs, slices)) is not None]
        if len(runs) == len(drawn):
            mean = statistics.fmean(_mean(ends) for ends in runs)
            if lowest is None or mean < lowest[0]:
                lowest = mean, name, runs
    return None if lowest is None else lowest[1:]


def _mean(ends: Ends) -> float:
    return statistics.fmean(ends[WARM:])


def _ratio_interval(dispatched: Sequence[float], baseline: Sequence[float]) -> list[float]:
    return rounded_interval([a / b for a, b in zip(dispatched, baseline, strict=True)])


def bars(result: Mapping[str, Any]) -> list[Bar]:
    """Compare the default settings with both static layouts at one load, by means."""
    dispatched, load = result["ways"][OURS], f"load {result['load']:g}: mean JCT over"
    return [
        Bar(f"{load} {EQUAL} ({result['cuts'][EQUAL]})", dispatched["over_equal"][0], TARGET),
        Bar(f"{load} {STATIC} ({result['cuts'][STATIC]})", dispatched["over_static"][0], TARGET),
    ]

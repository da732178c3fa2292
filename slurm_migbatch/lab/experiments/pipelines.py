"""Measure pipelines with one deadline with default settings (E8): deadlines met, and slices used.

Each pipeline is three or four jobs of Slurm, connected by --dependency, of measured models; its deadline
counts from its submission. Pipelines arrive at random times (Poisson). The submit filter's rule grants each job the
smallest slice that keeps the limit in its hints, here by the measured table, without a predictor. All rules run
`decide.core.decide` with the default configuration on the simulated Slurm, with all delays:

- **migbatchd**: jobs name their pipeline and its deadline; `decide.dispatch.pipelines` splits the remaining time. The
  first job is submitted with --begin=now+15, as the documentation recommends, so that it starts on its share.
- *equal split*: the user gives each job an equal part of the deadline as its own (`deadline=`), in as many parts as the
  longest path has jobs.
- *proportional split*: parts proportional to the predicted times of the jobs on the slice that each would be granted
  alone.
- *each alone*: no job knows of the others; each has the whole deadline, so that it gets the smallest slice that keeps
  it alone.
- Not a realistic policy: *oracle*, the cheapest split by true times without other jobs; if no split keeps
  the deadline, migbatchd's choice for that case. A bound for the slices of the others.

Slice-seconds are GPU equivalents times seven, so that a slice counts with the larger of its shares of compute and of
memory: 3g.40gb, which takes half of the memory, as three and a half.

Users who split the deadline themselves leave the same time for starts as migbatchd does (`START_S`).

With wrong predictions the true time is anywhere within a factor of `WRONG`. migbatchd and the submit filter decide by
the slow end of the predictor's interval, which holds with `CONFIDENCE`; so do all rules here (*intervals as wide*).
Beside it stands what happens if the predictor does not know that it is wrong, and its interval has no width.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from slurm_migbatch.config import Config
from slurm_migbatch.decide.capacity.demand import slices
from slurm_migbatch.decide.dispatch.pipelines import START_S
from slurm_migbatch.decide.dispatch.split import SplitStage, StageChoice, path_s, split
from slurm_migbatch.lab.bars import Bar, NotMeasurable, rounded_interval
from slurm_migbatch.lab.experiments.dispatch import MeasuredTable, OnSlice, Seconds, table
from slurm_migbatch.lab.progress import Progress, silent
from slurm_migbatch.lab.shipped import DECIDES, learned_from, pace, provenance
from slurm_migbatch.lab.sim.gpus import geometry
from slurm_migbatch.lab.slurm.controller import ServiceController
from slurm_migbatch.lab.slurm.run import SimulatedSite, SlurmSimulation, Submission
from slurm_migbatch.lab.studies.pariselsa import GPU
from slurm_migbatch.mig.grant import Grant
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.predict.learned import CONFIDENCE
from slurm_migbatch.report.equivalents import WHOLE, gpu_equivalent
from slurm_migbatch.values.quantiles import quantile

NODES: Final = 2
PER_NODE: Final = 4
PIPELINES: Final = 60
LOADS: Final = (0.5, 0.75)
"""Slice-seconds of all jobs on the slices that *each alone* grants, relative to the GPUs' capacity."""
MEDIAN_S: Final = 60.0
SPREAD: Final = 0.7
"""Run time of a job on the whole GPU: log-normal, with this sigma."""
SLACK: Final = (1.2, 5.0)
"""A deadline as a multiple of the longest path on whole GPUs, at random (uniform in the logarithm), plus the starts."""
WRONG: Final = 2.0
"""Largest error of a prediction, up or down (uniform in the logarithm, by model and batch)."""
SLOW_END: Final = WRONG ** (2.0 * CONFIDENCE - 1.0)
"""Slow end of the interval of such a prediction over its middle."""
BEGIN_S: Final = 15.0
"""--begin of a pipeline's first job, from its submission."""
IDLE_S: Final = 5.0
"""Between two rounds while nothing happens; the service's own are more frequent."""
SAVED: Final = 0.85
LOST: Final = 0.02
TIGHTNESS: Final = {"tight": (1.2, 1.6), "middle": (1.6, 2.5), "loose": (2.5, 5.0)}
"""Deadlines by how many times the longest path they are."""
OURS, EQUAL, PROPORTIONAL, ALONE, ORACLE = "migbatchd", "equal split", "proportional split", "each alone", "oracle"
WAYS: Final = (OURS, EQUAL, PROPORTIONAL, ALONE)

KINDS: Final[Mapping[str, tuple[tuple[str, int, tuple[int, ...]], ...]]] = {
    "detect, classify, caption": (("inception-v3", 32, ()), ("densenet121", 32, (0,)), ("bert-large", 8, (1,))),
    "preprocess, summarise, embed": (("mobilenet-v2", 32, ()), ("bert-large", 32, (0,)), ("bert-large", 16, (1,))),
    "decode, track, detect, caption": (
        ("vgg19", 32, ()),
        ("resnet101", 32, (0,)),
        ("mobilenet-v2", 32, (1,)),
        ("bert-large", 8, (2,)),
    ),
    "detect, classify beside caption, index": (
        ("resnet50", 32, ()),
        ("densenet201", 32, (0,)),
        ("bert-large", 16, (0,)),
        ("mobilenet-v2", 32, (1, 2)),
    ),
}
"""Models, batches, and the indexes of the jobs that each waits for. bert-large represents jobs that produce or read
text: of the models that were measured on every size of slices it gains least from a large one.
"""


@dataclass(frozen=True)
class PipelineJob:
    """A job of a pipeline: model, batch, items, and the indexes of those it waits for; `seconds`: its true times."""

    model: str
    batch: int
    items: int
    after: tuple[int, ...]
    seconds: Mapping[Profile, float]


@dataclass(frozen=True)
class Pipeline:
    """A pipeline: its arrival (s), its jobs, its deadline (s), and the deadline as a multiple of the longest path."""

    at: float
    parts: tuple[PipelineJob, ...]
    deadline_s: int
    slack: float


@dataclass(frozen=True)
class EndedPipeline:
    """Result of a pipeline: seconds from its submission to its last job's end, and slice-seconds."""

    seconds: float
    slice_seconds: float


def _slices(profile: Profile) -> float:
    """Return the cost of a slice: GPU equivalents, in compute slices."""
    return WHOLE[0] * gpu_equivalent(profile.name)


def draw(seconds: Seconds, load: float, seed: int) -> list[Pipeline]:
    """Draw the pipelines of one seed, in the order of their arrival."""
    chance = np.random.Generator(np.random.PCG64(seed))
    full = geometry(GPU).full.profile
    pipelines = []
    for _ in range(PIPELINES):
        stages = list(KINDS.values())[int(chance.integers(len(KINDS)))]
        parts = []
        for model, batch, after in stages:
            seconds_of = seconds[model, batch]
            items = max(
                batch, round(MEDIAN_S * math.exp(SPREAD * float(chance.standard_normal())) / seconds_of[full] * batch)
            )
            parts.append(PipelineJob(model, batch, items, after, {p: items / batch * s for p, s in seconds_of.items()}))
        slack = math.exp(float(chance.uniform(*np.log(SLACK))))
        deadline = slack * _longest(parts, [part.seconds[full] for part in parts]) + _starts_s(parts) + BEGIN_S
        pipelines.append(Pipeline(0.0, tuple(parts), math.ceil(deadline), slack))
    work = statistics.fmean(
        sum(_slices(profile := _granted(part, pipeline.deadline_s)) * part.seconds[profile] for part in pipeline.parts)
        for pipeline in pipelines
    )
    rate = load * NODES * PER_NODE * geometry(GPU).compute_slices / work
    moments = np.cumsum(chance.exponential(1.0 / rate, PIPELINES)).tolist()
    return [replace(pipeline, at=at) for at, pipeline in zip(moments, pipelines, strict=True)]


def _longest(parts: Sequence[PipelineJob], seconds: Sequence[float]) -> float:
    """Return the seconds of the longest path."""
    stages = [SplitStage((StageChoice(s, 0.0),), part.after) for s, part in zip(seconds, parts, strict=True)]
    return path_s(stages, [0] * len(stages))


def _starts_s(parts: Sequence[PipelineJob]) -> float:
    """Return the time reserved for starts."""
    return _longest(parts, [START_S] * len(parts))


def _granted(part: PipelineJob, limit_s: float, factor: float = 1.0) -> Profile:
    """Return the filter's grant: the smallest slice that keeps the limit, else the fastest."""
    kept = [profile for profile, seconds in part.seconds.items() if seconds / factor <= limit_s]
    return min(kept) if kept else min(part.seconds, key=lambda profile: part.seconds[profile])


Factors = Mapping[tuple[str, int], float]
"""Factor by which each model is predicted too fast at a batch."""


def limits(way: str, pipeline: Pipeline, factors: Factors) -> list[float]:
    """Return each job's own deadline, seconds."""
    whole = float(pipeline.deadline_s)
    if way in (OURS, ALONE):
        return [whole] * len(pipeline.parts)
    factor_of = [factors[part.model, part.batch] for part in pipeline.parts]
    lengths = [1.0] * len(pipeline.parts)
    if way == PROPORTIONAL:
        lengths = [p.seconds[_granted(p, whole, f)] / f for p, f in zip(pipeline.parts, factor_of, strict=True)]
    shared = (whole - _starts_s(pipeline.parts)) / _longest(pipeline.parts, lengths)
    return [max(1.0, math.floor(shared * length)) for length in lengths]


def workload(way: str, drawn: Sequence[Pipeline], factors: Factors) -> list[Submission]:
    """Return every job of every pipeline as the submit filter leaves it."""
    submissions: list[Submission] = []
    for number, pipeline in enumerate(drawn):
        first = len(submissions)
        for part, limit_s in zip(pipeline.parts, limits(way, pipeline, factors), strict=True):
            grant = Grant([(_granted(part, limit_s, factors[part.model, part.batch]), 1)], "auto")
            suffix = f" pipeline=p{number}" if way == OURS else ""
            hints = (
                f"migbatch: model={part.model} batch={part.batch} items={part.items} deadline={limit_s:.0f}s{suffix}"
            )
            longest = max(part.seconds.values())
            submissions.append(
                Submission(
                    pipeline.at + 1e-3 * (len(submissions) - first),
                    grant.gres,
                    partial(OnSlice, longest, by_profile=part.seconds),
                    limit_s=2 * math.ceil(longest) + 60,
                    after=tuple(first + before for before in part.after),
                    begin_s=BEGIN_S if way == OURS and not part.after else 0.0,
                    fields={"comment": grant.attach(hints), "cpus": 1, "user": "ann", "uid": 1001},
                )
            )
    return submissions


def played(
    way: str, drawn: Sequence[Pipeline], seconds: Seconds, factors: Factors, config: Config
) -> list[EndedPipeline]:
    """Run one rule on the simulated Slurm."""
    site = SimulatedSite.of(geometry(GPU), NODES, PER_NODE)
    simulation = SlurmSimulation(site, workload(way, drawn, factors))
    predicted = {key: {p: s / factors[key] for p, s in seconds_of.items()} for key, seconds_of in seconds.items()}
    outcome = simulation.run(
        ServiceController(simulation, config, MeasuredTable(predicted)), replace(pace(config), idle_s=IDLE_S)
    )
    ids = iter(outcome.submissions)
    results = []
    for pipeline in drawn:
        jobs = [outcome.jobs[job] for _ in pipeline.parts if (job := next(ids)) is not None]
        if len(jobs) < len(pipeline.parts):
            raise NotMeasurable("the simulated Slurm refuses a job of a pipeline")
        spent = sum(
            _slices(profile) * (job.end - (job.start or job.end)) for job in jobs for profile in slices(job.row.gres)
        )
        results.append(EndedPipeline(max(job.end for job in jobs) - outcome.begin - pipeline.at, spent))
    return results


def oracle(drawn: Sequence[Pipeline]) -> list[EndedPipeline]:
    """Return the cheapest splits by true times, without other jobs."""
    results = []
    for pipeline in drawn:
        stages = [
            SplitStage(
                tuple(StageChoice(s + START_S * bool(p.after), _slices(k) * s) for k, s in p.seconds.items()), p.after
            )
            for p in pipeline.parts
        ]
        best = split(stages, pipeline.deadline_s)
        results.append(EndedPipeline(best.seconds, best.price))
    return results


def config_of(drawn: Sequence[Pipeline]) -> Config:
    """Return the default settings of a site that has received these jobs for a while, each granted alone."""
    granted = [
        (profile := _granted(part, pipeline.deadline_s), part.seconds[profile])
        for pipeline in drawn
        for part in pipeline.parts
    ]
    return learned_from(granted, drawn[-1].at - drawn[0].at, {geometry(GPU): NODES * PER_NODE})


def exact(seconds: Seconds) -> Factors:
    """Return the factors of correct predictions."""
    return dict.fromkeys(seconds, 1.0)


def wrong(seconds: Seconds, seed: int, slow_end: float = 1.0) -> Factors:
    """Return factors at random; `slow_end`: of the interval that decides, over its middle."""
    chance = np.random.Generator(np.random.PCG64([seed, 1]))
    return {key: WRONG ** float(chance.uniform(-1.0, 1.0)) / slow_end for key in sorted(seconds)}


# -- the whole experiment ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PipelineScenario:
    """A load, whether predictions are wrong, and the slow end of their intervals over the middle."""

    name: str
    load: float
    wrong: bool = False
    slow_end: float = 1.0


def scenarios() -> list[PipelineScenario]:
    """Return the scenarios to measure."""
    found = [PipelineScenario(f"load {load:g}", load) for load in LOADS]
    name, load = f"load {LOADS[0]:g}, predictions wrong by up to {WRONG:g} times", LOADS[0]
    return [
        *found,
        PipelineScenario(f"{name}, intervals as wide", load, wrong=True, slow_end=SLOW_END),
        PipelineScenario(f"{name}, no intervals", load, wrong=True),
    ]


def measure(data: Path, seeds: int = 10, progress: Progress = silent) -> dict[str, Any]:
    """Run the whole experiment on a folder with measured tables. Raises NotMeasurable, TableError, OSError."""
    seconds = table(data)
    lacking = sorted({f"{m} at {b}" for kind in KINDS.values() for m, b, _ in kind if (m, b) not in seconds})
    if lacking:
        raise NotMeasurable(f"{data} lacks measurements of {', '.join(lacking)}")
    results = [_scenario(scenario, seconds, seeds, progress) for scenario in scenarios()]
    return {
        "bench": "pipelines",
        "data": str(data),
        "gpu": GPU,
        "gpus": NODES * PER_NODE,
        "seeds": seeds,
        "notes": [
            f"{PIPELINES} pipelines of {len(KINDS)} kinds in each stream, models as measured, one process on a slice",
            "bert-large represents language models: of the measured models it gains least from a large slice",
            "the oracle knows true times and has the GPUs for itself; its slice-seconds bound the savings of any split",
        ],
        "results": results,
        "bars": [bar.to_dict() for result in results for bar in bars(result)],
    }


def _scenario(scenario: PipelineScenario, seconds: Seconds, seeds: int, progress: Progress) -> dict[str, Any]:
    drawn = [draw(seconds, scenario.load, seed) for seed in range(seeds)]
    config = config_of(drawn[0])
    results_by_way: dict[str, list[list[EndedPipeline]]] = {}
    for way in WAYS:
        for seed, pipelines in enumerate(drawn):
            progress(f"{scenario.name}: seed {seed}, {way}", len(scenarios()) * len(WAYS) * seeds)
            factors = wrong(seconds, seed, scenario.slow_end) if scenario.wrong else exact(seconds)
            results_by_way.setdefault(way, []).append(played(way, pipelines, seconds, factors, config))
    results_by_way[ORACLE] = [oracle(pipelines) for pipelines in drawn]
    base = {way: [_spent(ended) for ended in results_by_way[way]] for way in (EQUAL, PROPORTIONAL)}
    cheaper = min(base, key=lambda way: statistics.fmean(base[way]))
    return {
        "scenario": scenario.name,
        "load": scenario.load,
        "wrong": scenario.wrong,
        "slow_end": round(scenario.slow_end, 3),
        **provenance(DECIDES, config),
        "cheaper": cheaper,
        "ways": {way: _row(runs, drawn, base[cheaper]) for way, runs in results_by_way.items()},
    }


def _row(
    runs: Sequence[Sequence[EndedPipeline]], drawn: Sequence[Sequence[Pipeline]], base: Sequence[float]
) -> dict[str, Any]:
    pairs = [pair for run, subset in zip(runs, drawn, strict=True) for pair in zip(run, subset, strict=True)]
    spent = [_spent(run) for run in runs]
    figures: dict[str, Any] = {
        **_kept(pairs),
        "late_p95_s": round(
            quantile([max(0.0, end.seconds - pipeline.deadline_s) for end, pipeline in pairs], 0.95), 1
        ),
        "over_cheaper": rounded_interval([a / b for a, b in zip(spent, base, strict=True)]),
    }
    for name, (low, high) in TIGHTNESS.items():
        subset = [pair for pair in pairs if low <= pair[1].slack < high]
        figures[name] = _kept(subset) if subset else None
    return figures


def _kept(pairs: Sequence[tuple[EndedPipeline, Pipeline]]) -> dict[str, float]:
    return {
        "kept": round(statistics.fmean(end.seconds <= pipeline.deadline_s for end, pipeline in pairs), 4),
        "slice_s": round(statistics.fmean(end.slice_seconds for end, _ in pairs), 1),
    }


def _spent(run: Sequence[EndedPipeline]) -> float:
    return sum(ended.slice_seconds for ended in run)


def bars(result: Mapping[str, Any]) -> list[Bar]:
    """Compare the default settings with both splits by users, or, with wrong predictions, with `ALONE`."""
    ways, name = result["ways"], result["scenario"]
    ours = ways[OURS]
    if result["wrong"] and result["slow_end"] == 1.0:
        return [Bar(f"{name}: deadlines met minus {ALONE}", ours["kept"] - ways[ALONE]["kept"], -LOST, at_least=True)]
    better_split = max((EQUAL, PROPORTIONAL), key=lambda way: ways[way]["kept"])
    return [
        Bar(
            f"{name}: deadlines met minus {better_split}", ours["kept"] - ways[better_split]["kept"], 0.0, at_least=True
        ),
        Bar(
            f"{name}: slice-seconds over {result['cheaper']}",
            ours["over_cheaper"][0],
            1.0 if result["wrong"] else SAVED,
        ),
    ]

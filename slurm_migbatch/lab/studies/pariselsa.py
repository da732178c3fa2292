"""Study PARIS and ELSA: how much work eight partitioned GPUs serve within its limit (E4), by layout and dispatch.

A server that divides its GPUs for one model and assigns single batches to slices, as in the paper. migbatchd serves
Slurm's jobs instead; `bench dispatch` measures that. So there are no targets.

Work arrives by Poisson; its batches are log-normal (median 6), cut off at 32, one model at a time. The limit is 1.5
times the time of batch 32 on the whole GPU. Measured is the latency-bounded rate: the highest at which the 95th
percentile of latency keeps the limit and nothing takes more than ten limits (`decide.paris_elsa.trial`). Only layouts
that can be placed are used. Seconds are those of the measured table (batches between measured ones by straight lines;
above the largest measured one a batch does not fit); there is no predictor, so no models have to be held out.

- *whole GPUs*, and the *best homogeneous* layout: over every profile, served first-idle-first-served or by ELSA,
  whichever carries more on average over all seeds. An operator would have to know it beforehand.
- *PARIS* as reconstructed, by largest remainder and packed, served first-idle-first-served and by ELSA.
- *ours*, and to separate the effects: our dispatch on the best homogeneous layout, ELSA on our layout.
- *bound*: the flow bound with evenly spaced arrivals, GPUs divided arbitrarily, and 5 % of the work late. Nothing
  exceeds it by more than chance.

Layouts are chosen on other random arrivals than they are measured on.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from slurm_migbatch.decide.paris_elsa.assignment import StockCosts, WorkClass
from slurm_migbatch.decide.paris_elsa.partition import Cut, flow, homogeneous, partition, ways
from slurm_migbatch.decide.paris_elsa.trial import ALLOWED, Stream, Trial, bounded_rate, central, stream
from slurm_migbatch.lab.bars import NotMeasurable, rounded_interval
from slurm_migbatch.lab.papers.pariselsa import early, first_idle, largest_remainder, packed, paris
from slurm_migbatch.lab.progress import Progress, silent
from slurm_migbatch.lab.sim.gpus import geometry
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.profiling.measurement import Measurement
from slurm_migbatch.profiling.table import read_folder

GPU: Final = "a100-80gb"
GPUS: Final = 8
LARGEST: Final = 32
MEDIAN: Final = 6.0
VARIANCES: Final = (0.3, 0.9, 1.8)
"""Of the logarithm of the batch; 0.9 is the paper's own setting."""
LIMIT: Final = 1.5
PIECES: Final = 6000
_FIRST_SEED: Final = 1000
_SCREEN: Final = 2
"""Seeds on which all homogeneous layouts are tried; those within a tenth of the best are tried on all."""


@dataclass(frozen=True)
class Curve:
    """Seconds of batches 1 to `LARGEST` on each kind, for one model."""

    model: str
    seconds: tuple[tuple[float, ...], ...]


def kinds_of(gpu: Geometry) -> tuple[Profile, ...]:
    """Return for each number of compute slices the profile with the least memory: those that tables measure."""
    least: dict[int, Profile] = {}
    for info in gpu.profiles:
        if not info.profile.suffix:
            least[info.compute_slices] = min(info.profile, least.get(info.compute_slices, info.profile))
    return tuple(least[compute] for compute in sorted(least))


def curves(rows: Sequence[Measurement], kinds: Sequence[Profile]) -> list[Curve]:
    """Return the curves of each model that was measured on all kinds with one process, and on the largest up to the
    largest batch.
    """
    names = [kind.name for kind in kinds]
    points_by_key: dict[tuple[str, str, int | None], list[dict[int, float]]] = {}
    for row in rows:
        if row.kind == "infer" and row.procs == 1 and row.gpu == GPU and row.profile in names and row.seconds:
            points = points_by_key.setdefault((row.model, row.source, row.input_size), [{} for _ in kinds])
            points[names.index(row.profile)][row.batch] = row.seconds
    result: dict[str, Curve] = {}
    for (model, _, _), points in sorted(points_by_key.items(), key=lambda item: str(item[0])):
        if all(points) and max(points[-1]) >= LARGEST and model not in result:
            by_kind = [_line(measured) for measured in points]
            result[model] = Curve(model, tuple(zip(*by_kind, strict=True)))
    return list(result.values())


def _line(points: Mapping[int, float]) -> list[float]:
    batches = sorted(points)
    return [
        float(np.interp(b, batches, [points[x] for x in batches])) if b <= batches[-1] else math.inf
        for b in range(1, LARGEST + 1)
    ]


def works_of(curve: Curve, variance: float) -> list[WorkClass]:
    """Return one class for each batch."""
    limit = LIMIT * curve.seconds[-1][-1]
    spread = math.sqrt(2 * variance)

    def below(batch: float) -> float:
        return 0.5 * (1 + math.erf(math.log(batch / MEDIAN) / spread))

    return [
        WorkClass(below(b + 0.5) - (below(b - 0.5) if b > 1 else 0.0), limit, seconds)
        for b, seconds in enumerate(curve.seconds, start=1)
    ]


class _StudyCase:
    """One model and one spread of batches: its streams, and rates on them."""

    def __init__(self, works: Sequence[WorkClass], kinds: Sequence[Profile], seeds: int, job_count: int) -> None:
        self.works = works
        self.prices = [float(kind.compute) for kind in kinds]
        self.streams = [
            stream(works, job_count, np.random.Generator(np.random.PCG64(_FIRST_SEED + i))) for i in range(seeds)
        ]

    def rates(self, cut: Cut, trial: Trial, guess: float, streams: Sequence[Stream] | None = None) -> list[float]:
        """Return the latency-bounded rate on each stream."""
        stock_costs = StockCosts(self.works, self.prices, cut.stock)
        rates: list[float] = []
        for drawn in self.streams if streams is None else streams:
            rate = bounded_rate(trial, stock_costs, drawn, guess)
            guess = rate or guess
            rates.append(rate)
        return rates

    def best(self, cuts: Sequence[Cut], guess: float) -> tuple[Cut, Trial, list[float]]:
        """Return the best combination of these layouts and both simple dispatch rules."""
        screened = [
            (statistics.fmean(self.rates(cut, trial, guess, self.streams[:_SCREEN])), cut, trial)
            for cut in cuts
            for trial in (first_idle, early)
        ]
        most = max(rate for rate, _, _ in screened)
        tried = [
            (self.rates(cut, trial, rate or guess), cut, trial) for rate, cut, trial in screened if rate >= 0.9 * most
        ]
        rates, cut, trial = max(tried, key=lambda entry: statistics.fmean(entry[0]))
        return cut, trial, rates


def measure(
    data: Path,
    seeds: int = 10,
    job_count: int = PIECES,
    variances: Sequence[float] = VARIANCES,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Run the whole experiment on a directory with measured tables.

    Raises:
        NotMeasurable: no model was measured on all slices.
        TableError, OSError: the directory cannot be read.
    """
    gpu = geometry(GPU)
    kinds = kinds_of(gpu)
    measured = curves(read_folder(data), kinds)
    if not measured:
        raise NotMeasurable(
            f"{data} has no model that was measured with one process on {', '.join(k.name for k in kinds)} of an "
            f"{GPU}, up to batch {LARGEST} on the largest"
        )
    results = []
    for variance in variances:
        rows = []
        for curve in measured:
            progress(f"variance {variance:g}: {curve.model}", len(variances) * len(measured))
            rows.append(_model(curve, variance, gpu, kinds, seeds, job_count))
        results.append({"variance": variance, "models": rows, **_summary(rows)})
    return {
        "bench": "dispatch",
        "data": str(data),
        "gpus": GPUS,
        "gpu": GPU,
        "kinds": [kind.name for kind in kinds],
        "seeds": seeds,
        "pieces": job_count,
        "notes": [
            f"{len(measured)} models; seconds as measured, no predictor; {len(kinds)} profiles on {GPUS} GPUs; legal "
            "layouts only; layouts were chosen on other arrivals than they are measured on",
            "PARIS and ELSA are reconstructions",
        ],
        "results": results,
        "bars": [],
    }


def _model(
    curve: Curve, variance: float, gpu: Geometry, kinds: Sequence[Profile], seeds: int, job_count: int
) -> dict[str, Any]:
    works = works_of(curve, variance)
    case = _StudyCase(works, kinds, seeds, job_count)
    bound = flow(works, ways(gpu, kinds), GPUS, whole=False, late=ALLOWED).rate
    guess = 0.8 * bound
    alike = homogeneous(gpu, kinds, GPUS)
    best, trial, best_rates = case.best(alike, guess)
    sizes = [float(kind.compute) for kind in kinds]
    capacity = float(gpu.compute_slices * GPUS)
    wanted = largest_remainder(paris(works, sizes, capacity), sizes, capacity)
    plain = packed(gpu, kinds, GPUS, wanted, "PARIS")
    began = time.perf_counter()
    cut = partition(gpu, kinds, works, GPUS)
    spent = time.perf_counter() - began
    rates = {
        "whole GPUs": case.best(alike[-1:], guess)[2],
        "best homogeneous": best_rates,
        "best homogeneous cut, our dispatch": case.rates(best, central, guess),
        "PARIS, first idle": case.rates(plain, first_idle, guess),
        "PARIS, ELSA": case.rates(plain, early, guess),
        "our cut, ELSA": case.rates(cut, early, guess),
        "ours": case.rates(cut, central, cut.rate or guess),
    }
    ratio = [_ratio(a, b) for a, b in zip(rates["ours"], best_rates, strict=True)]
    tails = _tails(case, cut, rates["ours"])
    return {
        "model": curve.model,
        "limit_s": round(works[0].limit_s, 6),
        "rates": {name: round(statistics.fmean(values), 1) for name, values in rates.items()},
        "bound": round(bound, 1),
        "ratio": rounded_interval(ratio),
        "least_ratio": round(min(ratio), 4),
        "best_homogeneous": {"cut": best.origin, "served": _SERVED[trial]},
        "paris": {"wanted": wanted, "placed": list(plain.stock)},
        "ours": {"stock": list(cut.stock), "gpus": [list(slices) for slices in cut.gpus], "origin": cut.origin},
        "ours_latency_in_limits": tails,
        "partition_s": round(spent, 3),
    }


_SERVED: Final[Mapping[Trial, str]] = {first_idle: "first idle", early: "ELSA"}


def _tails(case: _StudyCase, cut: Cut, rates: Sequence[float]) -> dict[str, float]:
    """Return latency over limit at the found rates: 95th and 99th percentile (means over seeds), and the longest."""
    stock_costs = StockCosts(case.works, case.prices, cut.stock)
    runs = [central(stock_costs, drawn, rate) or [] for drawn, rate in zip(case.streams, rates, strict=True) if rate]
    if not runs:
        return {}
    p95, p99 = (statistics.fmean(float(np.quantile(run, share)) for run in runs) for share in (0.95, 0.99))
    return {"p95": round(p95, 3), "p99": round(p99, 3), "longest": round(max(map(max, runs)), 3)}


def _ratio(value: float, baseline: float) -> float:
    return value / baseline if baseline else math.inf if value else 1.0


def _summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    ratios = [row["ratio"][0] for row in rows]
    best = [row["rates"]["best homogeneous"] for row in rows]
    names = [name for name in rows[0]["rates"] if name != "best homogeneous"]
    return {
        "least": round(min(ratios), 4),
        "mean": round(statistics.fmean(ratios), 4),
        "mean_over_best_homogeneous": {
            name: round(statistics.fmean(_ratio(r["rates"][name], b) for r, b in zip(rows, best, strict=True)), 4)
            for name in names
        },
        "mean_over_whole_gpus": round(
            statistics.fmean(_ratio(row["rates"]["ours"], row["rates"]["whole GPUs"]) for row in rows), 4
        ),
        "mean_over_bound": round(statistics.fmean(row["rates"]["ours"] / row["bound"] for row in rows), 4),
    }

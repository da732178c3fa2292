"""Evaluate slice and batch under a latency limit: the grant of `predict.selection.Chooser` with the default
configuration.

A case is a model on one GPU with a limit of 1, 1.5, 2, 4 or 8 times its measured latency at batch 8 on the whole GPU
(those of `choice`), requested like a batch job, `model=... slo=...`. The model was held out of the training, except
for as many points of its own as the product's rule would measure. All rules use the same conservative figures, and
their result is looked up in the measured table, interpolated between measured batches in logarithms. A
batch beyond the largest measured one counts as a limit that is exceeded.

- the usual batch: the smallest slice that keeps the limit with batches of 8, with these;
- the usual slice: the same slice, with the batch of best efficacy on it;
- ours: the smallest slice on which some batch keeps the limit, with its smallest batch of nearly the most throughput;
- D-STACK's efficacy: slice and batch with the best throughput / (latency x share), on at most the usual slice;
- most throughput for the share of a GPU, over all slices and batches.

The last two are not part of the product. A case in which the product has no figures of the model or refuses it, so that
all rules lack theirs, is counted as one without a choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np

from slurm_migbatch.config import Config
from slurm_migbatch.lab.bars import NotMeasurable
from slurm_migbatch.lab.evaluate.choice import FACTORS, LIMIT_BATCH
from slurm_migbatch.lab.evaluate.heldout import folds
from slurm_migbatch.lab.papers.rightsize import efficacy
from slurm_migbatch.lab.progress import Progress, silent
from slurm_migbatch.lab.shipped import provenance
from slurm_migbatch.lab.sim.gpus import named
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.predict.candidate import Figures
from slurm_migbatch.predict.known import ModelKnowledge
from slurm_migbatch.predict.learned import LearnedPredictor
from slurm_migbatch.predict.points import choose
from slurm_migbatch.predict.samples import Sample
from slurm_migbatch.predict.selection import Chooser
from slurm_migbatch.predict.state import Learned
from slurm_migbatch.predict.training import settle
from slurm_migbatch.profiling.measurement import Measurement
from slurm_migbatch.profiling.table import read_folder
from slurm_migbatch.report.equivalents import gpu_equivalent
from slurm_migbatch.workload.catalog import GpuKind, Partition
from slurm_migbatch.workload.hints import Hints
from slurm_migbatch.workload.refusal import Refusal

POINTS: Final = (0, 3)
USUAL, SLICE, OURS, EFFICACY, MOST = (
    "usual batch",
    "usual slice, best batch",
    "ours",
    "D-STACK's efficacy",
    "most items per share",
)
WAYS: Final = (USUAL, SLICE, OURS, EFFICACY, MOST)

Setting = tuple[Profile, int]
Measured = Mapping[Profile, tuple[Sequence[float], Sequence[float]]]
"""Logarithms of batches, ascending, and of their seconds, by profile."""


@dataclass(frozen=True)
class Outcome:
    """Grant of one rule in one case, by the measured table: share of a GPU, whether the limit was kept, items per
    second for a whole GPU's share over the best that keeps the limit (0 if it is exceeded).
    """

    share: float
    kept: bool
    quality: float


def measure(data: Path, progress: Progress = silent) -> dict[str, Any]:
    """Evaluate the tables of a directory. Raises NotMeasurable, TableError."""
    return {"data": str(data), **evaluate(read_folder(data), progress)}


def evaluate(rows: Sequence[Measurement], progress: Progress = silent) -> dict[str, Any]:
    """Compute every row. Raises NotMeasurable if no model was measured on slices of a known GPU."""
    config, knowledge = Config(), ModelKnowledge()
    outcomes: dict[tuple[int, str], list[Outcome]] = {}
    without: dict[int, list[str]] = {points: [] for points in POINTS}
    for fold in folds(rows, knowledge):
        progress(", ".join(sorted({sample.model for sample in fold.samples})), fold.of)
        inference = [(sample, _measured(sample)) for sample in fold.samples if sample.kind == "infer"]
        for (sample, cells), points in product([pair for pair in inference if pair[1]], POINTS):
            learned = settle(fold.learned, _shown(sample, points, knowledge), knowledge)
            for results in _cases(sample, cells, learned, config):
                for way, found in results.items():
                    outcomes.setdefault((points, way), []).append(found)
                without[points] += [] if results else [sample.model]
    if not outcomes:
        raise NotMeasurable("no model of these tables was measured on slices of a GPU that is known")
    return {
        "rows": [
            {
                "points": points,
                "way": way,
                "cases": len(found),
                "share": round(float(np.mean([choice.share for choice in found])), 4),
                "kept": round(float(np.mean([choice.kept for choice in found])), 4),
                "items_per_share": round(float(np.mean([choice.quality for choice in found])), 4),
            }
            for (points, way), found in outcomes.items()
        ],
        "no_choice": [
            {"points": points, "cases": len(models), "models": sorted(set(models))}
            for points, models in without.items()
            if models
        ],
        **provenance(f"{Chooser.__module__}.{Chooser.choose.__qualname__}", config),
        "bars": [],
    }


def _measured(sample: Sample) -> Measured:
    """Return the curves of one process over the batch; of the smallest input size if there are several."""
    points: dict[Profile, dict[int, float]] = {}
    size = min((row.input_size or 0 for row in sample.rows), default=0)
    for row, log in zip(sample.rows, sample.logs, strict=True):
        if row.procs == 1 and (row.input_size or 0) == size and row.profile:
            points.setdefault(Profile.parse(row.profile), {})[row.batch] = float(log)
    return {
        profile: ([float(np.log(batch)) for batch in sorted(curve)], [curve[batch] for batch in sorted(curve)])
        for profile, curve in points.items()
        if len(curve) > 1
    }


def _shown(sample: Sample, count: int, knowledge: ModelKnowledge) -> list[Measurement]:
    """Return the rows that the product's rule measures."""
    done: list[Measurement] = []
    candidates = [row for row in sample.rows if row.procs == 1]
    while candidates and len(done) < count:
        chosen = choose(done, candidates, knowledge)
        assert chosen is not None
        done.append(candidates.pop(chosen))
    return done


def _seconds(measured: Measured, setting: Setting) -> float:
    batches, seconds = measured[setting[0]]
    return float(np.exp(np.interp(np.log(setting[1]), batches, seconds)))


def _cases(sample: Sample, measured: Measured, learned: Learned, config: Config) -> list[dict[str, Outcome]]:
    """Return the outcomes by rule for each limit; a case without a choice has none."""
    gpu, facts = named(sample.gpu.name), sample.gpu.facts
    if gpu is None or gpu.full.profile not in measured:
        return []
    sliced = Geometry(gpu.name, [info for info in gpu.profiles if info.profile in measured])
    kind = GpuKind(sample.gpu.name, sliced, facts.tflops, facts.bandwidth_gbs, facts.sm_count)
    partition = Partition("p", (kind,))
    chooser = Chooser(LearnedPredictor(learned, confidence=config.learning.confidence))
    shares = {
        info.profile: gpu_equivalent(info.profile.name, info.memory_slices, (gpu.compute_slices, gpu.memory_slices))
        for info in sliced.profiles
    }
    largest_batch = {profile: float(np.exp(batches[-1])) for profile, (batches, _) in measured.items()}
    whole = _seconds(measured, (gpu.full.profile, int(LIMIT_BATCH)))
    cases = []
    for factor in FACTORS:
        results: dict[str, Outcome] = {}
        limit = whole * factor * (1 + 1e-9)
        hints = Hints(model=sample.model, input=sample.rows[0].input_size, slo_us=int(whole * factor * 1e6))
        best = max(
            (
                np.exp(b - s) / shares[profile]
                for profile, (batches, seconds) in measured.items()
                for b, s in zip(batches, seconds, strict=True)
                if np.exp(s) <= limit
            ),
            default=np.inf,
        )
        for way, setting in _ways(chooser, hints, partition, shares, largest_batch).items():
            seconds, share = _seconds(measured, setting), shares[setting[0]]
            in_time = seconds <= limit and setting[1] <= largest_batch[setting[0]] * (1 + 1e-9)
            quality = setting[1] / seconds / share / best if in_time else 0.0
            results[way] = Outcome(share, in_time, float(quality))
        cases.append(results)
    return cases


def _ways(
    chooser: Chooser, hints: Hints, partition: Partition, shares: Mapping[Profile, float], most: Mapping[Profile, float]
) -> Mapping[str, Setting]:
    """Return each rule's grant; if none keeps the limit by its figures, the usual slice and batch. There are none for
    a model of which nothing is known, or that is refused.

    Args:
        chooser: of the default configuration.
        partition: of one GPU, with the measured slices.
        most: the largest measured batch of each profile; larger ones cannot be looked up.
    """
    try:
        usual, ours = chooser.choose(hints, partition), chooser.choose(hints, partition, passes_batch=True)
    except Refusal:  # its name, held out, resembles one that is known
        return {}
    if usual.bucket is None:
        return {}
    slo_us = usual.bucket.slo_us or 0
    known: dict[Setting, Figures] = {
        (offer.profile, batch): figures
        for batch in chooser.grids[usual.bucket.model].ladder
        for offer in partition.plain
        for figures in (chooser.figures(replace(usual.bucket, batch=batch), partition)[offer.profile.gres_type],)
        if batch <= most[offer.profile] and figures.latency_us <= slo_us and figures.need_mib <= offer.memory_mib
    }
    advice = chooser.advice(usual.bucket, partition, usual.offer)
    assumed = (usual.offer.profile, usual.bucket.batch)
    no_larger = [setting for setting in known if partition.offers[setting[0].gres_type].order <= usual.offer.order]

    def efficacy_of(setting: Setting) -> float:
        return efficacy(setting[1], known[setting].latency_us, shares[setting[0]])

    def per_share(setting: Setting) -> float:
        return known[setting].rate / shares[setting[0]]

    return {
        USUAL: assumed,
        SLICE: assumed if advice is None else (usual.offer.profile, advice.batch),
        OURS: assumed if ours.batch is None else (ours.offer.profile, ours.batch),
        EFFICACY: max(no_larger, key=efficacy_of, default=assumed),
        MOST: max(known, key=per_share, default=assumed),
    }

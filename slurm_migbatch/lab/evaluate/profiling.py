"""Evaluate the cost of fewer measurements: compute slices and exceeded limits by the measured share of a model's grid.

For each service of each scenario slices, batches and processes are chosen by measured figures of the
cells that the rule chose to measure, and predicted ones of the rest, from a predictor without the model. Then the
choice is replayed on the measured table. A limit is exceeded if a chosen cell takes longer than allowed. A service is
short if its instances serve less than its rate; then instances are added until they do, and those slices count. A
service for which no cell seems to keep the limit gets the cell that comes closest to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from slurm_migbatch.lab.bars import Bar, NotMeasurable
from slurm_migbatch.lab.evaluate import placing
from slurm_migbatch.lab.evaluate.curves import compute_slices
from slurm_migbatch.lab.evaluate.heldout import Fold, Leave, folds
from slurm_migbatch.lab.evaluate.scenarios import ServiceLoad, models_of, services
from slurm_migbatch.lab.progress import Progress, silent
from slurm_migbatch.predict.cells import Array
from slurm_migbatch.predict.fewshot import adapt
from slurm_migbatch.predict.known import ModelKnowledge
from slurm_migbatch.predict.points import next_point
from slurm_migbatch.predict.samples import Sample
from slurm_migbatch.predict.state import Learned
from slurm_migbatch.predict.surface import TIME, Belief
from slurm_migbatch.profiling.measurement import Measurement
from slurm_migbatch.profiling.table import read_folder

SHARES: Final = (0.05, 0.1, 0.2, 0.5, 1.0)
BAR_SHARE: Final = 0.2
EXTRA_TARGET: Final = 0.05
BROKEN_TARGET: Final = 0.05
EVERY_POINT: Final = 0.2
"""Up to this share the belief is refitted after each point, beyond it after every fourth: nothing else changes."""
_LABELS: Final = (*(f"{k} points" for k in range(4)), *(f"{share:.0%}" for share in SHARES))
PREDICTED, MARGIN, MEASURED = "middle figures", "with margin", "measured cells only"


@dataclass(frozen=True)
class SampleKnowledge:
    """Knowledge about a sample after some cells (`done`) were measured: log seconds of all, and half an interval."""

    label: str
    done: tuple[int, ...]
    value: Array
    half: Array


@dataclass(frozen=True)
class PlacedService:
    """One service as it was placed: slices after additions, slices with everything measured, and errors."""

    scenario: str
    slices: float
    best: float
    broken: bool
    short: bool
    unsure: bool


def measure(data: Path, level: float, leave: Leave, progress: Progress = silent) -> dict[str, Any]:
    """Evaluate the tables of a directory. Raises NotMeasurable, TableError."""
    result = evaluate(data, read_folder(data), level=level, leave=leave, progress=progress)
    if not result["services"]:
        raise NotMeasurable(
            f"{data} has no model to choose a slice for: rows of kind infer are needed, of one process (procs 1) and "
            "for at least two points of a model, of which one keeps a limit"
        )
    return {"data": str(data), **result}


def evaluate(
    data: Path,
    rows: Sequence[Measurement],
    *,
    level: float = 0.8,
    leave: Leave = "model",
    progress: Progress = silent,
) -> dict[str, Any]:
    """Count slices, exceeded limits and short services by stage, for each way of choosing, in total and by scenario."""
    knowledge = ModelKnowledge()
    by_stage: dict[tuple[str, str], list[PlacedService]] = {}
    measured: dict[str, list[float]] = {}
    impossible = 0
    all_folds: list[Fold] = []
    for fold in folds(rows, knowledge, leave=leave):
        progress(", ".join(sorted({sample.model for sample in fold.samples})), fold.of)
        all_folds.append(fold)
    served, origin = services(data, [sample for fold in all_folds for sample in fold.samples])
    for fold in all_folds:
        for sample in fold.samples:
            of_sample = [service for service in served if service.sample is sample]
            if not of_sample:
                continue
            truth = np.exp(sample.logs)
            possible = [service for service in of_sample if (truth <= service.limit_s).any()]
            impossible += len(of_sample) - len(possible)
            for stage in stages(sample, fold, level):
                measured.setdefault(stage.label, []).append(len(stage.done) / len(sample.cells))
                for way in (PREDICTED, MARGIN, MEASURED):
                    results = [_place(service, stage, way) for service in possible]
                    by_stage.setdefault((stage.label, way), []).extend(
                        result for result in results if result is not None
                    )
    notes = [origin, f"each {leave} is held out of the training; cells that did not run are not part of a model's grid"]
    if impossible:
        notes.append(f"{impossible} services have a limit that no measured cell keeps: skipped")
    totals = [
        {"measured": label, "cells_share": round(float(np.mean(measured[label])), 4), "way": way, **_summary(placed)}
        for label in _LABELS
        for way in (PREDICTED, MARGIN, MEASURED)
        if (placed := by_stage.get((label, way)))
    ]
    return {
        "models": len(models_of(served)),
        "services": len(served) - impossible,
        "scenarios": origin,
        "level": level,
        "notes": notes,
        "totals": totals,
        "bars": [bar.to_dict() for bar in _bars(totals)],
    }


def stages(sample: Sample, fold: Fold, level: float) -> Iterator[SampleKnowledge]:
    """Yield the knowledge after 0 to 3 points, and after each share of the grid, chosen one by one by the rule."""
    prior = fold.learned.population("time", sample.kind).prior(sample.model, sample.known, sample.gpu, sample.stack)
    count = len(sample.cells)
    stage_points = [(k, f"{k} points") for k in range(min(4, count + 1))]
    stage_points += [(max(1, round(share * count)), f"{share:.0%}") for share in SHARES]
    belief, done = prior, list[int]()
    for n in range(count + 1):
        labels = [label for number, label in stage_points if number == n]
        if labels:
            belief = _fit(prior, sample, done)
        for label in labels:
            yield _stage(label, sample, belief, done, fold.learned, level)
        if n == count:
            return
        remaining = sorted(set(range(count)) - set(done))
        chosen = next_point(TIME, belief, sample.cells, done, remaining)
        assert chosen is not None
        done.append(chosen)
        if len(done) <= EVERY_POINT * count or len(done) % 4 == 0:
            belief = _fit(prior, sample, done)


def _fit(prior: Belief, sample: Sample, done: Sequence[int]) -> Belief:
    return adapt(TIME, prior, sample.cells.take(done), sample.logs[list(done)], sample.noise[list(done)])


def _stage(
    label: str, sample: Sample, belief: Belief, done: Sequence[int], learned: Learned, level: float
) -> SampleKnowledge:
    value, deviation, pace = belief.predict_paced(TIME, sample.cells)
    stranger = learned.population("time", sample.kind).is_stranger(sample.known, sample.gpu, sample.stack)
    calibration = learned.calibration("time", sample.kind)
    factor = calibration.factor(level, len(done), pace, stranger=stranger, close=sample.known.is_close)
    half = factor * deviation
    value, half = value.copy(), half.copy()
    value[list(done)], half[list(done)] = sample.logs[list(done)], 0.0
    return SampleKnowledge(label, tuple(done), value, half)


def _place(service: ServiceLoad, stage: SampleKnowledge, way: str) -> PlacedService | None:
    sample = service.sample
    whole = 4.0 if sample.gpu.facts.memory_slices == 4 else 7.0
    slices = np.array([compute_slices(row, whole) for row in sample.rows])
    items = sample.cells.batch * sample.cells.procs
    truth = np.exp(sample.logs)
    best = placing.plan(items / truth, slices, truth <= service.limit_s, service.rate)
    predicted_s = np.exp(stage.value + (stage.half if way == MARGIN else 0.0))
    usable = np.ones(len(predicted_s), dtype=bool)
    if way == MEASURED:
        usable[:] = False
        usable[list(stage.done)] = True
        if not usable.any():
            return None
    allowed = usable & (predicted_s <= service.limit_s)
    unsure = not allowed.any()
    if unsure:
        allowed = usable & (predicted_s <= predicted_s[usable].min())
    instance_plan = placing.plan(items / predicted_s, slices, allowed, service.rate)
    assert best is not None and instance_plan is not None
    used = list(instance_plan.instances)
    return PlacedService(
        service.scenario,
        placing.topped_up(instance_plan, items / truth, slices, service.rate),
        best.slices,
        bool((truth[used] > service.limit_s).any()),
        sum(count * float(items[i] / truth[i]) for i, count in instance_plan.instances.items())
        < service.rate * (1 - 1e-9),
        unsure,
    )


def _summary(results: Sequence[PlacedService]) -> dict[str, Any]:
    groups: dict[str, list[PlacedService]] = {}
    for result in results:
        groups.setdefault(result.scenario, []).append(result)
    return {**_total(results), "scenarios": {name: _total(group) for name, group in sorted(groups.items())}}


def _total(results: Sequence[PlacedService]) -> dict[str, Any]:
    unbroken = [result for result in results if not result.broken]
    best = sum(result.best for result in unbroken)
    return {
        "services": len(results),
        "slices": sum(result.slices for result in results),
        "best": sum(result.best for result in results),
        "extra": round(sum(result.slices for result in unbroken) / best - 1, 4) if best else None,
        "broken": sum(result.broken for result in results),
        "short": sum(result.short for result in results),
        "unsure": sum(result.unsure for result in results),
    }


def _bars(totals: Sequence[Mapping[str, Any]]) -> list[Bar]:
    bars = []
    for total in totals:
        if total["measured"] == f"{BAR_SHARE:.0%}" and total["way"] == MARGIN and total["extra"] is not None:
            name = f"{BAR_SHARE:.0%} of the cells measured"
            bars.append(Bar(f"{name}: extra slices with the limit kept", total["extra"], EXTRA_TARGET))
            bars.append(Bar(f"{name}: share of limits exceeded", total["broken"] / total["services"], BROKEN_TARGET))
    return bars

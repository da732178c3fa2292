"""Score the figures of language models that run in PyTorch without an engine, each network held out of the fit.

Tables are common ones, with rows of kind `infer` (a pass over a batch of prompts) and `train` (a step) of public models
on a GPU or a slice of one. For comparison: the data sheet's rates without launches, and the memory of weights,
gradients and optimizer alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

import numpy as np
from scipy.optimize import least_squares

from slurm_migbatch.lab.bars import Bar, NotMeasurable
from slurm_migbatch.lab.evaluate.llm import LEVELS
from slurm_migbatch.lab.progress import Progress, silent
from slurm_migbatch.predict.cells import Array
from slurm_migbatch.predict.llm.memory import Need, need_of
from slurm_migbatch.predict.llm.served import machine_of, weights_hint
from slurm_migbatch.predict.llm.speed import (
    EAGER,
    TRAINING,
    Efficiencies,
    Machine,
    TrainingEfficiencies,
    prefill_s,
    training_step,
)
from slurm_migbatch.predict.llm.trained import BESIDE_SPREAD, tuned_workload
from slurm_migbatch.predict.llm.workload import Workload, workload_of
from slurm_migbatch.profiling.measurement import Measurement
from slurm_migbatch.profiling.table import read_folder
from slurm_migbatch.workload.gpufacts import facts_of
from slurm_migbatch.workload.hints import Hints
from slurm_migbatch.workload.refusal import Refusal

KINDS: Final = ("infer", "train")
FITTED: Final[Mapping[str, tuple[str, ...]]] = {
    "infer": ("compute", "wide", "tf32", "layer_us"),
    "train": ("compute", "wide", "layer_us", "adapted"),
}
PRIOR_SPREAD: Final = 0.7
"""Standard deviation of the logarithms of what is fitted, around the shipped values: hardly any weight."""
TARGETS: Final = {"infer/seconds": 30.0, "train/seconds": 25.0, "train/memory": 10.0}


@dataclass(frozen=True)
class TorchPoint:
    """One measured point: the workload of a row, what it needs, and the figures that the row has."""

    row: Measurement
    workload: Workload
    need: Need
    machine: Machine

    @property
    def network(self) -> str:
        """The model's canonical name."""
        return self.workload.model.name

    def seconds(self, eff: Efficiencies | TrainingEfficiencies) -> float:
        """Return the computed seconds of a pass or step."""
        if isinstance(eff, TrainingEfficiencies):
            return training_step(self.workload, self.need, self.machine, eff)[0]
        work, tokens = self.workload, float(self.row.input_size or 1)
        return prefill_s(work.architecture, work.precision, tokens, self.machine, eff, float(self.row.batch))


def read(folder: Path) -> dict[str, list[TorchPoint]]:
    """Return the points of all tables below a folder by kind. Raises NotMeasurable."""
    points: dict[str, list[TorchPoint]] = {kind: [] for kind in KINDS}
    for row in read_folder(folder):
        point = _point(row)
        if point is not None:
            points[row.kind].append(point)
    if not any(points.values()):
        raise NotMeasurable(f"{folder} has no row of a public language model in PyTorch on a known GPU")
    return points


def _point(row: Measurement) -> TorchPoint | None:
    wanted = row.kind in KINDS and row.procs == 1 and row.input_size and row.seconds
    if not wanted or facts_of(row.gpu) is None:
        return None
    workload = tuned_workload(row) if row.kind == "train" else _passed(row)
    if workload is None or workload.architecture.kind == "plain" or workload.architecture.source:
        return None
    machine = machine_of(row)[0]
    return TorchPoint(row, workload, need_of(workload, int(machine.mib)), machine)


def _passed(row: Measurement) -> Workload | None:
    hints = replace(weights_hint(row), engine="transformers", max_num_seqs=row.batch, output=1)
    try:
        return workload_of(Hints(model=row.model, role="infer", input=row.input_size, input_unit="tok", llm=hints))
    except Refusal:
        return None


def fit(points: Sequence[TorchPoint], shipped: Efficiencies | TrainingEfficiencies) -> Any:
    """Return the efficiencies that fit the times of these points best, each network counting equally."""
    names = FITTED["train" if isinstance(shipped, TrainingEfficiencies) else "infer"]
    start = np.log([getattr(shipped, name) for name in names])
    networks = [point.network for point in points]
    weights = np.array([1.0 / math.sqrt(networks.count(network)) for network in networks])

    def of(theta: Array) -> Any:
        return replace(shipped, **dict(zip(names, np.exp(theta).tolist(), strict=True)))

    def residuals_of(theta: Array) -> Array:
        eff = of(theta)
        ratios = np.array([math.log(point.seconds(eff) / (point.row.seconds or 1.0)) for point in points])
        return np.concatenate([weights * ratios / 0.2, (theta - start) / PRIOR_SPREAD])

    return of(least_squares(residuals_of, start, loss="soft_l1").x)


def measure(data: Path, progress: Progress = silent) -> dict[str, Any]:
    """Evaluate the tables of a directory. Raises NotMeasurable, TableError."""
    points = read(data)
    progress(f"{sum(map(len, points.values()))} points", 0)
    return {"data": str(data), **evaluate(points)}


def evaluate(points: Mapping[str, Sequence[TorchPoint]]) -> dict[str, Any]:
    """Return the errors of times (held out, as shipped, by the data sheet) and of memory, coverage and the fit."""
    scores: dict[str, Any] = {}
    fits, coverage = {}, {}
    for kind, of_kind in points.items():
        if not of_kind:
            continue
        shipped: Efficiencies | TrainingEfficiencies = TRAINING if kind == "train" else EAGER
        held = _held_out(of_kind, shipped)
        networks = [point.network for point in of_kind]
        ways = {"held out": held, "as shipped": dict.fromkeys(networks, shipped)}
        ways["data sheet"] = dict.fromkeys(networks, _ideal(shipped))
        for way, by_network in ways.items():
            scores[f"{kind}/seconds/{way}"] = _score(
                (p, p.row.seconds, p.seconds(by_network[p.network])) for p in of_kind
            )
        scores[f"{kind}/memory/as shipped"] = _score((p, p.row.memory_mib, p.need.used) for p in of_kind)
        fixed = _score((p, p.row.memory_mib, p.need.weights + p.need.states) for p in of_kind)
        scores[f"{kind}/memory/weights and states"] = fixed
        coverage[f"{kind}/seconds"] = _coverage(
            (p.row.seconds, p.seconds(held[p.network]), _spread(p)) for p in of_kind
        )
        fits[kind] = _named(fit(of_kind, shipped), kind)
    coverage["train/memory"] = _coverage(
        (
            None if p.row.memory_mib is None else max(p.row.memory_mib - p.need.weights - p.need.states, 1.0),
            p.need.activations + p.need.runtime,
            BESIDE_SPREAD,
        )
        for p in points["train"]
    )
    bars = []
    for name, target in TARGETS.items():
        way = "held out" if name.endswith("seconds") else "as shipped"
        score = scores.get(f"{name}/{way}")
        if score is not None:
            bars.append(Bar(f"mean error of {name.replace('/', ': ')} (%), {way}", score["mean"], target).to_dict())
    return {
        "points": {kind: len(of_kind) for kind, of_kind in points.items()},
        "networks": sorted({point.network for of_kind in points.values() for point in of_kind}),
        "scores": {name: score for name, score in scores.items() if score is not None},
        "coverage": {name: levels for name, levels in coverage.items() if levels},
        "fit": fits,
        "shipped": {"infer": _named(EAGER, "infer"), "train": _named(TRAINING, "train")},
        "bars": bars,
    }


def _held_out(points: Sequence[TorchPoint], shipped: Efficiencies | TrainingEfficiencies) -> dict[str, Any]:
    """Return by network the fit on all others."""
    held = {}
    for network in {point.network for point in points}:
        others = [point for point in points if point.network != network]
        held[network] = fit(others, shipped) if others else shipped
    return held


def _ideal(shipped: Efficiencies | TrainingEfficiencies) -> Efficiencies | TrainingEfficiencies:
    if isinstance(shipped, TrainingEfficiencies):
        return replace(shipped, compute=1.0, wide=1.0, tf32=1.0, layer_us=0.0, adapted=1.0)
    return replace(shipped, compute=1.0, wide=1.0, tf32=1.0, bandwidth=1.0, layer_us=0.0)


def _spread(point: TorchPoint) -> float:
    if point.workload.training is None:
        return EAGER.spread_ttft
    return training_step(point.workload, point.need, point.machine)[1]


def _named(eff: Efficiencies | TrainingEfficiencies, kind: str) -> dict[str, float]:
    return {part.name: float(f"{getattr(eff, part.name):.3g}") for part in fields(eff) if part.name in FITTED[kind]}


def _score(rows: Iterable[tuple[TorchPoint, float | None, float]]) -> dict[str, Any] | None:
    by_network: dict[str, list[float]] = {}
    for point, real, computed in rows:
        if real is not None:
            by_network.setdefault(point.network, []).append(100.0 * abs(computed / real - 1.0))
    errors = [error for of_network in by_network.values() for error in of_network]
    if not errors:
        return None
    per_network = {name: round(fmean(of_network), 1) for name, of_network in sorted(by_network.items())}
    return {"mean": round(fmean(errors), 2), "median": round(median(errors), 2), "per_network": per_network}


def _coverage(rows: Iterable[tuple[float | None, float, float]]) -> dict[str, float]:
    known = [(real, computed, spread) for real, computed, spread in rows if real is not None]
    return {
        f"{level:.0%}": round(
            fmean(abs(math.log(real / computed)) <= span * spread for real, computed, spread in known), 3
        )
        for level, span in LEVELS.items()
        if known
    }

"""What trainings of language models were measured to do, against the arithmetic of `speed` and `memory`.

Each measured point holds up to two logarithms: measured over computed seconds of a step, and measured over computed
memory beside weights, gradients and optimizer, which are counted and not estimated. What is off is the sum of effects
of the site's software, of networks of a like size, of the network, of the way in which it is trained (method,
precision, whether activations are computed again) and of the size of a step and its slice, pooled as in `served`.
Names that share an architecture are one network.

As there, what lies far off the arithmetic teaches nothing, less what lies off at all, and one network alone tells
nothing of the site. No measurement makes a training take less than its weights, gradients and optimizer: a point that
says so teaches nothing of memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np

from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.predict.cells import Array, GpuSpec, shares_of
from slurm_migbatch.predict.llm.memory import need_of
from slurm_migbatch.predict.llm.pooling import bounded, solve, trust
from slurm_migbatch.predict.llm.served import AGREE, ELSEWHERE, gpu_of
from slurm_migbatch.predict.llm.speed import ASIS, Correction, Machine, training_spread, training_step_s
from slurm_migbatch.predict.llm.workload import Workload, workload_of
from slurm_migbatch.predict.samples import OWN_TABLES, RUNS, SILENT, SITE
from slurm_migbatch.profiling.measurement import Measurement
from slurm_migbatch.workload.gpufacts import facts_of
from slurm_migbatch.workload.hints import Hints
from slurm_migbatch.workload.llmhints import LlmHints
from slurm_migbatch.workload.refusal import Refusal

FIGURES: Final = ("step", "beside")
OF_SITE: Final = 0.10
OF_LIKE: Final = 0.15
OF_NETWORK: Final = 0.20
OF_WAY: Final = 0.25
OF_LOAD: Final = 0.30
"""Shares of the variance that a computed figure has, by what it comes from. Nobody has published measurements that
would tell them; these are ours, after those of servers."""
LIKE: Final = 0.5
"""Logarithms of layers, width, active and all parameters over which networks are alike."""
REACH: Final = (1.0, 1.0, 0.7)
"""Logarithms of tokens in a step, tokens of a sequence and share of the GPU over which loads are alike; of memory the
share does not matter."""
BESIDE_SPREAD: Final = 0.4
"""Standard deviation of the logarithm of what is estimated of a training's memory."""
DOUBTED: Final = 0.34
"""Unit of the distance from the arithmetic: a factor of ten is beyond `pooling.LIMIT`."""
DOUBTED_LESS: Final = 0.2
"""The same of less memory, where a quarter is: more likely the row does not say how it was trained, and a slice that is
too small ends the job."""
LEAST: Final = 0.06
"""Standard deviation of logarithms that stays however much was measured."""

Shape = tuple[float, float, float, float]
Load = tuple[float, float, float]


@dataclass(frozen=True)
class TrainedPoint:
    """One measured point: of which model, trained in which way, logarithms of its shape (layers, width, active and all
    parameters) and of its load (tokens in a step, of a sequence, share of the GPU), how far off the arithmetic a step
    and the memory beside weights and states are (None: not told, or not believed), and the spread that the arithmetic
    claims of a step there."""

    gpu: str
    model: str
    way: str
    source: str
    shape: Shape
    load: Load
    away: tuple[float | None, float | None]
    spread: float

    @property
    def series(self) -> tuple[str, ...]:
        """What it shares most with."""
        return (self.source, self.model, self.way)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-able form."""
        return {
            "of": [self.gpu, self.model, self.way, self.source],
            "shape": list(self.shape),
            "load": list(self.load),
            "away": list(self.away),
            "spread": self.spread,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TrainedPoint:
        """Read `to_dict`'s form; raises KeyError, TypeError or ValueError where it is none."""
        gpu, model, way, source = (str(word) for word in data["of"])
        layers, width, active, whole = (float(value) for value in data["shape"])
        tokens, seq, share = (float(value) for value in data["load"])
        step, beside = (None if value is None else float(value) for value in data["away"])
        spread = float(data["spread"])
        numbers = [layers, width, active, whole, tokens, seq, share, spread, step or 0.0, beside or 0.0]
        if not all(abs(value) <= 50 for value in numbers) or spread <= 0 or (step is None and beside is None):
            raise ValueError("a trained point is out of range")
        shape, load = (layers, width, active, whole), (tokens, seq, share)
        return cls(gpu, model, way, source, shape, load, (step, beside), spread)


def points_of(rows: Iterable[Measurement]) -> list[TrainedPoint]:
    """Return the believable points of a table's rows of trainings, in a stable order, a bounded number of a GPU."""
    found = []
    for row in rows:
        point = point_of(row) if row.kind == "train" else None
        away = (None, None) if point is None else (_believed(0, point.away[0]), _believed(1, point.away[1]))
        if point is not None and away != (None, None):
            found.append(replace(point, away=away))
    return bounded(found, lambda point: (point.load, *(away or 0.0 for away in point.away)))


def point_of(row: Measurement) -> TrainedPoint | None:
    """Return the point of a row, believable or not; None where it says nothing of the training of a language model."""
    told = row.input_size and row.procs == 1 and row.source not in (RUNS, SILENT)
    if not told or facts_of(row.gpu) is None or not _agrees(row):
        return None
    workload = _workload(row)
    if workload is None or workload.architecture.kind == "plain":
        return None
    gpu = GpuSpec.of_rows([row])
    sm, memory = shares_of(row, gpu)
    mib = 1024.0 * (Profile.parse(row.profile).memory_gb if row.profile else gpu.memory_gb)
    machine = Machine(gpu.facts.tflops * 1e12 * sm, gpu.facts.bandwidth_gbs * 1e9 * memory, mib, sliced=sm < 1.0)
    need = need_of(workload, int(mib))
    step = None if row.seconds is None else math.log(row.seconds / training_step_s(workload, need, machine))
    beside = None if row.memory_mib is None else row.memory_mib - need.weights - need.states
    held = None if beside is None or beside <= 0 else math.log(beside / (need.activations + need.runtime))
    if step is None and held is None:
        return None
    source = SITE if row.source.startswith(OWN_TABLES) else row.source
    return TrainedPoint(
        gpu_of(row.gpu), workload.model.name, way_of(workload), source, shape_of(workload), load_of(workload, sm),
        (step, held),        training_spread(workload, machine),
    )  # fmt: skip


def _workload(row: Measurement) -> Workload | None:
    tuning = row.trained
    plain = row.precision in ("bf16", "fp16", "fp32")
    llm = LlmHints(
        dtype=row.precision if plain else None,
        quantization=row.precision if row.precision and not plain else None,
        method=tuning.method,
        optimizer=tuning.optimizer,
        checkpointing=tuning.checkpointing,
        seq=row.input_size,
        micro_batch=row.batch,
    )
    try:
        return workload_of(Hints(model=row.model, role="train", llm=llm))
    except Refusal:
        return None


def _agrees(row: Measurement) -> bool:
    """Return whether throughput and latency speak of the same steps; with one of them, or none, they do."""
    if row.latency_s is None or row.throughput_per_s is None:
        return True
    return 1 / AGREE <= row.throughput_per_s * row.latency_s / row.batch <= AGREE


def _believed(place: int, away: float | None) -> float | None:
    return away if away is not None and _trust(place, away) > 0 else None


def _trust(place: int, away: float) -> float:
    return trust((away / (DOUBTED_LESS if place == 1 and away < 0 else DOUBTED)) ** 2)


def way_of(workload: Workload) -> str:
    """Return how a model is trained, as far as it decides by how much the arithmetic is off."""
    training = workload.training
    assert training is not None
    return f"{workload.precision.name}/{training.method}{'/checkpointing' if training.checkpointing else ''}"


def shape_of(workload: Workload) -> Shape:
    """Return logarithms of a model's layers, width, active and all parameters."""
    made = workload.architecture
    layers = made.layers + made.encoder_layers
    return (math.log(layers), math.log(made.width), math.log(made.active), math.log(made.parameters))


def load_of(workload: Workload, share: float) -> Load:
    """Return logarithms of the tokens in a step and of a sequence, and of the share of the GPU."""
    training = workload.training
    assert training is not None
    return (math.log(training.seq * training.micro_batch), math.log(training.seq), math.log(share))


class TrainedMeasurements:
    """Corrects computed trainings by measured points. Without points it leaves them as they are."""

    def __init__(self, points: Sequence[TrainedPoint] = ()) -> None:
        self.points = tuple(points)
        gpus = {point.gpu for point in self.points if point.away[0] is not None}
        self._steps = {gpu: _Process([point for point in self.points if point.gpu == gpu], 0) for gpu in gpus}
        # what a training holds does not depend on the GPU
        self._beside = _Process(self.points, 1)

    def correction(self, workload: Workload, gpu: str, machine: Machine, share: float) -> Correction:
        """Return by how much the figures of a training on a share of a GPU are to be changed."""
        if gpu not in self._steps or workload.training is None or workload.architecture.kind == "plain":
            return ASIS
        asked = _asked(workload, gpu, share, training_spread(workload, machine))
        shift, spread, own = self._steps[gpu].at(asked)
        return Correction(step=shift, spread_step=spread, points=own)

    def sized(self, workload: Workload) -> Workload:
        """Return a workload that takes the memory that was measured; one of another kind as it is."""
        if not self.points or workload.training is None or workload.architecture.kind == "plain":
            return workload
        shift, _, _ = self._beside.at(_asked(workload, "", 1.0, BESIDE_SPREAD))
        return replace(workload, beside=math.exp(shift))

    def misses(self, points: Iterable[TrainedPoint]) -> dict[tuple[str, str, str], list[float]]:
        """Return how far points are off what is predicted of them, by figure, model and GPU."""
        found: dict[tuple[str, str, str], list[float]] = {}
        for point in points:
            for figure, away in zip(FIGURES, point.away, strict=True):
                if away is not None:
                    found.setdefault((figure, point.model, point.gpu), []).append(away - self.at(figure, point)[0])
        return found

    def at(self, figure: str, asked: TrainedPoint) -> tuple[float, float]:
        """Return by how much a figure is off at a place where a point could be, and the standard deviation of that;
        how far that one is off does not count."""
        if figure == FIGURES[1]:
            return self._beside.at(asked)[:2]
        process = self._steps.get(asked.gpu)
        return (0.0, asked.spread) if process is None else process.at(asked)[:2]


def _asked(workload: Workload, gpu: str, share: float, spread: float) -> TrainedPoint:
    """Return the place of a workload; how far it is off does not count."""
    load = load_of(workload, share)
    return TrainedPoint(
        gpu, workload.model.name, way_of(workload), SITE, shape_of(workload), load, (0.0, 0.0), spread
    )  # fmt: skip


class _Process:
    """The points of which one figure is known."""

    def __init__(self, points: Sequence[TrainedPoint], place: int) -> None:
        found = [(point, away) for point in points if (away := point.away[place]) is not None]
        self._points = [point for point, _ in found]
        self._place = place
        self._reach = np.array(REACH if place == 0 else (*REACH[:2], math.inf))
        self._away = np.array([away for _, away in found])
        self._trust = np.array([_trust(place, away) for _, away in found])
        self._shape = np.array([point.shape for point in self._points]).reshape(-1, 4)
        self._load = np.array([point.load for point in self._points]).reshape(-1, 3)
        networks = len({point.shape for point in self._points})
        # what one network shows may be its own; that several agree by chance is ever less likely
        self._of_site = OF_SITE * (1.0 - 1.0 / networks) ** 2 if networks else 0.0

    def at(self, asked: TrainedPoint) -> tuple[float, float, int]:
        """Return by how much a figure is off at a place, the standard deviation that is left, and how many points are
        of the same network trained in the same way."""
        spread = self._spread_of(asked)
        alike = self._alike(asked, 1.0)
        if not alike.any():
            return 0.0, spread, 0
        inverse, weights = self._solved
        here = alike * self._spread * spread
        left = spread**2 - float(here @ inverse @ here)
        own = sum((point.shape, point.way) == (asked.shape, asked.way) for point in self._points)
        return float(here @ weights), math.sqrt(max(left, LEAST**2)), own

    def _spread_of(self, point: TrainedPoint) -> float:
        return point.spread if self._place == 0 else BESIDE_SPREAD

    @cached_property
    def _spread(self) -> Array:
        return np.array([self._spread_of(point) for point in self._points])

    @cached_property
    def _solved(self) -> tuple[Array, Array]:
        each = zip(self._points, self._trust.tolist(), strict=True)
        alike = np.array([self._alike(point, trusted) for point, trusted in each])
        return solve(alike, self._spread, self._away, self._trust)

    def _alike(self, asked: TrainedPoint, trusted: float) -> Array:
        """Return what each point has in common with another: 1 for itself."""
        distance = np.sum(((self._shape - np.array(asked.shape)) / LIKE) ** 2, axis=1)
        network = np.array([point.shape == asked.shape for point in self._points], dtype=np.float64)
        way = np.array([point.way == asked.way for point in self._points], dtype=np.float64)
        near = np.exp(-0.5 * np.sum(((self._load - np.array(asked.load)) / self._reach) ** 2, axis=1))
        source = np.array([1.0 if point.source == asked.source else ELSEWHERE for point in self._points])
        # what lies far off teaches others less than itself
        shared = (self._of_site + OF_LIKE * np.exp(-0.5 * distance)) * self._trust * trusted
        parts: Array = source * (shared + network * (OF_NETWORK + way * (OF_WAY + OF_LOAD * near)))
        return parts

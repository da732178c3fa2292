"""Correct the figures that `speed` and `memory` compute by measured training jobs of language models.

Each measured point holds up to two logarithms: measured over computed seconds of a step, and measured over computed
memory besides weights, gradients and optimizer, which are counted, not estimated. The error is the sum of effects
of the site's software, of networks of a similar size, of the network, of the training method (method, precision,
activation checkpointing) and of the size of a step and its slice, pooled as in `served`.
Names that share an architecture are one network.

As in `served`, points far from the computed value are ignored, distant ones count less, and one network alone does not
correct the site. No measurement reduces a training job below its weights, gradients and optimizer: a point that does
so is ignored for memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np

from slurm_migbatch.predict.cells import Array
from slurm_migbatch.predict.llm.memory import need_of
from slurm_migbatch.predict.llm.pooling import Errors, PooledPoints, bounded, trust
from slurm_migbatch.predict.llm.served import AGREE, ELSEWHERE, laboratory_of, machine_of, stated_size, weights_hint
from slurm_migbatch.predict.llm.speed import ASIS, Correction, Machine, training_step
from slurm_migbatch.predict.llm.workload import Workload, workload_of
from slurm_migbatch.predict.samples import OF_RUNS, SITE
from slurm_migbatch.profiling.measurement import CPU, Measurement
from slurm_migbatch.workload.gpufacts import facts_of, model_of
from slurm_migbatch.workload.hints import Hints
from slurm_migbatch.workload.refusal import Refusal

FIGURES: Final = ("step", "beside")
OF_SITE: Final = 0.10
OF_LIKE: Final = 0.15
OF_NETWORK: Final = 0.20
OF_WAY: Final = 0.25
OF_LOAD: Final = 0.30
"""Shares of a computed figure's variance, by effect. There are no published measurements for them; these are our
estimates, based on those of servers.
"""
LIKE: Final = 0.5
"""Logarithms of layers, width, active and all parameters within which networks are similar."""
REACH: Final = (1.0, 1.0, 0.7)
"""Logarithms of tokens in a step, tokens of a sequence and share of the GPU within which loads are similar; for memory
the share does not matter.
"""
BESIDE_SPREAD: Final = 0.4
"""Standard deviation of the logarithm of the estimated part of training memory."""
DOUBTED: Final = 0.34
"""Unit of the distance from the computed value: a factor of ten is beyond `pooling.LIMIT`."""
DOUBTED_LESS: Final = 0.2
"""The same for less memory than computed, where a factor of four is: the row more likely omits how it was trained, and
a slice that is too small ends the job.
"""
LEAST: Final = 0.06
"""Standard deviation of logarithms that no number of measurements removes."""

Shape = tuple[float, float, float, float]
Load = tuple[float, float, float]


@dataclass(frozen=True)
class TrainedPoint:
    """One measured point: the model, the training method, logarithms of its shape (layers, width, active and all
    parameters) and of its load (tokens in a step, of a sequence, share of the GPU), the errors of a step and of the
    memory besides weights and states (None: unknown or implausible), and the spread of a computed step there.
    """

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
        """The group of points that shares most of its error."""
        return (self.source, self.model, self.way)

    def is_of(self, other: TrainedPoint) -> bool:
        """Return whether both are of one network: of one shape, or of one name, whose size may be known by its
        parameters in one place and by its architecture in the other.
        """
        return self.shape == other.shape or self.model == other.model

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
        """Read the form of `to_dict`; raises KeyError, TypeError or ValueError if it is invalid."""
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
    """Return the plausible points of a table's rows of training jobs, in a stable order, a bounded number per GPU."""
    points = []
    for row in rows:
        point = point_of(row) if row.kind == "train" else None
        away = (None, None) if point is None else (_believed(0, point.away[0]), _believed(1, point.away[1]))
        if point is not None and away != (None, None):
            points.append(replace(point, away=away))
    return bounded(points, lambda point: (point.load, *(away or 0.0 for away in point.away)))


def point_of(row: Measurement) -> TrainedPoint | None:
    """Return the point of a row, plausible or not; None if it is not about training a language model.

    Of a GPU of unknown speed only the memory counts, which does not depend on the GPU.
    """
    usable = row.input_size and row.procs == 1 and row.source not in OF_RUNS
    if not usable or row.gpu == CPU or not row.agrees(AGREE):
        return None
    workload = tuned_workload(row)
    if workload is None or workload.architecture.kind == "plain":
        return None
    machine, sm = machine_of(row)
    need = need_of(workload, int(machine.mib))
    computed, spread = training_step(workload, need, machine)
    seconds = None if facts_of(row.gpu) is None else row.seconds
    step = None if seconds is None else math.log(seconds / computed)
    beside = None if row.memory_mib is None or not row.ran else row.memory_mib - need.weights - need.states
    memory = None if beside is None or beside <= 0 else math.log(beside / (need.activations + need.runtime))
    if step is None and memory is None:
        return None
    return TrainedPoint(
        model_of(row.gpu), workload.model.name, way_of(workload), laboratory_of(row), shape_of(workload),
        load_of(workload, sm), (step, memory), spread,
    )  # fmt: skip


def tuned_workload(row: Measurement) -> Workload | None:
    """Return the training job of a row; None if its values are refused or it is no language model."""
    try:
        return workload_of(hints_of(row))
    except Refusal:
        return None


def hints_of(row: Measurement) -> Hints:
    """Return the hints of a row's training job; those of language models only if the row states their values."""
    tuning = row.trained
    # tables state the parameters of any network
    params = stated_size(row) if row.family == "decoder" else None
    llm = replace(
        weights_hint(row), method=tuning.method, optimizer=tuning.optimizer, checkpointing=tuning.checkpointing,
        params=params,
    )  # fmt: skip
    return Hints(model=row.model, batch=row.batch, input=row.input_size, input_unit="tok", role="train", llm=llm)


def _believed(place: int, away: float | None) -> float | None:
    return away if away is not None and _trust(place, away) > 0 else None


def _trust(place: int, away: float) -> float:
    return trust((away / (DOUBTED_LESS if place == 1 and away < 0 else DOUBTED)) ** 2)


def way_of(workload: Workload) -> str:
    """Return the part of the training method that affects the error of computed figures."""
    training = workload.tuned
    return f"{workload.precision.name}/{training.method}{'/checkpointing' if training.checkpointing else ''}"


def shape_of(workload: Workload) -> Shape:
    """Return logarithms of a model's layers, width, active and all parameters."""
    architecture = workload.architecture
    layers = architecture.layers + architecture.encoder_layers
    return (
        math.log(layers),
        math.log(architecture.width),
        math.log(architecture.active),
        math.log(architecture.parameters),
    )


def load_of(workload: Workload, share: float) -> Load:
    """Return logarithms of the tokens in a step and of a sequence, and of the share of the GPU."""
    training = workload.tuned
    return (math.log(training.seq * training.micro_batch), math.log(training.seq), math.log(share))


class TrainedMeasurements:
    """Correct computed training figures by measured points. Without points they are unchanged."""

    def __init__(self, points: Sequence[TrainedPoint]) -> None:
        self.points = tuple(points)
        gpus = {point.gpu for point in self.points if point.away[0] is not None}
        self._steps = {gpu: _PointsOfFigure([point for point in self.points if point.gpu == gpu], 0) for gpu in gpus}
        # training memory does not depend on the GPU
        self._beside = _PointsOfFigure(self.points, 1)

    def correction(self, workload: Workload, gpu: str, machine: Machine, share: float) -> Correction:
        """Return the correction for a training job on a share of a GPU."""
        if gpu not in self._steps or workload.training is None or workload.architecture.kind == "plain":
            return ASIS
        _, spread = training_step(workload, need_of(workload, int(machine.mib)), machine)
        shift, spread, own = self._steps[gpu].at(_point_of(workload, gpu, share, spread))
        return Correction(step=shift, spread_step=spread, points=own)

    def sized(self, workload: Workload) -> Workload:
        """Return a workload with its memory corrected by measurements; one of another kind unchanged."""
        if not self.points or workload.training is None or workload.architecture.kind == "plain":
            return workload
        shift, _, _ = self._beside.at(_point_of(workload, "", 1.0, BESIDE_SPREAD))
        return replace(workload, beside=math.exp(shift))

    def errors(self, point: TrainedPoint) -> Errors:
        """Yield the errors of a point against the prediction."""
        for figure, away, process in zip(FIGURES, point.away, (self._steps.get(point.gpu), self._beside), strict=True):
            if away is not None:
                shift, spread = (0.0, point.spread) if process is None else process.at(point)[:2]
                yield figure, away - shift, spread


def _point_of(workload: Workload, gpu: str, share: float, spread: float) -> TrainedPoint:
    """Return the coordinates of a workload; its error is ignored."""
    load = load_of(workload, share)
    return TrainedPoint(
        gpu, workload.model.name, way_of(workload), SITE, shape_of(workload), load, (0.0, 0.0), spread
    )  # fmt: skip


class _PointsOfFigure:
    """The points of which one figure is known."""

    def __init__(self, points: Sequence[TrainedPoint], place: int) -> None:
        known = [(point, away) for point in points if (away := point.away[place]) is not None]
        self._points = [point for point, _ in known]
        self._place = place
        self._reach = np.array(REACH if place == 0 else (*REACH[:2], math.inf))
        self._away = np.array([away for _, away in known])
        self._trust = np.array([_trust(place, away) for _, away in known])
        self._shape = np.array([point.shape for point in self._points]).reshape(-1, 4)
        self._load = np.array([point.load for point in self._points]).reshape(-1, 3)
        networks = len({point.shape for point in self._points})
        # one network's error may be its own; the more networks agree, the less likely is chance
        self._of_site = OF_SITE * (1.0 - 1.0 / networks) ** 2 if networks else 0.0

    def at(self, asked: TrainedPoint) -> tuple[float, float, int]:
        """Return the error of a figure at given coordinates, the remaining standard deviation, and the number of points
        of the same network trained with the same method.
        """
        spread = self._spread_of(asked)
        alike = self._correlations(asked, 1.0)
        if not alike.any():
            return 0.0, spread, 0
        own = sum(point.is_of(asked) and point.way == asked.way for point in self._points)
        return *self._pool.at(alike, spread), own

    def _spread_of(self, point: TrainedPoint) -> float:
        return point.spread if self._place == 0 else BESIDE_SPREAD

    @cached_property
    def _pool(self) -> PooledPoints:
        weighted = zip(self._points, self._trust.tolist(), strict=True)
        alike = np.array([self._correlations(point, trusted) for point, trusted in weighted])
        return PooledPoints(alike, np.array(list(map(self._spread_of, self._points))), self._away, self._trust, LEAST)

    def _correlations(self, asked: TrainedPoint, trusted: float) -> Array:
        """Return the correlation of each point with another: 1 for itself."""
        distance = np.sum(((self._shape - np.array(asked.shape)) / LIKE) ** 2, axis=1)
        network = np.array([point.is_of(asked) for point in self._points], dtype=np.float64)
        way = np.array([point.way == asked.way for point in self._points], dtype=np.float64)
        near = np.exp(-0.5 * np.sum(((self._load - np.array(asked.load)) / self._reach) ** 2, axis=1))
        source = np.array([1.0 if point.source == asked.source else ELSEWHERE for point in self._points])
        # distant points correct others less than themselves
        shared = (self._of_site + OF_LIKE * np.exp(-0.5 * distance)) * self._trust * trusted
        parts: Array = source * (shared + network * (OF_NETWORK + way * (OF_WAY + OF_LOAD * near)))
        return parts

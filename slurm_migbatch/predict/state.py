"""Hold the learned state as a value: populations, fitted models, calibrations.

It is plain data, written as JSON and read with every number checked: a model file can be wrong but never execute code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np

from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.predict.calibration import MOST_POINTS, Calibration, unmeasured
from slurm_migbatch.predict.cells import GpuSpec
from slurm_migbatch.predict.known import Known
from slurm_migbatch.predict.llm.served import ServedPoint
from slurm_migbatch.predict.llm.trained import TrainedPoint
from slurm_migbatch.predict.population import Population, pool
from slurm_migbatch.predict.surface import MEMORY, TIME, Belief, Surface
from slurm_migbatch.workload.gpufacts import LESS, facts_of, model_of

FORMAT: Final = 7
SURFACES: Final[Mapping[str, Surface]] = {"time": TIME, "memory": MEMORY}
KINDS: Final = ("infer", "train")
_PARTS: Final = ("mean", "covariance", "places", "offsets", "noise")


class StateError(ValueError):
    """Data that is not a learned state; the message says what is wrong."""


@dataclass(frozen=True)
class Fitted:
    """One measured model on one GPU: the belief, its number of points, and its input sizes."""

    model: str
    kind: str
    gpu: str
    stack: str
    points: int
    inputs: tuple[int, ...]
    beliefs: Mapping[str, Belief]
    """By figure, `time` or `memory`; an unmeasured figure is missing."""

    def points_of(self, figure: str) -> int:
        """Return the number of points at which a figure was measured, at most that of the time: memory without a speed,
        as some jobs report it, is no measured point.
        """
        return min(self.points, len(self.beliefs[figure].offsets)) if figure in self.beliefs else 0


class Tried(NamedTuple):
    """Work that was tried on slices of a profile (empty: on whole GPUs): its batch and input size."""

    batch: int
    input: int
    profile: str


class MemoryBounds(NamedTuple):
    """MiB that work of a batch and an input size (0: not stated) needs at least and at most, by its runs."""

    batch: int
    input: int
    least: float
    most: float


@dataclass(frozen=True)
class Learned:
    """Everything that predictions use. `version` 0 has learned nothing: the physical prior."""

    version: int = 0
    created: float = 0.0
    rows: int = 0
    populations: Mapping[tuple[str, str], Population] = field(default_factory=dict)
    calibrations: Mapping[tuple[str, str], Calibration] = field(default_factory=dict)
    fitted: Mapping[tuple[str, str, str], Fitted] = field(default_factory=dict)
    known: Mapping[str, Known] = field(default_factory=dict)
    """Specifications from the measured table of models without public ones."""
    served: tuple[ServedPoint, ...] = ()
    """Measured servers of language models."""
    trained: tuple[TrainedPoint, ...] = ()
    """Measured trainings of language models."""
    short: Mapping[tuple[str, str, str], tuple[Tried, ...]] = field(default_factory=dict)
    """Work that needs more memory than a slice has, by model, kind of work and GPU."""
    held: Mapping[tuple[str, str, str], tuple[Tried, ...]] = field(default_factory=dict)
    """Work that needs no more memory than a slice has, by the same."""
    peaks: Mapping[tuple[str, str, str], tuple[MemoryBounds, ...]] = field(default_factory=dict)
    """Memory of work of which enough runs ended, by the same (`runs.peaks_of`)."""

    def population(self, figure: str, kind: str) -> Population:
        """Return the population of a figure (time, memory) for a kind of work.

        The physical prior if none was learned.
        """
        learned = self.populations.get((figure, kind))
        return pool(SURFACES[figure], kind, ()) if learned is None else learned

    def as_measured(self, gpu: GpuSpec) -> GpuSpec:
        """Return a GPU under the name that its measurements have: drivers and boards of one model differ a little in
        the memory that the full profile's name states. An unlisted GPU may have been measured on slices only, from
        which its exact memory does not follow: then it is matched by its model.
        """
        if gpu.name in self._measured:
            return gpu
        if facts_of(gpu.name) is None:
            return replace(gpu, name=self._unlisted.get(model_of(gpu.name), gpu.name))
        return replace(gpu, name=self._nearest(gpu))

    def _nearest(self, gpu: GpuSpec) -> str:
        """Return the measured name of a listed GPU that is nearly the same, or its own."""
        own, stem = gpu.memory_gb, f"{model_of(gpu.name)}-"
        named = {name: name.removeprefix(stem).removesuffix("gb") for name in sorted(self._measured)}
        same = {name: int(text) for name, text in named.items() if text.isdecimal()}
        near = {name: memory for name, memory in same.items() if LESS * own < memory < own / LESS}
        return min(near, key=lambda name: abs(near[name] - own), default=gpu.name)

    def belief(self, figure: str, model: str, role: str, known: Known, gpu: GpuSpec) -> tuple[Belief, int, str | None]:
        """Return the belief about a model, the number of its measured points (0: predicted from other models) and where
        they were measured.
        """
        gpu = self.as_measured(gpu)
        fitted = self.fitted.get((model, role, gpu.name))
        if fitted is not None and figure in fitted.beliefs:
            return fitted.beliefs[figure], min(fitted.points_of(figure), MOST_POINTS), fitted.stack
        return self.population(figure, role).prior(model, known, gpu), 0, None

    @cached_property
    def _measured(self) -> frozenset[str]:
        return frozenset(fitted.gpu for fitted in self.fitted.values())

    @cached_property
    def _unlisted(self) -> Mapping[str, str]:
        """Measured name of each unlisted GPU, by its model; of several names the one with most points."""
        ordered = sorted(self.fitted.values(), key=lambda fitted: (fitted.points, fitted.gpu))
        return {model_of(fitted.gpu): fitted.gpu for fitted in ordered if facts_of(fitted.gpu) is None}

    def calibration(self, figure: str, kind: str) -> Calibration:
        """Return a figure's calibration; that of strangers if none was learned."""
        return self.calibrations.get((figure, kind)) or unmeasured(figure, kind)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-able form."""
        return {
            "format": FORMAT,
            "version": self.version,
            "created": self.created,
            "rows": self.rows,
            "populations": {f"{f}/{k}": value.to_dict() for (f, k), value in self.populations.items()},
            "calibrations": {f"{f}/{k}": value.to_dict() for (f, k), value in self.calibrations.items()},
            "fitted": [_fitted(fit) for fit in self.fitted.values()],
            "known": {name: asdict(known) for name, known in self.known.items()},
            "served": [point.to_dict() for point in self.served],
            "trained": [point.to_dict() for point in self.trained],
            "short": _tried(self.short),
            "held": _tried(self.held),
            "peaks": [[*key, *peak] for key, of_key in self.peaks.items() for peak in of_key],
        }

    @classmethod
    def from_dict(cls, data: Any) -> Learned:
        """Read the form of `to_dict`.

        Raises:
            StateError: it is invalid, or of a newer release.
        """
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            raise StateError(
                f"not a learned model of format {FORMAT}: another release wrote it; migbatchd learns again from the "
                "record, `migbatch model refit` does so at once"
            )
        try:
            populations = {
                _pair(name): Population.from_dict(SURFACES[_pair(name)[0]], value)
                for name, value in data["populations"].items()
            }
            calibrations = {_pair(name): Calibration.from_dict(value) for name, value in data["calibrations"].items()}
            fitted = [_read_fitted(fit) for fit in data["fitted"]]
            return cls(
                int(data["version"]),
                float(data["created"]),
                int(data["rows"]),
                populations,
                calibrations,
                {(fit.model, fit.kind, fit.gpu): fit for fit in fitted},
                {str(name): _known(value) for name, value in data["known"].items()},
                tuple(ServedPoint.from_dict(point) for point in data.get("served", ())),
                tuple(TrainedPoint.from_dict(point) for point in data.get("trained", ())),
                _read_tried(data.get("short", ())),
                _read_tried(data.get("held", ())),
                _read_peaks(data.get("peaks", ())),
            )
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError, np.linalg.LinAlgError) as error:
            raise StateError(f"cannot parse the learned model: {error!r}") from None


def _tried(work: Mapping[tuple[str, str, str], tuple[Tried, ...]]) -> list[list[Any]]:
    return [[*key, *tried] for key, of_key in work.items() for tried in of_key]


def _read_tried(data: Iterable[Any]) -> dict[tuple[str, str, str], tuple[Tried, ...]]:
    found: dict[tuple[str, str, str], tuple[Tried, ...]] = {}
    for model, kind, gpu, batch, size, profile in data:
        key = (str(model), str(kind), str(gpu))
        tried = Tried(int(batch), int(size), Profile.parse(str(profile)).name if profile else "")
        if kind not in KINDS or not 1 <= tried.batch <= 10**9 or not 1 <= tried.input <= 10**9:
            raise ValueError("work that was tried is out of range")
        found[key] = (*found.get(key, ()), tried)
    return found


def _read_peaks(data: Iterable[Any]) -> dict[tuple[str, str, str], tuple[MemoryBounds, ...]]:
    found: dict[tuple[str, str, str], tuple[MemoryBounds, ...]] = {}
    for model, kind, gpu, batch, size, least, most in data:
        key = (str(model), str(kind), str(gpu))
        peak = MemoryBounds(int(batch), int(size), float(least), float(most))
        possible = kind in KINDS and 1 <= peak.batch <= 10**9 and 0 <= peak.input <= 10**9
        if not possible or not 0 < peak.least < 1e9 or not 0 < peak.most < 1e9:
            raise ValueError("the memory of runs is out of range")
        found[key] = (*found.get(key, ()), peak)
    return found


def _pair(name: str) -> tuple[str, str]:
    figure, _, kind = name.partition("/")
    if figure not in SURFACES or kind not in KINDS:
        raise ValueError(f"unknown figure {name!r}")
    return figure, kind


def _fitted(fit: Fitted) -> dict[str, Any]:
    return {
        "model": fit.model,
        "kind": fit.kind,
        "gpu": fit.gpu,
        "stack": fit.stack,
        "points": fit.points,
        "inputs": list(fit.inputs),
        "beliefs": {
            figure: {name: getattr(belief, name).tolist() for name in _PARTS} for figure, belief in fit.beliefs.items()
        },
    }


def _read_fitted(data: Mapping[str, Any]) -> Fitted:
    beliefs = {}
    for figure, values in data["beliefs"].items():
        parts = {name: np.asarray(values[name], dtype=np.float64) for name in _PARTS}
        size, count = len(SURFACES[figure].names), len(parts["offsets"])
        parts["places"] = parts["places"].reshape(count, 5)
        shapes = {"mean": (size,), "covariance": (size, size), "offsets": (count,), "noise": (count,)}
        if any(parts[name].shape != shape for name, shape in shapes.items()):
            raise ValueError(f"the belief of {figure} has another size")
        if not all(np.isfinite(part).all() for part in parts.values()) or not (parts["noise"] > 0).all():
            raise ValueError("a belief is not finite")
        beliefs[figure] = Belief(**parts)
    if data["kind"] not in KINDS:
        raise ValueError(f"unknown kind of work {data['kind']!r}")
    inputs = tuple(int(size) for size in data["inputs"])
    if any(not 1 <= size <= 10**9 for size in inputs):
        raise ValueError("an input size is out of range")
    return Fitted(
        str(data["model"]), data["kind"], str(data["gpu"]), str(data["stack"]), int(data["points"]), inputs, beliefs
    )


def _known(data: Mapping[str, Any]) -> Known:
    known = Known(**data)
    memory = known.weight_mib, known.alive_mib, known.kept_mib
    figures = (known.kernels, known.flops, known.traffic_mib, known.params, *memory)
    possible = known.unit in ("tok", "px") and known.reference >= 1 and known.doubt in (0, 1, 2)
    possible = possible and all(np.isfinite(figure) and figure > 0 for figure in figures)
    if not possible or not 0 <= known.quadratic <= 1:
        raise ValueError("the figures of a model are out of range")
    return known

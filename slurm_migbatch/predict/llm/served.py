"""Correct the speeds that `speed` computes by measured servers of language models.

Each measured point is a pair of logarithms: measured over computed time to the first token, and of each further one.
The error is the sum of effects of the engine, of the model, of the model on that engine, of its precision there, and
of the load, the last similar for similar loads and slices (partial pooling: a Gaussian process whose covariance is the
sum of theirs). Without measurements the computed figures stand; a point corrects its own series (one model in one
precision by one engine) almost fully, and others by what they share.

A table may be wrong. A point whose figures contradict each other is ignored, and so is one beyond a distance from
the computed value (`pooling.LIMIT`); distant points count less. One model alone does not correct an engine: its error
may be its own. Memory is not corrected here: what an engine takes is not what it needs (`memory`).
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
from slurm_migbatch.predict.llm import names
from slurm_migbatch.predict.llm.memory import need_of
from slurm_migbatch.predict.llm.pooling import Errors, PooledPoints, bounded, trust
from slurm_migbatch.predict.llm.precision import UNQUANTIZED
from slurm_migbatch.predict.llm.speed import ASIS, Correction, Machine, arithmetic_spread, pace_of
from slurm_migbatch.predict.llm.workload import Workload, workload_of
from slurm_migbatch.predict.samples import OWN_TABLES, SITE
from slurm_migbatch.profiling.measurement import SERVE, Measurement
from slurm_migbatch.values.grouping import grouped
from slurm_migbatch.workload.gpufacts import facts_of, model_of
from slurm_migbatch.workload.hints import Hints
from slurm_migbatch.workload.llmhints import CHOICES, LlmHints
from slurm_migbatch.workload.refusal import Refusal

FIGURES: Final = ("ttft", "tpot")
OF_ENGINE: Final = 0.10
OF_MODEL: Final = 0.05
OF_BOTH: Final = 0.15
OF_SERIES: Final = 0.35
OF_LOAD: Final = 0.35
"""Shares of a computed figure's variance (`speed.arithmetic_spread`), by effect. In the 92 measurements of NVIDIA's
sample most of a model's error is common to its series, in time to the first token about four fifths (variances;
`migbatch eval llm` shows the effect).
"""
REACH: Final = (1.0, 1.0, 1.0, 0.7)
"""Logarithms of concurrency, tokens in, tokens out and share of the GPU within which loads are similar."""
ELSEWHERE: Final = 0.5
"""Correlation of another laboratory's points with a site's."""
UNNAMED: Final = 0.7
"""Weight of points of any engine for a job that names none."""
DOUBTED: Final = {"ttft": 0.6, "tpot": 0.35}
"""Unit of the distance from the computed value, by figure: a factor of ten in both is beyond `pooling.LIMIT`."""
LEAST_SIZE: Final = 1e6
"""Fewer parameters than a language model has: they are not used."""
AGREE: Final = 2.0
"""Largest factor between a request's time and the sum of its tokens' times in a consistent row."""
LEAST: Final = {"ttft": 0.15, "tpot": 0.06}
"""Standard deviation of logarithms that no number of measurements removes: variation between days and prompts."""


@dataclass(frozen=True)
class ServedPoint:
    """One measured point: its series, load and share of the GPU (logarithms), its error against the computed value, and
    the computed value's spread there.
    """

    gpu: str
    engine: str
    model: str
    precision: str
    source: str
    load: tuple[float, float, float, float]
    away: tuple[float, float]
    spread: tuple[float, float]

    @property
    def series(self) -> tuple[str, str, str, str]:
        """The group of points that shares most of its error."""
        return (self.source, self.engine, self.model, self.precision)

    @property
    def trust(self) -> float:
        """Weight of the point: from 1 near the computed value to 0 far from it."""
        units = [DOUBTED[figure] for figure in FIGURES]
        squares = sum((away / unit) ** 2 for away, unit in zip(self.away, units, strict=True))
        return trust(squares)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-able form."""
        return {
            "of": [self.gpu, self.engine, self.model, self.precision, self.source],
            "load": list(self.load),
            "away": list(self.away),
            "spread": list(self.spread),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ServedPoint:
        """Read the form of `to_dict`; raises KeyError, TypeError or ValueError if it is invalid."""
        gpu, engine, model, precision, source = (str(word) for word in data["of"])
        load = _numbers(data["load"], 4)
        away, spread = _numbers(data["away"], 2), _numbers(data["spread"], 2)
        if min(spread) <= 0 or max(map(abs, (*load, *away, *spread))) > 50:
            raise ValueError("a served point is out of range")
        return cls(
            gpu, engine, model, precision, source, (load[0], load[1], load[2], load[3]), (away[0], away[1]),
            (spread[0], spread[1]),
        )  # fmt: skip


def _numbers(values: Any, count: int) -> list[float]:
    numbers = [float(value) for value in values]
    if len(numbers) != count or not all(math.isfinite(value) for value in numbers):
        raise ValueError(f"{count} finite numbers are needed")
    return numbers


def points_of(rows: Iterable[Measurement]) -> list[ServedPoint]:
    """Return the plausible points of a table's rows of servers, in a stable order, a bounded number per GPU."""
    points = [point for row in rows if row.kind == SERVE and (point := point_of(row)) is not None and point.trust > 0]
    return bounded(points, lambda point: (point.load, point.away))


def point_of(row: Measurement) -> ServedPoint | None:
    """Return the point of a row, plausible or not; None if it is not about a served language model."""
    if row.ttft_s is None or row.tpot_s is None or not row.output or not row.input_size or not agrees(row):
        return None
    workload = workload_served(row)
    if workload is None or facts_of(row.gpu) is None:
        return None
    machine, sm = machine_of(row)
    pace = pace_of(workload, need_of(workload, int(machine.mib)), machine)
    away = (math.log(row.ttft_s / pace.ttft), math.log(row.tpot_s / pace.tpot))
    return ServedPoint(
        model_of(row.gpu), row.engine, workload.model.name, workload.precision.name, laboratory_of(row),
        load_of(workload, sm), away, arithmetic_spread(workload, machine),
    )  # fmt: skip


def workload_served(row: Measurement) -> Workload | None:
    """Return the workload of a row of a server; None if its model generates no tokens or a value of it is unknown."""
    engine = row.engine if row.engine in CHOICES["engine"] else None
    llm = replace(weights_hint(row), engine=engine, max_num_seqs=row.batch, output=row.output, params=stated_size(row))
    try:
        workload = workload_of(Hints(model=row.model, input=row.input_size, input_unit="tok", llm=llm))
    except Refusal:
        return None
    generates = workload is not None and workload.architecture.generates
    return workload if generates else None


def stated_size(row: Measurement) -> int | None:
    """Return the parameters that a row states of a model whose name says no size, which is not public."""
    stated = row.params is not None and row.params >= LEAST_SIZE and names.resolve(row.model) is None
    return round(row.params or 0.0) if stated else None


def weights_hint(row: Measurement) -> LlmHints:
    """Return the precision of a row's weights as hints; none if the row leaves it to the model's name."""
    if row.precision in UNQUANTIZED:
        return LlmHints(dtype=row.precision)
    return LlmHints(quantization=row.precision or None)


def machine_of(row: Measurement) -> tuple[Machine, float]:
    """Return the slice on which a row was measured, and its share of the GPU's SMs."""
    gpu = GpuSpec.of_rows([row])
    sm, memory = shares_of(row, gpu)
    mib = 1024.0 * (Profile.parse(row.profile).memory_gb if row.profile else gpu.memory_gb)
    return Machine(gpu.facts.tflops * 1e12 * sm, gpu.facts.bandwidth_gbs * 1e9 * memory, mib, sliced=sm < 1.0), sm


def laboratory_of(row: Measurement) -> str:
    """Return the laboratory that measured a row: SITE for this site's own tables, else the source."""
    return SITE if row.source.startswith(OWN_TABLES) else row.source


def agrees(row: Measurement) -> bool:
    """Return whether the figures of a row with times of tokens are consistent."""
    assert row.ttft_s is not None and row.tpot_s is not None and row.output is not None
    if row.latency_s is None:
        return True
    ratio = row.latency_s / (row.ttft_s + (row.output - 1) * row.tpot_s)
    rate = 1.0 if row.throughput_per_s is None else row.throughput_per_s * row.latency_s / row.batch
    return 1 / AGREE <= ratio <= AGREE and 1 / AGREE <= rate <= AGREE


def load_of(workload: Workload, share: float) -> tuple[float, float, float, float]:
    """Return the coordinates of a load: logarithms of its concurrency, tokens in and out, and the share of the GPU."""
    serving = workload.served
    return (
        math.log(serving.concurrency), math.log(max(serving.input, 1)), math.log(max(serving.output, 1)),
        math.log(share),
    )  # fmt: skip


class ServedMeasurements:
    """Correct computed figures by measured points. Without points they are unchanged."""

    def __init__(self, points: Sequence[ServedPoint]) -> None:
        self.points = tuple(points)
        self._by_gpu = {gpu: _PointsOfGpu(own) for gpu, own in grouped(self.points, lambda point: point.gpu).items()}

    def correction(self, workload: Workload, gpu: str, machine: Machine, share: float) -> Correction:
        """Return the correction for a workload on a share of a GPU."""
        serving = workload.serving
        if gpu not in self._by_gpu or serving is None or not workload.architecture.generates:
            return ASIS
        model, precision = workload.model.name, workload.precision.name
        spread = arithmetic_spread(workload, machine)
        load = load_of(workload, share)
        return self.at(ServedPoint(gpu, serving.engine, model, precision, SITE, load, (0.0, 0.0), spread))

    def at(self, asked: ServedPoint) -> Correction:
        """Return the correction at a point's coordinates; the point's own error is ignored."""
        process = self._by_gpu.get(asked.gpu)
        return ASIS if process is None else process.correction(asked)

    def errors(self, point: ServedPoint) -> Errors:
        """Yield the errors of a point against the prediction."""
        predicted = self.at(point)
        for figure, away, spread in zip(FIGURES, point.away, point.spread, strict=True):
            shift, corrected = getattr(predicted, figure), getattr(predicted, f"spread_{figure}")
            yield figure, away - shift, corrected or spread


class _PointsOfGpu:
    """The points on one kind of GPU."""

    def __init__(self, points: Sequence[ServedPoint]) -> None:
        self._points = points
        self._load = np.array([point.load for point in points]) / REACH
        self._trust = np.array([point.trust for point in points])
        models: dict[str, set[str]] = {}
        for point in points:
            models.setdefault(point.engine, set()).add(point.model)
        # one model's error may be its own; the more models agree, the less likely is chance
        self._of_engine = {engine: OF_ENGINE * (1.0 - 1.0 / len(names)) ** 2 for engine, names in models.items()}

    def correction(self, asked: ServedPoint) -> Correction:
        alike = self._correlations(asked)
        if not alike.any():
            return ASIS
        network = (asked.model, asked.precision)
        own = sum((p.model, p.precision) == network and asked.engine in ("", p.engine) for p in self._points)
        ttft, tpot = (pool.at(alike, spread) for pool, spread in zip(self._pools, asked.spread, strict=True))
        return Correction(ttft[0], tpot[0], ttft[1], tpot[1], own)

    @cached_property
    def _pools(self) -> list[PooledPoints]:
        """The points of each figure."""
        alike = np.array([self._correlations(point) for point in self._points])
        away, spread = (np.array([getattr(point, name) for point in self._points]) for name in ("away", "spread"))
        return [
            PooledPoints(alike, spread[:, index], away[:, index], self._trust, LEAST[figure])
            for index, figure in enumerate(FIGURES)
        ]

    def _correlations(self, asked: ServedPoint) -> Array:
        """Return the correlation of each point with another: 1 for itself under the same load."""
        engine = [self._of_engine.get(p.engine, 0.0) * (p.engine == asked.engine) for p in self._points]
        model = np.array([p.model == asked.model for p in self._points], dtype=np.float64)
        same = np.array([1.0 if p.engine == asked.engine else UNNAMED * (asked.engine == "") for p in self._points])
        exact = np.array([p.precision == asked.precision for p in self._points], dtype=np.float64)
        near = np.exp(-0.5 * np.sum((self._load - np.array(asked.load) / REACH) ** 2, axis=1))
        source = np.array([1.0 if p.source == asked.source else ELSEWHERE for p in self._points])
        own = model * same
        # distant points correct others less than themselves
        shared = (np.array(engine) + OF_MODEL * model) * self._trust * asked.trust
        parts = shared + own * (OF_BOTH + exact * (OF_SERIES + OF_LOAD * near))
        correlation: Array = source * parts
        return correlation

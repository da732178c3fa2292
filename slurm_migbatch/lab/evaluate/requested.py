"""Predict measured rows as a request for them is answered, where that is computed from the architecture.

A row is requested by its model, batch and input, and with the precision and tuning that it states. Training of public
language models is computed, and passes of encoders whose row states the precision. The answers are
those of `Chooser` and `LearnedPredictor` after the points were imported that are given as measured, on a GPU with the
slices of the table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from slurm_migbatch.mig.geometry import Geometry, ProfileInfo
from slurm_migbatch.mig.placement import Placement
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.predict.candidate import Figures, Interval
from slurm_migbatch.predict.cells import Array, GpuSpec, shares_of
from slurm_migbatch.predict.known import ModelKnowledge
from slurm_migbatch.predict.learned import CONFIDENCE, LearnedPredictor
from slurm_migbatch.predict.llm import names, trained
from slurm_migbatch.predict.llm.served import weights_hint
from slurm_migbatch.predict.llm.speed import TokenFigures
from slurm_migbatch.predict.samples import Sample
from slurm_migbatch.predict.selection import Chooser
from slurm_migbatch.predict.state import Learned
from slurm_migbatch.predict.training import settle
from slurm_migbatch.profiling.measurement import CPU, Measurement
from slurm_migbatch.workload.buckets import Bucket
from slurm_migbatch.workload.catalog import GpuKind, Partition
from slurm_migbatch.workload.hints import Hints
from slurm_migbatch.workload.refusal import Refusal


@dataclass(frozen=True)
class ComputedCells:
    """Logarithms of a figure as computed, by cell, with half its intervals; NaN for a cell that is not computed."""

    value: Array
    below: Array
    above: Array

    @classmethod
    def of(cls, intervals: Iterable[Interval | None]) -> ComputedCells:
        """Return the cells of these intervals; None: not computed."""
        unknown = (math.nan, math.nan, math.nan)
        ends = [unknown if interval is None else (interval.low, interval.mid, interval.high) for interval in intervals]
        low, middle, high = np.log(np.array(ends).reshape(-1, 3)).T
        return cls(middle, middle - low, high - middle)

    @property
    def known(self) -> npt.NDArray[np.bool_]:
        """True for each cell that is computed."""
        mask: npt.NDArray[np.bool_] = np.isfinite(self.value)
        return mask

    def widths(self, level: float) -> tuple[Array, Array]:
        """Return half the widths of the intervals of `level`. Requests get bounds of CONFIDENCE; other intervals are as
        much wider or narrower as those of a normal distribution.
        """
        scale = NormalDist().inv_cdf(0.5 + level / 2.0) / NormalDist().inv_cdf(CONFIDENCE)
        return scale * self.below, scale * self.above


@dataclass(frozen=True)
class LearnedSite:
    """What a site has learned: its measured rows, and the state learned from them."""

    rows: Sequence[Measurement]
    learned: Learned
    knowledge: ModelKnowledge

    def with_points(self, sample: Sample, points: Sequence[Measurement]) -> Learned:
        """Return the state after measured points of a sample were imported too; of other models only what computed
        training uses.
        """
        own = [row for row in self.rows if self.knowledge.canonical(row.model) == sample.model]
        settled = settle(self.learned, [*own, *points], self.knowledge)
        return replace(
            settled,
            fitted={**self.learned.fitted, **settled.fitted},
            trained=tuple(trained.points_of([*self.rows, *points])) if points else self.learned.trained,
        )


def computed(site: LearnedSite, sample: Sample, figure: str, done: Sequence[int]) -> ComputedCells:
    """Return a figure of a sample's cells as requests get it after the cells `done` were measured, where that is
    computed. Without specifications (`ModelKnowledge`) it never is.
    """
    rows = sample.rows if figure == "time" else sample.memory_rows
    passes = sample.kind != "train" and not any(row.precision for row in rows)
    if passes or not site.knowledge.facts or names.resolve(sample.model) is None:
        return ComputedCells.of([None] * len(rows))
    facts = [site.knowledge.facts[sample.model]] if sample.model in site.knowledge.facts else []
    predictor = LearnedPredictor(site.with_points(sample, [rows[i] for i in done]), facts)
    answers = _Answers(sample, Chooser(predictor))
    return ComputedCells.of(answers.interval(row, figure) for row in rows)


class _Answers:
    """Answers to requests for the rows of a sample."""

    def __init__(self, sample: Sample, chooser: Chooser) -> None:
        self._sample, self._chooser = sample, chooser
        gpu = sample.gpu
        slices: dict[Profile, tuple[float, float]] = {}
        for row in (*sample.rows, *sample.memory_rows):
            if _is_sliced(row):
                slices.setdefault(_profile_of(row, gpu), shares_of(row, gpu))
        self._sliced, self._whole = _kind_of(gpu, slices), _kind_of(gpu, {})

    def interval(self, row: Measurement, figure: str) -> Interval | None:
        """Return the figure of a row; None if it is not computed. There are no requests for several processes."""
        encodes = self._sample.known.family == "encoder" and bool(row.precision)
        if row.procs != 1 or row.gpu == CPU or not (row.kind == "train" or encodes):
            return None
        row = replace(row, model=self._sample.model, input_size=row.input_size or self._sample.known.reference)
        figures = self._figures(row, figure, self._sliced if _is_sliced(row) else self._whole)
        if figures is None or (isinstance(figures, TokenFigures) and not figures.has_speeds):
            return None
        return figures.latency_s if figure == "time" else figures.memory_mib

    def _figures(self, row: Measurement, figure: str, kind: GpuKind) -> Figures | None:
        try:
            workload = self._chooser.workload(_hints_of(row))
        except Refusal:
            return None
        profile = _profile_of(row, self._sample.gpu)
        if workload is not None:
            return self._chooser.token_figures(workload, None, Partition(kind.name, (kind,)))[profile.gres_type]
        predictor = self._chooser.predictor
        if predictor.computable(figure, row.model, row.kind, GpuSpec.of_kind(kind)) is None:
            return None
        return predictor.figures(Bucket(row.model, row.kind, row.batch, row.input_size or 0, "tok"), kind)[profile]


def _hints_of(row: Measurement) -> Hints:
    if row.kind == "train":
        return trained.hints_of(row)
    hints = weights_hint(row)
    return Hints(model=row.model, batch=row.batch, input=row.input_size, input_unit="tok", role="infer", llm=hints)


def _is_sliced(row: Measurement) -> bool:
    return bool(row.profile) or row.compute_slices is not None


def _profile_of(row: Measurement, gpu: GpuSpec) -> Profile:
    """Return a row's profile without its suffix, which does not affect the speed; the whole GPU's if it has none."""
    if row.profile:
        return Profile.parse(row.profile)._replace(suffix="")
    whole = _whole(gpu)
    if row.compute_slices is None:
        return whole
    return Profile(row.compute_slices, round(whole.memory_gb * shares_of(row, gpu)[1]))


def _whole(gpu: GpuSpec) -> Profile:
    return Profile(gpu.facts.compute_slices, gpu.memory_gb)


def _kind_of(gpu: GpuSpec, slices: Mapping[Profile, tuple[float, float]]) -> GpuKind:
    """Return the kind of a GPU with these slices, of which the shares of SMs and memory are given, and the whole."""
    facts, whole = gpu.facts, _whole(gpu)
    if all(profile.compute < whole.compute for profile in slices):
        slices = {**slices, whole: (1.0, 1.0)}
    infos = []
    for profile, (sm, memory) in slices.items():
        sms, parts = max(round(sm * facts.sm_count), 1), max(round(memory * facts.memory_slices), 1)
        place = Placement(0, parts)
        mib = 1024 * profile.memory_gb
        infos.append(ProfileInfo(profile, 0, profile.compute, parts, mib, sms, 1, 0, 0, 0, 0, 1, (place,)))
    return GpuKind(gpu.name, Geometry(gpu.name, infos), facts.tflops, facts.bandwidth_gbs, facts.sm_count)

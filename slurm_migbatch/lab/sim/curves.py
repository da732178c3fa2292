"""Provide speeds of real models on slices: `Curves` is a `Speeds` over a measured table or the predictor.

A source gives, for an application, a batch and a kind of work, the items per second on each profile of a GPU on which
it fits. A job's speed is its rate relative to that of the whole GPU. A job of several GPUs divides its batch among
them. Its speed is the sum over its places relative to what it requests: whole GPUs, or the slices that it names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Protocol

from slurm_migbatch.lab.sim.cluster import Place
from slurm_migbatch.lab.sim.job import Kind, SimulatedJob
from slurm_migbatch.lab.sim.relative import relative_speed
from slurm_migbatch.lab.sim.run import SimulatedRun
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.predict.cells import Cells, GpuSpec, shares_of
from slurm_migbatch.predict.learned import LearnedPredictor
from slurm_migbatch.predict.surface import TIME
from slurm_migbatch.profiling.measurement import Measurement
from slurm_migbatch.workload.gpufacts import facts_of, guess


class SpeedError(ValueError):
    """Speeds are not available; the message says which, and which ones there are."""


class RateSource(Protocol):
    """Rates of applications on the profiles of one GPU."""

    def rates(self, app: str, batch: int, kind: Kind) -> Mapping[Profile, float]:
        """Return items per second by profile on which it fits; raises SpeedError for unknown applications."""

    def apps(self, kind: Kind) -> Sequence[str]:
        """Return the applications that the source has rates of."""

    def batches(self, app: str, kind: Kind) -> Sequence[int]:
        """Return the usual batches of an application."""


class Curves:
    """Speeds from a source of rates.

    A job without an application is, as with `speeds.Linear`, as fast as its share of the requested compute slices, and
    gains nothing from more.
    """

    def __init__(self, source: RateSource, geometry: Geometry, *, shared: float = 2.0) -> None:
        """Use rates from `source`; `shared` is the slowdown by one other job in the same slice."""
        self.source, self.geometry, self.shared = source, geometry, shared
        self._full = geometry.full.profile
        self._known: dict[tuple[str, int, Kind, Profile], float] = {}

    def speed(self, job: SimulatedJob, places: Sequence[Place]) -> float:
        """See `Speeds`."""
        total = 0.0
        for place in places:
            speed = self.relative(job, place.slot.profile)
            if not speed:
                return 0.0
            total += speed
        # a model that was drawn for a job may not fit on the slice that the job requests
        requested_speed = self.relative(job, job.profile) if job.profile else 1.0
        speed = total / job.gpus / (requested_speed or 1.0)
        return speed if job.app else min(1.0, speed)

    def slowdown(self, _run: SimulatedRun, others: Sequence[SimulatedRun]) -> float:
        """See `Speeds`."""
        return 1.0 + (self.shared - 1.0) * len(others)

    def relative(self, job: SimulatedJob, profile: Profile) -> float:
        """Return the speed on one slice relative to the whole GPU; 0 if it does not fit."""
        if not job.app:
            return profile.compute / self._full.compute
        key = job.app, -(-job.batch // job.gpus), job.kind, profile
        cached = self._known.get(key)
        if cached is None:
            cached = self._known[key] = self._relative(*key)
        return cached

    def _relative(self, app: str, batch: int, kind: Kind, profile: Profile) -> float:
        rates = self.source.rates(app, batch, kind)
        full_rate = rates.get(self._full)
        if full_rate is None:
            raise SpeedError(f"{app} with batch {batch} does not fit on a whole {self.geometry.name}")
        return rates.get(profile, 0.0) / full_rate


class RateTable:
    """Measured rates. A batch that was not measured gets the rates of the nearest measured one, by its logarithm.

    Profiles are matched by compute slices and by their share of memory, so a table of an A100 with 40 GB can also be
    used for one with 80 GB; whether a job fits is then judged by the smaller GPU.
    """

    def __init__(self, rows: Iterable[Measurement], geometry: Geometry) -> None:
        """Read rows of one process count (1), with the largest input size of each model."""
        self.geometry = geometry
        self._found: dict[tuple[str, Kind], dict[int, dict[Profile, float]]] = {}
        full = geometry.full
        single = [row for row in rows if row.procs == 1 and row.gpu != "cpu"]
        sizes: dict[str, int] = {}
        for row in single:
            sizes[row.model] = max(sizes.get(row.model, 0), row.input_size or 0)
        by_shape = {
            (info.compute_slices, info.memory_slices): info.profile
            for info in reversed(geometry.profiles)
            if not info.profile.suffix
        }
        specs = {name: GpuSpec.of_rows([row for row in single if row.gpu == name]) for name in {r.gpu for r in single}}
        for row in single:
            profile = Profile.parse(row.profile) if row.profile else full.profile
            memory = round(shares_of(row, specs[row.gpu])[1] * geometry.memory_slices)
            profile_of_shape = by_shape.get((row.compute_slices or profile.compute, memory))
            if profile_of_shape is None or row.rate is None or (row.input_size or 0) != sizes[row.model]:
                continue
            kind: Kind = "train" if row.kind == "train" else "infer"
            self._found.setdefault((row.model, kind), {}).setdefault(row.batch, {})[profile_of_shape] = row.rate
        for batches in self._found.values():
            for batch in [batch for batch, rates in batches.items() if full.profile not in rates]:
                del batches[batch]
        self._found = {key: batches for key, batches in self._found.items() if batches}

    def rates(self, app: str, batch: int, kind: Kind) -> Mapping[Profile, float]:
        """See `RateSource`."""
        batches = self._found.get((app, kind))
        if batches is None:
            names = ", ".join(self.apps(kind)) or "none"
            raise SpeedError(f"the table has no {kind} speeds of {app or 'a job without a model'}; it has {names}")
        log_batch = math.log(max(batch, 1))
        return batches[min(batches, key=lambda known: (abs(math.log(known) - log_batch), known))]

    def apps(self, kind: Kind) -> Sequence[str]:
        """See `RateSource`."""
        return sorted(app for app, measured_kind in self._found if measured_kind == kind)

    def batches(self, app: str, kind: Kind) -> Sequence[int]:
        """Return the batches at which an application was measured on the whole GPU."""
        return sorted(self._found.get((app, kind), ()))


class Predicted:
    """Predicted rates, at the model's usual input size; a model fits if the median prediction of its memory does."""

    def __init__(self, predictor: LearnedPredictor, geometry: Geometry, name: str) -> None:
        """Use rates from `predictor`; `name` is the GPU's short name in the measurements, `a100-80gb`."""
        self.predictor, self.geometry = predictor, geometry
        full = geometry.full
        facts = facts_of(geometry.name) or guess(full.sm_count, full.profile.memory_gb)
        facts = facts._replace(memory_slices=geometry.memory_slices)
        self.gpu = GpuSpec(name, facts, full.profile.memory_gb)
        self._rates = lru_cache(maxsize=1 << 14)(self._ask)

    def rates(self, app: str, batch: int, kind: Kind) -> Mapping[Profile, float]:
        """See `RateSource`; the rates are relative, scaled so that the whole GPU processes one batch a second."""
        return self._rates(app, max(batch, 1), kind)

    def apps(self, _kind: Kind) -> Sequence[str]:
        """See `RateSource`: every model that the predictor knows, of either kind."""
        return sorted(self.predictor.grids())

    def batches(self, app: str, kind: Kind) -> Sequence[int]:
        """See `RateSource`: the batches at which the predictor's buckets begin and that fit on the whole GPU."""
        full = self.geometry.full.profile
        return [batch for batch in self.predictor.grids()[app].batches if full in self.rates(app, batch, kind)] or [1]

    def _ask(self, app: str, batch: int, kind: Kind) -> Mapping[Profile, float]:
        grid = self.predictor.grids().get(app)
        if grid is None:
            raise SpeedError(f"the predictor knows no model {app!r}; it knows {', '.join(self.apps(kind))}")
        known = self.predictor.learned.known.get(app) or self.predictor.knowledge.of(app)
        infos = [info for info in self.geometry.profiles if not info.profile.suffix]
        cells = Cells.grid(batch, known.reference, infos, self.gpu, known)
        whole = Cells.grid(batch, known.reference, [self.geometry.full] * len(infos), self.gpu, known)
        belief, _, _ = self.predictor.learned.belief("time", app, kind, known, self.gpu)
        middle, _ = belief.predict(TIME, whole)
        speeds = relative_speed(belief, cells, whole)
        mib = self.predictor.interval("memory", app, known, self.gpu, kind, cells)[1]
        full_s = float(math.exp(middle[0]))
        return {
            info.profile: batch * float(speeds[i]) / full_s for i, info in enumerate(infos) if mib[i] <= info.memory_mib
        }

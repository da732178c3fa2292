"""What is predicted for one workload on one slice, and the seam that predictors fill."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.workload.buckets import Bucket, Grid
from slurm_migbatch.workload.catalog import GpuKind, Offer


@dataclass(frozen=True)
class Interval:
    """A predicted figure: `low` to `high` holds the truth with the predictor's confidence, `mid` is the best guess."""

    low: float
    mid: float
    high: float

    def hull(self, other: Interval) -> Interval:
        """The interval that holds both, with the larger guess."""
        return Interval(min(self.low, other.low), max(self.mid, other.mid), max(self.high, other.high))

    def to_list(self) -> list[float]:
        """`[low, mid, high]`, JSON-able."""
        return [self.low, self.mid, self.high]


@dataclass(frozen=True)
class Figures:
    """What a slice does with a workload: seconds for one batch, items per second, MiB in use."""

    latency_s: Interval
    throughput_per_s: Interval
    memory_mib: Interval

    def worst(self, other: Figures) -> Figures:
        """Figures that hold on two kinds of GPUs."""
        throughput = self.throughput_per_s.hull(other.throughput_per_s)
        return Figures(
            self.latency_s.hull(other.latency_s),
            Interval(throughput.low, min(self.throughput_per_s.mid, other.throughput_per_s.mid), throughput.high),
            self.memory_mib.hull(other.memory_mib),
        )

    @property
    def latency_us(self) -> int:
        """The latency to count on: the upper bound in whole microseconds."""
        return math.ceil(self.latency_s.high * 1e6)

    @property
    def rate(self) -> int:
        """The throughput to count on: the lower bound in whole thousandths of items per second."""
        return math.floor(self.throughput_per_s.low * 1e3)

    @property
    def need_mib(self) -> int:
        """The memory to count on: the upper bound in whole MiB."""
        return math.ceil(self.memory_mib.high)


@dataclass(frozen=True)
class Candidate:
    """One profile for one workload: what it has, what is predicted, whether it will do and, where not, why."""

    offer: Offer
    figures: Figures | None
    ok: bool
    why: str

    @property
    def profile(self) -> Profile:
        """The profile."""
        return self.offer.profile

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "profile": self.profile.name,
            "compute_slices": self.offer.compute_slices,
            "capacity_mib": self.offer.memory_mib,
            "latency_s": None if self.figures is None else self.figures.latency_s.to_list(),
            "throughput_per_s": None if self.figures is None else self.figures.throughput_per_s.to_list(),
            "memory_mib": None if self.figures is None else self.figures.memory_mib.to_list(),
            "ok": self.ok,
            "why": self.why,
        }


class Predictor(Protocol):
    """What knows models: the physical prior, and later whatever has learned from measurements.

    Figures may depend on the bucket's cell only (model, role, batch, input), never on its objective: the compiled table
    holds them for every cell and compares them with objectives itself.
    """

    @property
    def version(self) -> str:
        """Which predictor, for the decision's record."""
        ...

    def grids(self) -> Mapping[str, Grid]:
        """The known models by canonical name, with their bucket edges."""
        ...

    def aliases(self) -> Mapping[str, str]:
        """Other names of known models, canonical name by alias."""
        ...

    def figures(self, cell: Bucket, kind: GpuKind) -> Mapping[Profile, Figures]:
        """What each plain profile of one kind of GPU does with the cell; profiles without figures are missing."""
        ...

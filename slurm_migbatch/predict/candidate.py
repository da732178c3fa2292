"""Define the prediction for one workload on one slice."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.workload.buckets import preferred
from slurm_migbatch.workload.catalog import ProfileOffer

NEED_BITS: Final = 5
"""Leading bits of a memory need after the first: rounding up adds at most 1/32."""
MOST_MIB: Final = 2**32
"""Larger needs are reported as this."""
FAR_TOO_LARGE: Final = 4
"""Memory need in largest slices from which a job is refused: no median is that wrong."""


@dataclass(frozen=True)
class Interval:
    """A predicted figure: `low` to `high` covers the value with the predictor's confidence, `mid` is the median."""

    low: float
    mid: float
    high: float

    def hull(self, other: Interval, worse: Callable[[float, float], float] = max) -> Interval:
        """Return the interval that covers both, with the worse median."""
        return Interval(min(self.low, other.low), worse(self.mid, other.mid), max(self.high, other.high))

    def widened(self, factor: float) -> Interval:
        """Return the interval with its width, in logarithms, times `factor`; this very one for a factor of 1."""
        if factor == 1.0:
            return self
        return Interval(
            self.mid * (self.low / self.mid) ** factor, self.mid, self.mid * (self.high / self.mid) ** factor
        )

    def to_list(self) -> list[float]:
        """Return `[low, mid, high]`, JSON-able."""
        return [self.low, self.mid, self.high]


@dataclass(frozen=True)
class Figures:
    """Performance of a workload on a slice: seconds per batch, items per second, MiB in use.

    Conservative values are rounded to the safe side. Latency and rate go to the preferred numbers that limits use
    (`workload.buckets`), so rounding changes no comparison with a limit but keeps the compiled table small.
    """

    latency_s: Interval
    throughput_per_s: Interval
    memory_mib: Interval

    def worst(self, other: Figures) -> Figures:
        """Return the figures that hold on both kinds of GPUs."""
        return Figures(
            self.latency_s.hull(other.latency_s),
            self.throughput_per_s.hull(other.throughput_per_s, min),
            self.memory_mib.hull(other.memory_mib),
        )

    @property
    def tokens(self) -> Mapping[str, Interval]:
        """Token figures by name; empty except for language models."""
        return {}

    @property
    def latency_us(self) -> int:
        """Conservative latency: the upper bound in whole microseconds, rounded up to a preferred number."""
        return preferred(math.ceil(self.latency_s.high * 1e6), ceiling=True)

    @property
    def rate(self) -> int:
        """Conservative throughput: the lower bound in whole thousandths of items per second, rounded down to a
        preferred number.
        """
        return preferred(math.floor(self.throughput_per_s.low * 1e3), ceiling=False)

    @property
    def need_mib(self) -> int:
        """Conservative memory: the upper bound in whole MiB, rounded up to six leading bits."""
        mib = min(math.ceil(self.memory_mib.high), MOST_MIB)
        return -(-mib // step_of(mib)) * step_of(mib)


def step_of(mib: int) -> int:
    """Return the step to which a conservative memory of such a size is rounded."""
    return 1 << max(mib.bit_length() - 1 - NEED_BITS, 0)


@dataclass(frozen=True)
class Candidate:
    """One profile for one workload: its resources, its prediction, whether it is sufficient and, if not, why."""

    offer: ProfileOffer
    figures: Figures | None
    ok: bool
    why: str

    @property
    def profile(self) -> Profile:
        """The profile."""
        return self.offer.profile

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-able form."""
        figures = self.figures
        intervals: dict[str, list[float] | None] = dict.fromkeys(("latency_s", "throughput_per_s", "memory_mib"))
        if figures is not None:
            intervals = {name: getattr(figures, name).to_list() for name in intervals}
            intervals |= {name: interval.to_list() for name, interval in figures.tokens.items()}
        return {
            "profile": self.profile.name,
            "compute_slices": self.offer.compute_slices,
            "capacity_mib": self.offer.memory_mib,
            **intervals,
            "ok": self.ok,
            "why": self.why,
        }

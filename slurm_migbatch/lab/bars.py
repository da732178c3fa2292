"""Compare figures with their targets ("bars"), in the form that every benchmark prints."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurm_migbatch.values.quantiles import quantile


class NotMeasurable(ValueError):
    """Required data are missing; the message names them."""


@dataclass(frozen=True)
class Bar:
    """One figure that should be at most its target or, with `at_least`, at least its target.

    `floor`: the same figure without migbatch, a lower bound for it.
    """

    name: str
    value: float
    target: float
    at_least: bool = False
    floor: float | None = None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Bar:
        """Return the bar that `to_dict` wrote."""
        optional = values.get("at_least", False), values.get("floor")
        return cls(values["name"], values["value"], values["target"], *optional)

    @property
    def ok(self) -> bool:
        """Whether the bar is met."""
        return self.value >= self.target if self.at_least else self.value <= self.target

    @property
    def sign(self) -> str:
        """The comparison of value and target that meets the bar."""
        return ">=" if self.at_least else "<="

    def to_dict(self) -> dict[str, Any]:
        """Return name, value, target and ok, with `"at_least": true` if more is better, and "floor" if it has one."""
        fields = {"name": self.name, "value": round(self.value, 6), "target": self.target, "ok": self.ok}
        floor = {} if self.floor is None else {"floor": round(self.floor, 6)}
        return {**fields, **({"at_least": True} if self.at_least else {}), **floor}

    def line(self) -> str:
        """Return one line of text."""
        floor = "" if self.floor is None else f"; {self.floor:.4g} without migbatch"
        met = "ok" if self.ok else "MISSED"
        return f"{met:<7} {self.name}: {self.value:.4g} (target {self.sign} {self.target:g}{floor})"


def times_of(seconds: Sequence[float]) -> dict[str, float]:
    """Return figures of the durations of one operation: milliseconds, and their number."""
    return {
        "median_ms": round(statistics.median(seconds) * 1e3, 4),
        "p99_ms": round(quantile(seconds, 0.99) * 1e3, 4),
        "min_ms": round(min(seconds) * 1e3, 4),
        "n": len(seconds),
    }


def mean_with_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean and the ends of its 95 % confidence interval, by Student's t."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, -math.inf, math.inf
    from scipy.stats import t as student  # slow to import; most benchmarks need it only once, at their end

    t = float(student.ppf(0.975, len(values) - 1))
    half = t * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def rounded_interval(values: Sequence[float]) -> list[float]:
    """Return `mean_with_interval` with four digits after the point."""
    return [round(value, 4) for value in mean_with_interval(values)]


def finite_interval(values: Sequence[float]) -> list[float | None]:
    """Return `rounded_interval` with None for what is infinite, as the interval of a single value."""
    return [value if math.isfinite(value) else None for value in rounded_interval(values)]


def exponent(points: Sequence[tuple[float, float]]) -> float | None:
    """Return the exponent of a power law, fitted to the points by least squares of their logarithms.

    None for fewer than two points.
    """
    if len(points) < 2:
        return None
    xs, ys = [math.log(x) for x, _ in points], [math.log(y) for _, y in points]
    return statistics.linear_regression(xs, ys).slope

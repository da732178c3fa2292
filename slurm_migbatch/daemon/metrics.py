"""Register one service's Prometheus metrics, and gauges whose values are read at each scrape."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

_BUCKETS_S: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
Values = float | Mapping[str, float] | Mapping[tuple[str, str], float]
"""The value of a gauge without labels, or that of each series by the value of its label, or by those of both labels."""

# A process-wide switch; the library has no other. Otherwise each counter and histogram gets a second series.
disable_created_metrics()  # type: ignore[no-untyped-call]


class CallbackGauge(Collector):
    """A gauge that calls `read` at each scrape for the value of each series."""

    def __init__(self, name: str, doc: str, labels: Sequence[str], read: Callable[[], Values]) -> None:
        self._name, self._doc, self._labels, self._read = name, doc, labels, read

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Yield the family without values; the registry refuses a second one of its name."""
        yield GaugeMetricFamily(self._name, self._doc, labels=self._labels)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the family with the current values."""
        (family,) = self.describe()
        values = self._read()
        series = sorted(values.items()) if isinstance(values, Mapping) else [((), values)]
        for labels, value in series:
            family.add_metric((labels,) if isinstance(labels, str) else labels, value)
        yield family


class Metrics(CollectorRegistry):
    """All metrics of one service, in the order of their registration.

    Each service has its own: a reload makes a new service in the same process, which begins at zero.
    """

    def counter(self, name: str, doc: str, *labels: str) -> Counter:
        """Register a counter with these label names; its name ends in _total."""
        return Counter(name, doc, labels, registry=self)

    def histogram(self, name: str, doc: str) -> Histogram:
        """Register a histogram of seconds."""
        return Histogram(name, doc, registry=self, buckets=_BUCKETS_S)

    def gauge(self, name: str, doc: str, read: Callable[[], Values], *labels: str) -> None:
        """Register a gauge with these label names that calls `read` at each scrape for the value of each series."""
        self.register(CallbackGauge(name, doc, labels, read))


class Age:
    """Age of something, now and maximum so far; the series `now` and `longest` of a gauge."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._born: float | None = None
        self._longest = 0.0

    def renewed(self, born: float) -> None:
        """Record that a new object was created at time `born`; the maximum so far remains."""
        self._longest = self.values().get("longest", 0.0)
        self._born = born

    def values(self) -> Mapping[str, float]:
        """Return both ages in seconds; none before the first call of `renewed`."""
        if self._born is None:
            return {}
        now = self._clock() - self._born
        return {"now": now, "longest": max(now, self._longest)}

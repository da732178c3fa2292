"""Counters, gauges and histograms, printed in Prometheus's text form."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping

_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
Labels = tuple[tuple[str, str], ...]


class Counter:
    """A number that only grows, one per set of labels."""

    kind = "counter"

    def __init__(self) -> None:
        self._values: dict[Labels, float] = {}
        self._lock = threading.Lock()

    def add(self, amount: float = 1.0, **labels: str) -> None:
        """Count `amount` more."""
        key = tuple(sorted(labels.items()))
        with self._lock:
            self._values[key] = self._values.get(key, 0.0) + amount

    def value(self, **labels: str) -> float:
        """The count so far."""
        with self._lock:
            return self._values.get(tuple(sorted(labels.items())), 0.0)

    def samples(self) -> Iterator[tuple[str, Labels, float]]:
        """(suffix, labels, value) of each series."""
        with self._lock:
            items = sorted(self._values.items())
        for labels, value in items or [((), 0.0)]:
            yield "", labels, value


class Gauge:
    """Values that are read when somebody asks: the callback returns {labels: value}."""

    kind = "gauge"

    def __init__(self, read: Callable[[], Mapping[Labels, float]]) -> None:
        self._read = read

    def samples(self) -> Iterator[tuple[str, Labels, float]]:
        """(suffix, labels, value) of each series."""
        for labels, value in sorted(self._read().items()):
            yield "", labels, value


class Histogram:
    """How long something took, in seconds."""

    kind = "histogram"

    def __init__(self, buckets: tuple[float, ...] = _BUCKETS) -> None:
        self._edges = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        with self._lock:
            self._counts[bisect_left(self._edges, seconds)] += 1
            self._sum += seconds

    def samples(self) -> Iterator[tuple[str, Labels, float]]:
        """(suffix, labels, value) of each series."""
        with self._lock:
            counts, total = list(self._counts), self._sum
        running = 0
        for edge, count in zip((*(f"{e:g}" for e in self._edges), "+Inf"), counts, strict=True):
            running += count
            yield "_bucket", (("le", edge),), running
        yield "_sum", (), total
        yield "_count", (), running


class Age:
    """How old something has become, now and at most so far; as a gauge, {what="now"} and {what="longest"}."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._born: float | None = None
        self._longest = 0.0

    def renewed(self, born: float) -> None:
        """It is replaced by one of the time `born`."""
        self._longest = self.values().get((("what", "longest"),), 0.0)
        self._born = born

    def values(self) -> Mapping[Labels, float]:
        """Seconds; nothing before there is one."""
        if self._born is None:
            return {}
        now = self._clock() - self._born
        return {(("what", "now"),): now, (("what", "longest"),): max(now, self._longest)}


class Metrics:
    """All metrics of one service, in the order they were made."""

    def __init__(self) -> None:
        self._all: dict[str, tuple[str, Counter | Gauge | Histogram]] = {}

    def counter(self, name: str, doc: str) -> Counter:
        """Make a counter; by custom its name ends in _total."""
        metric = Counter()
        self._all[name] = doc, metric
        return metric

    def gauge(self, name: str, doc: str, read: Callable[[], Mapping[Labels, float]]) -> None:
        """Make a gauge that asks `read` for its values."""
        self._all[name] = doc, Gauge(read)

    def histogram(self, name: str, doc: str) -> Histogram:
        """Make a histogram of seconds."""
        metric = Histogram()
        self._all[name] = doc, metric
        return metric

    def text(self) -> str:
        """Everything in the text exposition format 0.0.4."""
        lines = []
        for name, (doc, metric) in self._all.items():
            lines += [f"# HELP {name} {doc}", f"# TYPE {name} {metric.kind}"]
            for suffix, labels, value in metric.samples():
                inner = ",".join(f'{k}="{_escape(v)}"' for k, v in labels)
                lines.append(
                    f"{name}{suffix}{{{inner}}} {_number(value)}" if inner else f"{name}{suffix} {_number(value)}"
                )
        return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)

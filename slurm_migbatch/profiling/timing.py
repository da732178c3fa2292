"""Time batches: when warm-up is over, how many batches are timed, and their summary.

Runs in the measured program's own Python, so it imports only the standard library.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MAX_BATCHES = 10_000
"""Times kept of one point."""

LEAST = 3
"""Minimum number of timed batches, however slow they are."""

P99_SAMPLE = 100
"""Minimum number of times for a 99th percentile."""

_WINDOW = 3
_SETTLED = 0.10


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        warmup: batches before anything counts; more follow until half of `min_seconds` is over (clocks rise while a GPU
            works) and their times settle.
        warmup_seconds: the end of warm-up, settled or not; the first batch, which may compile, is not counted.
        repeats: minimum number of timed batches.
        min_seconds: minimum of timed seconds.
        max_seconds: the end of timing, even below these minima, once LEAST batches are timed.
    """

    warmup: int = 3
    warmup_seconds: float = 10.0
    repeats: int = 20
    min_seconds: float = 1.0
    max_seconds: float = 30.0


def settled(times: Sequence[float]) -> bool:
    """Return whether the last three batches took as long as the three before them, within a tenth."""
    if len(times) < 2 * _WINDOW:
        return False
    last, before = statistics.median(times[-_WINDOW:]), statistics.median(times[-2 * _WINDOW : -_WINDOW])
    return abs(last - before) <= _SETTLED * before


def warm_up(once: Callable[[], float], effort: Effort) -> int:
    """Run batches until their times settle; returns how many. `once` runs one batch and returns its seconds."""
    times = [once()]
    spent = 0.0
    while len(times) < MAX_BATCHES and spent < effort.warmup_seconds:
        if len(times) >= effort.warmup and spent >= effort.min_seconds / 2 and settled(times):
            break
        times.append(once())
        spent += times[-1]
    return len(times)


def collect(once: Callable[[], float], effort: Effort, go_on: Callable[[], bool] = lambda: False) -> list[float]:
    """Return the seconds of each batch, until both minima are reached or a maximum is.

    Then batches continue, and their times are kept, while `go_on` is true: other processes are still measuring.
    """
    times: list[float] = []
    spent = 0.0
    while True:
        seconds = once()
        if len(times) < MAX_BATCHES:
            times.append(seconds)
        spent += seconds
        minima = len(times) >= effort.repeats and spent >= effort.min_seconds
        maximum = len(times) >= MAX_BATCHES or (len(times) >= LEAST and spent >= effort.max_seconds)
        if (minima or maximum) and not go_on():
            return times


@dataclass(frozen=True)
class Summary:
    """Summary of a point's times, in seconds. `p99` is None if there are too few times."""

    count: int
    mean: float
    p50: float
    p99: float | None

    @classmethod
    def of(cls, times: Sequence[float]) -> Summary:
        """Summarize at least one time."""
        ordered = sorted(times)
        p99 = ordered[math.ceil(0.99 * len(ordered)) - 1] if len(ordered) >= P99_SAMPLE else None
        return cls(len(ordered), math.fsum(ordered) / len(ordered), statistics.median(ordered), p99)

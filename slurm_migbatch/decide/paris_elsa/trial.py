"""Run short trials of a stream of work on a stock of slices, to evaluate partitionings and for the experiment.

A stream is drawn once, with gaps of mean 1, and scaled to any rate, so that every stock and every rate gets the same
jobs. The **latency-bounded rate** is the highest at which no group of work has more than its allowed share of late jobs
(`ALLOWED` keeps the 95th percentile of latency within the limit) and no job takes more than `WORST` limits (nobody is
starved to reach it).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from slurm_migbatch.decide.paris_elsa.assignment import Central, StockCosts, Waiting, WorkClass

ALLOWED: Final = 0.05
WORST: Final = 10.0
LARGEST_STEP: Final = 1e4
"""Rates so many times smaller than the last failure are not searched."""


@dataclass(frozen=True)
class Stream:
    """Jobs in the order of arrival: cumulated gaps of mean 1, and classes. For each group the jobs that may
    be late.
    """

    times: tuple[float, ...]
    works: tuple[int, ...]
    may_be_late: tuple[int, ...]

    def at(self, rate: float) -> list[float]:
        """Return the times of arrival in seconds, at so many jobs a second."""
        return [time / rate for time in self.times]


def stream(
    works: Sequence[WorkClass],
    job_count: int,
    chance: np.random.Generator,
    *,
    allowed: float = ALLOWED,
    exact: bool = False,
) -> Stream:
    """Draw Poisson arrivals of classes by their shares.

    Args:
        allowed: the share of each group's jobs that may be late.
        exact: each class appears exactly in its share, in random order, so that a short stream has the right mix.
    """
    shares = np.array([work.share for work in works], dtype=np.float64)
    shares /= shares.sum()
    times = np.cumsum(chance.exponential(size=job_count))
    if exact:
        edges = np.rint(np.cumsum(shares) * job_count).astype(int)
        drawn = chance.permutation(np.repeat(np.arange(len(works)), np.diff(edges, prepend=0)))
    else:
        drawn = chance.choice(len(works), p=shares, size=job_count)
    counts = np.bincount(np.array([work.group for work in works])[drawn])
    return Stream(tuple(times.tolist()), tuple(drawn.tolist()), tuple(int(allowed * count) for count in counts))


Trial = Callable[[StockCosts, Stream, float], "list[float] | None"]
"""One way to dispatch, at a rate.

It returns latency over limit of each job in order of arrival, or None as soon as the bounds cannot hold.
"""


class Latencies:
    """Latencies so far, and whether the bounds can still be met."""

    def __init__(self, stream: Stream) -> None:
        self.latencies = [math.inf] * len(stream.times)
        self.left = list(stream.may_be_late)
        self.lost = False

    def note(self, index: int, work: WorkClass, latency: float) -> None:
        """Record that a job is done, `latency` seconds after its arrival."""
        relative = latency / work.limit_s
        self.latencies[index] = relative
        if relative > 1 + 1e-9:
            self.left[work.group] -= 1
            if self.left[work.group] < 0 or relative > WORST:
                self.lost = True

    def result(self) -> list[float] | None:
        """Return latency over limit of each job; None if the bounds are not met."""
        return None if self.lost or math.inf in self.latencies else self.latencies


def central(stock_costs: StockCosts, stream: Stream, rate: float) -> list[float] | None:
    """Run the arrivals with `assignment.Central`; see `Trial`."""
    works, latencies, queue = stock_costs.works, Latencies(stream), Central(stock_costs)
    busy: list[tuple[float, int]] = []

    def start(job: Waiting, kind: int, now: float) -> None:
        work = works[job.work]
        finish = now + work.seconds[kind]
        latencies.note(job.name, work, finish - job.arrived)
        heapq.heappush(busy, (finish, kind))

    def advance(until: float) -> None:
        while busy and busy[0][0] <= until and not latencies.lost:
            now, kind = heapq.heappop(busy)
            job = queue.release(now, kind)
            if job is not None:
                start(job, kind, now)
            elif queue.late:
                for job, idle_kind in queue.start_idle(now):
                    start(job, idle_kind, now)

    for index, (now, number) in enumerate(zip(stream.at(rate), stream.works, strict=True)):
        advance(now)
        if latencies.lost:
            return None
        job = Waiting(now, number, index)
        kind = queue.arrive(job)
        if kind is not None:
            start(job, kind, now)
    advance(math.inf)
    return latencies.result()


def bounded_rate(
    trial: Trial, stock_costs: StockCosts, stream: Stream, guess: float, precision: float = 0.005
) -> float:
    """Return the latency-bounded rate in jobs a second, by bisection from a guess; 0 if none is found.

    Sampled lateness is not quite monotonic in the rate: the result is a rate that meets the bounds, next to one (larger
    by the precision at most) that does not.
    """

    def holds(rate: float) -> bool:
        return trial(stock_costs, stream, rate) is not None

    low, step = guess, 1.02
    if holds(guess):
        high = guess * step
        while holds(high):
            low, step = high, step**2
            high *= step
    else:
        high, low = guess, guess / step
        while not holds(low):
            high, step = low, step**2
            if step > LARGEST_STEP:
                return 0.0
            low /= step
    while high > low * (1 + precision):
        middle = math.sqrt(low * high)
        if holds(middle):
            low = middle
        else:
            high = middle
    return low

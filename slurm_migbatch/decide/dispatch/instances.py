"""Compute the fewest concurrent instances of a service that serve its load within its latency limit.

A service is a job array with the hints `role=serve` and `rate=` (items or requests a second of all tasks together), and
optionally a latency limit; each task is one instance on one slice. Its number follows the load, as in ElasticBatch
(Xiao et al., IEEE TPDS 35(10), 2024) for batch inference; only the abstract is public, so all of this is a
reconstruction.

- One instance serves what is predicted for its slice within the limit, or more if one was measured to do more within
  the limit. If reports show batches above the limit, it is the current throughput.
- The load is `rate`; if instances report their items, it is the measured load of the last minutes (the mean of those
  that reported, times those that run), plus `RESERVE`.
- A higher number takes effect immediately, a lower one when no higher one was needed for `HOLD_S`, as in Kubernetes'
  HorizontalPodAutoscaler (stabilization window).

Reports come from the job. A user who overstates his load gets more instances only if no other job needs the capacity:
scarce capacity is shared according to past use (`decide.dispatch.shares`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Final

from slurm_migbatch.decide.snapshot import Report, Run

LOAD_S: Final = 600.0
"""Seconds over which the load is measured. By default nodes report every 120."""
HOLD_S: Final = 300.0
"""Seconds after which a number that is no longer needed is lowered; as in Kubernetes."""
RESERVE: Final = 0.25
"""Additional share of the measured load: requests arrive unevenly, and an instance takes time to start."""
LEAST_S: Final = 10.0
"""Minimum seconds between two reports to derive a throughput."""
TOLERANCE: Final = 1e-9
"""Relative shortfall of a rate that is ignored: rounding."""


def fewest(rate: float, instance_rate: float) -> int:
    """Return how many instances, at least one, serve `rate` if one serves `instance_rate` (both a second)."""
    return max(math.ceil(rate / instance_rate * (1 - TOLERANCE)), 1)


@dataclass(frozen=True)
class InstanceLoad:
    """Measured load of a service's instances, in items a second.

    Attributes:
        each: mean of one instance, in the last minutes.
        most: the maximum that one reached within the limit; 0: none.
        slow: whether their batches exceed the limit.
    """

    each: float
    most: float = 0.0
    slow: bool = False


def carried(predicted: float | None, load: InstanceLoad | None) -> float | None:
    """Return the throughput of one instance within the limit, a second; None if unknown."""
    if load is None:
        return predicted
    if load.slow and load.each > 0:
        return min(load.each, predicted or load.each)
    return max(predicted or 0.0, load.most) or None


def instances(rate: float, running: int, predicted: float | None, load: InstanceLoad | None) -> int | None:
    """Return the fewest instances that serve the load; None if the throughput of one is unknown.

    Args:
        rate: expected load, a second, all instances together.
        predicted: conservative prediction of one instance's throughput; None: unknown.
        load: measured load; None: not reported.
    """
    instance_rate = carried(predicted, load)
    if instance_rate is None:
        return None
    return fewest(rate if load is None else load.each * running * (1 + RESERVE), instance_rate)


@dataclass
class LoadHistory:
    """Reports of instances, and recent numbers needed; as long as Slurm lists the arrays.

    Attributes:
        counts: of each run, times (unix s) and items done, oldest first.
        latency: of each run, its typical batch time in ms.
        most: of each array, the maximum items a second that one instance reached within the limit.
        needs: of each array, times and numbers of instances needed; each number lower than the one before.
    """

    counts: dict[Run, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    latency: dict[Run, float] = field(default_factory=dict)
    most: dict[int, float] = field(default_factory=dict)
    needs: dict[int, tuple[tuple[float, int], ...]] = field(default_factory=dict)

    def add_report(self, run: Run, started: float, report: Report, now: float) -> None:
        """Add a report of an instance's run, which began at `started` (unix seconds)."""
        if report.latency_ms is not None:
            self.latency[run] = report.latency_ms
        if report.items is None:
            return
        at = now if report.at is None else min(report.at, now)
        counts = self.counts.get(run, ((started, 0.0),))
        if report.items < counts[-1][1]:  # its counter was reset
            counts = ()
        if not counts or at - counts[-1][0] >= LEAST_S:
            counts = (*counts, (at, report.items))
        while len(counts) > 2 and counts[1][0] <= now - LOAD_S:
            counts = counts[1:]
        self.counts[run] = counts

    def load(self, array: int, runs: Collection[Run], limit_ms: float | None, now: float) -> InstanceLoad | None:
        """Return the measured load of an array's running instances; None if none of them has reported recently."""
        rates = [rate for run in runs if (rate := self._rate(run, now)) is not None]
        if not rates:
            return None
        batch_ms = [self.latency[run] for run in runs if run in self.latency]
        slow = limit_ms is not None and bool(batch_ms) and fmean(batch_ms) > limit_ms
        if not slow:
            self.most[array] = max(self.most.get(array, 0.0), *rates)
        return InstanceLoad(fmean(rates), self.most.get(array, 0.0), slow)

    def _rate(self, run: Run, now: float) -> float | None:
        counts = self.counts.get(run, ())
        if len(counts) < 2 or counts[-1][0] <= now - LOAD_S:
            return None
        (since, before), (at, items) = counts[0], counts[-1]
        return (items - before) / (at - since)

    def held(self, array: int, need: int, throttle: int | None, now: float) -> int:
        """Return the number to run: the maximum needed in the last `HOLD_S`.

        `throttle`: the previous one; after a restart nothing else is known of the past.
        """
        needs = self.needs.get(array, () if throttle is None else ((now, throttle),))
        recent = [(at, number) for at, number in needs if at > now - HOLD_S and number > need]
        self.needs[array] = (*recent, (now, need))
        return self.needs[array][0][1]

    def forget_but(self, starts: Mapping[int, Mapping[Run, float]]) -> None:
        """Remove all but these arrays and their running instances."""
        runs = {run for of_array in starts.values() for run in of_array}
        self.counts = {run: counts for run, counts in self.counts.items() if run in runs}
        self.latency = {run: latency for run, latency in self.latency.items() if run in runs}
        self.most = {array: count for array, count in self.most.items() if array in starts}
        self.needs = {array: needs for array, needs in self.needs.items() if array in starts}

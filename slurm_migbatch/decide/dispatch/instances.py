"""How many instances of a service run at once: the fewest that carry its load within its latency limit.

A service is a job array whose hints hold `role=serve` and `rate=` (items or requests a second of all tasks together),
and a latency limit if it has one; each task is one instance on one slice. Its number follows the load, as ElasticBatch
(Xiao et al., IEEE TPDS 35(10), 2024) makes the instances of batch inference follow it; the text is not public beyond
the abstract, so all of this is a reconstruction.

- One instance carries what is predicted of its slice within the limit, or more where one of them was seen to do more
  and still kept the limit. Where their reports say that batches take longer than the limit, it is what they do now.
- The load is `rate`; where instances report their items, it is what all of them got in the last minutes (the mean of
  those that reported, times those that run), and `RESERVE` more.
- A higher number counts at once. A lower one counts when no higher one was needed for `HOLD_S`, which is how
  Kubernetes' HorizontalPodAutoscaler scales down (stabilization window).

Reports are the job's own words. Who overstates his load gets more instances only where nobody else needs the room: what
is scarce is shared by what users had (`decide.dispatch.shares`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from slurm_migbatch.decide.snapshot import Report, Run

LOAD_S: Final = 600.0
"""Seconds over which the load is measured. By default nodes report every 120."""
HOLD_S: Final = 300.0
"""Seconds after which a number that is no longer needed is lowered; that of Kubernetes."""
RESERVE: Final = 0.25
"""Share of the measured load that is carried beside it: requests come unevenly, and an instance takes time to start."""
LEAST_S: Final = 10.0
"""Seconds below which two reports tell no speed."""
TOLERANCE: Final = 1e-9
"""Relative shortfall of a rate that counts as none: rounding."""


def fewest(rate: float, instance_rate: float) -> int:
    """Return how many instances, at least one, carry `rate` where one carries `instance_rate` (both a second)."""
    return max(math.ceil(rate / instance_rate * (1 - TOLERANCE)), 1)


@dataclass(frozen=True)
class InstanceLoad:
    """What instances of a service do by their reports, in items a second.

    Attributes:
        each: one of them in the mean, in the last minutes.
        most: the most that one was seen to do while the limit was kept; 0: none was.
        slow: whether their batches take longer than the limit.
    """

    each: float
    most: float = 0.0
    slow: bool = False


def carried(predicted: float | None, load: InstanceLoad | None) -> float | None:
    """Return what one instance carries within the limit, a second; None where nobody knows."""
    if load is None:
        return predicted
    if load.slow and load.each > 0:
        return min(load.each, predicted or load.each)
    return max(predicted or 0.0, load.most) or None


def instances(rate: float, running: int, predicted: float | None, load: InstanceLoad | None) -> int | None:
    """Return the fewest instances that carry the load; None where nobody knows what one carries.

    Args:
        rate: what the service is told to get, a second, all instances together.
        running: instances that run now.
        predicted: what one carries by the prediction that can be counted on; None: unknown.
        load: what they do; None: they have not told.
    """
    instance_rate = carried(predicted, load)
    if instance_rate is None:
        return None
    return fewest(rate if load is None else load.each * running * (1 + RESERVE), instance_rate)


class LoadHistory:
    """What instances reported, and how many were needed lately; for as long as Slurm lists the arrays.

    Attributes:
        counts: of each run, when (unix s) it had done how many items, oldest first.
        latency: of each run, its usual time for a batch in ms.
        most: of each array, the most items a second that one instance did within the limit.
        needs: of each array, when how many instances were needed; each number less than the one before.
    """

    def __init__(self) -> None:
        self.counts: dict[Run, tuple[tuple[float, float], ...]] = {}
        self.latency: dict[Run, float] = {}
        self.most: dict[int, float] = {}
        self.needs: dict[int, tuple[tuple[float, int], ...]] = {}

    def hear(self, run: Run, started: float, report: Report, now: float) -> None:
        """Take in what a run of an instance said, which began at `started` (unix seconds)."""
        if report.latency_ms is not None:
            self.latency[run] = report.latency_ms
        if report.items is None:
            return
        at = now if report.at is None else min(report.at, now)
        counts = self.counts.get(run, ((started, 0.0),))
        if report.items < counts[-1][1]:  # it counts anew
            counts = ()
        if not counts or at - counts[-1][0] >= LEAST_S:
            counts = (*counts, (at, report.items))
        while len(counts) > 2 and counts[1][0] <= now - LOAD_S:
            counts = counts[1:]
        self.counts[run] = counts

    def load(self, array: int, runs: Collection[Run], limit_ms: float | None, now: float) -> InstanceLoad | None:
        """Return what an array's running instances do; None where none of them has told lately."""
        rates = [rate for run in runs if (rate := self._rate(run, now)) is not None]
        if not rates:
            return None
        took = [self.latency[run] for run in runs if run in self.latency]
        slow = limit_ms is not None and bool(took) and fmean(took) > limit_ms
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
        """Return the number to run at once: the highest that was needed in the last `HOLD_S`.

        `throttle`: the one that was set here before; nothing else is known of the past after a restart.
        """
        known = self.needs.get(array, () if throttle is None else ((now, throttle),))
        lately = [(at, number) for at, number in known if at > now - HOLD_S and number > need]
        self.needs[array] = (*lately, (now, need))
        return self.needs[array][0][1]

    def forget_but(self, starts: Mapping[int, Mapping[Run, float]]) -> None:
        """Forget all but these arrays and their running instances."""
        runs = {run for of_array in starts.values() for run in of_array}
        self.counts = {run: counts for run, counts in self.counts.items() if run in runs}
        self.latency = {run: took for run, took in self.latency.items() if run in runs}
        self.most = {array: count for array, count in self.most.items() if array in starts}
        self.needs = {array: needs for array, needs in self.needs.items() if array in starts}

"""Run jobs by SJF-BSBF and its variant that simulates the queue: `decide.lending.lookahead` on whole GPUs, with gangs.

The policy updates a `GangQueue` at every start and end; a job's remaining work follows from its estimate and
its speed so far. Slowdowns of pairs are those of the engine's `Speeds`. Memory is assumed to be sufficient for two jobs
on a GPU, as in the baselines, and the cost of starting is not predicted.
"""

from __future__ import annotations

import math
import sys
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from slurm_migbatch.config.keys import between, key
from slurm_migbatch.decide.lending.lookahead import (
    PAIR,
    RULES,
    QueuedTraining,
    Rank,
    SharingQueue,
    TrainingStart,
    plan,
)
from slurm_migbatch.lab.sim.cluster import Place, SimulatedCluster
from slurm_migbatch.lab.sim.engine import Simulation
from slurm_migbatch.lab.sim.policy import Policy
from slurm_migbatch.lab.sim.registry import NoParams, simulated
from slurm_migbatch.lab.sim.run import SimulatedRun

_NONE_REFUSED: Final = (sys.maxsize, math.inf)


class GangQueue(SharingQueue):
    """Jobs that need one GPU or several, started in the order of the queue; those that do not fit are skipped."""

    def start(self, rule: Rank | None) -> list[tuple[QueuedTraining, int, list[tuple[QueuedTraining, int]]]]:
        """Start the jobs that the rule starts; return the number of empty GPUs and the partners of each."""
        started: list[tuple[QueuedTraining, int, list[tuple[QueuedTraining, int]]]] = []
        queue = self.queue
        # by every rule a pair that gains too little gains no more if the job is longer: need and length that found none
        refused: dict[str, tuple[int, float]] = {}
        position = 0
        while position < len(queue) and (self.free or (self.lone and rule is not None)):
            task = queue[position]
            need, left = refused.get(task.app, _NONE_REFUSED)
            place = None if task.need >= need and task.left >= left else self._place(task, rule)
            if place is None:
                if task.need < need:
                    refused[task.app] = task.need, task.left
                position += 1
                continue
            refused.clear()
            del queue[position]
            self.run(task, *place)
            started.append((task, *place))
        return started

    def _place(self, task: QueuedTraining, rule: Rank | None) -> tuple[int, list[tuple[QueuedTraining, int]]] | None:
        if self.free >= task.need:
            return task.need, []
        if rule is None or self.free + self.lone < task.need:
            return None
        missing = task.need - self.free
        candidates: list[tuple[float, int, QueuedTraining]] = []
        available = 0
        self.budget.left -= len(self.single)
        pair_slowdowns, now = self._pairs, self.now
        app, own_left = task.app, task.left
        for other in self.single:
            slowdowns = pair_slowdowns.get((app, other.app)) or self._both(app, other.app)
            if math.inf in slowdowns:
                continue
            ranked = rule(own_left, other.remaining(now), *slowdowns)
            if ranked is not None:
                candidates.append((ranked, len(candidates), other))
                available += other.alone
        if available < missing:
            return None
        candidates.sort()
        chosen: list[tuple[QueuedTraining, int]] = []
        for _, _, other in candidates:
            count = min(missing, other.alone)
            chosen.append((other, count))
            missing -= count
            if not missing:
                break
        return self.free, chosen


class BsbfSharing(Policy):
    """Shortest job first, alone or next to one other job, by the rule of `rules` that `lookahead.plan` finds best."""

    def __init__(self, rules: Sequence[Rank | None] = (PAIR,), depth: int = 64) -> None:
        self.rules, self.depth = tuple(rules), depth
        self.runs: dict[int, SimulatedRun] = {}
        self.sharing = GangQueue(0, lambda own, other: 1.0)
        self._xi: dict[tuple[str, str], float] = {}
        self._samples: dict[str, SimulatedRun] = {}
        self._sim: Simulation | None = None

    def begin(self, sim: Simulation) -> None:
        """Begin with all GPUs empty."""
        self._sim = sim
        self.sharing = GangQueue(len(sim.cluster.gpus), self._slowdown)

    def arrive(self, sim: Simulation, run: SimulatedRun) -> None:
        """Add the job to the queue; a job that can never fit waits forever."""
        self._samples.setdefault(run.job.app, run)
        if run.job.gpus <= len(sim.cluster.gpus):
            self.runs[run.job.id] = run
            task = QueuedTraining(run.job.id, run.job.app, run.job.gpus, run.job.claimed)
            insort(self.sharing.queue, task, key=lambda queued: (queued.left, queued.key))

    def complete(self, sim: Simulation, run: SimulatedRun) -> None:
        """Free the job's GPUs, or leave them to the other job alone."""
        self.sharing.now = sim.now
        self.sharing.end(self.sharing.tasks[run.job.id])
        del self.runs[run.job.id]

    def decide(self, sim: Simulation) -> None:
        """Start the jobs that `plan` chooses."""
        self.sharing.now = sim.now
        if not self.sharing.queue:
            return
        for start in plan(self.sharing, self.rules, self.depth):
            run = self.runs[start.key]
            sim.start(run, self._places(sim, start))

    def _places(self, sim: Simulation, start: TrainingStart) -> list[Place]:
        gpus, places = sim.cluster.gpus, []
        empty = sim.cluster.empty
        for _ in range(start.empty):
            low = empty & -empty
            places.append(gpus[low.bit_length() - 1].whole)
            empty ^= low
        for partner, count in start.partners:
            single = [place for place in self.runs[partner].places if len(sim.cluster.runs(place)) == 1]
            places += single[:count]
        return places

    def _slowdown(self, own: str, other: str) -> float:
        factor = self._xi.get((own, other))
        if factor is None:
            assert self._sim is not None
            factor = self._sim.speeds.slowdown(self._samples[own], [self._samples[other]])
            self._xi[own, other] = factor
        return factor


@dataclass(frozen=True)
class SharingParams:
    """Share or wait, by simulating the whole queue."""

    depth: int = key(64, "Number of pending jobs simulated to their end.", between(1, 10**6))


BSBF = simulated("shortest first, sharing if the pair gains", NoParams, lambda p, cluster: BsbfSharing((PAIR,)))


def _sharing(params: SharingParams, _cluster: SimulatedCluster) -> BsbfSharing:
    return BsbfSharing(RULES, params.depth)


SHARING = simulated("shortest first, sharing if the whole queue gains", SharingParams, _sharing)

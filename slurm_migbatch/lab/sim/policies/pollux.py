"""Run jobs by Pollux on whole GPUs: `lab.papers.pollux` on the simulator's queue, once a minute.

Speeds are those of the engine's `Speeds` on the fewest nodes, so the policy knows the true speed for every number of
GPUs. Pollux treats every training job as elastic: a job that is not elastic in the trace may get from one GPU up to
`stretch` times its request. Inference jobs get what they request, and are not moved.

Two things save work and change no result. Rounds in which no restart can pay yet are left out until a job is submitted
or ends. Of equal jobs that have not run yet, only as many as there is room for take part in a round: those
that were submitted first, since the others would count less.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from slurm_migbatch.config.keys import between, key
from slurm_migbatch.lab.papers.pollux import DELAY_S, PERIOD_S, PolluxJob, divide, place, stays
from slurm_migbatch.lab.sim.cluster import NodePart, SimulatedCluster, bit_indexes
from slurm_migbatch.lab.sim.engine import Simulation
from slurm_migbatch.lab.sim.job import SimulatedJob
from slurm_migbatch.lab.sim.policy import Policy
from slurm_migbatch.lab.sim.registry import simulated
from slurm_migbatch.lab.sim.run import SimulatedRun

_FINE: Final = 16
"""Up to this many GPUs every number is tried, above that whole nodes only."""
_ROUND: Final = "pollux"


class Pollux(Policy):
    """Divide all GPUs again every `period_s` seconds."""

    def __init__(self, *, period_s: float = PERIOD_S, delay_s: float = DELAY_S, stretch: float = 1.0) -> None:
        self.period_s, self.delay_s, self.stretch = period_s, delay_s, stretch
        self.part = NodePart(0, 0, 0)
        self.runs: dict[SimulatedRun, int] = {}
        """All jobs, numbered in the order of their submission."""
        self._begun: dict[SimulatedRun, None] = {}
        self._fresh: dict[Hashable, dict[SimulatedRun, None]] = {}
        """Jobs that have not run yet, by what makes them equal."""
        self._submitted = 0
        self._next = math.inf
        """Time of the next round."""
        self._rest = 1
        """Half of the periods for which it is tested next whether all rounds can be left out."""
        self._speeds: dict[tuple[Hashable, int], dict[int, float]] = {}
        self._shares: dict[tuple[Hashable, int], float] = {}

    def begin(self, sim: Simulation) -> None:
        """Determine the policy's GPUs."""
        self.part = sim.cluster.part()

    def arrive(self, sim: Simulation, run: SimulatedRun) -> None:
        """Queue the job for the next round; a job that can never fit waits forever."""
        if self._least(run.job) <= self.part.size:
            self._wake(sim, math.ceil(sim.now / self.period_s) if self.runs else sim.now // self.period_s + 1)
            self._submitted += 1
            self.runs[run] = self._submitted
            self._fresh.setdefault(_class(run.job), {})[run] = None

    def complete(self, sim: Simulation, run: SimulatedRun) -> None:
        """Remove the job; its GPUs stay free until the next round."""
        del self.runs[run], self._begun[run]
        self._wake(sim, math.ceil(sim.now / self.period_s))

    def _wake(self, sim: Simulation, period: float) -> None:
        if period * self.period_s < self._next:
            self._next = period * self.period_s
            sim.wake(self._next, _ROUND)

    def decide(self, sim: Simulation) -> None:
        """Divide the GPUs and place the jobs, if a round is due."""
        if sim.now < self._next:
            return
        self._next = math.inf
        self._wake(sim, round(sim.now / self.period_s) + self._round(sim))

    def _round(self, sim: Simulation) -> float:
        """Return after how many periods another round may change something, if no job is submitted and none ends."""
        if not self.runs:
            return math.inf
        pinned = {run for run in self._begun if run.job.kind == "infer" and run.places}
        capacity = self.part.size - sum(len(run.places) for run in pinned)
        runs = self._candidates(pinned, capacity)
        if not runs or not capacity:
            return math.inf
        fair = max(1, -(-self.part.size // len(self.runs)))
        candidates = [self._candidate(sim, run, fair) for run in runs]
        counts = divide(candidates, capacity)
        if all(count == len(run.places) for run, count in zip(runs, counts, strict=True)):
            return self._resting(candidates, capacity)
        had = {run: self._by_node(sim, run) for run in runs if run.places}
        free = {
            node: (sim.cluster.empty & self.part.gpus & _bits(sim.cluster.nodes[node])).bit_count()
            for node in bit_indexes(self.part.nodes)
        }
        least = {run: self._least(run.job) for run in runs}
        placed = place(dict(zip(runs, counts, strict=True)), had, least, free)
        changed = [run for run in runs if placed.get(run, {}) != had.get(run, {})]
        for run in changed:
            if run.places:
                sim.preempt(run)
        for run in changed:
            if nodes := placed.get(run):
                gpus = [gpu for node, count in nodes.items() for gpu in self._empty(sim, node, count)]
                sim.start(run, [sim.cluster.gpus[gpu].whole for gpu in gpus])
                self._fresh[_class(run.job)].pop(run, None)
                self._begun[run] = None
        return 1

    def _resting(self, candidates: Sequence[PolluxJob], capacity: int) -> float:
        if stays(candidates, capacity):
            return math.inf
        longer = 2 * self._rest
        self._rest = longer if stays(candidates, capacity, longer * self.period_s) else max(1, self._rest // 2)
        return self._rest if self._rest == longer else 1

    def _candidates(self, pinned: Collection[SimulatedRun], capacity: int) -> list[SimulatedRun]:
        """Return the jobs among which a round divides the GPUs, in the order of their submission."""
        runs = [run for run in self._begun if run not in pinned]
        for equal in self._fresh.values():
            if equal:
                runs += islice(equal, capacity // self._least(next(iter(equal)).job))
        return sorted(runs, key=self.runs.__getitem__)

    def _candidate(self, sim: Simulation, run: SimulatedRun, fair: int) -> PolluxJob:
        job, have = run.job, len(run.places)
        equal = _class(job)
        speeds = self._speeds.get((equal, have))
        if speeds is None:
            speeds = self._speeds[equal, have] = self._speeds_of(sim, job, have)
        share = self._shares.get((equal, fair))
        if share is None:
            least, most = self._bounds(job)
            share = self._shares[equal, fair] = self._speed(sim, job, min(max(fair, least), most))
        share = share or max(speeds.values(), default=1.0)
        return PolluxJob(speeds, share, have, sim.now - job.arrival, run.preempted, self.delay_s)

    def _speeds_of(self, sim: Simulation, job: SimulatedJob, have: int) -> dict[int, float]:
        least, most = self._bounds(job)
        per_node = len(sim.cluster.nodes[0])
        sizes = {n for n in range(least, most + 1) if n <= _FINE or n % per_node == 0} | {least, most}
        if have:
            sizes.add(have)
        return {n: speed for n in sorted(sizes) if (speed := self._speed(sim, job, n)) > 0}

    def _bounds(self, job: SimulatedJob) -> tuple[int, int]:
        return self._least(job), min(self._most(job), self.part.size)

    def _speed(self, sim: Simulation, job: SimulatedJob, count: int) -> float:
        return sim.speeds.speed(job, [gpu.whole for gpu in sim.cluster.gpus[:count]])

    def _least(self, job: SimulatedJob) -> int:
        return job.least if job.kind == "infer" or job.least < job.most else 1

    def _most(self, job: SimulatedJob) -> int:
        return job.most if job.kind == "infer" or job.least < job.most else max(1, int(self.stretch * job.gpus))

    def _by_node(self, sim: Simulation, run: SimulatedRun) -> dict[int, int]:
        counts: dict[int, int] = {}
        for held in run.places:
            node = sim.cluster.gpus[held.gpu].node
            counts[node] = counts.get(node, 0) + 1
        return counts

    def _empty(self, sim: Simulation, node: int, count: int) -> list[int]:
        return list(islice(bit_indexes(sim.cluster.empty & self.part.gpus & _bits(sim.cluster.nodes[node])), count))


def _class(job: SimulatedJob) -> Hashable:
    """Return what the speed of a job on any number of GPUs, and which numbers it may get, depend on."""
    return job.kind, job.gpus, job.least, job.most, job.app, job.batch, job.profile


def _bits(gpus: range) -> int:
    return ((1 << len(gpus)) - 1) << gpus.start


@dataclass(frozen=True)
class PolluxParams:
    """Goodput relative to fair shares."""

    period_s: float = key(PERIOD_S, "Seconds between two rounds.", between(1, 1e6))
    delay_s: float = key(DELAY_S, "Assumed cost of a restart, in seconds.", between(0, 1e6))
    stretch: float = key(1.0, "Largest allocation of a job as a multiple of its request.", between(1, 1000))


def _pollux(params: PolluxParams, _cluster: SimulatedCluster) -> Pollux:
    return Pollux(period_s=params.period_s, delay_s=params.delay_s, stretch=params.stretch)


POLLUX = simulated("elastic whole GPUs by the harmonic mean of speedups, restarts penalised", PolluxParams, _pollux)

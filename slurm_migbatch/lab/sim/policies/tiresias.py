"""Run jobs by least attained service in queues, with preemption, as Tiresias (Gu et al., NSDI 2019): a reconstruction.

A job begins in the first queue and moves to the next lower one when its GPU time passes a limit. Within a queue the
first to arrive is served first. A job of a higher queue takes the GPUs of jobs of lower queues, first of the lowest
queue and of the latest arrival; these jobs save their work. The published promotion of starved jobs is omitted. The
limits of the paper are not public in a verifiable form; one hour and ten hours of GPU time are our choice.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from slurm_migbatch.lab.papers.queueing import Lanes, level, victims
from slurm_migbatch.lab.sim.cluster import NodePart
from slurm_migbatch.lab.sim.engine import Simulation
from slurm_migbatch.lab.sim.placing import whole_gpus
from slurm_migbatch.lab.sim.policy import Policy
from slurm_migbatch.lab.sim.run import SimulatedRun


class _Limit(NamedTuple):
    """Key of a timer: the run passes a limit then, unless it was interrupted since the timer was set."""

    run: SimulatedRun
    starts: int


class Tiresias(Policy):
    """Queues by attained GPU-seconds; at each of `limits` a job moves to the next lower queue."""

    def __init__(self, nodes: range | None = None, limits: Sequence[float] = (3600.0, 36000.0)) -> None:
        self.nodes = nodes
        self.limits = tuple(sorted(limits))
        self.part = NodePart(0, 0, 0)
        self.waiting: list[Lanes[int, SimulatedRun]] = [Lanes() for _ in range(len(self.limits) + 1)]
        self.running: list[list[tuple[float, int, SimulatedRun]]] = [[] for _ in range(len(self.limits) + 1)]
        self.held = [0] * (len(self.limits) + 1)
        self.at: dict[int, int] = {}

    def begin(self, sim: Simulation) -> None:
        """Determine the policy's GPUs."""
        self.part = sim.cluster.part(self.nodes)

    def arrive(self, sim: Simulation, run: SimulatedRun) -> None:
        """Put the job into the first queue."""
        if run.job.gpus <= self.part.size:
            self._wait(sim, run)

    def complete(self, _sim: Simulation, run: SimulatedRun) -> None:
        """Remove the job from its queue."""
        self._stop(run)

    def timer(self, sim: Simulation, key: Any) -> None:
        """Move a running job that has passed a limit to its new queue, unless it was interrupted meanwhile."""
        if isinstance(key, _Limit) and key.run.places and key.run.starts == key.starts:
            self._stop(key.run)
            self._go(sim, key.run)

    def decide(self, sim: Simulation) -> None:
        """Start the jobs that fit, from the highest queue down, on empty GPUs and on those held by lower queues."""
        for rank, lanes in enumerate(self.waiting):
            free = (sim.cluster.empty & self.part.gpus).bit_count()
            below = sum(self.held[rank + 1 :])
            while (head := lanes.first((free + below).__ge__)) is not None:
                need = head[0]
                run = lanes.pop(need)
                for victim in victims(need, free, self._lowest(rank)) or ():
                    below -= victim.job.gpus
                    self._stop(victim)
                    sim.preempt(victim)
                    self._wait(sim, victim)
                places = whole_gpus(sim.cluster, need, self.part)
                assert places is not None
                sim.start(run, places)
                self._go(sim, run)
                free = (sim.cluster.empty & self.part.gpus).bit_count()

    def _lowest(self, rank: int) -> Iterator[tuple[int, SimulatedRun]]:
        for entries in reversed(self.running[rank + 1 :]):
            for _, _, run in reversed(entries):
                yield run.job.gpus, run

    def _attained(self, sim: Simulation, run: SimulatedRun) -> float:
        return run.attained(sim.now) / sim.cluster.gpus[0].geometry.compute_slices

    def _wait(self, sim: Simulation, run: SimulatedRun) -> None:
        rank = level(self._attained(sim, run), self.limits)
        self.waiting[rank].push((run.job.arrival, run.job.id), run.job.gpus, run)

    def _go(self, sim: Simulation, run: SimulatedRun) -> None:
        attained = self._attained(sim, run)
        rank = level(attained + 1e-6, self.limits)
        insort(self.running[rank], (run.job.arrival, run.job.id, run))
        self.held[rank] += run.job.gpus
        self.at[run.job.id] = rank
        if rank < len(self.limits):
            sim.wake(sim.now + (self.limits[rank] - attained) / run.job.gpus, _Limit(run, run.starts))

    def _stop(self, run: SimulatedRun) -> None:
        rank = self.at.pop(run.job.id)
        entries = self.running[rank]
        del entries[bisect_left(entries, (run.job.arrival, run.job.id), key=lambda entry: entry[:2])]
        self.held[rank] -= run.job.gpus

"""Run jobs on whole GPUs without sharing and preemption: first come first served, shortest first, EASY backfilling."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

from slurm_migbatch.lab.papers.queueing import Lanes, RunningClaim, may_backfill, shadow
from slurm_migbatch.lab.sim.cluster import NodePart, Place
from slurm_migbatch.lab.sim.engine import Simulation
from slurm_migbatch.lab.sim.placing import whole_gpus
from slurm_migbatch.lab.sim.policy import Policy
from slurm_migbatch.lab.sim.run import SimulatedRun


class Fifo(Policy):
    """First come, first served: while the first job does not fit, no later one starts.

    `nodes` limits the policy to some nodes of the cluster.
    """

    def __init__(self, nodes: range | None = None) -> None:
        self.nodes = nodes
        self.queue: Lanes[int, SimulatedRun] = Lanes()
        self.part = NodePart(0, 0, 0)

    def begin(self, sim: Simulation) -> None:
        """Determine the policy's GPUs."""
        self.part = sim.cluster.part(self.nodes)

    def arrive(self, _sim: Simulation, run: SimulatedRun) -> None:
        """Add the job to the queue; a job that can never fit is dropped, and waits forever."""
        if run.job.gpus <= self.part.size:
            self.queue.push(self.key(run), run.job.gpus, run)

    def key(self, run: SimulatedRun) -> tuple[float, int]:
        """Return the sort key in the queue; the least goes first."""
        return run.job.arrival, run.job.id

    def decide(self, sim: Simulation) -> None:
        """Start jobs from the head of the queue as long as the head fits."""
        while (head := self.queue.first()) is not None:
            places = whole_gpus(sim.cluster, head[0], self.part)
            if places is None:
                return
            self.launch(sim, self.queue.pop(head[0]), places)

    def launch(self, sim: Simulation, run: SimulatedRun, places: Sequence[Place]) -> None:
        """Start a job on these places."""
        sim.start(run, places)

    def free(self, sim: Simulation) -> int:
        """Count the policy's empty GPUs."""
        return (sim.cluster.empty & self.part.gpus).bit_count()


class Sjf(Fifo):
    """Shortest job first, by estimate; jobs that do not fit are skipped."""

    def key(self, run: SimulatedRun) -> tuple[float, int]:
        """Return the job's estimated length, and its id."""
        return run.job.claimed, run.job.id

    def decide(self, sim: Simulation) -> None:
        """Start the jobs that fit, in order."""
        while (head := self.queue.first(self.free(sim).__ge__)) is not None:
            places = whole_gpus(sim.cluster, head[0], self.part)
            assert places is not None
            self.launch(sim, self.queue.pop(head[0]), places)


class Easy(Fifo):
    """EASY backfilling: the head has a reservation; up to `depth` later jobs may start if they do not delay it.

    `depth` corresponds to Slurm's bf_max_job_test.
    """

    def __init__(self, nodes: range | None = None, depth: int = 100) -> None:
        super().__init__(nodes)
        self.depth = depth
        self._ends: list[tuple[float, int, int]] = []

    def launch(self, sim: Simulation, run: SimulatedRun, places: Sequence[Place]) -> None:
        """Start a job and record its estimated end."""
        sim.start(run, places)
        insort(self._ends, (self._end(run), run.job.id, run.job.gpus))

    def complete(self, _sim: Simulation, run: SimulatedRun) -> None:
        """Remove the job's estimated end."""
        self._ends.remove((self._end(run), run.job.id, run.job.gpus))

    def decide(self, sim: Simulation) -> None:
        """Start jobs from the head as long as the head fits, then backfill."""
        super().decide(sim)
        free = self.free(sim)
        head = self.queue.first()
        if head is None or not free:
            return
        reserved = shadow(head[0], free, (RunningClaim(end, need) for end, _, need in self._ends), sim.now)
        for need, run in self.queue.ordered(self.depth + 1)[1:]:
            if may_backfill(need, run.job.claimed, free, sim.now, reserved):
                if sim.now + run.job.claimed > reserved.time:
                    reserved = reserved._replace(spare=reserved.spare - need)
                places = whole_gpus(sim.cluster, need, self.part)
                assert places is not None
                self.queue.drop(self.key(run), need)
                self.launch(sim, run, places)
                free -= need
                if not free:
                    return

    @staticmethod
    def _end(run: SimulatedRun) -> float:
        assert run.started is not None
        return run.started + run.job.claimed

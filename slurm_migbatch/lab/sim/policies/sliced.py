"""Run jobs on MIG slices: on the requested slices, created where they fit, or on static partitions."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Literal, NamedTuple

from slurm_migbatch.lab.papers.queueing import Lanes
from slurm_migbatch.lab.sim.cluster import NodePart, Place
from slurm_migbatch.lab.sim.engine import Simulation
from slurm_migbatch.lab.sim.job import Kind
from slurm_migbatch.lab.sim.placing import Rule, slices, whole_gpus
from slurm_migbatch.lab.sim.policy import Policy
from slurm_migbatch.lab.sim.run import SimulatedRun
from slurm_migbatch.mig.layout import Layout
from slurm_migbatch.mig.profile import Profile

Ask = tuple[Profile | None, int]


class Slices(Policy):
    """Every job gets its requested slices (whole GPUs without a profile), created where they fit.

    `order` is `fifo` (first come first served among those that fit) or `sjf`. With `block`, a job that does not fit
    blocks all later ones. The GPU is chosen by `rule`, and on it the placement that keeps the largest useful space
    (`mig.planning`).
    """

    def __init__(self, order: Literal["fifo", "sjf"] = "fifo", rule: Rule = "best", block: bool = False) -> None:
        self.order, self.rule, self.block = order, rule, block
        self.part = NodePart(0, 0, 0)
        self.queue: Lanes[Ask, SimulatedRun] = Lanes()
        self.full: set[Ask] = set()

    def begin(self, sim: Simulation) -> None:
        """Determine the policy's GPUs."""
        self.part = sim.cluster.part()

    def arrive(self, sim: Simulation, run: SimulatedRun) -> None:
        """Add the job to the queue; a job that cannot run on the slices that it requests waits forever."""
        profile, geometry = run.job.profile, sim.cluster.gpus[0].geometry
        if profile is not None and profile in geometry:
            place = Place(0, geometry.info(profile).slots[0])
            if sim.speeds.speed(run.job, [place] * run.job.gpus) <= 0:
                return
        key = run.job.arrival if self.order == "fifo" else run.job.claimed
        self.queue.push((key, run.job.id), (run.job.profile, run.job.gpus), run)

    def complete(self, _sim: Simulation, _run: SimulatedRun) -> None:
        """Record that there is room again."""
        self.full.clear()

    def decide(self, sim: Simulation) -> None:
        """Start the jobs that fit; requests that do not fit are not tried again until a job has ended."""
        while (head := self.queue.first(None if self.block else self._open)) is not None:
            ask, run = head
            places = None if ask in self.full else self.places(sim, ask)
            if places is not None:
                self.queue.pop(ask)
                sim.start(run, places)
            else:
                self.full.add(ask)
                if self.block:
                    return

    def places(self, sim: Simulation, ask: Ask) -> list[Place] | None:
        """Return places for a request; None if it does not fit now."""
        profile, count = ask
        if profile is None:
            return whole_gpus(sim.cluster, count, self.part)
        return slices(sim.cluster, profile, count, self.part, self.rule)

    def _open(self, ask: Ask) -> bool:
        return ask not in self.full


class Static(Policy):
    """Static partitions: every GPU has the same layout; a job takes the smallest free slice that it fits.

    A job without a profile takes the largest free slices, as many as its requested GPUs. A slice on which the job's
    speed is 0 is not used. The order is first come first served, among the jobs that fit.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.free: dict[Profile, list[Place]] = {}
        self.queue: Lanes[_Like, SimulatedRun] = Lanes()
        self._fitting: dict[tuple[_Like, Profile], bool] = {}

    def begin(self, sim: Simulation) -> None:
        """Create the layouts."""
        for gpu in sim.cluster.gpus:
            sim.cluster.configure(gpu.index, self.layout)
            for slot in self.layout.slots:
                heappush(self.free.setdefault(slot.profile, []), Place(gpu.index, slot))

    def arrive(self, sim: Simulation, run: SimulatedRun) -> None:
        """Add the job to the queue; one of more whole GPUs than there are waits forever, as without partitions."""
        job = run.job
        if job.profile is None and job.gpus > len(sim.cluster.gpus):
            return
        like = _Like(job.profile, job.gpus, job.kind, job.app, job.batch)
        for profile, places in self.free.items():
            if (like, profile) not in self._fitting:
                at = places[0] if places else Place(0, next(s for s in self.layout.slots if s.profile == profile))
                self._fitting[like, profile] = _holds(profile, job.profile) and sim.speeds.speed(job, [at]) > 0
        self.queue.push((job.arrival, job.id), like, run)

    def complete(self, _sim: Simulation, run: SimulatedRun) -> None:
        """Free the job's slices."""
        assert isinstance(run.note, list)
        for place in run.note:
            heappush(self.free[place.slot.profile], place)

    def decide(self, sim: Simulation) -> None:
        """Start the jobs that fit, in order."""
        while (head := self.queue.first(self._fits)) is not None:
            like, run = head
            self.queue.pop(like)
            run.note = [heappop(self.free[profile]) for profile in self._wanted(like)]
            sim.start(run, run.note)

    def _fits(self, like: _Like) -> bool:
        return len(self._wanted(like)) == like.gpus

    def _wanted(self, like: _Like) -> list[Profile]:
        profiles: list[Profile] = []
        for profile in sorted(self.free, reverse=like.profile is None):
            if self._fitting[like, profile]:
                profiles += [profile] * len(self.free[profile])
        return profiles[: like.gpus]


class _Like(NamedTuple):
    """Properties of jobs that determine where they fit."""

    profile: Profile | None
    gpus: int
    kind: Kind
    app: str
    batch: int


def _holds(profile: Profile, wanted: Profile | None) -> bool:
    return wanted is None or (profile.compute >= wanted.compute and profile.memory_gb >= wanted.memory_gb)

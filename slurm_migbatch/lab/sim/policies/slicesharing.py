"""Run training jobs on slices of one size, of which two may share one: by migbatchd's decision, always or never.

`decide.lending.pairs.pairs` decides, with the same input as from `decide.lending.slice_sharing`: a job's time limit and
its hints. This module does what Slurm, supply and the nodes do: a job starts as soon as a slice is free, in the order
of the queue; a job without a free slice may become the second one on a slice with one job.

Simplifications: a pair starts at once, and nothing is reclaimed for inference.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import replace
from heapq import heappop, heappush
from typing import Final

from slurm_migbatch.decide.lending.pair_slowdowns import MEASURED_S, PairSlowdowns, RateKey, Reported
from slurm_migbatch.decide.lending.pairs import Host, Sharer, SharingRules, pairs, partings, renewals
from slurm_migbatch.decide.lending.run_lengths import LengthHistory
from slurm_migbatch.decide.lending.slice_sharing import REST_S
from slurm_migbatch.lab.sim.cluster import Place
from slurm_migbatch.lab.sim.engine import Simulation
from slurm_migbatch.lab.sim.job import SimulatedJob
from slurm_migbatch.lab.sim.policy import Policy
from slurm_migbatch.lab.sim.run import SimulatedRun
from slurm_migbatch.mig.layout import EMPTY
from slurm_migbatch.mig.planning import capacity, plan_free
from slurm_migbatch.mig.profile import Profile

DECIDES: Final = f"{pairs.__module__}.{pairs.__qualname__}"
"""The decision function, as results name it."""
HEARD_S: Final = MEASURED_S + 30.0
"""Seconds until two reports of a job that began to share are far enough apart for a rate."""
RESTART_S: Final = 60.0
"""migbatchd's default cost of a restart, a checkpoint included."""
LEAD_S: Final = 60.0
"""How long before its time limit a job that is to get a new one is stopped."""
Order = Callable[[SimulatedJob], tuple[float, int]]
"""Sort key of the queue: the least first."""


def by_arrival(job: SimulatedJob) -> tuple[float, int]:
    """Return the key of Slurm's default order."""
    return job.arrival, job.id


def by_claim(job: SimulatedJob) -> tuple[float, int]:
    """Return the key of an order by estimate, the shortest first."""
    return job.claimed, job.id


class SliceQueue(Policy):
    """Every GPU is divided into slices of one profile, each for one job."""

    def __init__(self, profile: Profile, order: Order) -> None:
        self.profile, self.order = profile, order
        self.queue: list[tuple[tuple[float, int], SimulatedRun]] = []
        self.free: list[Place] = []
        self.alone: dict[int, SimulatedRun] = {}
        self.running: dict[int, SimulatedRun] = {}
        self.joined = 0

    def begin(self, sim: Simulation) -> None:
        """Divide the GPUs into slices of the profile."""
        for gpu in sim.cluster.gpus:
            wanted = [self.profile] * capacity(gpu.geometry, EMPTY, self.profile)
            layout = plan_free(gpu.geometry, EMPTY, wanted)
            sim.cluster.configure(gpu.index, layout)
            self.free += [Place(gpu.index, slot) for slot in layout.slots]
        self.free.sort()

    def arrive(self, _sim: Simulation, run: SimulatedRun) -> None:
        """Add the job to the queue."""
        insort(self.queue, (self.order(run.job), run), key=lambda entry: entry[0])

    def complete(self, sim: Simulation, run: SimulatedRun) -> None:
        """Free the job's slice, or leave it to the other job alone."""
        self.alone.pop(run.job.id, None)
        del self.running[run.job.id]
        assert isinstance(run.note, Place)
        others = sim.cluster.runs(run.note)
        for other in others:
            self.alone[other.job.id] = other
        if not others:
            heappush(self.free, run.note)

    def timer(self, sim: Simulation, key: object) -> None:
        """Do nothing; `decide` follows."""

    def decide(self, sim: Simulation) -> None:
        """Start jobs on free slices, then next to other jobs."""
        while self.queue and self.free:
            _, run = self.queue.pop(0)
            self._start(sim, run, heappop(self.free))
            self.alone[run.job.id] = run
        if self.queue and self.alone:
            self.share(sim)

    def share(self, sim: Simulation) -> None:
        """Start pending jobs next to running ones; here: none."""

    def join(self, sim: Simulation, run: SimulatedRun, host: SimulatedRun) -> None:
        """Start a job, which was removed from the queue, next to another one."""
        del self.alone[host.job.id]
        self.joined += 1
        assert isinstance(host.note, Place)
        self._start(sim, run, host.note)

    def _start(self, sim: Simulation, run: SimulatedRun, place: Place) -> None:
        sim.start(run, (place,))
        run.note = place
        self.running[run.job.id] = run


class FirstFitSharing(SliceQueue):
    """FFS: a job without a free slice shares the first slice that has one job."""

    def share(self, sim: Simulation) -> None:
        """Start pending jobs on slices with one job, in the order of the slices."""
        while self.queue and self.alone:
            _, run = self.queue.pop(0)
            self.join(sim, run, min(self.alone.values(), key=lambda host: host.places))


class LivePairs(SliceQueue):
    """A job without a free slice shares one, and later leaves it, if migbatchd decides so.

    Args:
        limits: returns a job's time limit, seconds; None if it has none.
        memory_mib: the memory that every job states to need.
        round_s: seconds until the next round after one with the maximum number of pairs.
        profile, order: see `SliceQueue`.
    """

    def __init__(
        self,
        rules: SharingRules,
        limits: Callable[[SimulatedJob], float | None],
        memory_mib: float,
        round_s: float,
        profile: Profile,
        order: Order = by_arrival,
    ) -> None:
        super().__init__(profile, order)
        self.rules, self.limits, self.memory_mib, self.round_s = rules, limits, memory_mib, round_s
        self.lengths = LengthHistory()
        self.slowdowns = PairSlowdowns(rules.measured, rules.slowdown)
        self.resting: dict[tuple[int, int], float] = {}
        self.begun: dict[int, float] = {}
        self.shared: set[int] = set()
        #: numbers of pairs that were ended, of jobs that were requeued for a new time limit, and of jobs that exceeded
        #: their limit only because they shared
        self.parted = self.renewed = self.late = 0

    def decide(self, sim: Simulation) -> None:
        """Process reports, stop the jobs that renewal or the end of a pair requires to stop, and start jobs."""
        self._listen(sim)
        self._renew(sim)
        self._part(sim)
        super().decide(sim)
        self._listen(sim)

    def share(self, sim: Simulation) -> None:
        """Decide on pairs, and start them."""
        waiting = [self._sharer(run, sim.now) for _, run in self.queue]
        speeds = {job: {self.profile: 1.0} for job in (*self.running, *(job.job for job in waiting))}
        chosen = pairs(self._hosts(sim), waiting, speeds, self._rules(), self.resting.keys())
        guests = {pair.guest for pair in chosen}
        runs = {run.job.id: run for _, run in self.queue if run.job.id in guests}
        self.queue = [entry for entry in self.queue if entry[1].job.id not in guests]
        for pair in chosen:
            self.join(sim, runs[pair.guest], self.alone[pair.host])
            self.shared |= {pair.guest, pair.host}
            for number in (1, 2):
                sim.wake(sim.now + number * HEARD_S)
        if len(chosen) == self.rules.most and self.queue:
            sim.wake(sim.now + self.round_s)

    def complete(self, sim: Simulation, run: SimulatedRun) -> None:
        """Record the job's length and free its slice."""
        limit_s = self.limits(run.job)
        if limit_s is not None:
            self.late += sim.now - self.begun[run.job.id] > limit_s >= run.job.work
            self.lengths.note(_uid(run), self.rules.of_limit * limit_s, run.job.work)
        super().complete(sim, run)
        self.slowdowns.forget([_key(run) for run in self.running.values()])

    def _start(self, sim: Simulation, run: SimulatedRun, place: Place) -> None:
        self.begun[run.job.id] = sim.now
        self.shared.discard(run.job.id)
        super()._start(sim, run, place)
        limit_s = self.limits(run.job)
        if limit_s is not None and limit_s >= self.rules.renewed_s:
            sim.wake(sim.now + limit_s - LEAD_S)

    def _listen(self, sim: Simulation) -> None:
        for run in self.running.values():
            assert isinstance(run.note, Place)
            if sim.now < run.resumes:  # it has not done a step yet
                continue
            other = next((other for other in sim.cluster.runs(run.note) if other is not run), None)
            kind = RateKey(_uid(run), run.job.app, str(self.profile))
            report = Reported(kind, run.job.app, run.job.work - run.remaining(sim.now), sim.now)
            beside = (None, "") if other is None else (_key(other), other.job.app)
            self.slowdowns.add_report(_key(run), report, *beside)

    def _renew(self, sim: Simulation) -> None:
        shared = [self._sharer(self.running[job], sim.now) for job in sorted(self.shared & self.running.keys())]
        for job in renewals(shared, self.rules, LEAD_S):
            self._stop(sim, self.running[job])
            self.renewed += 1

    def _part(self, sim: Simulation) -> None:
        self.resting = {pair: until for pair, until in self.resting.items() if until > sim.now}
        if self.shared.isdisjoint(self.running):
            return
        speeds = {job: {self.profile: 1.0} for job in self.running}
        keys = {job: _key(run) for job, run in self.running.items()}

        def measured(job: int, beside: int) -> float | None:
            return self.slowdowns.measured(keys[job], keys[beside])

        for pair in partings(self._hosts(sim), speeds, self._rules(), measured, RESTART_S):
            self._stop(sim, self.running[pair.guest])
            self.parted += 1
            self.resting[pair.guest, pair.host] = sim.now + REST_S

    def _stop(self, sim: Simulation, run: SimulatedRun) -> None:
        """Requeue a job; another job on its slice then has it alone."""
        assert isinstance(run.note, Place)
        del self.running[run.job.id]
        self.alone.pop(run.job.id, None)
        others = [other for other in sim.cluster.runs(run.note) if other is not run]
        sim.preempt(run)
        self.alone.update({other.job.id: other for other in others})
        if not others:
            heappush(self.free, run.note)
        insort(self.queue, (self.order(run.job), run), key=lambda entry: entry[0])

    def _rules(self) -> SharingRules:
        return replace(self.rules, measured=self.slowdowns.known, assumed=self.slowdowns.assumed)

    def _hosts(self, sim: Simulation) -> list[Host]:
        memory = sim.cluster.gpus[0].geometry.info(self.profile).memory_mib
        slices: dict[Place, list[Sharer]] = {}
        for run in self.running.values():
            assert isinstance(run.note, Place)
            slices.setdefault(run.note, []).append(self._sharer(run, sim.now))
        return [Host(holders[0], self.profile, memory, *holders[1:]) for holders in slices.values()]

    def _sharer(self, run: SimulatedRun, now: float) -> Sharer:
        job, whole_s, uid = run.job, self.limits(run.job), _uid(run)
        limit = max(0.0, self.begun[job.id] + whole_s - now) if whole_s is not None and run.running else whole_s
        return Sharer(
            job.id,
            uid,
            job.app,
            limit_s=limit,
            memory_mib=self.memory_mib,
            ran_s=job.work - run.remaining(now),
            whole_s=whole_s,
            errors=self.lengths.errors(uid),
            resumes=True,
        )


def _uid(run: SimulatedRun) -> int:
    return int(run.job.user or 0)


def _key(run: SimulatedRun) -> tuple[int, int]:
    return run.job.id, run.starts

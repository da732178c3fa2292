"""Run the event-driven simulation: time, progress and costs. The policy makes the decisions.

Between two events nothing is computed. Predicted completions are in a heap. When a job's speed changes, its completion
is predicted again; the old entry is recognized by its version and skipped when it is popped. An event costs O(log n),
plus the policy's work. Arrivals are sorted once and merged with the heap's events.

Costs are assigned as follows:

- creating a slice (destroying instances in the way, creating it): to the job that starts or moves there;
- waiting until the previous job has written its checkpoint: to the job that takes its slices;
- cold start, restart and its own checkpoint: to the job itself.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np

from slurm_migbatch.lab.sim.cluster import Place, PlaceError, SimulatedCluster, UtilizationMeter
from slurm_migbatch.lab.sim.job import SimulatedJob
from slurm_migbatch.lab.sim.log import LoggedEvent, What
from slurm_migbatch.lab.sim.policy import Policy
from slurm_migbatch.lab.sim.result import SimulationResult
from slurm_migbatch.lab.sim.run import SimulatedRun
from slurm_migbatch.lab.sim.speeds import Neighbours, Speeds

_COMPLETION, _TIMER = range(2)
_MOST_AT_ONCE = 100_000
"""Rounds of decisions at one moment from which a policy counts as looping."""
_STALE = 1 << 16
"""Size of the heap below which stale entries are not removed."""


class SimulationError(RuntimeError):
    """An impossible action of a policy; the message says what and when."""


class Simulation:
    """One simulation; `run` it once.

    Attributes:
        now: current time, seconds.
        cluster, speeds: see `SimulatedCluster` and `Speeds`. Policies may read both.
        rng: seeded generator, for policies that need random numbers.
    """

    def __init__(
        self,
        cluster: SimulatedCluster,
        jobs: Iterable[SimulatedJob],
        policy: Policy,
        speeds: Speeds,
        *,
        neighbours: Neighbours | None = None,
        seed: int = 0,
        log: bool = False,
    ) -> None:
        self.cluster = cluster
        self.speeds = speeds
        self.policy = policy
        self.rng = np.random.Generator(np.random.PCG64(seed))
        self.now = 0.0
        ordered = sorted(jobs, key=lambda job: (job.arrival, job.id))
        sensitivities = neighbours.draw(len(ordered), self.rng) if neighbours is not None else [0.0] * len(ordered)
        self._arrivals = [
            SimulatedRun(job, sensitivity) for job, sensitivity in zip(ordered, sensitivities, strict=True)
        ]
        if len({job.id for job in ordered}) != len(ordered):
            raise SimulationError("two jobs have the same id")
        self._neighbourly = any(sensitivities) and cluster.fragments
        self._count = 0
        self._heap: list[tuple[float, int, int, Any, int]] = []
        self._log: list[LoggedEvent] | None = [] if log else None
        self._meter = UtilizationMeter()
        self._fragmentation = self._waiting = 0.0
        self._created = self._destroyed = self._queued = self._running = self._steps = 0
        self._ended = 0
        self._changed = 0.0  # time of the last arrival, start, move, preemption or completion

    # -- actions -----------------------------------------------------------------------------------------------

    def start(self, run: SimulatedRun, places: Sequence[Place], *, pause: float | None = None) -> None:
        """Start a pending job on these places.

        `pause` is the time from available slices to the first progress; by default the job's cold start or restart.
        Places may be shared with other runs.

        Raises:
            SimulationError: the job is running or has ended, or its speed on these places is 0.
            PlaceError: held places are in the way.
        """
        if run.places or run.ended is not None:
            raise SimulationError(f"at {self.now:.3f} s: {run.job.name} cannot be started, it is not pending")
        costs = run.job.costs
        if pause is None:
            pause = costs.restart_s if run.starts else costs.cold_start_s
        run.settle(self.now)
        self._queued -= 1
        self._running += 1
        run.starts += 1
        if run.started is None:
            run.started = self.now
        run.progress_clock = 0.0
        created, destroyed = self._created, self._destroyed
        self._settle_down(run, tuple(places), (), max(0.0, run.ready - self.now), pause)
        if self._log is not None:
            self._note("start", run, self._destroyed - destroyed, self._created - created)

    def move(
        self,
        run: SimulatedRun,
        places: Sequence[Place],
        *,
        save: float | None = None,
        pause: float | None = None,
    ) -> None:
        """Move a running job to other slices, or to more or fewer of them.

        It keeps the places that it has and that are in `places`. The job stops for `save` seconds (by default its
        checkpoint), then new instances are created, then it needs `pause` seconds (by default its restart). The places
        that it leaves can be used after `save`.

        Raises:
            SimulationError: the job is not running, or its speed on these places is 0.
            PlaceError: held places are in the way.
        """
        if not run.places:
            raise SimulationError(f"at {self.now:.3f} s: {run.job.name} cannot be moved, it is not running")
        costs = run.job.costs
        run.settle(self.now)
        save = self._saving(run) if save is None else save
        pause = costs.restart_s if pause is None else pause
        unchanged = tuple(place for place in run.places if place in places)
        released = tuple(place for place in run.places if place not in places)
        for place in released:
            self._leave(run, place, self.now + save)
        run.moves += 1
        run.progress_clock = 0.0
        created, destroyed = self._created, self._destroyed
        self._settle_down(run, tuple(places), unchanged, save, pause)
        self._touch([place for place in released if place not in run.places], run)
        if self._log is not None:
            self._note("move", run, self._destroyed - destroyed, self._created - created)

    def preempt(self, run: SimulatedRun) -> None:
        """Take a running job's slices and requeue it.

        It writes a checkpoint first, which blocks its slices for that time.

        Raises:
            SimulationError: the job is not running.
        """
        if not run.places:
            raise SimulationError(f"at {self.now:.3f} s: {run.job.name} cannot be preempted, it is not running")
        self._changed = self.now
        run.settle(self.now)
        places = run.places
        until = self.now + self._saving(run)
        run.ready = max(run.ready, until)
        self._part(run, until)
        run.preempted += 1
        self._queued += 1
        if self._log is not None:
            self._log.append(LoggedEvent(self.now, "preempt", run.job.id, places, 0.0, run.job.name))

    def wake(self, at: float, key: Any = None) -> None:
        """Have the policy's `timer` called with this key at time `at`, or now if that has passed."""
        self._push(max(at, self.now), _TIMER, key)

    # -- the loop ----------------------------------------------------------------------------------------------

    def run(self, until: float = math.inf, progress: Callable[[int, int], None] | None = None) -> SimulationResult:
        """Simulate until there are no further events, or to the moment `until`.

        `progress` is called regularly with the number of ended jobs and that of all jobs.

        The cyclic garbage collector is disabled during the simulation: the engine creates no reference cycles, and at
        650,000 jobs a quarter of the time was spent in scanning all jobs again and again.
        """
        collecting = gc.isenabled()
        gc.disable()
        try:
            return self._run(until, progress)
        finally:
            if collecting:
                gc.enable()

    def _run(self, until: float, progress: Callable[[int, int], None] | None) -> SimulationResult:
        arrivals, heap = self._arrivals, self._heap
        position, at_once = 0, 0
        begin = arrivals[0].job.arrival if arrivals else (heap[0][0] if heap else 0.0)
        self.now = self._changed = begin
        self.policy.begin(self)
        while True:
            moment = self._next_moment(position)
            if moment > until or moment == math.inf:
                break
            if moment > self.now:
                self._advance(moment)
                at_once = 0
            at_once += 1
            if at_once > _MOST_AT_ONCE:
                raise SimulationError(f"at {moment:.3f} s: the policy keeps setting timers for this moment")
            self._take_events(moment)
            position = self._take_arrivals(moment, position)
            self.policy.decide(self)
            self._steps += 1
            if progress is not None and self._steps % 4096 == 0:
                progress(self._ended, len(arrivals))
            if len(heap) > _STALE and len(heap) > 4 * (self._running + 1024):
                self._sweep()
        left = position < len(arrivals) or self._queued or self._running
        # timers that a policy had set for jobs that were no longer there, and in which nothing happened, do not count
        self._advance(max(until, self.now) if left and until < math.inf else self._changed)
        if progress is not None:
            progress(self._ended, len(arrivals))
        return self._result(begin, arrivals[:position])

    def _next_moment(self, position: int) -> float:
        """Return the time of the next event or arrival; infinity if there is none.

        `position` is the index of the first job that has not arrived.
        """
        heap, arrivals = self._heap, self._arrivals
        while heap and heap[0][1] == _COMPLETION and heap[0][3].version != heap[0][4]:
            heappop(heap)
        moment = heap[0][0] if heap else math.inf
        if position < len(arrivals) and arrivals[position].job.arrival < moment:
            moment = arrivals[position].job.arrival
        return moment

    def _take_events(self, moment: float) -> None:
        """Handle completions and timers up to the moment."""
        heap = self._heap
        while heap and heap[0][0] <= moment:
            _, rank, _, payload, version = heappop(heap)
            if rank == _COMPLETION:
                if payload.version == version:
                    self._complete(payload)
            else:
                self.policy.timer(self, payload)

    def _take_arrivals(self, moment: float, position: int) -> int:
        """Handle jobs that arrive up to the moment; return the index of the first one that arrives later."""
        arrivals = self._arrivals
        while position < len(arrivals) and arrivals[position].job.arrival <= moment:
            run = arrivals[position]
            self._changed = moment
            position += 1
            self._queued += 1
            if self._log is not None:
                self._log.append(LoggedEvent(moment, "arrive", run.job.id, (), 0.0, run.job.name))
            self.policy.arrive(self, run)
        return position

    def _advance(self, moment: float) -> None:
        elapsed = moment - self.now
        self._waiting += self._queued * elapsed
        if self.cluster.fragments:
            self._fragmentation += self.cluster.fragmentation * elapsed
        self.now = moment

    def _complete(self, run: SimulatedRun) -> None:
        self._changed = self.now
        run.settle(self.now)
        run.left = 0.0
        places = run.places
        self._part(run, self.now)
        run.ended = self.now
        self._ended += 1
        if self._log is not None:
            self._log.append(
                LoggedEvent(self.now, "complete", run.job.id, places, self.now - run.job.arrival, run.job.name)
            )
        self.policy.complete(self, run)

    def _result(self, begin: float, runs: Sequence[SimulatedRun]) -> SimulationResult:
        for gpu in self.cluster.gpus:
            for cell in gpu.cells.values():
                self._meter.mark(cell, self.now)
        for run in runs:
            if run.places:
                run.settle(self.now)
        elapsed = self.now - begin
        return SimulationResult(
            runs=tuple(sorted(runs, key=lambda run: run.job.id)),
            begin=begin,
            end=self.now,
            gpus=len(self.cluster.gpus),
            slices=self.cluster.slices,
            held=self._meter.held,
            busy=self._meter.busy,
            fragmentation=self._fragmentation / elapsed / len(self.cluster.gpus) if elapsed else 0.0,
            waiting=self._waiting / elapsed if elapsed else 0.0,
            created=self._created,
            destroyed=self._destroyed,
            steps=self._steps,
            events=tuple(self._log or ()),
        )

    # -- places ------------------------------------------------------------------------------------------------

    def _settle_down(
        self,
        run: SimulatedRun,
        places: tuple[Place, ...],
        unchanged: tuple[Place, ...],
        save: float,
        pause: float,
    ) -> None:
        """Give the run all `places`, of which it holds `unchanged` already, and predict its end."""
        self._changed = self.now
        if not places:
            raise SimulationError(f"at {self.now:.3f} s: {run.job.name} is given no places")
        if len(places) > 1 and len(set(places)) != len(places):
            raise SimulationError(f"at {self.now:.3f} s: {run.job.name} is given a place twice")
        gpus = self.cluster.gpus
        ready_after: dict[int, float] = {}
        slices = 0
        for place in places:
            gpu = gpus[place.gpu]
            if place not in unchanged:
                wait = gpu.wait(place.slot, self.now) if gpu.blocked else 0.0
                change = self.cluster.take(place, run, self.now)
                if change is not None:
                    self._created += change.created
                    self._destroyed += change.destroyed
                    ready_after[place.gpu] = max(ready_after.get(place.gpu, 0.0), wait) + change.seconds
                elif wait:
                    ready_after[place.gpu] = max(ready_after.get(place.gpu, 0.0), wait)
            slices += gpu.cells[place.slot].slices
        run.places = places
        run.slices = slices
        run.resumes = self.now + max(save, max(ready_after.values(), default=0.0)) + pause
        run.alone = self.speeds.speed(run.job, places)
        if not run.alone > 0:
            place_names = ", ".join(str(place) for place in places)
            raise SimulationError(f"at {self.now:.3f} s: {run.job.name} does not fit at its place ({place_names})")
        for place in places:
            self._meter.mark(gpus[place.gpu].cells[place.slot], self.now)
        self._foresee(run)
        self._touch(places, run)

    def _part(self, run: SimulatedRun, until: float) -> None:
        """Make the run leave all its places; their slices can be used from `until` on."""
        places, run.places = run.places, ()
        for place in places:
            self._leave(run, place, until)
        run.slices = 0
        run.rate = run.alone = 0.0
        run.version += 1
        self._running -= 1
        self._touch(places, run)

    def _leave(self, run: SimulatedRun, place: Place, until: float) -> None:
        cell = self.cluster.gpus[place.gpu].cells[place.slot]
        self._meter.mark(cell, self.now)
        self.cluster.leave(place, run, self.now, until)
        self._meter.mark(cell, self.now)

    def _saving(self, run: SimulatedRun) -> float:
        """Return the seconds that the run needs to save its work: 0 if it made no progress since it last resumed."""
        return run.job.costs.checkpoint_s if run.progress_clock > 0 else 0.0

    # -- speed -------------------------------------------------------------------------------------------------

    def _touch(self, places: Iterable[Place], run: SimulatedRun) -> None:
        """Predict the ends of all runs affected by a change at these places, except `run`."""
        affected: dict[SimulatedRun, None] = {}
        for place in places:
            gpu = self.cluster.gpus[place.gpu]
            if self._neighbourly:
                affected.update(dict.fromkeys(self.cluster.holders(place.gpu)))
            elif (cell := gpu.cells.get(place.slot)) is not None and cell.runs[0] is not cell.runs[-1]:
                affected.update(dict.fromkeys(cell.runs))
            elif cell is not None and cell.runs[0] is not run:
                affected[cell.runs[0]] = None
        affected.pop(run, None)
        for affected_run in affected:
            affected_run.settle(self.now)
            self._foresee(affected_run)

    def _foresee(self, run: SimulatedRun) -> None:
        """Set the run's current speed and predict its completion from it."""
        run.rate = run.alone / self._hindrance(run)
        run.version += 1
        self._push(max(run.since, run.resumes) + run.left / run.rate, _COMPLETION, run, run.version)

    def _hindrance(self, run: SimulatedRun) -> float:
        """Return the run's slowdown by other runs: a gang is as slow as its slowest part."""
        worst = 1.0
        gpus = self.cluster.gpus
        for place in run.places:
            gpu = gpus[place.gpu]
            factor = 1.0
            cell = gpu.cells[place.slot]
            if len(cell.runs) > 1:
                factor = self.speeds.slowdown(run, [other for other in cell.runs if other is not run])
            if run.sensitivity and len(gpu.cells) > 1:
                own_slices = place.slot.placement.size
                share = (gpu.used.mask.bit_count() - own_slices) / (gpu.geometry.memory_slices - own_slices)
                factor *= 1.0 + run.sensitivity * share
            worst = max(worst, factor)
        return worst

    def _note(self, kind: What, run: SimulatedRun, destroyed: int, created: int) -> None:
        assert self._log is not None
        pause = run.resumes - self.now
        self._log.append(LoggedEvent(self.now, kind, run.job.id, run.places, pause, run.job.name, destroyed, created))

    # -- the heap ----------------------------------------------------------------------------------------------

    def _push(self, time: float, rank: int, payload: Any, version: int = 0) -> None:
        self._count += 1
        heappush(self._heap, (time, rank, self._count, payload, version))

    def _sweep(self) -> None:
        """Drop stale completions if they are most of the heap."""
        self._heap[:] = [entry for entry in self._heap if entry[1] != _COMPLETION or entry[3].version == entry[4]]
        heapify(self._heap)


__all__ = ["PlaceError", "Simulation", "SimulationError", "SimulationResult"]

"""Convert events of simulated nodes to the input of `sim.metrics`: held slices, progress, created instances."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurm_migbatch.lab.sim.cluster import Place, SimulatedCluster, UtilizationMeter
from slurm_migbatch.lab.sim.log import LoggedEvent, What
from slurm_migbatch.lab.sim.result import SimulationResult
from slurm_migbatch.lab.sim.run import SimulatedRun
from slurm_migbatch.lab.slurm.records import EndedJob
from slurm_migbatch.lab.slurm.tracejobs import Course
from slurm_migbatch.mig.layout import Slot


@dataclass
class Played:
    """A simulated job of the trace.

    Attributes:
        run: the job's history, from which the figures are computed.
        ended: how it left Slurm's queue; None: it has not, or was refused.
    """

    run: SimulatedRun
    course: Course
    ended: EndedJob | None = None

    def last(self, restart: int) -> bool:
        """Return whether this run is the one with which the job left the queue."""
        return self.ended is not None and restart == self.ended.restarts


class Booking:
    """Compute the result of one simulation from its events; use an object once.

    Args:
        cluster: an empty cluster with the GPUs of the site, in the order of `places`.
        places: the index of each GPU in the cluster, by UUID.
        played: the jobs, by Slurm's job id.
        moment: converts a unix time to seconds on the trace's clock.
    """

    def __init__(
        self,
        cluster: SimulatedCluster,
        places: Mapping[str, int],
        played: Mapping[int, Played],
        moment: Callable[[float], float],
        *,
        log: bool,
    ) -> None:
        self._cluster, self._places, self._played, self._moment = cluster, places, played, moment
        self._meter = UtilizationMeter()
        self._fragmentation = self._held_s = 0.0
        self._now = 0.0
        self._holding: dict[tuple[int, int], list[tuple[float, Place]]] = {}
        self._counts = {"create": 0, "destroy": 0}
        self._log: list[LoggedEvent] | None = [] if log else None

    def book(
        self,
        runs: Sequence[SimulatedRun],
        events: Iterable[Mapping[str, Any]],
        end: float,
        steps: int,
        actions: Mapping[str, int],
    ) -> SimulationResult:
        """Process all events and return the result.

        Args:
            runs: every job that arrived, in the order of their ids.
            end: the last moment, on the trace's clock.
            actions: changes of jobs, by kind.
        """
        begin = self._now = min((run.job.arrival for run in runs), default=0.0)
        for event in _merged(events):
            self._advance(self._moment(event["ts"]))
            kind = event["kind"]
            if kind in self._counts:
                self._counts[kind] += 1
            elif kind == "start":
                self._start(event)
            elif kind == "stop":
                self._stop(event["job"], event["restart"])
        self._advance(end)
        for job, restart in list(self._holding):
            course = self._played[job].course
            if restart in course.resumes:  # its script has begun
                course.settle(min(self._now - self._moment(0.0), course.end_at()))
            self._stop(job, restart, over=True)
        self._finish()
        elapsed, gpus = self._now - begin, len(self._cluster.gpus)
        # refused jobs are not among those played, and jobs that did not fit have left without an end of their work
        present = sum(
            (self._now if played.ended is None else self._moment(played.ended.end)) - played.run.job.arrival
            for played in self._played.values()
        )
        return SimulationResult(
            runs=tuple(runs),
            begin=begin,
            end=self._now,
            gpus=gpus,
            slices=self._cluster.slices,
            held=self._meter.held,
            busy=self._meter.busy,
            fragmentation=self._fragmentation / elapsed / gpus if elapsed else 0.0,
            waiting=max(0.0, present - self._held_s) / elapsed if elapsed else 0.0,
            created=self._counts["create"],
            destroyed=self._counts["destroy"],
            steps=steps,
            events=self._events(runs),
            actions=dict(sorted(actions.items())),
        )

    def _advance(self, moment: float) -> None:
        elapsed = moment - self._now
        if elapsed > 0:
            if self._cluster.fragments:
                self._fragmentation += self._cluster.fragmentation * elapsed
            self._now = moment

    def _start(self, event: Mapping[str, Any]) -> None:
        job, restart = event["job"], event["restart"]
        played = self._played[job]
        resumes = played.course.resumes.get(restart)
        played.run.resumes = math.inf if resumes is None else self._moment(resumes)
        held = self._holding[job, restart] = []
        for slice_fields in event["slices"]:
            place = Place(
                self._places[slice_fields["gpu"]],
                Slot.of(slice_fields["profile"], slice_fields["start"], slice_fields["size"]),
            )
            gpu = self._cluster.gpus[place.gpu]
            if place.slot in gpu.cells:
                self._meter.mark(gpu.cells[place.slot], self._now)
            self._cluster.take(place, played.run, self._now)
            self._meter.mark(gpu.cells[place.slot], self._now)
            held.append((self._now, place))
        played.run.places = tuple(place for _, place in held)
        self._note("start", played.run, max(0.0, played.run.resumes - self._now))

    def _stop(self, job: int, restart: int, *, over: bool = False) -> None:
        """Record that a run has ended; if it has several nodes, it ends on all of them at once.

        `over`: the simulation ends, not the run.
        """
        held = self._holding.pop((job, restart), None)
        if held is None:
            return
        played = self._played[job]
        run, since = played.run, held[0][0]
        for _, place in held:
            cell = self._cluster.gpus[place.gpu].cells[place.slot]
            self._meter.mark(cell, self._now)
            self._cluster.leave(place, run, self._now, self._now)
            self._meter.mark(cell, self._now)
            run.service += place.slot.profile.compute * (self._now - since)
        self._held_s += self._now - since
        if self._now > since:
            run.started = since if run.started is None else run.started
            run.starts += 1
            run.paused += self._now - since
            run.preempted += not (over or played.last(restart))
        if not over:
            self._note("complete" if played.last(restart) else "preempt", run, 0.0)
            run.places = ()

    def _finish(self) -> None:
        """Copy end, first progress, pauses and lost work of every job from its work to its run."""
        for played in self._played.values():
            run, course, ended = played.run, played.course, played.ended
            if ended is not None:
                course.settle(ended.end)
                if ended.state == "COMPLETED" and not course.failed:
                    run.ended = self._moment(ended.end)
            run.began = None if course.began is None else self._moment(course.began)
            run.paused = max(0.0, run.paused - course.progress_s)
            run.lost = course.lost_s

    # -- the log ---------------------------------------------------------------------------------------------------

    def _note(self, kind: What, run: SimulatedRun, seconds: float) -> None:
        if self._log is not None:
            seconds = 0.0 if math.isinf(seconds) else seconds
            self._log.append(LoggedEvent(self._now, kind, run.job.id, run.places, seconds, run.job.name))

    def _events(self, runs: Sequence[SimulatedRun]) -> tuple[LoggedEvent, ...]:
        if self._log is None:
            return ()
        arrivals = [LoggedEvent(run.job.arrival, "arrive", run.job.id, (), 0.0, run.job.name) for run in runs]
        duration_of = {run.job.id: (run.ended or self._now) - run.job.arrival for run in runs}
        logged = [e._replace(seconds=duration_of[e.job]) if e.what == "complete" else e for e in self._log]
        return tuple(sorted([*arrivals, *logged], key=lambda event: event.time))


def _merged(events: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the events in order of time; a run that started on several nodes has one start event with all slices."""
    merged: list[Mapping[str, Any]] = []
    starts: dict[tuple[int, int], int] = {}
    for event in sorted(events, key=lambda event: float(event["ts"])):
        if event["kind"] == "start":
            run = event["job"], event["restart"]
            if run in starts:
                first = merged[starts[run]]
                merged[starts[run]] = {**first, "slices": [*first["slices"], *event["slices"]]}
                continue
            starts[run] = len(merged)
        merged.append(event)
    return merged

"""Extract from the event log which job held which place when, and how much of the cluster was held over time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from slurm_migbatch.lab.sim.cluster import Place
from slurm_migbatch.lab.sim.log import LoggedEvent


class Span(NamedTuple):
    """The time for which a job held a place; in its first `paused` seconds the job made no progress."""

    place: Place
    job: int
    name: str
    begin: float
    end: float
    paused: float


def spans(events: Iterable[LoggedEvent], end: float) -> list[Span]:
    """Return all spans in order of their beginning; those that have not ended in the log end at `end`."""
    open_: dict[tuple[int, Place], tuple[float, float, str]] = {}
    closed: list[Span] = []

    def close(job: int, place: Place, now: float) -> None:
        begin, pause, name = open_.pop((job, place))
        if now > begin:
            closed.append(Span(place, job, name, begin, now, min(pause, now - begin)))

    held: dict[int, Sequence[Place]] = {}
    for event in events:
        if event.what in ("preempt", "complete"):
            for place in held.pop(event.job):
                close(event.job, place, event.time)
        elif event.what in ("start", "move"):
            for place in held.get(event.job, ()):
                close(event.job, place, event.time)
            held[event.job] = event.places
            for place in event.places:
                open_[event.job, place] = (event.time, event.seconds, event.name)
    for job, place in list(open_):
        close(job, place, end)
    return sorted(closed, key=lambda span: (span.begin, span.place, span.job))


class MeanLevels(NamedTuple):
    """Means over equal parts of the time: the held share of the cluster's compute slices, and the pending jobs."""

    times: list[float]
    held: list[float]
    waiting: list[float]


def levels(events: Sequence[LoggedEvent], begin: float, end: float, slices: int, parts: int = 240) -> MeanLevels:
    """Return the held share and the pending jobs between `begin` and `end`. A shared slice counts once."""
    edges = np.linspace(begin, end, parts + 1)
    held, waiting = np.zeros(parts), np.zeros(parts)
    width = (end - begin) / parts if end > begin else 1.0
    holders: dict[Place, int] = {}
    of_job: dict[int, Sequence[Place]] = {}
    level, queue, last = 0, 0, begin
    for event in events:
        if event.time > last:
            _spread(held, begin, width, last, event.time, level)
            _spread(waiting, begin, width, last, event.time, queue)
            last = event.time
        if event.what == "arrive":
            queue += 1
            continue
        for place in of_job.pop(event.job, ()):
            holders[place] -= 1
            level -= place.slot.profile.compute * (holders[place] == 0)
        if event.what in ("start", "move"):
            of_job[event.job] = event.places
            for place in event.places:
                holders[place] = holders.get(place, 0) + 1
                level += place.slot.profile.compute * (holders[place] == 1)
        queue += {"start": -1, "preempt": 1}.get(event.what, 0)
    _spread(held, begin, width, last, end, level)
    _spread(waiting, begin, width, last, end, queue)
    times = ((edges[:-1] + edges[1:]) / 2).tolist()
    return MeanLevels(times, (held / width / slices).tolist(), (waiting / width).tolist())


def _spread(
    into: np.ndarray[Any, np.dtype[np.float64]], begin: float, width: float, start: float, end: float, level: float
) -> None:
    """Add `level` times seconds, from `start` to `end`, to the parts of the time that this interval lies in."""
    if not level or end <= start:
        return
    first = min(len(into) - 1, int((start - begin) / width))
    last = min(len(into) - 1, int((end - begin) / width))
    if first == last:
        into[first] += level * (end - start)
        return
    into[first] += level * (begin + (first + 1) * width - start)
    into[first + 1 : last] += level * width
    into[last] += level * (end - begin - last * width)

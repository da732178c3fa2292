"""What a reader returns, and what can be done to it: a window, a limit, more load, copies."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from slurm_migbatch.lab.sim.job import DemandChange, InferenceRequest, SimulatedJob


@dataclass(frozen=True)
class Trace:
    """Jobs, requests and demand of one source, by time from 0 on.

    Attributes:
        name: the source.
        jobs, requests, demands: what it holds, each by its time; most sources have one of the three.
        notices: what the reader passed over or had to assume, for people.
    """

    name: str
    jobs: tuple[SimulatedJob, ...] = ()
    requests: tuple[InferenceRequest, ...] = ()
    demands: tuple[DemandChange, ...] = ()
    notices: tuple[str, ...] = ()

    def window(self, begin: float, end: float = math.inf) -> Trace:
        """Return what comes from `begin` on and before `end`, in seconds; the clock then begins at 0."""
        return replace(
            self,
            jobs=tuple(replace(j, arrival=j.arrival - begin) for j in self.jobs if begin <= j.arrival < end),
            requests=tuple(r._replace(time=r.time - begin) for r in self.requests if begin <= r.time < end),
            demands=tuple(d._replace(time=d.time - begin) for d in self.demands if begin <= d.time < end),
        )

    def first(self, count: int) -> Trace:
        """Return the first so many jobs and requests."""
        return replace(self, jobs=self.jobs[:count], requests=self.requests[:count])

    def faster(self, load: float) -> Trace:
        """Return the trace with everything arriving `load` times as fast; the work stays."""
        return replace(
            self,
            jobs=tuple(replace(j, arrival=j.arrival / load) for j in self.jobs),
            requests=tuple(r._replace(time=r.time / load) for r in self.requests),
            demands=tuple(d._replace(time=d.time / load) for d in self.demands),
        )

    def copies(self, count: int, jitter: float = 3600.0, seed: int = 0) -> Trace:
        """Repeat the jobs `count` times, each copy's arrivals moved by up to `jitter` seconds; ids are given anew."""
        rng = np.random.Generator(np.random.PCG64(seed))
        jobs = list(self.jobs)
        for number in range(1, count):
            moved = rng.uniform(0.0, jitter, len(self.jobs)).tolist()
            jobs += [
                replace(job, arrival=job.arrival + by, name=f"{job.name}.{number}", user=job.user)
                for job, by in zip(self.jobs, moved, strict=True)
            ]
        jobs.sort(key=lambda job: (job.arrival, job.id))
        return replace(self, jobs=tuple(replace(job, id=number) for number, job in enumerate(jobs)))

    def changed(self, change: Callable[[SimulatedJob], SimulatedJob | None]) -> Trace:
        """Return the trace with every job as `change` returns it; without those for which it returns None."""
        return replace(self, jobs=tuple(new for job in self.jobs if (new := change(job)) is not None))

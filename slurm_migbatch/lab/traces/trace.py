"""Define what readers return, and its transformations: a window, a limit, more load, copies."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from slurm_migbatch.lab.sim.job import DemandChange, InferenceRequest, SimulatedJob


@dataclass(frozen=True)
class Trace:
    """Jobs, requests and demand of one source; times begin at 0.

    Attributes:
        name: of the source.
        jobs, requests, demands: each in order of time; most sources have only one of the three.
        notices: what the reader skipped or had to assume, for the user.
    """

    name: str
    jobs: tuple[SimulatedJob, ...] = ()
    requests: tuple[InferenceRequest, ...] = ()
    demands: tuple[DemandChange, ...] = ()
    notices: tuple[str, ...] = ()

    def window(self, begin: float, end: float = math.inf) -> Trace:
        """Return the entries from `begin` on and before `end`, in seconds, with times relative to `begin`."""
        return replace(
            self,
            jobs=tuple(replace(j, arrival=j.arrival - begin) for j in self.jobs if begin <= j.arrival < end),
            requests=tuple(r._replace(time=r.time - begin) for r in self.requests if begin <= r.time < end),
            demands=tuple(d._replace(time=d.time - begin) for d in self.demands if begin <= d.time < end),
        )

    def first(self, count: int) -> Trace:
        """Return the trace with only the first `count` jobs and the first `count` requests."""
        return replace(self, jobs=self.jobs[:count], requests=self.requests[:count])

    def faster(self, load: float) -> Trace:
        """Return the trace with all times divided by `load`; the work is unchanged."""
        return replace(
            self,
            jobs=tuple(replace(j, arrival=j.arrival / load) for j in self.jobs),
            requests=tuple(r._replace(time=r.time / load) for r in self.requests),
            demands=tuple(d._replace(time=d.time / load) for d in self.demands),
        )

    def copies(self, count: int, jitter: float = 3600.0, seed: int = 0) -> Trace:
        """Repeat the jobs `count` times, each copy's arrivals shifted by up to `jitter` seconds; ids are renumbered."""
        rng = np.random.Generator(np.random.PCG64(seed))
        jobs = list(self.jobs)
        for number in range(1, count):
            shifts = rng.uniform(0.0, jitter, len(self.jobs)).tolist()
            jobs += [
                replace(job, arrival=job.arrival + by, name=f"{job.name}.{number}", user=job.user)
                for job, by in zip(self.jobs, shifts, strict=True)
            ]
        jobs.sort(key=lambda job: (job.arrival, job.id))
        return replace(self, jobs=tuple(replace(job, id=number) for number, job in enumerate(jobs)))

    def changed(self, change: Callable[[SimulatedJob], SimulatedJob | None]) -> Trace:
        """Return the trace with every job replaced by `change(job)`, and without those for which it is None."""
        return replace(self, jobs=tuple(new for job in self.jobs if (new := change(job)) is not None))

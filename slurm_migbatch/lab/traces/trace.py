"""Define what readers return, and its transformations: a window, a limit, more load, copies."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from slurm_migbatch.lab.sim.job import SimulatedJob


@dataclass(frozen=True)
class Trace:
    """Jobs of one source; times begin at 0.

    Attributes:
        jobs: in order of time.
        notices: what the reader skipped or had to assume, for the user.
    """

    jobs: tuple[SimulatedJob, ...] = ()
    notices: tuple[str, ...] = ()

    def window(self, begin: float, end: float = math.inf) -> Trace:
        """Return the jobs from `begin` on and before `end`, in seconds, with times relative to `begin`."""
        return replace(
            self,
            jobs=tuple(replace(j, arrival=j.arrival - begin) for j in self.jobs if begin <= j.arrival < end),
        )

    def first(self, count: int) -> Trace:
        """Return the trace with only the first `count` jobs."""
        return replace(self, jobs=self.jobs[:count])

    def faster(self, load: float) -> Trace:
        """Return the trace with all times divided by `load`; the work is unchanged."""
        return replace(
            self,
            jobs=tuple(replace(j, arrival=j.arrival / load) for j in self.jobs),
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

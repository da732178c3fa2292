"""Simulate Slurm without migbatch: the same simulated Slurm, with whole GPUs for every job.

A job gets as many GPUs as it has slices or GPUs in the trace. The GPUs have no MIG, so no instance is created for a
job, and each node lists all of its GPUs for good, as in slurm.conf: of migbatchd only the submit filter runs, which
spells the requests. The speed of a job on whole GPUs is, as everywhere, relative to the slices that it has in the
trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from slurm_migbatch.config import Config
from slurm_migbatch.lab.sim.cluster import Place
from slurm_migbatch.lab.sim.gpus import without_mig
from slurm_migbatch.lab.sim.job import SimulatedJob
from slurm_migbatch.lab.sim.policies.migbatch import MigbatchParams, play
from slurm_migbatch.lab.sim.registry import NamedPolicy, NoParams, Setup
from slurm_migbatch.lab.sim.result import SimulationResult
from slurm_migbatch.lab.sim.run import SimulatedRun
from slurm_migbatch.lab.sim.speeds import Speeds


@dataclass(frozen=True)
class _AsInTrace:
    """The speeds of the trace's jobs, for jobs without their profiles."""

    speeds: Speeds
    jobs: Mapping[int, SimulatedJob]

    def speed(self, job: SimulatedJob, places: Sequence[Place]) -> float:
        """See Speeds."""
        return self.speeds.speed(self.jobs[job.id], places)

    def slowdown(self, run: SimulatedRun, others: Sequence[SimulatedRun]) -> float:
        """See Speeds."""
        return self.speeds.slowdown(run, others)


def _play(_params: NoParams, setup: Setup) -> SimulationResult:
    jobs = tuple(replace(job, profile=None) for job in setup.jobs)
    speeds = _AsInTrace(setup.speeds, {job.id: job for job in setup.jobs})
    whole = without_mig(setup.geometry)
    return play(MigbatchParams(), Config(), replace(setup, geometry=whole, jobs=jobs, speeds=speeds), decides=False)


SLURM: Final = NamedPolicy(
    "Slurm without migbatch: whole GPUs for every job, on the same simulated Slurm", NoParams, _play
)

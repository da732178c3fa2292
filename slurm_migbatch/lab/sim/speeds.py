"""Define the speed of a job: alone on slices, and next to others.

The engine uses one `Speeds`, the true speeds. Policies may decide by the same one or by another one, for example by the
predictor's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import numpy as np

from slurm_migbatch.lab.sim.cluster import Place, SimulatedCluster
from slurm_migbatch.lab.sim.job import SimulatedJob
from slurm_migbatch.lab.sim.run import SimulatedRun

_SPREAD: Final = 3.0
"""Sum of the two parameters of the beta distribution: the larger, the more similar the jobs."""


class Speeds(Protocol):
    """Speeds of jobs; 1.0 is the speed on what the job requests: whole GPUs of the reference kind, or slices."""

    def speed(self, job: SimulatedJob, places: Sequence[Place]) -> float:
        """Return the work per second on these places without other jobs; 0 if the job does not fit there."""

    def slowdown(self, run: SimulatedRun, others: Sequence[SimulatedRun]) -> float:
        """Return how many times slower `run` is with `others` in the same slice; at least 1."""


class Linear:
    """Speed grows with the share of the requested compute slices; `slowdown` for each sharer is fixed.

    A simple approximation: with `exponent` 1 a job on half the slices is half as fast, with 0 more slices make it no
    faster. For the number of GPUs the exponent is always 1: jobs use all GPUs that they request.
    """

    def __init__(
        self, cluster: SimulatedCluster, *, exponent: float = 1.0, shared: float = 2.0, most: float = 1.0
    ) -> None:
        """Limit speeds to `most`: with 1 a job gains nothing from more than it requests, with infinity it does."""
        self.cluster = cluster
        self.exponent = exponent
        self.shared = shared
        self.most = most

    def speed(self, job: SimulatedJob, places: Sequence[Place]) -> float:
        """Return the job's share of the requested slices, to the power of the exponent, at most `most`."""
        return min(self.most, sum(float(self._share(job, place) ** self.exponent) for place in places) / job.gpus)

    def slowdown(self, _run: SimulatedRun, others: Sequence[SimulatedRun]) -> float:
        """Return `shared` with one other job, and as much more for each further one."""
        return 1.0 + (self.shared - 1.0) * len(others)

    def _share(self, job: SimulatedJob, place: Place) -> float:
        requested = job.profile.compute if job.profile else self.cluster.gpus[place.gpu].geometry.compute_slices
        return place.slot.profile.compute / requested


class Paired:
    """Another `Speeds`, with measured slowdowns of pairs inside one slice."""

    def __init__(self, alone: Speeds, xi: Mapping[tuple[str, str], float], default: float = 2.0) -> None:
        """Use `xi[a, b]`, the slowdown of application a next to b; `default` for unknown pairs."""
        self.alone, self.xi, self.default = alone, xi, default

    def speed(self, job: SimulatedJob, places: Sequence[Place]) -> float:
        """Return the speed of `alone`."""
        return self.alone.speed(job, places)

    def slowdown(self, run: SimulatedRun, others: Sequence[SimulatedRun]) -> float:
        """Return 1 plus, for each other job, the measured slowdown of the pair minus 1."""
        return 1.0 + sum(self.xi.get((run.job.app, other.job.app), self.default) - 1.0 for other in others)


class Whole:
    """Every job runs at speed 1 on its request; jobs that share a slice get an equal part of it."""

    def speed(self, job: SimulatedJob, places: Sequence[Place]) -> float:
        """Return the number of places as a share of the requested number."""
        return 1.0 if len(places) == job.gpus else len(places) / job.gpus

    def slowdown(self, _run: SimulatedRun, others: Sequence[SimulatedRun]) -> float:
        """Return the number of sharers as the slowdown."""
        return 1.0 + len(others)


class Neighbours:
    """Slowdown by busy slices on the same GPU, although they share no compute.

    Measured (MLPerf HeteroMultiUse, one slice alone against all others busy): 1.9 % on average and 7 % at worst on an
    A100, 8.4 % and 12 % on an A30. Each job gets a sensitivity between nothing and the worst, drawn from a beta
    distribution with that mean; its slowdown is its sensitivity times the held share of the other memory slices.
    """

    def __init__(self, mean: float = 0.019, worst: float = 0.07) -> None:
        """Use the mean and the worst slowdown; a mean of 0 turns it off.

        Raises ValueError if the mean is not below the worst.
        """
        if mean and not 0 < mean < worst:
            raise ValueError(
                f"neighbours cost {mean} on average and {worst} at worst: the mean must be below the worst"
            )
        self.mean, self.worst = mean, worst

    def draw(self, count: int, rng: np.random.Generator) -> list[float]:
        """Draw the sensitivities of `count` jobs."""
        if not self.mean:
            return [0.0] * count
        share = self.mean / self.worst
        drawn: list[float] = (self.worst * rng.beta(_SPREAD * share, _SPREAD * (1.0 - share), count)).tolist()
        return drawn

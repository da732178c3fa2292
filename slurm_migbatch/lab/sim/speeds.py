"""How fast a job goes: alone on slices, and beside others.

The engine asks a `Speeds`; policies may ask the same one (then they decide on the truth) or another one, for example
the predictor's (then they decide on what they believe and the engine charges the truth).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import numpy as np

from slurm_migbatch.lab.sim.cluster import Place, SimulatedCluster
from slurm_migbatch.lab.sim.job import SimulatedJob
from slurm_migbatch.lab.sim.run import SimulatedRun

_SPREAD: Final = 3.0
"""The two parameters of the beta distribution together: the larger, the more alike all jobs are."""


class Speeds(Protocol):
    """Speeds of jobs; 1.0 is a job on what it asks for, as whole GPUs of the reference kind."""

    def speed(self, job: SimulatedJob, places: Sequence[Place], steps: int = 1) -> float:
        """Return the work a second on these places with nobody beside it; 0 where it does not fit there.

        `steps` is the number of micro-steps that a batch is split into.
        """

    def slowdown(self, run: SimulatedRun, others: Sequence[SimulatedRun]) -> float:
        """Return how many times slower `run` is with `others` in the same slice; at least 1."""


class Linear:
    """Speed grows with the share of the compute slices that the job asks for; `slowdown` for each sharer is fixed.

    A rule of thumb and a base for better ones: `exponent` 1 says that half the slices are half as fast, 0 that a job
    gains nothing from more. It takes the exponent of `gpus` as 1: jobs fill what they ask for.
    """

    def __init__(
        self, cluster: SimulatedCluster, *, exponent: float = 1.0, shared: float = 2.0, most: float = 1.0
    ) -> None:
        """Bound the speed by `most`: a job gains nothing from more than it asks for (1), or it does (infinity)."""
        self.cluster = cluster
        self.exponent = exponent
        self.shared = shared
        self.most = most

    def speed(self, job: SimulatedJob, places: Sequence[Place], _steps: int = 1) -> float:
        """Return the share of the slices that it asks for, to the power of the exponent, `most` at the most."""
        if len(places) == 1 == job.gpus:
            return min(self.most, float(self._share(places[0]) ** self.exponent))
        return min(self.most, sum(float(self._share(place) ** self.exponent) for place in places) / job.gpus)

    def slowdown(self, _run: SimulatedRun, others: Sequence[SimulatedRun]) -> float:
        """Return `shared` with one other, and that much more with each further one."""
        return 1.0 + (self.shared - 1.0) * len(others)

    def _share(self, place: Place) -> float:
        geometry = self.cluster.gpus[place.gpu].geometry
        return place.slot.profile.compute / geometry.compute_slices


class Paired:
    """Another `Speeds`, with measured slowdowns of pairs inside one slice."""

    def __init__(self, alone: Speeds, xi: Mapping[tuple[str, str], float], default: float = 2.0) -> None:
        """Take `xi[a, b]`, how many times slower application a gets beside b; `default` where a pair is not known."""
        self.alone, self.xi, self.default = alone, xi, default

    def speed(self, job: SimulatedJob, places: Sequence[Place], steps: int = 1) -> float:
        """Return the speed that `alone` gives."""
        return self.alone.speed(job, places, steps)

    def slowdown(self, run: SimulatedRun, others: Sequence[SimulatedRun]) -> float:
        """Return 1 and the excesses of all pairs added up."""
        return 1.0 + sum(self.xi.get((run.job.app, other.job.app), self.default) - 1.0 for other in others)


class Whole:
    """Every job runs at speed 1 on what it asks for; jobs that share a slice get an equal part of it."""

    def speed(self, job: SimulatedJob, places: Sequence[Place], _steps: int = 1) -> float:
        """Return the share of the places that it asks for."""
        return 1.0 if len(places) == job.gpus else len(places) / job.gpus

    def slowdown(self, _run: SimulatedRun, others: Sequence[SimulatedRun]) -> float:
        """Return the number of sharers as the slowdown."""
        return 1.0 + len(others)


class Neighbours:
    """What busy slices beside a job cost it, though they share no compute.

    Measured (MLPerf HeteroMultiUse, one slice alone against all others busy): 1.9 % on average and 7 % at worst on an
    A100, 8.4 % and 12 % on an A30. Each job gets a sensitivity between nothing and the worst, drawn from a beta
    distribution with that mean; what it pays is its sensitivity times the share of the other memory slices that are
    held.
    """

    def __init__(self, mean: float = 0.019, worst: float = 0.07) -> None:
        """Take the mean and the worst cost; a mean of 0 switches it off.

        Raises ValueError: the mean must be below the worst.
        """
        if mean and not 0 < mean < worst:
            raise ValueError(
                f"neighbours cost {mean} on average and {worst} at worst: the mean must be below the worst"
            )
        self.mean, self.worst = mean, worst

    def draw(self, count: int, rng: np.random.Generator) -> list[float]:
        """Draw the sensitivities of so many jobs."""
        if not self.mean:
            return [0.0] * count
        share = self.mean / self.worst
        drawn: list[float] = (self.worst * rng.beta(_SPREAD * share, _SPREAD * (1.0 - share), count)).tolist()
        return drawn

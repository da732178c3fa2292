"""Define the workload of a cluster: jobs, which are values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from slurm_migbatch.mig.profile import Profile

Kind: TypeAlias = Literal["infer", "train"]


class JobError(ValueError):
    """Values that do not describe a job; the message says which, and what to write instead."""


@dataclass(frozen=True, slots=True)
class JobCosts:
    """Seconds that a job needs besides its work.

    Attributes:
        cold_start_s: from an available slice to the first progress, at the first start.
        restart_s: the same after an interruption or a move.
        checkpoint_s: to save the work when signalled to stop; the next holder of its slices waits that long.
    """

    cold_start_s: float = 0.0
    restart_s: float = 0.0
    checkpoint_s: float = 0.0


FREE = JobCosts()


@dataclass(frozen=True, slots=True)
class SimulatedJob:
    """One job as it is submitted.

    Attributes:
        id: unique; also breaks ties, so that a simulation is deterministic.
        arrival: seconds on the simulation's clock.
        work: its length, in seconds at speed 1. Speed 1 is what `Speeds` returns for the job on what it requests:
            usually its `gpus` as whole GPUs of the reference kind, or as slices of `profile`.
        kind: `train` jobs may be paused and moved; users wait for the results of `infer` jobs.
        gpus: requested GPUs, or slices if `profile` is given (a gang: all at once).
        profile: the smallest slice it requests; None requests whole GPUs.
        largest: the largest slice that is useful to it; None if any is.
        least, most: smallest and largest number of GPUs or slices on which an elastic job can run; both are `gpus`
            for other jobs.
        app: model or application, by the names of the table of speeds; empty if the trace does not say it: a name that
            users choose for their jobs is none.
        batch: items in one step of all its GPUs together, 0 if unknown.
        user: the user whose share it counts to, in policies that share fairly.
        slo_s: seconds after its arrival within which it must end; None without a limit.
        start_slo_s: seconds after its arrival within which it must make its first progress (a service must be up);
            None without a limit.
        estimate: its user's estimate in seconds (a time limit); None: its true work.
        tasks: number of requests of an inference job, 0 if unknown.
    """

    id: int
    name: str
    arrival: float
    work: float
    kind: Kind = "train"
    gpus: int = 1
    profile: Profile | None = None
    largest: Profile | None = None
    least: int = 0
    most: int = 0
    app: str = ""
    batch: int = 0
    user: str = ""
    costs: JobCosts = FREE
    slo_s: float | None = None
    start_slo_s: float | None = None
    estimate: float | None = None
    tasks: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.arrival) and self.arrival >= 0):
            raise JobError(f"{self.name}: arrival must be 0 s or later, not {self.arrival}")
        if not (math.isfinite(self.work) and self.work > 0):
            raise JobError(f"{self.name}: work must be above 0 s, not {self.work}")
        if self.gpus < 1:
            raise JobError(f"{self.name}: must ask for at least 1 GPU, not {self.gpus}")
        if not self.least:
            object.__setattr__(self, "least", self.gpus)
        if not self.most:
            object.__setattr__(self, "most", self.gpus)
        if not 1 <= self.least <= self.gpus <= self.most:
            raise JobError(
                f"{self.name}: least <= gpus <= most is needed, not {self.least}, {self.gpus} and {self.most}"
            )

    @property
    def claimed(self) -> float:
        """Length of the job as its user estimates it, seconds; its true work without an estimate."""
        return self.work if self.estimate is None else self.estimate

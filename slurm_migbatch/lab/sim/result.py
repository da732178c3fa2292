"""Define the result of a simulation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from slurm_migbatch.lab.sim.log import LoggedEvent
from slurm_migbatch.lab.sim.run import SimulatedRun


@dataclass(frozen=True)
class SimulationResult:
    """The history of every job, and sums over the cluster.

    Attributes:
        runs: the history of every job that arrived, in the order of their ids.
        begin, end: first arrival and last event, in seconds.
        gpus, slices: numbers of GPUs and of compute slices of the cluster.
        held: compute-slice seconds that were held. `busy`: those of them with progress.
        fragmentation: mean over GPUs and time, 0 to 1.
        waiting: mean number of pending jobs.
        events: the log; empty if not requested.
        steps: rounds of decisions.
        actions: changes of jobs through Slurm, by kind; empty for the simulator's own policies.
        without_run: number of jobs that never could run, because they were refused or did not fit on their slices; the
            notices tell of them.
    """

    runs: tuple[SimulatedRun, ...]
    begin: float
    end: float
    gpus: int
    slices: int
    held: float
    busy: float
    fragmentation: float
    waiting: float
    created: int
    destroyed: int
    steps: int
    events: tuple[LoggedEvent, ...] = field(default=(), repr=False)
    actions: Mapping[str, int] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    without_run: int = 0

"""What a simulation leaves behind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from slurm_migbatch.lab.sim.log import LoggedEvent
from slurm_migbatch.lab.sim.run import SimulatedRun


@dataclass(frozen=True)
class SimulationResult:
    """The course of every job, and what was booked for the cluster.

    Attributes:
        runs: the course of every job that arrived, in the order of their ids.
        begin, end: first arrival and last event, in seconds.
        gpus, slices: of the cluster; slices are compute slices.
        held: compute-slice seconds that were held. `busy`: those in which somebody made progress.
        fragmentation: mean over GPUs and time, 0 to 1.
        waiting: mean number of jobs that waited.
        created, destroyed: instances.
        events: the log; empty where none was asked for.
        steps: moments at which something happened.
        actions: what was done to jobs through Slurm, by kind; empty where the simulator's own policies decided.
        notices: what should be known of this run, for people.
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

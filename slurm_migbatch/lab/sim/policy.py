"""Define the interface of a scheduling policy.

The engine reports all events of an instant to a policy, and then asks it once to decide. Deciding means
calling the engine's actions (`start`, `move`, `preempt`, `wake`) any number of times; jobs that are not started wait.
The rules themselves are pure functions of `lab.papers` and `decide`, which know no simulation; a policy here keeps the
queues and translates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from slurm_migbatch.lab.sim.job import DemandChange
from slurm_migbatch.lab.sim.run import SimulatedRun

if TYPE_CHECKING:
    from slurm_migbatch.lab.sim.engine import Simulation


class Policy(Protocol):
    """Events in; actions out through the simulation that each call is given.

    At one instant the order is: completions, demands, timers, arrivals, then `decide`.
    """

    def begin(self, sim: Simulation) -> None:
        """Examine the cluster before the first event, create layouts at no cost (`sim.cluster.configure`)."""

    def arrive(self, sim: Simulation, run: SimulatedRun) -> None:
        """Take an arrived job; it waits until it is started."""

    def complete(self, sim: Simulation, run: SimulatedRun) -> None:
        """Record that a job has ended; its slices are free already."""

    def demand(self, sim: Simulation, demand: DemandChange) -> None:
        """Record that the demand of an application changed."""

    def timer(self, sim: Simulation, key: Any) -> None:
        """Act at a time that the policy requested with `sim.wake`."""

    def decide(self, sim: Simulation) -> None:
        """Act: all events of this instant were delivered."""


class Quiet:
    """A policy that ignores all events and does nothing: a base for those that handle only some events."""

    def begin(self, sim: Simulation) -> None:
        """Prepare nothing."""

    def arrive(self, sim: Simulation, run: SimulatedRun) -> None:
        """Let the job wait."""

    def complete(self, sim: Simulation, run: SimulatedRun) -> None:
        """Leave its slices free."""

    def demand(self, sim: Simulation, demand: DemandChange) -> None:
        """Ignore the demand: nobody serves it."""

    def timer(self, sim: Simulation, key: Any) -> None:
        """Do nothing: none was set."""

    def decide(self, sim: Simulation) -> None:
        """Do nothing."""

"""Define the interface of a scheduling policy.

The engine reports all events of an instant to a policy, and then asks it once to decide. Deciding means
calling the engine's actions (`start`, `move`, `preempt`, `wake`) any number of times; jobs that are not started wait.
The rules themselves are pure functions in `lab.papers` and `decide`, which do not depend on the simulator; a policy
keeps the queues, calls these functions, and carries out their results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slurm_migbatch.lab.sim.run import SimulatedRun

if TYPE_CHECKING:
    from slurm_migbatch.lab.sim.engine import Simulation


class Policy:
    """A scheduling policy: it is told events, and acts through the simulation that each call passes.

    At one instant the order is: completions, timers, arrivals, then `decide`. This one ignores all of them.
    """

    def begin(self, sim: Simulation) -> None:
        """Prepare before the first event; layouts can be created at no cost here (`sim.cluster.configure`)."""

    def arrive(self, sim: Simulation, run: SimulatedRun) -> None:
        """Record that a job has arrived; it waits until the policy starts it."""

    def complete(self, sim: Simulation, run: SimulatedRun) -> None:
        """Record that a job has ended; its slices are already free."""

    def timer(self, sim: Simulation, key: Any) -> None:
        """Act at a time that the policy requested with `sim.wake`."""

    def decide(self, sim: Simulation) -> None:
        """Act, after all events of this instant have been delivered."""

"""Run training and inference on separate nodes: a site without lending."""

from __future__ import annotations

from typing import Any

from slurm_migbatch.lab.sim.engine import Simulation
from slurm_migbatch.lab.sim.policy import Policy
from slurm_migbatch.lab.sim.run import SimulatedRun


class Halves(Policy):
    """Pass each job to the policy of its kind, of two policies on separate nodes.

    Timers are passed to both policies, so their keys must be distinct.
    """

    def __init__(self, train: Policy, infer: Policy) -> None:
        self.of_kind = {"train": train, "infer": infer}

    def begin(self, sim: Simulation) -> None:
        """Let both policies begin."""
        for policy in self.of_kind.values():
            policy.begin(sim)

    def arrive(self, sim: Simulation, run: SimulatedRun) -> None:
        """Pass the job to the policy of its kind."""
        self.of_kind[run.job.kind].arrive(sim, run)

    def complete(self, sim: Simulation, run: SimulatedRun) -> None:
        """Pass the job to the policy of its kind."""
        self.of_kind[run.job.kind].complete(sim, run)

    def timer(self, sim: Simulation, key: Any) -> None:
        """Pass the timer to both policies."""
        for policy in self.of_kind.values():
            policy.timer(sim, key)

    def decide(self, sim: Simulation) -> None:
        """Let inference decide first."""
        self.of_kind["infer"].decide(sim)
        self.of_kind["train"].decide(sim)

"""Find policies by name, for configuration files and benchmarks: `POLICIES` has the module of each.

A module defines a policy as a `NamedPolicy`, most of them by `simulated`: a dataclass of its parameters (fields made
with `config.keys.key`) and a function that makes the policy for a cluster. To register it, add a line to `POLICIES`;
modules are imported on demand. `migbatch` and `slurm` are different: their jobs go through a simulated Slurm, those of
`migbatch` with migbatchd's own decision.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from slurm_migbatch.lab.sim.cluster import SimulatedCluster
from slurm_migbatch.lab.sim.engine import Simulation
from slurm_migbatch.lab.sim.job import SimulatedJob
from slurm_migbatch.lab.sim.policy import Policy
from slurm_migbatch.lab.sim.result import SimulationResult
from slurm_migbatch.lab.sim.speeds import Neighbours, Speeds
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.profiling.measurement import Measurement


@dataclass(frozen=True)
class Setup:
    """Input of a simulation: the same for every policy.

    Attributes:
        geometry: of the GPUs; there are `nodes` nodes with `per_node` GPUs each.
        speeds: speed of each job by place.
        neighbours: slowdown by busy slices on the same GPU; None: no slowdown.
        measured: the measurements that the speeds come from, for a predictor to learn from.
        until: time on the trace's clock at which the simulation stops, seconds; infinite: at the last event.
        progress: called regularly with the number of ended jobs and that of all jobs.
    """

    geometry: Geometry
    nodes: int
    per_node: int
    jobs: tuple[SimulatedJob, ...]
    speeds: Speeds
    neighbours: Neighbours | None = None
    measured: tuple[Measurement, ...] = ()
    seed: int = 0
    until: float = float("inf")
    log: bool = False
    progress: Callable[[int, int], None] | None = None

    def cluster(self) -> SimulatedCluster:
        """Return the cluster, with all GPUs empty."""
        return SimulatedCluster.of(self.geometry, self.nodes * self.per_node, self.per_node)


@dataclass(frozen=True)
class NoParams:
    """No parameters."""


@dataclass(frozen=True)
class NamedPolicy:
    """A policy with a name.

    Attributes:
        about: description in one line.
        params: frozen dataclass of its parameters, all with defaults.
        play: simulates. Raises PlaceError and SimulationError if cluster, jobs and policy are incompatible.
        settings: names of the decision function and of its configuration, if it has more than its parameters.
    """

    about: str
    params: type[Any]
    play: Callable[[Any, Setup], SimulationResult]
    settings: Callable[[Any], Mapping[str, str]] = lambda params: {}


def simulated(about: str, params: type[Any], make: Callable[[Any, SimulatedCluster], Policy]) -> NamedPolicy:
    """Return a policy of the event-driven simulator; `make` returns it for its parameters and the cluster."""

    def play(values: Any, setup: Setup) -> SimulationResult:
        cluster = setup.cluster()
        policy, neighbours = make(values, cluster), setup.neighbours
        simulation = Simulation(
            cluster, setup.jobs, policy, setup.speeds, neighbours=neighbours, seed=setup.seed, log=setup.log
        )
        return simulation.run(setup.until, setup.progress)

    return NamedPolicy(about, params, play)


DEFAULT: Final = "migbatch"
"""Default policy of a scenario."""
SLURM: Final = "slurm"
ON_SLURM: Final = frozenset({DEFAULT, SLURM})
"""Policies whose jobs go through a simulated Slurm."""
_KINDS = "slurm_migbatch.lab.sim.policies.kinds"
POLICIES: Final[dict[str, str]] = {
    DEFAULT: "slurm_migbatch.lab.sim.policies.migbatch:MIGBATCH",
    SLURM: "slurm_migbatch.lab.sim.policies.slurmalone:SLURM",
    "fifo": f"{_KINDS}:FIFO",
    "sjf": f"{_KINDS}:SJF",
    "sjf-ffs": f"{_KINDS}:SJF_FFS",
    "easy": f"{_KINDS}:EASY",
    "tiresias": f"{_KINDS}:TIRESIAS",
    "pollux": "slurm_migbatch.lab.sim.policies.pollux:POLLUX",
    "slices": f"{_KINDS}:SLICES",
    "static": f"{_KINDS}:STATIC",
    "halves": f"{_KINDS}:HALVES",
    "sjf-bsbf": "slurm_migbatch.lab.sim.policies.sharing:BSBF",
    "sharing": "slurm_migbatch.lab.sim.policies.sharing:SHARING",
}
"""Name -> module:attribute."""


def find(name: str) -> NamedPolicy:
    """Return the policy of this name; raises KeyError."""
    module, _, attribute = POLICIES[name].partition(":")
    policy: NamedPolicy = getattr(importlib.import_module(module), attribute)
    return policy

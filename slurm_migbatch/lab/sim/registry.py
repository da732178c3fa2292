"""Policies by name, for configuration files and benchmarks: `POLICIES` says where each is found.

A module offers a policy by a `PolicyKind`: a dataclass of its parameters (fields made with `config.schema.key`) and a
function that makes the policy for a cluster. Add a line to `POLICIES`; nothing is imported before it is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from slurm_migbatch.lab.sim.cluster import Cluster
from slurm_migbatch.lab.sim.policy import Policy


@dataclass(frozen=True)
class PolicyKind:
    """A policy that can be named.

    Attributes:
        about: what it does, in one line.
        params: frozen dataclass of its parameters, all with defaults.
        make: the policy, from an instance of `params` and the cluster.
    """

    about: str
    params: type[Any]
    make: Callable[[Any, Cluster], Policy]


_KINDS = "slurm_migbatch.lab.sim.policies.kinds"
POLICIES: Final[dict[str, str]] = {
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
    "lending-slices": "slurm_migbatch.lab.sim.policies.slicelending:SLICE_LENDING",
    "sharing": "slurm_migbatch.lab.sim.policies.sharing:SHARING",
}
"""Name -> module:attribute."""


def find(name: str) -> PolicyKind:
    """The policy of this name; raises KeyError."""
    module, _, attribute = POLICIES[name].partition(":")
    found = getattr(importlib.import_module(module), attribute)
    assert isinstance(found, PolicyKind)
    return found

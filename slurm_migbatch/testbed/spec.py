"""What a test bed is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Hooks:
    """Paths of the hook programs, empty for none, and slurmd's limit for them in seconds."""

    prolog: str = ""
    epilog: str = ""
    task_prolog: str = ""
    timeout: int = 60


@dataclass(frozen=True)
class Spec:
    """What a cluster is made of.

    Attributes:
        nodes, gpus, gpu_type: nodes n1..., simulated GPUs per node and their model.
        users: number of ordinary users (mbalice, mbbob, mbcarol, ...).
        dbd: whether slurmdbd and MariaDB run and keep accounts.
        slurm_root: a debootstrapped Debian whose Slurm programs are run; empty for the machine's own.
        latency: of the simulated driver: seconds per create or destroy, or "real".
        cpus: made-up CPUs per node.
        catalog_nodes: how many nodes list every profile; jobs wider than that cannot pend for one that nobody offers.
        counts: GRES counts per node in slurm.conf (types in GRES spelling); empty for the smallest slices everywhere.
        migbatch: "" for Slurm alone, "hooks" for the hooks without agents and controller, "all" for everything.
        auth: how nodes and migbatchd know each other.
        node_conf, config: values of node.conf and migbatch.toml (section -> key -> value) beside the test bed's own.
        job_submit, cli_filter: Lua scripts to load; empty for none.
        options: further lines of slurm.conf.
        partition_nodes: host list of a partition (gpu, train) that does not have all nodes.
        lends: whether training jobs of the partition `train` are lent idle slices, and Slurm may requeue them.
    """

    nodes: int = 2
    gpus: int = 2
    gpu_type: str = "h100-80gb"
    users: int = 3
    dbd: bool = False
    slurm_root: str = ""
    latency: float | Literal["real"] = 0.0
    cpus: int = 64
    catalog_nodes: int = 2
    counts: Mapping[str, int] = field(default_factory=dict)
    migbatch: Literal["", "hooks", "all"] = ""
    auth: Literal["munge", "token"] = "munge"
    node_conf: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    hooks: Hooks = Hooks()
    job_submit: str = ""
    cli_filter: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    partition_nodes: Mapping[str, str] = field(default_factory=dict)
    lends: bool = False

    @property
    def node_names(self) -> tuple[str, ...]:
        """n1, n2, ..."""
        return tuple(f"n{number}" for number in range(1, self.nodes + 1))

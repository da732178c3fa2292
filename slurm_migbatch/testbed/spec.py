"""Specify a test bed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Hooks:
    """Paths of the hook programs, empty for none, and slurmd's limit for them in seconds.

    `primary_on` and `primary_off` are slurmctld's, on a test bed with two controllers.
    """

    prolog: str = ""
    epilog: str = ""
    task_prolog: str = ""
    timeout: int = 60
    primary_on: str = ""
    primary_off: str = ""


@dataclass(frozen=True)
class Spec:
    """The specification of a test bed.

    Attributes:
        nodes, gpus, gpu_type: nodes n1..., simulated GPUs per node and their model.
        users: number of ordinary users (mbalice, mbbob, mbcarol, ...).
        dbd: whether slurmdbd and MariaDB run and keep accounts.
        rest: whether slurmrestd runs (of a --slurm-root whose REST API migbatch speaks), see `testbed.restd`.
        slurm_root: a debootstrapped Debian whose Slurm programs are run; empty for the machine's own.
        latency: of the simulated driver: seconds per create or destroy, or "real".
        cpus: configured CPUs per node; they need not exist.
        catalog_nodes: number of catalog nodes; a job for more nodes than that is refused if no node offers its profile.
        counts: GRES counts per node in slurm.conf (types in GRES spelling); empty for the smallest slices everywhere.
        migbatch: "" for Slurm alone, "hooks" for the hooks without agents and controller, "all" for everything.
        auth: how nodes and migbatchd authenticate each other.
        node_conf, config: values of node.conf and migbatch.toml (section -> key -> value) beside the test bed's own.
        job_submit, cli_filter: Lua scripts to load; empty for none.
        options: further lines of slurm.conf, or other values of the test bed's own.
        partition_nodes: host list of a partition (gpu, train) that does not have all nodes.
        features: further features of nodes, beside each node's own name (node -> names joined by commas).
        topology: topology.conf of the site (nodes n1, ...; `options` names TopologyPlugin); empty for none.
        constrained: whether Slurm's cgroups deny jobs the devices of GRES that they do not have; the site counts one
            GPU and one network card on each node, and `conf.DEVICES` stand for them.
        slurm_user: SlurmUser, the user of slurmctld and slurmdbd.
        daemon_user: the user of migbatchd: root, as `migbatch install` chooses, or SlurmUser.
        backup: whether there is a second controller, each under its own host name (`mbctl1`, `mbctl2`; processes
            `slurmctld` and `slurmctld-2`, `migbatchd` and `migbatchd-2`); `config` must name a database server.
    """

    nodes: int = 2
    gpus: int = 2
    gpu_type: str = "h100-80gb"
    users: int = 3
    dbd: bool = False
    rest: bool = False
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
    features: Mapping[str, str] = field(default_factory=dict)
    name: str = "migbatch"
    topology: str = ""
    constrained: bool = False
    slurm_user: str = "slurm"
    daemon_user: str = "root"
    backup: bool = False

    @property
    def node_names(self) -> tuple[str, ...]:
        """n1, n2, ..."""
        return tuple(f"n{number}" for number in range(1, self.nodes + 1))

    @property
    def lending(self) -> tuple[str, ...]:
        """The partitions whose training jobs are lent idle slices, by `config`."""
        lending: Mapping[str, Any] = self.config.get("lending", {})
        return tuple(lending.get("partitions", ())) if lending.get("enabled") else ()

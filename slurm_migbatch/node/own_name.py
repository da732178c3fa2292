"""Load node.conf under the name that Slurm gives this host, for programs that slurmd does not start.

slurmd passes the name to its hooks. Everybody else must use the same one: it is part of the paths of the journal and
of the agent's socket, and an agent under another name would take the slices of running jobs for nobody's.
"""

from __future__ import annotations

import os

from slurm_migbatch.node import conf
from slurm_migbatch.node.conf import ConfError
from slurm_migbatch.node.config import NodeConfig, load
from slurm_migbatch.node.scontrol import ScontrolError, query


def load_own(etc: str, name: str = "") -> NodeConfig:
    """Load node.conf for the node `name`, or without one for this host's. Raises ConfError."""
    if name:
        return load(etc, conf.node_name({b"SLURMD_NODENAME": name.encode()}))
    config = load(etc, conf.node_name(dict(os.environb)))
    if b"SLURMD_NODENAME" in os.environb:
        return config
    nodes = _nodes_of_host(config)
    if len(nodes) > 1:
        raise ConfError(f"slurm.conf has several nodes on this host ({', '.join(nodes)}): select one with --node")
    return load(etc, nodes[0]) if nodes and nodes[0] != config.node else config


def _nodes_of_host(config: NodeConfig) -> list[str]:
    """Return the nodes that slurm.conf has for this host (NodeHostname), by its short or its full name as in slurmd;
    none if slurm.conf has none or cannot be read.
    """
    host = os.uname().nodename
    for name in dict.fromkeys((host.partition(".")[0], host)):
        try:
            # reads slurm.conf and does not ask slurmctld
            words = query(config, "scontrol", ["show", "aliases", name], config.scontrol_timeout).split()
            nodes = [conf.node_name({b"SLURMD_NODENAME": word.encode()}) for word in words]
        except (ScontrolError, ConfError):
            return []
        if nodes:
            return nodes
    return []

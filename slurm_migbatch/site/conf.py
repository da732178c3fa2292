"""What the templates of Slurm's configuration files are filled with."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from slurm_migbatch.workload.loans import GUEST, LOAN

WAITING: Final = {LOAN: 2, GUEST: 1}
"""What the catalog lists beside the profiles: types that only co-scheduled training jobs have. Of the first it has as
many as a job that waits asks for, and on a Slurm that does not forget it every node has one less."""
FORGETS: Final = (23, 11)
"""The first release that surely forgets what a pending job asked for when its GRES is changed."""


def mig_gres(counts: Mapping[str, int]) -> str:
    """Format typed counts as Slurm does: {"1g.10gb": 7} -> "mig:1g.10gb:7"."""
    return ",".join(f"mig:{kind}:{count}" for kind, count in counts.items())


@dataclass(frozen=True)
class NodeLine:
    """One line of slurm.conf: a node or a host list of equal ones.

    Attributes:
        names: node name or host list expression.
        counts: GRES types (profiles in GRES spelling, and the filler "none") and how many of each.
        settings: further words of the line, e.g. "CPUs=64 RealMemory=500000".
    """

    names: str
    counts: Mapping[str, int]
    settings: str = ""

    @property
    def gres(self) -> str:
        """Value of Gres=."""
        return mig_gres(self.counts)

    @property
    def total(self) -> int:
        """The constant sum over all types."""
        return sum(self.counts.values())


@dataclass(frozen=True)
class PartitionLine:
    """One partition line; the catalog node is added to `nodes`."""

    name: str
    nodes: str
    settings: str = ""


def spare(version: tuple[int, int]) -> dict[str, int]:
    """Return the extra GRES of a lending node: the `loan` that no job ever gets, where Slurm needs it."""
    return {} if version >= FORGETS else {LOAN: 1}


def preemption(partitions: Collection[str], name: str) -> str:
    """Return the words of a partition's line by which Slurm itself may take slices back from those that lend."""
    if not partitions:
        return ""
    return "PriorityTier=1 PreemptMode=REQUEUE" if name in partitions else "PriorityTier=10 PreemptMode=OFF"


@dataclass(frozen=True)
class Site:
    """A cluster as the templates see it.

    Attributes:
        version: Slurm release, e.g. (22, 5).
        nodes: the MIG nodes.
        catalog: the node that is always down and lists every profile.
        prolog, epilog, task_prolog: hook paths, empty for none.
        job_submit, cli_filter: whether the Lua scripts lie beside slurm.conf.
        hook_timeout: PrologEpilogTimeout in seconds; must exceed the hooks' own deadline.
        lends: whether training jobs of some partitions are requeued for others.
        accounting: whether slurmdbd records the mig TRES.
        cgroup_plugin: CgroupPlugin of cgroup.conf.
    """

    version: tuple[int, int]
    nodes: Sequence[NodeLine]
    catalog: NodeLine
    partitions: Sequence[PartitionLine]
    prolog: str = ""
    epilog: str = ""
    task_prolog: str = ""
    job_submit: bool = False
    cli_filter: bool = False
    hook_timeout: int = 60
    lends: bool = False
    accounting: bool = False
    cgroup_plugin: str = "disabled"

    @property
    def types(self) -> list[str]:
        """Every GRES type of the site, in the catalog's order."""
        return list(self.catalog.counts)

    @property
    def all_nodes(self) -> list[NodeLine]:
        """The MIG nodes and the catalog."""
        return [*self.nodes, self.catalog]

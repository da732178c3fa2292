"""Hold the values for the templates of Slurm's configuration files."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from slurm_migbatch.workload.loans import GUEST, LOAN

WAITING: Final = {LOAN: 2, GUEST: 1}
"""GRES types that the catalog lists besides the profiles, and that only co-scheduled training jobs have. Of the first
it has as many as a pending job requests, and on a Slurm that keeps the old type every node has one less.
"""
FORGETS: Final = (23, 11)
"""The first release that certainly forgets a pending job's old type when its GRES is changed."""


_CONSTANT = (
    "GRES mig counts the MIG slices that the supply planner offers; the sum over all types of one node must stay "
    "constant (the filler mig:none takes the rest), or slurmd's next registration drains the node."
)
_ALLOC = (
    "Alloc: nodes of a job without a step create their slices too. DeferBatch: the batch script waits for all of them."
)
_LENDS = (
    "While migbatchd is down, Slurm's own preemption frees slices of training jobs: those of a lower PriorityTier are "
    "requeued for the same type of slice."
)
PREEMPT_EXEMPT: Final = "00:30:00"
_EXEMPT = (
    "Slurm itself preempts only jobs that have run for so long: migbatchd reclaims slices within seconds, and ends the "
    "loans with the least loss. This is how long inference may wait for a lent slice while migbatchd is down."
)
CRED_EXPIRE_S: Final = 30
_CRED_EXPIRE = (
    "A requeued job waits one second longer than this, 121 by default. If started sooner it is often requeued again: "
    "slurmd of this release assumes that its Prolog has already run. Credentials must only be valid until slurmd has "
    "received them."
)


@dataclass(frozen=True)
class Setting:
    """One cluster setting in slurm.conf that migbatch needs.

    Attributes:
        kind: how it combines with the site's value: "words" are added to the existing ones, a "hook" runs
            in addition to the site's, "at_least" is a number of seconds, a way of "preemption" is only set if the site
            has none, a "program" is omitted if the site has its own, and a "default" is the site's to change.
    """

    key: str
    value: str
    kind: Literal["words", "hook", "at_least", "preemption", "program", "default"]
    why: str = ""


def mig_gres(counts: Mapping[str, int]) -> str:
    """Format typed counts as Slurm does: {"1g.10gb": 7} -> "mig:1g.10gb:7"."""
    return ",".join(f"mig:{kind}:{count}" for kind, count in counts.items())


@dataclass(frozen=True)
class NodeLine:
    """One line of slurm.conf: a node or a host list of equal ones.

    Attributes:
        counts: GRES types (profiles in GRES spelling, and the filler "none") and their counts.
        settings: further words of the line, e.g. "CPUs=64 RealMemory=500000".
        others: its GRES other than mig.
    """

    names: str
    counts: Mapping[str, int]
    settings: str = ""
    others: str = ""

    @property
    def gres(self) -> str:
        """Value of Gres=."""
        return ",".join(filter(None, (self.others, mig_gres(self.counts))))


def spare(version: tuple[int, int]) -> dict[str, int]:
    """Return the extra GRES of a lending node: the `loan` that no job ever gets, if Slurm needs it."""
    return {} if version >= FORGETS else {LOAN: 1}


def preemption(partitions: Collection[str], name: str, *, tiers: bool = False) -> str:
    """Return the settings of a partition with which Slurm itself may reclaim slices from those that lend.

    `tiers`: other partitions have tiers that 10 would pass; by default the tier is 1.
    """
    if not partitions:
        return ""
    if name in partitions:
        return f"PriorityTier={0 if tiers else 1} PreemptMode=REQUEUE"
    return "PreemptMode=OFF" if tiers else "PriorityTier=10 PreemptMode=OFF"


@dataclass(frozen=True)
class Site:
    """A cluster as the templates see it.

    Attributes:
        version: Slurm release, e.g. (22, 5).
        nodes: the MIG nodes. Their lines, and those of partitions, are the site's own and are edited.
        catalog: the node that is always down and lists every profile.
        prolog, epilog, task_prolog: hook paths, empty for none.
        job_submit, cli_filter: whether the Lua scripts are beside slurm.conf.
        hook_timeout: PrologEpilogTimeout in seconds; at least `node.fallback.longest`.
        lends: whether training jobs of some partitions are requeued for others.
        preempts: whether the site has had preemption of its own.
        accounting: whether slurmdbd records the mig TRES.
        suspends: whether slurmctld powers idle nodes down, from which the catalog must be excluded.
        primary_on, primary_off: programs that slurmctld runs when it becomes the primary of several, or no longer is;
            empty for none.
        devices: lines of gres.conf for GPUs that Slurm has detected by itself so far.
        gpu_devices: device files of the GPUs with slices, by node.
        own: keys, as in `Setting`, that the site's own lines hold, so that they are not rendered.
    """

    version: tuple[int, int]
    nodes: Sequence[NodeLine]
    catalog: NodeLine
    prolog: str = ""
    epilog: str = ""
    task_prolog: str = ""
    job_submit: bool = False
    cli_filter: bool = False
    hook_timeout: int = 60
    lends: bool = False
    preempts: bool = False
    accounting: bool = False
    suspends: bool = False
    primary_on: str = ""
    primary_off: str = ""
    devices: Sequence[str] = ()
    gpu_devices: Mapping[str, Collection[str]] = field(default_factory=dict)
    own: Collection[str] = ()

    @property
    def settings(self) -> list[Setting]:
        """Settings to render."""
        return [setting for setting in self.needed() if setting.key not in self.own]

    def needed(self) -> Iterator[Setting]:
        """Yield every setting of the cluster that migbatch needs."""
        yield Setting("GresTypes", "gpu,mig", "words", _CONSTANT)
        if self.prolog:
            yield Setting("PrologFlags", "Alloc,DeferBatch", "words", _ALLOC)
            yield Setting("Prolog", self.prolog, "hook")
            yield Setting("Epilog", self.epilog, "hook")
            yield Setting("PrologEpilogTimeout", str(self.hook_timeout), "at_least")
            if self.task_prolog:
                yield Setting("TaskProlog", self.task_prolog, "hook")
        if self.job_submit:
            yield Setting(
                "JobSubmitPlugins", "lua", "words", "slurmctld reads job_submit.lua in the directory of slurm.conf."
            )
        if self.cli_filter:
            yield Setting(
                "CliFilterPlugins", "cli_filter/lua", "words", "Every host that runs srun has cli_filter.lua."
            )
        if self.lends:
            yield from self._preemption()
        if self.accounting:
            typed = ",".join(f"gres/mig:{kind}" for kind in self.types)
            yield Setting("AccountingStorageTRES", f"gres/mig,{typed}", "words", "Account slices in sacct and sreport.")
        if self.primary_on:
            yield Setting(
                "SlurmctldPrimaryOnProg", self.primary_on, "program", "Notify migbatchd of a takeover immediately."
            )
            yield Setting("SlurmctldPrimaryOffProg", self.primary_off, "program")
        if self.suspends:
            yield Setting("SuspendExcNodes", self.catalog.names, "words", "The catalog node must not be powered down.")

    def _preemption(self) -> Iterator[Setting]:
        """Yield the settings with which Slurm itself may end loans."""
        yield Setting("PreemptType", "preempt/partition_prio", "preemption", _LENDS)
        yield Setting("PreemptMode", "REQUEUE", "preemption")
        if not self.preempts:
            yield Setting("PreemptExemptTime", PREEMPT_EXEMPT, "default", _EXEMPT)
        if self.version < FORGETS:
            yield Setting("AuthInfo", f"cred_expire={CRED_EXPIRE_S}", "words", _CRED_EXPIRE)

    @property
    def types(self) -> list[str]:
        """Every GRES type of the site, in the catalog's order."""
        return list(self.catalog.counts)

    @property
    def all_nodes(self) -> list[NodeLine]:
        """The MIG nodes and the catalog."""
        return [*self.nodes, self.catalog]

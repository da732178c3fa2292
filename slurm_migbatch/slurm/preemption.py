"""Parse which running jobs a site lets Slurm preempt for which pending jobs: PreemptType and what belongs to it.

As in Slurm's plugins preempt/qos and preempt/partition_prio: the way in which a job ends is that of its own QOS or
partition, else the cluster's. Jobs that Slurm would only suspend keep their GRES, so they count as not preemptible.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from slurm_migbatch.slurm.fields import fields_of
from slurm_migbatch.slurm.settings import CONFIG_COMMAND, PARTITIONS_COMMAND, parse_settings
from slurm_migbatch.slurm.times import TimeFormError, parse_duration

if TYPE_CHECKING:
    from slurm_migbatch.slurm.client import JobRow

COMMANDS: Final = (
    CONFIG_COMMAND,
    PARTITIONS_COMMAND,
    ("sacctmgr", "-nP", "show", "qos", "format=Name,Preempt,PreemptMode,GraceTime,PreemptExemptTime"),
)
"""Commands whose output `parse` reads, in this order; the last fails on a cluster without accounting."""
_QOS, _PARTITION = "preempt/qos", "preempt/partition_prio"
_EXEMPT: Final = re.compile(r"min_exempt_priority=(\d{1,10})\b", re.IGNORECASE)


@dataclass(frozen=True)
class Ending:
    """How a preempted job ends: requeued or cancelled, `grace_s` seconds after SIGTERM; 0: at once.

    `by_priority`: only if the other job's priority is higher (PreemptMode with PRIORITY).
    """

    cancel: bool
    grace_s: float = 0.0
    by_priority: bool = False


@dataclass(frozen=True)
class PreemptedPartition:
    """Settings of a partition. `ending`: how its jobs are preempted; None: not at all. `qos`: its own QOS."""

    tier: int
    ending: Ending | None = None
    qos: str = ""


@dataclass(frozen=True)
class PreemptingQos:
    """Settings of a QOS.

    Attributes:
        preempts: names of the QOS whose jobs it preempts.
        mode: how its own jobs are preempted, in Slurm's words; empty: as the cluster says.
        grace_s: seconds between SIGTERM and the end of its own jobs.
        exempt_s: seconds for which its own jobs must have run before; None: as the cluster says.
    """

    preempts: frozenset[str] = frozenset()
    mode: str = ""
    grace_s: float = 0.0
    exempt_s: float | None = None


@dataclass(frozen=True)
class PreemptionRules:
    """Preemption of a cluster.

    Attributes:
        kind: PreemptType; empty: no preemption.
        mode: PreemptMode of the cluster.
        exempt_s: PreemptExemptTime of the cluster.
        exempt_priority: jobs of this priority and higher ones are not preempted; None: there is no such limit.
    """

    kind: str = ""
    mode: str = ""
    exempt_s: float = 0.0
    partitions: Mapping[str, PreemptedPartition] = field(default_factory=dict)
    qos: Mapping[str, PreemptingQos] = field(default_factory=dict)
    exempt_priority: int | None = None

    @property
    def any_preempted(self) -> bool:
        """Whether any job may be preempted."""
        if self.kind == _QOS:
            preempted = {name for qos in self.qos.values() for name in qos.preempts if name in self.qos}
            return any(_ending(self.qos[name].mode or self.mode, 0.0) for name in preempted)
        return self._any_below(max([found.tier for found in self.partitions.values()], default=-1))

    def may_preempt(self, waiting: JobRow) -> bool:
        """Return whether a pending job may preempt any job."""
        if self.kind == _QOS:
            return bool(self._of_qos(waiting).preempts)
        if self.kind != _PARTITION:
            return False
        return self._any_below(self._tier(waiting))

    def ending(self, running: JobRow, waiting: JobRow, now: float) -> Ending | None:
        """Return how a running job ends if a pending job preempts it now; None: it may not be preempted."""
        if running.start is None or now - running.start < self._exempt_s(running):
            return None
        if self.exempt_priority is not None and running.priority >= self.exempt_priority:
            return None
        if self.kind == _QOS:
            above = running.qos in self._of_qos(waiting).preempts
        else:
            partition = self.partitions.get(running.partition)
            above = partition is not None and partition.tier < self._tier(waiting)
        ending = self.ending_of(running) if above else None
        if ending is not None and ending.by_priority and waiting.priority <= running.priority:
            return None
        return ending

    def ending_of(self, running: JobRow) -> Ending | None:
        """Return how a running job ends if it is preempted, by whichever job; None: its settings do not let it be."""
        if self.kind == _QOS:
            own = self._of_qos(running)
            return _ending(own.mode or self.mode, own.grace_s)
        partition = self.partitions.get(running.partition) if self.kind == _PARTITION else None
        return None if partition is None else partition.ending

    def _any_below(self, tier: int) -> bool:
        return any(found.ending is not None and found.tier < tier for found in self.partitions.values())

    def _of_qos(self, row: JobRow) -> PreemptingQos:
        return self.qos.get(row.qos, PreemptingQos())

    def _tier(self, waiting: JobRow) -> int:
        """Return the lowest tier of a pending job's partitions; -1 if one is unknown.

        Of several partitions Slurm checks at submission only that the user may use one: another may be in the list.
        """
        return min(
            [self.partitions[name].tier if name in self.partitions else -1 for name in waiting.partitions], default=-1
        )

    def _exempt_s(self, row: JobRow) -> float:
        partition = self.partitions.get(row.partition)
        names = (row.qos, partition.qos if partition is not None else "")
        own = [self.qos[name].exempt_s for name in names if name in self.qos]
        return max([exempt_s for exempt_s in own if exempt_s is not None], default=self.exempt_s)


NO_PREEMPTION: Final = PreemptionRules()


def by_qos(config: str) -> bool:
    """Return whether QOS decide, by the output of `scontrol show config`."""
    return parse_settings(config).get("preempttype") == _QOS


def parse(config: str, partitions: str, qos: str) -> PreemptionRules:
    """Return the rules by the outputs of `COMMANDS`; `qos` is empty if there is no accounting."""
    settings = parse_settings(config)
    exempt = _EXEMPT.search(settings.get("preemptparameters", ""))
    kind = settings.get("preempttype", "")
    if kind not in (_QOS, _PARTITION):
        return NO_PREEMPTION
    return PreemptionRules(
        kind,
        settings.get("preemptmode", ""),
        _seconds(settings.get("preemptexempttime", "")) or 0.0,
        dict(filter(None, (_partition(fields_of(record)) for record in partitions.splitlines()))),
        dict(filter(None, (_qos(line.split("|")) for line in qos.splitlines()))),
        int(exempt[1]) if exempt else None,
    )


def _partition(words: Mapping[str, str]) -> tuple[str, PreemptedPartition] | None:
    name, tier = words.get("PartitionName"), words.get("PriorityTier", "")
    if not name or not (tier.isascii() and tier.isdigit()):
        return None
    ending = _ending(words.get("PreemptMode", ""), _seconds(words.get("GraceTime", "")) or 0.0)
    own = words.get("QoS", "")
    return name, PreemptedPartition(int(tier), ending, "" if own == "N/A" else own)


def _qos(values: list[str]) -> tuple[str, PreemptingQos] | None:
    if len(values) != len(COMMANDS[2][-1].split(",")) or not values[0]:
        return None
    name, preempts, mode, grace, exempt = values
    names = frozenset(filter(None, preempts.split(",")))
    return name, PreemptingQos(names, "" if mode == "cluster" else mode, _seconds(grace) or 0.0, _seconds(exempt))


def _ending(mode: str, grace_s: float) -> Ending | None:
    words = mode.upper().split(",")
    if "CANCEL" not in words and "REQUEUE" not in words:
        return None
    return Ending("CANCEL" in words, grace_s, "PRIORITY" in words)


def _seconds(text: str) -> float | None:
    """Return the seconds of GraceTime (a plain number) or of a time; None for none, also for UNLIMITED and -1."""
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        return parse_duration(text)
    except TimeFormError:
        return None

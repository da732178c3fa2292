"""Check the settings that [lending] requires."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from slurm_migbatch.config import Config
from slurm_migbatch.node.findings import FAIL, OK, WARN, Finding
from slurm_migbatch.site import FORGETS, PREEMPT_EXEMPT, WAITING
from slurm_migbatch.slurm.client import NodeRow
from slurm_migbatch.slurm.fields import fields_of
from slurm_migbatch.slurm.nodelist import expand
from slurm_migbatch.workload.loans import LOAN

_PREEMPTING = frozenset({"preempt/partition_prio", "preempt/qos"})
_AT_ONCE = frozenset({"", "0", "00:00:00", "INFINITE", "NONE"})


def parse_partitions(text: str) -> dict[str, dict[str, str]]:
    """Parse `scontrol -o show partition`: the words of each partition, by its name."""
    partitions = map(fields_of, text.splitlines())
    return {words["PartitionName"]: words for words in partitions if "PartitionName" in words}


def check_lending(
    config: Config,
    conf: Mapping[str, str],
    rows: Sequence[NodeRow],
    partitions: Mapping[str, Mapping[str, str]],
    version: tuple[int, int],
) -> Iterator[Finding]:
    """Check that training jobs can pend, be requeued, and be preempted by Slurm itself; `conf`: keys in lower case."""
    if conf.get("jobrequeue") == "0":
        text = "JobRequeue is 0: loans cannot be reclaimed"
        yield Finding(FAIL, "lending", text, "set JobRequeue=1 in slurm.conf")
    most = conf.get("maxpreemptrequeue", "")
    if most.isdigit() and int(most):
        text = f"MaxPreemptRequeue is {most}: Slurm holds a training job after as many requeues, and a reclaim is one"
        advice = "set MaxPreemptRequeue=0 in slurm.conf; `scontrol release JOB` lets a held job continue"
        yield Finding(WARN, "lending", text, advice)
    yield from _catalog(config, rows)
    if version < FORGETS:
        yield from _remembering(config, rows, version)
        if "tmpfs" in conf.get("jobcontainertype", ""):
            text = "on this release slurmd may create none for a training job that returns at once, and the job fails"
            advice = "install Slurm 23.11 or later, or give each partition that lends at least two nodes"
            yield Finding(WARN, "lending", f"JobContainerType is {conf['jobcontainertype']}: {text}", advice)
    for name in config.lending.partitions:
        yield from _partition(name, conf.get("preempttype", ""), partitions)
    if conf.get("preempttype") in _PREEMPTING and conf.get("preemptexempttime", "").strip() in _AT_ONCE:
        text = "PreemptExemptTime is 0: Slurm itself preempts loans before migbatchd reclaims those with the least loss"
        yield Finding(WARN, "lending", text, f"set PreemptExemptTime={PREEMPT_EXEMPT} in slurm.conf")


def _catalog(config: Config, rows: Sequence[NodeRow]) -> Iterator[Finding]:
    names = expand(config.cluster.catalog_nodes)
    for row in rows:
        if row.name in names:
            lacking = [f"mig:{kind}:{n}" for kind, n in WAITING.items() if row.gres.get(kind, 0) < n]
            if lacking:
                text = f"{row.name} does not list {', '.join(lacking)}, so training jobs are refused"
                yield Finding(FAIL, "lending", text, "migbatch install --role controller --apply --edit")
            else:
                yield Finding(OK, "lending", f"training jobs can pend as mig:{LOAN} ({row.name} lists it)")


def _remembering(config: Config, rows: Sequence[NodeRow], version: tuple[int, int]) -> Iterator[Finding]:
    release = f"Slurm {version[0]}.{version[1]:02d}"
    text = f"{release} cannot change the GRES type of a pending job: jobs keep their first lent profile"
    yield Finding(WARN, "lending", text, f"Slurm {FORGETS[0]}.{FORGETS[1]:02d} or later lets jobs change profile")
    catalog = expand(config.cluster.catalog_nodes)
    lacking = [
        row.name
        for row in rows
        if row.name not in catalog
        and any(kind not in ("none", LOAN) for kind in row.gres)
        and not row.gres.get(LOAN)
        and set(row.partitions) & set(config.lending.partitions)
    ]
    if lacking:
        text = f"{', '.join(lacking)}: {release} needs mig:{LOAN}:1 in the Gres of every node that lends"
        yield Finding(FAIL, "lending", text, "migbatch install --role controller --apply --edit")


def _partition(name: str, preempt: str, partitions: Mapping[str, Mapping[str, str]]) -> Iterator[Finding]:
    subject = f"lending partition {name}"
    words = partitions.get(name)
    if words is None:
        advice = "correct [lending] partitions in migbatch.toml, or add the partition"
        yield Finding(FAIL, subject, "Slurm has no such partition", advice)
        return
    mode = words.get("PreemptMode", "OFF").split(",")
    tier = _number(words.get("PriorityTier"))
    overlapping = [other for other in partitions if other != name and _nodes(words) & _nodes(partitions[other])]
    higher = [other for other in overlapping if _number(partitions[other].get("PriorityTier")) > tier]
    if preempt not in _PREEMPTING or "REQUEUE" not in mode:
        text = "Slurm cannot preempt its jobs: loans are not reclaimed while migbatchd is down"
        advice = f"set PreemptType=preempt/partition_prio, and PreemptMode=REQUEUE for partition {name}"
        if preempt == "preempt/qos":
            advice = "give the QOS of its jobs PreemptMode=requeue, and let that of inference preempt it (sacctmgr)"
        yield Finding(WARN, subject, text, advice)
    elif preempt == "preempt/partition_prio" and overlapping and not higher:
        text = "no partition on its nodes has a higher PriorityTier, so Slurm never preempts there"
        yield Finding(WARN, subject, text, f"give it a lower PriorityTier than {', '.join(overlapping)}")
    else:
        yield Finding(OK, subject, "Slurm can preempt its jobs")


def _nodes(words: Mapping[str, str]) -> set[str]:
    listed = words.get("Nodes", "")
    return set() if listed in ("", "(null)") else set(expand(listed))


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdigit() else 1

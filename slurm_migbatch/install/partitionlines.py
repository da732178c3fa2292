"""Decide what the site's lines of partitions need: the catalog node, and with lending settings of preemption."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Final

from slurm_migbatch.install.catalogline import Counts, NodeNameLine, former_catalog, listed_features, without_hosts
from slurm_migbatch.install.slurmconf import Conf, LineEdit, edit
from slurm_migbatch.install.slurmplan import SlurmPlan, hosts_of
from slurm_migbatch.site import preemption
from slurm_migbatch.slurm.gres import SEPARATE_PARTITIONS, confused_types
from slurm_migbatch.slurm.nodelist import expand

_TIERS: Final = range(2, 10)
"""Tiers of other partitions that those with MIG nodes, if they have none, must not pass by getting 10."""


def partition_settings(conf: Conf, lending: Collection[str], preempts: bool) -> Callable[[str], str]:
    """Return what gives the settings of a partition, by its name, with which Slurm itself may end loans.

    What the site's own preemption does to others remains: by QOS it needs none, and by partition those that do not lend
    keep the mode of the cluster. `preempts`: whether the site has preemption of its own.
    """
    if preempts_by_qos(conf):
        return lambda name: ""
    others = (values for _, values in conf.records("partitionname") if values["partitionname"] not in lending)
    tiers = any(tier.isdigit() and int(tier) in _TIERS for values in others if (tier := values.get("prioritytier", "")))

    def settings(name: str) -> str:
        wanted = preemption(lending, name, tiers=tiers)
        return wanted.removesuffix("PreemptMode=OFF") if preempts else wanted

    return settings


def preempts_by_qos(conf: Conf) -> bool:
    """Return whether jobs are preempted by their QOS."""
    return conf.value("PreemptType").lower() == "preempt/qos"


def partition_edits(
    conf: Conf,
    rows: Sequence[NodeNameLine],
    counts: Counts,
    catalog: str,
    preempting: Callable[[str], str],
    done: SlurmPlan,
) -> Iterator[LineEdit]:
    """Yield the changes of partitions that have MIG nodes: the catalog must be one of their nodes.

    `preempting`: see `partition_settings`.
    """
    sets = dict(_node_sets(conf, rows, done))
    former = former_catalog(conf, catalog)
    for line, values in conf.records("partitionname"):
        listed = values.get("nodes", "")
        items = hosts_of(line, listed, done)
        all_nodes = any(item.upper() == "ALL" for item in items)
        members = {name for item in items for name in sets.get(item, (item,))}
        if not (all_nodes or members & {*counts, *former}):
            continue
        kinds = (kind for name in (counts if all_nodes else members & counts.keys()) for kind in counts[name])
        confused = confused_types(values["partitionname"], kinds)
        done.notes += [f"{line.place}: {text}; {SEPARATE_PARTITIONS}" for text in confused]
        change, additions = {}, {}
        token = line.get("nodes")
        if not all_nodes and (not set(expand(catalog)) <= members or members & former):
            if token:
                kept = without_hosts(token.value, {*former, *expand(catalog)})
                change["nodes"] = ",".join(filter(None, (kept, catalog)))
            else:
                additions["Nodes"] = f"{listed},{catalog}"
        for setting in preempting(values["partitionname"]).split():
            key, _, value = setting.partition("=")
            if key.lower() not in values:
                additions[key] = value
        if change or additions:
            yield edit(conf, line, change, additions)


def left_after_lending(conf: Conf) -> Iterator[str]:
    """Yield a sentence for each partition that has what is written with lending, which is off now."""
    for line, _ in conf.records("partitionname"):
        last = [(token.key, token.value) for token in line.tokens[-2:]]
        for settings in (preemption(("x",), "x"), preemption(("x",), "x", tiers=True), preemption(("x",), "")):
            words = (setting.partition("=") for setting in settings.split())
            if last == [(key.lower(), value) for key, _, value in words]:
                yield (
                    f"{line.place}: {settings} remains though lending is off; remove it, and PreemptType and "
                    "PreemptMode of the cluster, if only lending needed them"
                )


def _node_sets(conf: Conf, rows: Sequence[NodeNameLine], done: SlurmPlan) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the nodes of each NodeSet."""
    for line, values in conf.records("nodeset"):
        members: list[str] = []
        feature = values.get("feature", "")
        for _, node, names in rows:
            if feature and feature in listed_features(node):
                members += names
        members += hosts_of(line, values.get("nodes", ""), done)
        yield values["nodeset"], tuple(members)

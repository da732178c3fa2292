"""Check that requests can pend: the catalog's lines in slurm.conf allow for them, and it is in Slurm's topology."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from slurm_migbatch.install.catalogline import catalog_lacks
from slurm_migbatch.install.slurmconf import Conf
from slurm_migbatch.install.topology import SWITCH
from slurm_migbatch.node.findings import FAIL, OK, UNKNOWN, WARN, Finding
from slurm_migbatch.slurm.nodelist import NodeListError, expand

_WHY = {
    "NodeAddr": "slurmctld looks its name up, and does not start where that is unknown",
    "Features": "--constraint",
    "RealMemory": "--mem",
    "TmpDisk": "--tmp",
    "Gres": "another --gres beside mig",
}
_UNIT = re.compile(r"^(Switch|Block|Ring|Torus)Name=.*? Nodes=(\S+)", re.MULTILINE)
_ADVICE = "migbatch install --role controller --edit --apply, then restart slurmctld; in a topology.yaml by hand (add "
_MORE_ADVICE = {
    "block": f"{_ADVICE}`- block: {SWITCH}` with `nodes: %s`); before Slurm 25.11 [cluster] catalog_nodes needs as "
    "many nodes as a block",
    "ring": f"add `- ring: {SWITCH}` with `nodes: %s` to the rings in topology.yaml, then restart slurmctld",
    "torus": f"add to the toruses in topology.yaml `- name: {SWITCH}` with `nodes: %s`, their number as x in `dims`, "
    "and `placements` of as many nodes as jobs have; then restart slurmctld",
}


def check_catalog(conf: Conf, catalog: str, mig: Collection[str]) -> Iterator[Finding]:
    """Check that the catalog (a host list) has an address, and the size, features and other GRES of all MIG nodes."""
    try:
        lacking = dict(word.split("=", 1) for word in catalog_lacks(conf, catalog, mig))
    except NodeListError as error:
        yield Finding(UNKNOWN, "catalog", f"{conf.main} cannot be read: {error}", "correct that line")
        return
    for key, value in lacking.items():
        reason = _WHY.get(key, "-c, -n")
        text = reason if key == "NodeAddr" else f"jobs with {reason} are refused unless a node offers their profile"
        advice = f"its NodeName line needs {key}={value}: migbatch install --role controller --apply"
        yield Finding(FAIL, "catalog", f"{catalog} lacks {key}: {text}", advice)
    if not lacking:
        yield Finding(OK, "catalog", f"{catalog} has an address, and the size and features of the MIG nodes")


def topologies_of(partitions: Mapping[str, Mapping[str, str]], mig: Collection[str]) -> tuple[str, ...]:
    """Return the topologies of the partitions `mig`, which have MIG nodes, by the fields of each partition in `scontrol
    show partition`; "" is the cluster's own.
    """
    return tuple(dict.fromkeys(words.get("Topology", "") for name, words in partitions.items() if name in mig)) or ("",)


def check_topology(shown: Mapping[str, str], catalog: str) -> Iterator[Finding]:
    """Check that the catalog nodes (a host list) are in a switch, block, ring or torus of each topology, shown by its
    name; empty if it has none of these.
    """
    for name, text in shown.items():
        units = _UNIT.findall(text)
        if not units:
            continue
        subject = f"topology {name}" if name else "topology"
        kind = units[0][0].lower()
        try:
            listed = {node for _, nodes in units for node in expand(nodes)}
        except NodeListError as error:
            yield Finding(UNKNOWN, subject, f"cannot be read: {error}", "see `scontrol show topology`")
            continue
        if set(expand(catalog)) <= listed:
            yield Finding(OK, subject, f"{catalog} is in a {kind}")
        elif kind == "switch":
            text = f"{catalog} is in no switch: jobs are refused unless a node offers their profile"
            yield Finding(FAIL, subject, text, f"{_ADVICE}`- switch: {SWITCH}` with `nodes: {catalog}`)")
        else:
            text = f"{catalog} is in no {kind}: multi-node jobs are refused unless nodes offer their profile"
            yield Finding(WARN, subject, text, _MORE_ADVICE[kind] % catalog)

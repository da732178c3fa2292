"""Decide which MIG nodes may count GPUs: Slurm's cgroups deny a job the devices of GRES that it does not have.

With `ConstrainDevices=yes` these are the devices that gres.conf lists for the GRES of the node in slurm.conf, if Slurm
has a plugin for it, as for gpu (`gres_g_get_devices`; tested on 22.05, 24.11 and 26.05). Slices are only counted, so
the GPU of a slice must not be one of them; and Slurm refuses nodes that count GPUs without listing them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from slurm_migbatch.install.catalogline import NodeNameLine, gres_entries
from slurm_migbatch.install.slurmconf import Conf
from slurm_migbatch.slurm.nodelist import expand_valid, fold

_NEED_GPUS = frozenset({"shard", "mps"})


def has_cgroups(conf: Conf) -> bool:
    """Return whether jobs run in cgroups of Slurm."""
    return "cgroup" in {plugin.removeprefix("task/") for plugin in conf.value("TaskPlugin").lower().split(",")}


def constrains(conf: Conf, cgroup_conf: Conf) -> bool:
    """Return whether Slurm's cgroups deny jobs the devices of GRES."""
    return has_cgroups(conf) and cgroup_conf.value("ConstrainDevices").lower() in ("yes", "true", "1")


def listed(gres_conf: Conf, node: str, names: Collection[str]) -> Iterator[str]:
    """Yield the device files that gres.conf lists for these GRES of a node."""
    for line in gres_conf.lines:
        name, nodes = line.get("name"), line.get("nodename")
        if name is None or name.value not in names or (nodes is not None and node not in expand_valid(nodes.value)):
            continue
        for key in ("file", "multiplefiles"):
            if (files := line.get(key)) is not None:
                yield from expand_valid(files.value)


def not_counted(
    rows: Sequence[NodeNameLine], gres_conf: Conf, sliced: Mapping[str, Collection[str]], problems: list[str]
) -> frozenset[str]:
    """Return the nodes of which slurm.conf must no longer count GPUs, because all of them have slices.

    Lines with GPUs of both kinds, and shares of GPUs, are added to `problems`.

    Args:
        sliced: device files of the GPUs with slices, by node.
    """
    nodes: set[str] = set()
    for line, values, names in rows:
        entries = [entry for _, entry in gres_entries(values)]
        count = sum(entry.count for entry in entries if entry.name == "gpu")
        for name in names if count else ():
            own = set(sliced.get(name, ()))
            files = set(listed(gres_conf, name, {"gpu"}))
            if not own or (files and files.isdisjoint(own)):
                continue
            if files - own or (not files and count > len(own)):
                problems.append(
                    f"{line.place}: with ConstrainDevices=yes in cgroup.conf Slurm denies a job every GPU that it has "
                    f"not allocated to it, also that of its slices: count as gpu of {name}, and list by File= in "
                    f"{gres_conf.main}, only other GPUs than {fold(own)}; or put these into MIG mode too"
                )
            elif _NEED_GPUS & {entry.name for entry in entries}:
                problems.append(
                    f"{line.place}: {name} has slices on all of its GPUs; remove shard and mps from its Gres"
                )
            else:
                nodes.add(name)
    return frozenset(nodes)

"""Decide what the site's lines of gres.conf need: no others for slices, and the GPUs that AutoDetect has found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slurm_migbatch.install.catalogline import Counts, NodeNameLine, gres_entries
from slurm_migbatch.install.slurmconf import Conf
from slurm_migbatch.install.slurmplan import INCLUDED_GRES, SlurmPlan, hosts_of
from slurm_migbatch.slurm.nodelist import fold


def check_gres(conf: Conf, counts: Counts, done: SlurmPlan) -> None:
    """Add lines of the site's gres.conf that must be removed to the problems of `done`."""
    own_file = conf.beside(INCLUDED_GRES)
    for line in conf.lines:
        if line.path == own_file:
            continue
        name = line.get("name")
        if name is not None and name.value == "mig":
            done.problems.append(
                f"{line.place}: lines with Name=mig belong to migbatch, in {INCLUDED_GRES}; remove this one"
            )
        detect = line.get("autodetect")
        nodes = line.get("nodename")
        if detect is None or detect.value.lower() == "off" or nodes is None:
            continue
        if affected := sorted(set(hosts_of(line, nodes.value, done)) & set(counts)):
            text = (
                f"AutoDetect={detect.value} detects the slices of {fold(affected)} and drains the node when they change"
            )
            done.problems.append(f"{line.place}: {text}; set it to off there, with a File= line for each GPU")


def gpu_lines(conf: Conf, rows: Sequence[NodeNameLine], counts: Counts, done: SlurmPlan) -> Iterator[str]:
    """Yield lines of gres.conf for GPUs of MIG nodes that AutoDetect, which is disabled there, has found so far."""
    described = _described(conf, done)
    if described is None:
        return
    nodes_by_gpus: dict[str, list[str]] = {}  # not by line: a first run splits these into a line for each node
    for line, values, names in rows:
        members = [name for name in names if name in counts and name not in described]
        gpus = [entry for _, entry in gres_entries(values) if entry.name == "gpu"]
        if not members or not gpus:
            continue
        if len(gpus) > 1:
            done.problems.append(
                f"{line.place}: AutoDetect is disabled on MIG nodes; add a line for each type of GPU of "
                f"{fold(members)} to {conf.main}: NodeName={fold(members)} Name=gpu Type=... File=/dev/nvidia..."
            )
            continue
        (gpu,) = gpus
        last = f"[0-{gpu.count - 1}]" if gpu.count > 1 else "0"
        kind = f" Type={gpu.type}" if gpu.type else ""
        nodes_by_gpus.setdefault(f"Name=gpu{kind} File=/dev/nvidia{last}", []).extend(members)
    for gpus_of_nodes, members in nodes_by_gpus.items():
        yield f"NodeName={fold(members)} {gpus_of_nodes}"


def _described(conf: Conf, done: SlurmPlan) -> set[str] | None:
    """Return the nodes whose GPUs the site's gres.conf describes; None if those of all, or none are detected."""
    described: set[str] = set()
    detects = False
    for line in conf.lines:
        name, nodes, detect = line.get("name"), line.get("nodename"), line.get("autodetect")
        if line.path == conf.beside(INCLUDED_GRES):
            continue
        if name is not None and name.value == "gpu":
            if nodes is None:
                return None
            described |= set(hosts_of(line, nodes.value, done))
        elif detect is not None and detect.value.lower() != "off":
            detects = True
    return described if detects else None

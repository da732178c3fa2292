"""Decide what the line of the catalog nodes in slurm.conf needs: the resources and features of the site's MIG nodes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from slurm_migbatch.install.slurmconf import FEATURES, INCLUDED, Conf, Line
from slurm_migbatch.slurm import gres
from slurm_migbatch.slurm.nodelist import expand, expand_valid
from slurm_migbatch.workload.catalog import NODE_FEATURE

_SHAPE: Final = (
    ("boards", "Boards"),
    ("socketsperboard", "SocketsPerBoard"),
    ("sockets", "Sockets"),
    ("corespersocket", "CoresPerSocket"),
    ("threadspercore", "ThreadsPerCore"),
    ("cpus", "CPUs"),
    ("procs", "CPUs"),
)
_OF_GPUS: Final = frozenset({"mig", "gpu", "mps", "shard"})

NodeNameLine = tuple[Line, dict[str, str], tuple[str, ...]]
"""A line of nodes, its values, and the nodes' names."""
Counts = Mapping[str, Mapping[str, int]]
"""Slices by profile, of each MIG node."""


def catalog_settings(rows: Sequence[NodeNameLine], counts: Counts, inherited: Mapping[str, str]) -> str:
    """Return the settings of the catalog's line except Gres: the largest MIG node's size, and the features of all.

    Args:
        inherited: what the line inherits from DEFAULT lines, which may be meant for smaller nodes.
    """
    mig = [values for _, values, names in rows if any(name in counts for name in names)]
    settings = {"NodeAddr": "127.0.0.1", "Port": "1"}
    largest = max(mig, key=_cpus, default={})
    settings.update(_size(largest, inherited))
    settings.update(_reserved(mig, largest, inherited))
    for key, name in (("realmemory", "RealMemory"), ("tmpdisk", "TmpDisk")):
        maximum = max((_number(values.get(key, "")) for values in mig), default=0)
        if maximum:
            settings[name] = str(maximum)
    own = [NODE_FEATURE + name for name in counts]
    features: dict[str, None] = {}
    for values in mig:
        features.update(dict.fromkeys(feature for feature in listed_features(values) if feature and feature not in own))
    features.update(dict.fromkeys(own))
    if features:
        settings["Features"] = ",".join(features)
    return " ".join(f"{name}={value}" for name, value in settings.items())


def _size(largest: Mapping[str, str], inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the CPUs of a node, with what it leaves open if the catalog would inherit that."""
    size = {name: largest[key] for key, name in _SHAPE if key in largest}
    cpus = _cpus(largest)
    cores = _number(largest.get("corespersocket", ""), 1) * _number(largest.get("threadspercore", ""), 1)
    sockets = max(1, cpus // cores)
    implied = {"sockets": sockets, "socketsperboard": sockets, "cpus": cpus, "procs": cpus}
    for key, name in _SHAPE:
        if key in inherited:
            size.setdefault(name, str(implied.get(key, 1)))
    return size


def _reserved(
    mig: Sequence[Mapping[str, str]], largest: Mapping[str, str], inherited: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Yield what each MIG node reserves for the system. Slurm takes jobs for more that any other node could run.

    CoreSpecCount has an effect only on a node that registers, and excludes CpuSpecList.
    """
    if _number(inherited.get("corespeccount", "")):
        yield "CoreSpecCount", "0"
    if cores := min(map(_reserved_cores, mig), default=0):
        last = cores * _threads(largest) - 1
        yield "CpuSpecList", f"0-{last}" if last else "0"
    memory = min((_number(values.get("memspeclimit", "")) for values in mig), default=0)
    if _number(inherited.get("memspeclimit", "")) != memory:
        yield "MemSpecLimit", str(memory)


def _reserved_cores(values: Mapping[str, str]) -> int:
    listed = expand_valid(f"[{values['cpuspeclist']}]") if "cpuspeclist" in values else ()
    return len(listed) // _threads(values) or _number(values.get("corespeccount", ""))


def _threads(values: Mapping[str, str]) -> int:
    return _number(values.get("threadspercore", ""), 1)


def others_of(rows: Sequence[NodeNameLine], names: Collection[str]) -> dict[str, int]:
    """Return the largest count of each GRES on a line of these nodes, except those of GPUs."""
    largest: dict[str, int] = {}
    for _, values, members in rows:
        for _, entry in gres_entries(values) if not set(names).isdisjoint(members) else ():
            if entry.name not in _OF_GPUS:
                kind = str(replace(entry, count=0)).removesuffix(":0")
                largest[kind] = max(entry.count, largest.get(kind, 0))
    return largest


def gres_words(counts: Mapping[str, int]) -> str:
    """Return the value of Gres= with these counts."""
    return ",".join(f"{kind}:{count}" for kind, count in counts.items())


def catalog_lacks(conf: Conf, catalog: str, mig: Collection[str]) -> Iterator[str]:
    """Yield the settings missing from the lines of the catalog, a host list; a catalog node without a line lacks all.

    Raises:
        NodeListError: a line names no nodes.
    """
    rows = [(line, values, expand(values["nodename"])) for line, values in conf.records("nodename")]
    listed = set(expand(catalog))
    own = [values for _, values, names in rows if listed & set(names)]
    others = [row for row in rows if not listed & set(row[2])]
    inherited = conf.defaults("nodename", conf.beside(INCLUDED))
    needed = catalog_settings(others, {name: {} for name in sorted(mig)}, inherited)
    shape = {name.lower() for _, name in _SHAPE}
    short = any(_cpus(values) < _cpus(_values(needed)) for values in own)
    for setting in needed.split():
        key, _, value = setting.partition("=")
        for values in own or [{}]:
            if short if key.lower() in shape else _is_less(key, values, value):
                yield setting
                break
    present = others_of(rows, listed)
    if missing := {kind: n for kind, n in others_of(rows, mig).items() if present.get(kind, 0) < n}:
        yield f"Gres={gres_words(missing)}"


def _values(settings: str) -> dict[str, str]:
    return {key.lower(): value for key, _, value in (setting.partition("=") for setting in settings.split())}


def _is_less(key: str, values: Mapping[str, str], needed: str) -> bool:
    """Return whether the value of a key on a line of the catalog leaves less to jobs than needed."""
    present = values.get(key.lower(), values.get("feature", "") if key == "Features" else "")
    if key in ("CoreSpecCount", "CpuSpecList"):
        return False
    if key == "MemSpecLimit":
        return _number(present) > _number(needed)
    if key == "Features":
        return not set(needed.split(",")) <= set(present.split(","))
    return not present if key in ("NodeAddr", "Port") else _number(present) < _number(needed)


def _cpus(values: Mapping[str, str]) -> int:
    """Return how many CPUs a line of nodes gives each of them."""
    boards = _number(values.get("boards", ""), 1)
    sockets = _number(values.get("sockets", "")) or _number(values.get("socketsperboard", "")) * boards
    cores = _number(values.get("corespersocket", ""), 1)
    product = (sockets or boards) * cores * _number(values.get("threadspercore", ""), 1)
    cpus = _number(values.get("cpus", values.get("procs", "")))
    # Slurm ignores a number that does not match the sockets
    return cpus if cpus and (not sockets or cpus in (sockets, sockets * cores)) else product


def _number(text: str, default: int = 0) -> int:
    return gres.count_of(text) if gres.is_count(text) else default  # RealMemory=500K is 512000 MiB for Slurm


def listed_features(values: Mapping[str, str]) -> list[str]:
    """Return the features on a line of nodes, as written."""
    return next((values[key] for key in FEATURES if key in values), "").split(",")


def has_gres(values: Mapping[str, str], name: str) -> bool:
    """Return whether a line gives its nodes this GRES."""
    return any(entry.name == name for _, entry in gres_entries(values))


def gres_entries(values: Mapping[str, str]) -> Iterator[tuple[str, gres.Gres]]:
    """Yield the entries of a node's Gres=, with their texts; Slurm skips empty ones and reports wrong ones."""
    for text in gres.split(values.get("gres", "")):
        with suppress(gres.GresError):
            yield text, gres.parse_entry(text)


def former_catalog(conf: Conf, catalog: str) -> set[str]:
    """Return the catalog nodes of an earlier run that are not in `catalog`: slurmctld would not know them any more."""
    own_file = conf.beside(INCLUDED)
    lines = (values["nodename"] for line, values in conf.records("nodename") if line.path == own_file)
    return {name for names in lines for name in expand_valid(names)} - set(expand(catalog))


def without_hosts(listed: str, removed: Collection[str]) -> str:
    """Return a host list without the parts that name only nodes of `removed`."""
    return ",".join(item for item in gres.split(listed) if not set(expand_valid(item) or (item,)) <= set(removed))

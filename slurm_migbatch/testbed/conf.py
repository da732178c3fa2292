"""Slurm's configuration files of a test bed, rendered from the templates that sites use."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Mapping
from pathlib import Path

from slurm_migbatch import site

from .gpu_kind import FILLER, SimulatedGpuKind
from .spec import Spec

CLUSTER = "migbatch"
CATALOG = "migcatalog"
_TIERS = {"gpu": "PriorityTier=10", "train": "PriorityTier=1"}


def write(
    directory: Path,
    spec: Spec,
    kind: SimulatedGpuKind,
    version: tuple[int, int],
    ports: Mapping[str, int],
    munge_socket: Path,
) -> None:
    """Write slurm.conf, gres.conf, cgroup.conf and the Lua scripts to `directory`/etc."""
    etc = directory / "etc"
    names: dict[str, object] = {
        "site": describe(spec, kind, version, ports),
        "bed": {
            "name": CLUSTER,
            "host": socket.gethostname(),
            "port": ports["slurmctld"],
            "dbd_port": ports.get("slurmdbd"),
            "directory": directory,
            "munge_socket": munge_socket,
            "options": spec.options,
        },
    }
    for file, template in (("slurm", "testbed"), ("gres", "gres"), ("cgroup", "cgroup")):
        fresh = etc / f"{file}.conf.new"
        fresh.write_text(site.render(f"{template}.conf.j2", **names))
        fresh.replace(etc / f"{file}.conf")
    for name, source in (("job_submit.lua", spec.job_submit), ("cli_filter.lua", spec.cli_filter)):
        if source and Path(source) != etc / name:
            shutil.copyfile(source, etc / name)


def catalog_names(spec: Spec) -> str:
    """Return the host list of the catalog."""
    return CATALOG if spec.catalog_nodes == 1 else f"{CATALOG}[1-{spec.catalog_nodes}]"


def describe(spec: Spec, kind: SimulatedGpuKind, version: tuple[int, int], ports: Mapping[str, int]) -> site.Site:
    """Return the test bed as the templates see it."""
    counts = {**dict.fromkeys([*kind.most, FILLER], 0), **(spec.counts or kind.base(spec.gpus))}
    counts |= site.spare(version) if spec.lends or spec.config.get("lending", {}).get("enabled") else {}
    always = "MaxTime=INFINITE State=UP"
    lending = ("train",) if spec.lends else ()
    tiers = {name: site.preemption(lending, name) for name in ("gpu", "train")} if lending else _TIERS
    made_up = f"CPUs={spec.cpus} RealMemory=500000"
    here = f"NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 {made_up}"
    listed = ",".join(spec.node_names)
    return site.Site(
        version=version,
        nodes=[site.NodeLine(name, counts, f"{here} Port={ports[name]}") for name in spec.node_names],
        # Nobody ever listens for the catalog: it stays down.
        catalog=site.NodeLine(catalog_names(spec), kind.catalog(spec.gpus), f"NodeAddr=127.0.0.1 Port=1 {made_up}"),
        partitions=[
            site.PartitionLine("gpu", spec.partition_nodes.get("gpu", listed), f"Default=YES {always} {tiers['gpu']}"),
            site.PartitionLine("train", spec.partition_nodes.get("train", listed), f"{always} {tiers['train']}"),
        ],
        prolog=spec.hooks.prolog,
        epilog=spec.hooks.epilog,
        task_prolog=spec.hooks.task_prolog,
        hook_timeout=spec.hooks.timeout,
        job_submit=bool(spec.job_submit),
        cli_filter=bool(spec.cli_filter),
        lends=spec.lends,
        accounting=spec.dbd,
    )

"""Write the Slurm configuration files of a test bed: those of a small site, as `migbatch install` changes them."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from slurm_migbatch import site
from slurm_migbatch.install import slurmedit
from slurm_migbatch.install.reported import describe
from slurm_migbatch.install.slurmconf import apply, load
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.values import atomicfile

from . import restd
from .errors import TestbedError
from .spec import Spec

_CONSTRAINED: Final = {
    "TaskPlugin": "task/cgroup",
    "ProctrackType": "proctrack/cgroup",  # otherwise Slurm makes no cgroups for jobs
    "GresTypes": "gpu,nic",
}
CATALOG: Final = "no-mig-slice-free"
DEVICES: Final = {"gpu": "/dev/full", "nic": "/dev/random"}
"""The devices of a constrained site (`Spec.constrained`), which exist everywhere and which jobs do not need."""


def write(
    directory: Path,
    spec: Spec,
    geometry: Geometry,
    version: tuple[int, int],
    ports: Mapping[str, int],
    munge_socket: Path,
) -> None:
    """Write slurm.conf, gres.conf, the files they include, cgroup.conf and the Lua scripts to `directory`/etc.

    Raises:
        TestbedError: the site's slurm.conf (`spec.options`) is incompatible with migbatch.
    """
    etc = directory / "etc"
    values = {
        "name": spec.name,
        "host": socket.gethostname(),
        "hosts": [f"{name}({address})" for name, address in controllers(spec).items()],
        # a controller's own files: another directory on each
        "run": directory / ("local" if spec.backup else "run"),
        "log": directory / ("local" if spec.backup else "log"),
        "port": ports["slurmctld"],
        "ports": ports,
        "dbd_port": ports.get("slurmdbd"),
        "directory": directory,
        "munge_socket": munge_socket,
        "spec": spec,
        "options": {
            **(restd.options(directory) if spec.rest else {}),
            **(_CONSTRAINED if spec.constrained else {}),
            **spec.options,
        },
        "gres": ",".join(f"{name}:1" for name in DEVICES) if spec.constrained else "",
    }
    cgroups = site.render("cgroup.conf.j2", version=version, constrained=spec.constrained)
    texts = installed(spec, geometry, version, etc, site.render("testbed.conf.j2", bed=values), cgroups)
    texts[str(etc / "cgroup.conf")] = cgroups
    for path, text in texts.items():
        atomicfile.write(path, text.encode())
    for name, source in (("job_submit.lua", spec.job_submit), ("cli_filter.lua", spec.cli_filter)):
        if source and Path(source) != etc / name:
            shutil.copyfile(source, etc / name)


def installed(
    spec: Spec, geometry: Geometry, version: tuple[int, int], etc: Path, stock: str, cgroups: str = ""
) -> dict[str, str]:
    """Return slurm.conf, gres.conf and the files they include, by path, as `migbatch install` changes a stock
    slurm.conf; `cgroups`: the site's cgroup.conf.
    """
    names = ("slurm.conf", "gres.conf", "topology.conf", "cgroup.conf")
    main, gres, switches, cgroup = (str(etc / name) for name in names)
    devices = "".join(f"NodeName={','.join(spec.node_names)} Name={g} File={file}\n" for g, file in DEVICES.items())
    conf, gres_conf = load(main, {main: stock}.get), load(gres, {gres: devices if spec.constrained else ""}.get)
    topology = load(switches, {switches: spec.topology}.get) if spec.topology else None
    cgroup_conf = load(cgroup, {cgroup: cgroups}.get)
    plan = slurmedit.plan(described(spec, geometry, version), conf, gres_conf, spec.lending, topology, cgroup_conf)
    if plan.problems:
        raise TestbedError("; ".join(plan.problems))
    rendered = {str(etc / name): text for name, text in slurmedit.rendered(plan).items()}
    texts = {**conf.texts, **gres_conf.texts, **(topology.texts if topology else {})}
    return {**apply(texts, plan.edits), **rendered}


def controllers(spec: Spec) -> dict[str, str]:
    """Return the names of slurmctld's hosts with their addresses."""
    return {"mbctl1": "127.0.0.1", "mbctl2": "127.0.0.2"} if spec.backup else {socket.gethostname(): "127.0.0.1"}


def described(spec: Spec, geometry: Geometry, version: tuple[int, int]) -> site.Site:
    """Return the test bed as its nodes report it."""
    gpus = dict.fromkeys(spec.node_names, (geometry,) * spec.gpus)
    described_site = describe(gpus, version, catalog_names(spec), spec.lending)
    if spec.counts:
        extra = site.spare(version) if spec.lending else {}
        nodes = [
            replace(node, counts={**dict.fromkeys(node.counts, 0), **spec.counts, **extra})
            for node in described_site.nodes
        ]
        described_site = replace(described_site, nodes=nodes)
    return replace(
        described_site,
        gpu_devices=dict.fromkeys(spec.node_names, (DEVICES["gpu"],)),
        prolog=spec.hooks.prolog,
        epilog=spec.hooks.epilog,
        task_prolog=spec.hooks.task_prolog,
        hook_timeout=spec.hooks.timeout,
        primary_on=spec.hooks.primary_on,
        primary_off=spec.hooks.primary_off,
        job_submit=bool(spec.job_submit),
        cli_filter=bool(spec.cli_filter),
    )


def catalog_names(spec: Spec) -> str:
    """Return the host list of the catalog."""
    return CATALOG if spec.catalog_nodes == 1 else f"{CATALOG}[1-{spec.catalog_nodes}]"

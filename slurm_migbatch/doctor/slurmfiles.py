"""Check gres.conf, cgroup.conf and slurm.conf for MIG nodes, parsed like Slurm does."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Final

from slurm_migbatch.doctor.programs import unreadable
from slurm_migbatch.install import devices, scripts
from slurm_migbatch.install.catalogline import gres_entries, has_gres
from slurm_migbatch.install.files import read
from slurm_migbatch.install.hosts import CLI_FILTER
from slurm_migbatch.install.slurmconf import Conf, Line, load
from slurm_migbatch.node.findings import FAIL, OK, WARN, Finding
from slurm_migbatch.slurm.nodelist import expand_valid, fold

_DETECTS: Final = frozenset({"nvml", "full"})


def beside(conf: Conf, name: str) -> Conf:
    """Read a file beside slurm.conf; no lines if there is none."""
    return load(conf.beside(name), read)


def check_autodetect(gres_conf: Conf, nodes: Collection[str]) -> Iterator[Finding]:
    """Check that Slurm does not detect slices itself on MIG nodes."""
    default_line = next(
        (line for line in reversed(gres_conf.lines) if line.get("autodetect") and not line.get("nodename")), None
    )
    node_lines: dict[str, Line] = {}
    for line in gres_conf.lines:
        names, detect = line.get("nodename"), line.get("autodetect")
        if names and detect:
            node_lines.update(dict.fromkeys(expand_valid(names.value), line))
    detecting: dict[str, list[str]] = {}
    for node in sorted(nodes):
        setting = node_lines.get(node, default_line)
        detect = setting.get("autodetect") if setting else None
        if setting and detect and detect.value.lower() in _DETECTS:
            detecting.setdefault(f"{setting.place}: AutoDetect={detect.value}", []).append(node)
    for where, members in detecting.items():
        text = f"{where} counts the slices of {fold(members)} when slurmd starts, and drains the node when they change"
        advice = f"add to gres.conf: NodeName={fold(members)} AutoDetect=off (migbatch install --role controller does)"
        yield Finding(FAIL, "gres.conf", text, advice)
    if not detecting:
        yield Finding(OK, "gres.conf", "AutoDetect is off for MIG nodes")


def check_cloud_nodes(conf: Conf, shown: Mapping[str, str]) -> Iterator[Finding]:
    """Check that Slurm shows powered-down cloud nodes that have slices; by default it hides them from all commands.

    Args:
        shown: `scontrol show config`, keys in lower case.
    """
    if "cloud" in shown.get("privatedata", "").lower().split(","):
        return
    hidden = [
        name
        for _, values in conf.records("nodename")
        if values.get("state", "").upper() == "CLOUD" and has_gres(values, "mig")
        for name in expand_valid(values["nodename"])
    ]
    if hidden:
        text = f"{fold(hidden)}: Slurm hides State=CLOUD nodes that are powered down, so no slices are offered there"
        yield Finding(WARN, "PrivateData", text, "add cloud to PrivateData in slurm.conf, and run scontrol reconfigure")


def check_cgroup(
    conf: Conf, cgroup: Conf, gres_conf: Conf, node: str, *, whole: Collection[str], sliced: Collection[str]
) -> Iterator[Finding]:
    """Check who may open this node's GPUs. Slices are protected by the owners of their devices; whole GPUs by cgroups
    alone, which must not keep jobs from the GPUs of their slices.

    Args:
        whole, sliced: devices of the GPUs without slices of migbatch, and of those with them.
    """
    if devices.constrains(conf, cgroup):
        denied = sorted(set(devices.listed(gres_conf, node, _gres_of(conf, node))).intersection(sliced))
        if not denied:
            yield Finding(OK, "cgroup.conf", "ConstrainDevices=yes")
            return
        text = (
            f"with ConstrainDevices=yes a job can open {', '.join(denied)}, a device of gres.conf, only if Slurm has "
            "allocated the whole GPU to it: jobs with slices of that GPU cannot use them"
        )
        advice = (
            "run `migbatch install --role controller --edit` on the controller: it says, or changes, what the node may "
            "count as gpu in its Gres=; then restart slurmctld and slurmd"
        )
        yield Finding(FAIL, "cgroup.conf", text, advice)
    elif whole and "gpu" in _gres_of(conf, node):
        shown = ", ".join(sorted(whole))
        text = f"devices are not constrained: every job can open {shown}, which Slurm allocates as whole GPUs"
        advice = "set TaskPlugin=task/cgroup in slurm.conf and ConstrainDevices=yes in cgroup.conf, and list only these"
        yield Finding(FAIL, "cgroup.conf", text, f"{advice} by File= in gres.conf")
    else:
        text = "Slurm constrains no devices; slices are protected by the owners of theirs"
        yield Finding(OK, "cgroup.conf", text)


def _gres_of(conf: Conf, node: str) -> set[str]:
    """Return the names of the GRES that slurm.conf counts on a node."""
    return {
        entry.name
        for _, values in conf.records("nodename")
        if node in expand_valid(values["nodename"])
        for _, entry in gres_entries(values)
        if entry.count
    }


def check_cli_filter(conf: Conf) -> Iterator[Finding]:
    """Check that every srun of this host finds the script that slurm.conf makes it load."""
    plugins = scripts.plugins(conf.value("CliFilterPlugins"))
    if "lua" not in plugins:
        return
    path = str(Path(conf.main).with_name(CLI_FILTER))
    text = read(path)
    closed = unreadable(path, None) if text is not None else ""
    if text is None:
        problem = f"{path} is missing: every srun, salloc and sbatch of this host fails"
        yield Finding(FAIL, CLI_FILTER, problem, f"copy the controller's {path} here")
    elif closed:
        problem = f"users cannot read it, and their srun, salloc and sbatch fail: {closed}"
        yield Finding(FAIL, CLI_FILTER, problem, f"chmod a+r {path}")
    elif text == scripts.DOES_NOTHING:
        problem = f"{path} changes nothing: srun and salloc with mig:auto or --gpus are refused from this host"
        yield Finding(WARN, CLI_FILTER, problem, f"copy the controller's {path} here")
    elif (module := scripts.loaded(text, scripts.BESIDE[CLI_FILTER])) and read(module) is None:
        skipped = "pcall(dofile" in text
        effect = (
            "srun and salloc with mig:auto or --gpus are refused" if skipped else "every srun, salloc and sbatch fails"
        )
        problem = f"{path} loads {module}, which is missing: {effect} on this host"
        yield Finding(WARN if skipped else FAIL, CLI_FILTER, problem, f"copy the controller's {module} here")
    else:
        yield Finding(OK, CLI_FILTER, path)

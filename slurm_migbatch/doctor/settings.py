"""Check slurmctld's settings, by `scontrol show config`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import ceil

from slurm_migbatch.install.scripts import plugins
from slurm_migbatch.node import fallback
from slurm_migbatch.node.config import NodeConfig
from slurm_migbatch.node.findings import FAIL, OK, WARN, Finding

TIMEOUT = "PrologEpilogTimeout"
#: Slurm's "no limit"
_NO_LIMIT = 65534
_EDIT = "migbatch install --role controller --apply --edit"


def check_slurm_conf(conf: Mapping[str, str]) -> Iterator[Finding]:
    """Check that slurmctld runs with what migbatch needs."""
    types = conf.get("grestypes", "").split(",")
    missing = [word for word in ("mig", "gpu") if word not in types]
    if "mig" in missing:
        yield Finding(FAIL, "GresTypes", "does not include mig", f"set GresTypes=gpu,mig ({_EDIT})")
    elif missing:
        yield Finding(
            WARN, "GresTypes", "does not include gpu", "without it, Slurm refuses --gpus before the submit filter runs"
        )
    else:
        yield Finding(OK, "GresTypes", conf["grestypes"])
    select = conf.get("selecttype", "")
    if select and not select.endswith("cons_tres"):  # without a line in slurm.conf it is select/linear on 22.05
        advice = "set SelectType=select/cons_tres, and restart slurmctld and every slurmd; Slurm loses all jobs by that"
        yield Finding(FAIL, "SelectType", f"is {select}: slices need select/cons_tres", advice)
    listed = conf.get("jobsubmitplugins", "")
    if "lua" in plugins(listed):
        yield Finding(OK, "JobSubmitPlugins", listed)
    else:
        yield Finding(FAIL, "JobSubmitPlugins", "lua is not loaded", "set JobSubmitPlugins=lua and restart slurmctld")
    for key in ("Prolog", "Epilog", "TaskProlog"):
        value = next((v for k, v in conf.items() if re.fullmatch(rf"{key.lower()}(\[\d+\])?", k) and v), "")
        if value:
            yield Finding(OK, key, value)  # its effect is checked on the nodes, which have it
        else:
            yield Finding(FAIL, key, "is not set: no job gets a slice", f"{_EDIT}, then restart every slurmd")
    yield from _prolog_flags(conf)
    yield from check_timeouts(conf, NodeConfig("", "", "", ""))
    if conf.get("jobrequeue") == "0":
        yield Finding(
            WARN, "JobRequeue", "is 0", "jobs cannot be requeued after a misfit or a GPU failure; set JobRequeue=1"
        )
    tracking = conf.get("proctracktype", "")
    if tracking and not tracking.endswith("cgroup"):
        text = f"is {tracking}: what leaves its process group or parent outlives the job, and keeps its slice"
        yield Finding(WARN, "ProctrackType", text, "set ProctrackType=proctrack/cgroup and restart every slurmd")
    if conf.get("accountingstoragetype", "").endswith("slurmdbd") and "gres/mig" not in conf.get(
        "accountingstoragetres", ""
    ):
        advice = "add gres/mig (and gres/mig:<profile> for each profile) for fairshare and sreport"
        yield Finding(WARN, "AccountingStorageTRES", "does not include slices", advice)


def _prolog_flags(conf: Mapping[str, str]) -> Iterator[Finding]:
    key = "PrologFlags"
    present = conf.get("prologflags", "")
    flags = {word.strip().lower() for word in present.split(",")}
    problems = []
    if not flags & {"alloc", "contain"}:
        text = "has no Alloc, so nodes without a first step get no slices"
        problems.append((text, f"add Alloc,DeferBatch to it ({_EDIT})"))
    if "deferbatch" not in flags:
        text = "has no DeferBatch: batch scripts start before the slices of all their nodes exist"
        problems.append((text, f"add it ({_EDIT})"))
    if "serial" in flags:
        text = "has Serial: the hooks of a node run one at a time and may exceed their time limit"
        problems.append((text, "remove Serial from slurm.conf"))
    if "runinjob" in flags:
        text = "has RunInJob: the Prolog runs inside the job's cgroup and cannot create slices"
        problems.append((text, "remove RunInJob from slurm.conf"))
    for text, advice in problems:
        change = f"{advice}, then restart slurmctld and every slurmd"
        yield Finding(FAIL, key, f"{present or 'none'}: {text}", change)
    if not problems:
        yield Finding(OK, key, present)


def check_timeouts(conf: Mapping[str, str], node: NodeConfig) -> Iterator[Finding]:
    """Check that slurmd waits until hooks with this configuration have ended by themselves; else it drains the node."""
    needed: dict[str, float] = {}
    for hook in ("prolog", "epilog"):  # from 25.05 on each hook may have its own
        key = f"{hook.capitalize()}Timeout"
        key = key if key.lower() in conf else TIMEOUT
        needed[key] = max(needed.get(key, 0.0), fallback.longest(node, hook))
    for key in sorted(needed):
        match = re.match(r"\d+", conf.get(key.lower(), ""))
        limit = int(match[0]) if match else _NO_LIMIT
        if limit < needed[key]:
            text = f"slurmd kills hooks after {limit} s, and they may take {needed[key]:g} s if the driver hangs"
            advice = f"set it to at least {max(60, ceil(needed[key]))}, or lower HookDeadline in node.conf"
            yield Finding(FAIL, key, text, advice)
        else:
            yield Finding(OK, key, "unlimited" if limit == _NO_LIMIT else f"{limit} s")

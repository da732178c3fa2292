"""Check weights and limits of GPUs (`gres/gpu`) that do not count slices (`gres/mig`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Final

from slurm_migbatch.node.findings import UNKNOWN, WARN, Finding
from slurm_migbatch.slurm.client import SlurmError

_LIMITS: Final = ("GrpTRES", "GrpTRESMins", "GrpTRESRunMins", "MaxTRES", "MaxTRESPerNode", "MaxTRESMins")
_QOS_LIMITS: Final = (*_LIMITS, "MaxTRESPU", "MaxTRESPA", "MaxTRESRunMinsPU", "MaxTRESRunMinsPA", "MinTRES")
_SHOWN: Final = 5


def check_weights(
    partitions: Mapping[str, Mapping[str, str]], served: Collection[str], conf: Mapping[str, str]
) -> Iterator[Finding]:
    """Check what jobs on the partitions `served`, which have MIG nodes, are billed, and the priority by size.

    Args:
        partitions: words of `scontrol show partition`, by name.
        conf: `scontrol show config`, keys in lower case.
    """
    unbilled = [name for name in sorted(served) if _no_slices(partitions.get(name, {}).get("TRESBillingWeights", ""))]
    if unbilled:
        text = f"TRESBillingWeights of {', '.join(unbilled)} has gres/gpu only: jobs with slices are billed no GPU"
        advice = "add gres/mig:PROFILE= for each profile, for example 3/7 of the weight of a GPU for 3g.40gb"
        yield Finding(WARN, "billing", text, advice)
    if _no_slices(conf.get("priorityweighttres", "")):
        text = "PriorityWeightTRES has gres/gpu only: jobs with slices get no priority for them"
        yield Finding(WARN, "billing", text, "add a weight of gres/mig to it")


def check_limits(conf: Mapping[str, str], show: Callable[..., str]) -> Iterator[Finding]:
    """Check the limits of QOS and associations that Slurm enforces.

    Args:
        conf: `scontrol show config`, keys in lower case.
        show: returns what `sacctmgr -n -P show` prints, for its further arguments. Raises SlurmError.
    """
    enforced = {word.strip() for word in conf.get("accountingstorageenforce", "").lower().split(",")}
    if not enforced & {"limits", "safe", "all"}:
        return
    columns = f"format=Account,User,Partition,{','.join(_LIMITS)}"
    try:
        qos = _rows(show("qos", f"format=Name,{','.join(_QOS_LIMITS)}"), _QOS_LIMITS)
        # WOPLimits: otherwise the limits of an account are shown for each of its users too
        shown = show("associations", "WOPLimits", f"clusters={conf.get('clustername', '')}", columns)
    except SlurmError as error:
        yield Finding(UNKNOWN, "limits", str(error), "check that slurmdbd runs, and that sacctmgr reaches it")
        return
    associations = _rows(shown, _LIMITS)
    least = [name for name, limits in qos if "MinTRES" in limits]
    if least:
        text = f"MinTRES of QOS {_listed(least)} demands gres/gpu: jobs with slices stay pending (QOSMinGRES)"
        advice = "clear it for each QOS that is used on MIG nodes: sacctmgr modify qos NAME set MinTRES=gres/gpu=-1"
        yield Finding(WARN, "limits", text, advice)
    named = [*((f"QOS {name}", limits) for name, limits in qos), *associations]
    others = [f"{name} ({', '.join(found)})" for name, limits in named if (found := sorted(limits - {"MinTRES"}))]
    if others:
        text = f"limits of gres/gpu do not count slices: {_listed(others)}"
        yield Finding(WARN, "limits", text, "set limits of gres/mig or gres/mig:PROFILE beside them with sacctmgr")


def _no_slices(tres: str) -> bool:
    """Return whether a list of TRES, "cpu=1,gres/gpu=2", counts GPUs and no slices."""
    return "gres/gpu" in _names(tres) and "gres/mig" not in _names(tres)


def _names(tres: str) -> set[str]:
    return {entry.partition("=")[0].strip().lower().partition(":")[0] for entry in tres.split(",")}


def _rows(shown: str, limits: Sequence[str]) -> list[tuple[str, set[str]]]:
    """Return the rows that limit GPUs only: the name, and its limits that do; `limits`: the last columns."""
    rows = []
    for line in shown.splitlines():
        words = line.split("|")
        name, values = "/".join(filter(None, words[: -len(limits)])), words[-len(limits) :]
        tres = dict(zip(limits, values, strict=False))
        found = {limit for limit, value in tres.items() if _no_slices(value)}
        if "gres/gpu" in _names(tres.get("MinTRES", "")):
            found.add("MinTRES")  # each of several minimums must be met
        if found:
            rows.append((name, found))
    return rows


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"

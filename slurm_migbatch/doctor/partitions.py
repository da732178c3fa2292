"""Check what keeps slices of MIG nodes from jobs: partitions that give a job the whole node, reservations of slices."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Final

from slurm_migbatch.node.findings import OK, WARN, Finding
from slurm_migbatch.slurm import gpu_defaults
from slurm_migbatch.slurm.fields import fields_of

_UNSET: Final = frozenset({"", "0", "UNLIMITED"})


def check_partitions(
    partitions: Mapping[str, Mapping[str, str]], served: Collection[str], conf: Mapping[str, str]
) -> Iterator[Finding]:
    """Check the partitions `served`, which have MIG nodes.

    Args:
        partitions: words of `scontrol show partition`, by name.
        conf: `scontrol show config`, keys in lower case.
    """
    exclusive = [name for name in sorted(served) if _exclusive_by(partitions.get(name, {}))]
    greedy = [name for name in sorted(served) if name not in exclusive and _takes_all_memory(partitions, name, conf)]
    if exclusive:
        settings = dict.fromkeys(_exclusive_by(partitions[name]) for name in exclusive)
        text = f"{', '.join(exclusive)}: {', '.join(settings)} gives each job whole nodes, however small its slice is"
        yield Finding(WARN, "partitions", text, "remove it, or put the MIG nodes into a partition without it")
    if greedy:
        text = f"{', '.join(greedy)}: a job without --mem gets all memory of its node, so no second job fits there"
        yield Finding(WARN, "partitions", text, "set DefMemPerCPU= for them in slurm.conf, and scontrol reconfigure")
    if served and not exclusive and not greedy:
        yield Finding(OK, "partitions", "jobs can share MIG nodes")


def check_reservations(shown: str) -> Iterator[Finding]:
    """Check that no reservation holds slices instead of nodes; `shown`: `scontrol --oneliner show reservation`."""
    for values in map(fields_of, shown.splitlines()):
        if "gres/mig" in values.get("TRES", ""):
            name = values.get("ReservationName", "")
            text = f"{name} holds slices (TRES={values['TRES']}), which migbatchd may offer as other profiles"
            yield Finding(WARN, "reservations", text, "reserve whole nodes and a catalog node instead (Nodes=)")


def _exclusive_by(words: Mapping[str, str]) -> str:
    """Return the setting of a partition that gives each job whole nodes, as 26.05 and older releases show it."""
    settings = {"OverSubscribe": "EXCLUSIVE", "Exclusive": "NODE"}
    return next((f"{key}={value}" for key, value in settings.items() if words.get(key) == value), "")


def _takes_all_memory(partitions: Mapping[str, Mapping[str, str]], name: str, conf: Mapping[str, str]) -> bool:
    """Return whether memory is allocated to jobs, and neither the partition nor the cluster has a default for it."""
    words = partitions.get(name, {})
    if gpu_defaults.read(words.get("JobDefaults", ""), gpu_defaults.read(conf.get("jobdefaults", ""))).memory_mib:
        return False  # jobs with slices get their share of it
    own = words.get("SelectTypeParameters", "NONE")
    parameters = conf.get("selecttypeparameters", "") if own == "NONE" else own
    limits = [words.get(key, "") for key in ("DefMemPerCPU", "DefMemPerNode")]
    limits += [conf.get(key, "") for key in ("defmempercpu", "defmempernode")]
    return bool(words) and "MEMORY" in parameters.upper() and _UNSET.issuperset(limits)

"""Check that the catalog's lines in slurm.conf allow every request that some node could serve to pend."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from slurm_migbatch.install.slurmconf import Conf
from slurm_migbatch.install.slurmedit import catalog_lacks
from slurm_migbatch.node.findings import BAD, GOOD, UNKNOWN, Finding
from slurm_migbatch.slurm.nodelist import NodeListError

_WHY = {
    "NodeAddr": "slurmctld looks its name up, and does not start where that is unknown",
    "Features": "--constraint",
    "RealMemory": "--mem",
    "TmpDisk": "--tmp",
    "Gres": "another --gres beside mig",
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
        yield Finding(BAD, "catalog", f"{catalog} lacks {key}: {text}", advice)
    if not lacking:
        yield Finding(GOOD, "catalog", f"{catalog} has an address, and the size and features of the MIG nodes")

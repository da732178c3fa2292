"""Parse what jobs get for each GPU that they request: DefCpuPerGPU and DefMemPerGPU of slurm.conf and its partitions.

Slurm applies these to gres/gpu only, so the submit filter applies them to slices (`submit.per_gpu`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from slurm_migbatch.slurm.fields import fields_of
from slurm_migbatch.slurm.settings import CONFIG_COMMAND, PARTITIONS_COMMAND

COMMANDS: Final = (PARTITIONS_COMMAND, CONFIG_COMMAND)
"""Commands whose output `parse` reads, in this order."""
_OF_CLUSTER: Final = re.compile(r"^JobDefaults\s*=\s*(\S+)", re.MULTILINE)


@dataclass(frozen=True)
class GpuDefaults:
    """CPUs, and memory in MiB, that a job gets for each GPU if it does not request them; 0: no default."""

    cpus: int = 0
    memory_mib: int = 0


NO_DEFAULTS: Final = GpuDefaults()


def parse(partitions: str, config: str) -> dict[str, GpuDefaults]:
    """Return the defaults of each partition that has any: its own, else those of the cluster."""
    cluster = _OF_CLUSTER.search(config)
    general = read(cluster[1]) if cluster else NO_DEFAULTS
    found = {}
    for record in partitions.splitlines():
        words = fields_of(record)
        own = read(words.get("JobDefaults", ""), general)
        if own != NO_DEFAULTS and words.get("PartitionName"):
            found[words["PartitionName"]] = own
    return found


def read(text: str, general: GpuDefaults = NO_DEFAULTS) -> GpuDefaults:
    """Return the defaults in a value of JobDefaults; `general`: for what it does not set."""
    values = {key.lower(): value for key, _, value in (word.partition("=") for word in text.split(","))}

    def number(key: str, default: int) -> int:
        text = values.get(key, "")
        return int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else default

    return GpuDefaults(number("defcpupergpu", general.cpus), number("defmempergpu", general.memory_mib))

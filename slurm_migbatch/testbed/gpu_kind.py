"""What the simulated GPUs of a node offer, as their driver says (nothing here is a table)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slurm_migbatch.site import WAITING

from .errors import TestbedError

FILLER = "none"

# In a process of its own: a loaded driver library stays, and this process may read machines in other directories.
_ASK = """
import json, sys
from slurm_migbatch.mig.nvml import NvmlDriver
driver = NvmlDriver(sys.argv[1])
geometry = driver.gpus()[0].geometry()
most = {info.profile.gres_type: info.max_instances for info in geometry.profiles}
print(json.dumps({"most": most, "slots": geometry.max_slots}))
driver.close()
"""


@dataclass(frozen=True)
class SimulatedGpuKind:
    """One GPU model.

    Attributes:
        most: profile in GRES spelling -> how many instances of it fit on one GPU.
        slots: how many slices fit at most (the constant K per GPU).
    """

    most: Mapping[str, int]
    slots: int

    def catalog(self, gpus: int) -> dict[str, int]:
        """Counts of the catalog node: the most that a node with `gpus` GPUs could ever offer of each profile."""
        return {**{profile: count * gpus for profile, count in self.most.items()}, FILLER: 0, **WAITING}

    def base(self, gpus: int) -> dict[str, int]:
        """Counts of slurm.conf for a node: the smallest slices everywhere, which can be placed on empty GPUs."""
        smallest = next(profile for profile, count in self.most.items() if count == self.slots)
        return {**dict.fromkeys([*self.most, FILLER], 0), smallest: self.slots * gpus}


def ask(library: Path) -> SimulatedGpuKind:
    """Return the model of the first GPU that the NVML library `library` shows.

    Raises:
        TestbedError: it shows none.
    """
    done = subprocess.run([sys.executable, "-c", _ASK, str(library)], check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise TestbedError(f"{library} shows no GPU: {done.stderr.strip().splitlines()[-1:]}")
    data = json.loads(done.stdout)
    return SimulatedGpuKind(data["most"], data["slots"])

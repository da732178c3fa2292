"""Read the geometry of a simulated GPU from its driver."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from slurm_migbatch.mig.geometry import Geometry

from .errors import TestbedError

# In a separate process: a driver library stays loaded, and this process may read machines in other directories.
_ASK = """
import json, sys
from slurm_migbatch.mig.nvml import NvmlDriver
driver = NvmlDriver(sys.argv[1])
print(json.dumps(driver.gpus()[0].geometry().to_dict()))
driver.close()
"""


def ask(library: Path) -> Geometry:
    """Return the geometry of the first GPU that the NVML library `library` lists.

    Raises:
        TestbedError: it lists none.
    """
    done = subprocess.run([sys.executable, "-c", _ASK, str(library)], check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise TestbedError(f"{library} shows no GPU: {done.stderr.strip().splitlines()[-1:]}")
    return Geometry.from_dict(json.loads(done.stdout))

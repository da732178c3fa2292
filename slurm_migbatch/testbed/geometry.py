"""Read the geometry of a simulated GPU from its driver."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
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


def ask(library: Path, run: Callable[[Sequence[str]], str]) -> Geometry:
    """Return the geometry of the first GPU that the NVML library `library` lists.

    `run` runs a command in the test bed's process group and returns its output. An interrupt while the command is being
    started leaves it running; as a member of the group it ends with the test bed.

    Raises:
        TestbedError: it lists none.
    """
    try:
        output = run([sys.executable, "-c", _ASK, str(library)])
    except TestbedError as error:
        raise TestbedError(f"{library} shows no GPU: {str(error).splitlines()[-1]}") from error
    return Geometry.from_dict(json.loads(output))

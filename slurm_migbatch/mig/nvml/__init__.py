"""Access GPUs and their MIG instances through NVML; the only importer of pynvml (from the package nvidia-ml-py).

Pitfalls of NVML, and how they are handled:

- The enum that requests a profile's description is not the profile's id. All other calls take the id it returns.
- Placement is always explicit. The driver's own choice differs between models and causes fragmentation.
- INSUFFICIENT_RESOURCES means "blocked" or "exactly this instance exists"; only a listing distinguishes them.
- Ids of instances are reused, so before an instance is changed its profile and place are compared with the expected
  ones.
- A compute instance may be destroyed while its GPU instance still reports "in use"; both orders of failure are handled.
- The UUID is read from the handle in the compute instance's info: walking or looking up MIG devices takes seconds on a
  busy node. If that handle is the GPU's, as nvml.h describes it, they are walked.
- Several compute profiles may have as many slices as the GPU instance; the one that makes it whole has all its SMs.
"""

from __future__ import annotations

from slurm_migbatch.mig.nvml.driver import NvmlDriver
from slurm_migbatch.mig.nvml.gpu import NvmlGpu

__all__ = ["NvmlDriver", "NvmlGpu"]

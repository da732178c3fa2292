"""GPUs and their MIG instances through NVML; the only importer of pynvml (from the package nvidia-ml-py).

What NVML makes easy to get wrong, and what is done here:

- The enum that asks for a profile's description is not the profile's id. Everything else takes the id it returns.
- Placement is always explicit. The driver's own choice differs between models and fragments.
- INSUFFICIENT_RESOURCES means "blocked" or "this very instance exists"; only a listing tells which.
- Ids of instances are reused, so before an instance is touched its profile and place are compared with what was meant.
- A compute instance may be gone while its GPU instance still says "in use"; both orders of failure are survived.
- The UUID is asked of the handle in the compute instance's info: walking or looking up MIG devices takes seconds on a
  busy node. Where that handle turns out to be the GPU's, as nvml.h has it, they are walked all the same.
- Several compute profiles may have as many slices as the GPU instance; the one that makes it whole has all its SMs.
"""

from __future__ import annotations

from slurm_migbatch.mig.nvml.driver import NvmlDriver
from slurm_migbatch.mig.nvml.gpu import NvmlGpu

__all__ = ["NvmlDriver", "NvmlGpu"]

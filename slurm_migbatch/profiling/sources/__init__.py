"""List the laboratories whose published folders can be imported directly, recognised by their headers."""

from __future__ import annotations

from slurm_migbatch.profiling.sources import migperf, miso, parvagpu
from slurm_migbatch.profiling.sources.laboratory import Laboratory, Reading

LABORATORIES: tuple[Laboratory, ...] = (parvagpu.LABORATORY, migperf.LABORATORY, miso.LABORATORY)
"""In the order in which they are tried."""

__all__ = ["LABORATORIES", "Laboratory", "Reading"]

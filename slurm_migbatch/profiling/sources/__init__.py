"""Laboratories whose published folders are understood as they are, each told by the headers of its files."""

from __future__ import annotations

from slurm_migbatch.profiling.sources import migperf, miso, parvagpu
from slurm_migbatch.profiling.sources.laboratory import Laboratory, Reading

LABORATORIES: tuple[Laboratory, ...] = (parvagpu.LABORATORY, migperf.LABORATORY, miso.LABORATORY)
"""In the order in which they are asked whether a file is theirs."""

__all__ = ["LABORATORIES", "Laboratory", "Reading"]

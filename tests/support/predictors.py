"""Compute the figures of many cells from those of single cells, for predictors of tests."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.predict.candidate import Figures
from slurm_migbatch.predict.cells import Array
from slurm_migbatch.predict.sheet import Block
from slurm_migbatch.workload.buckets import Bucket, Grid
from slurm_migbatch.workload.catalog import GpuKind


class ByCells:
    """A predictor that implements only `figures` and `grids`."""

    def grids(self) -> Mapping[str, Grid]:
        raise NotImplementedError

    def figures(self, cell: Bucket, kind: GpuKind) -> Mapping[Profile, Figures]:
        raise NotImplementedError

    def sheet(self, block: Block, kind: GpuKind) -> Array:
        plain = [info.profile for info in kind.geometry.profiles if not info.profile.suffix]
        values = np.full((3, 3, len(block), len(plain)), np.nan)
        unit = self.grids()[block.model].unit
        cells = (Bucket(block.model, block.role, batch, size, unit) for batch in block.batches for size in block.inputs)
        for number, cell in enumerate(cells):
            figures = self.figures(cell, kind)
            for column, profile in enumerate(plain):
                if (known := figures.get(profile)) is not None:
                    intervals = known.latency_s, known.throughput_per_s, known.memory_mib
                    values[:, :, number, column] = [interval.to_list() for interval in intervals]
        return values

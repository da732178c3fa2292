"""What can be counted on in many cells of one model at once, in the whole numbers of `candidate.Figures`.

The compiled table holds these numbers for every cell, and the choice of a batch (`sizing`) compares some of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.predict.candidate import MOST_MIB, NEED_BITS, Predictor
from slurm_migbatch.predict.cells import Array
from slurm_migbatch.predict.rightsize import Counted, Ladder
from slurm_migbatch.workload.buckets import R20, Bucket
from slurm_migbatch.workload.catalog import GpuKind, Partition

Codes = npt.NDArray[np.int64]

SCALE: Final = np.array([*range(100), *(number * 10**decade for decade in range(13) for number in R20)], dtype=float)
"""The preferred numbers by code: 0 to 99 themselves, then twenty to a decade."""


@dataclass(frozen=True)
class Block:
    """Cells of one model and kind of work: each of the batches, and within it each of the inputs."""

    model: str
    role: str
    unit: str
    batches: Sequence[int]
    inputs: Sequence[int]

    def __len__(self) -> int:
        return len(self.batches) * len(self.inputs)


@runtime_checkable
class Sheets(Protocol):
    """A predictor that predicts all cells of a block at once, which may be far quicker than one after the other."""

    def sheet(self, block: Block, kind: GpuKind) -> Mapping[Profile, tuple[Array, Array, Array]]:
        """Return the numbers of `figures` for each plain profile and cell.

        They are seconds of a batch (upper end), items per second (lower end) and MiB (upper end).
        """
        ...


def sheet_of(predictor: Predictor, block: Block, kind: GpuKind) -> tuple[Array, Array, Array]:
    """Return the seconds, items per second and MiB to count on, cells x plain profiles.

    Not a number where nothing is known.
    """
    plain = [info.profile for info in kind.geometry.profiles if not info.profile.suffix]
    found = np.full((3, len(block), len(plain)), np.nan)
    if isinstance(predictor, Sheets):
        for profile, columns in predictor.sheet(block, kind).items():
            found[:, :, plain.index(profile)] = columns
        return found[0], found[1], found[2]
    cells = (
        Bucket(block.model, block.role, batch, size, block.unit) for batch in block.batches for size in block.inputs
    )
    for number, cell in enumerate(cells):
        figures = predictor.figures(cell, kind)
        for place, profile in enumerate(plain):
            if (known := figures.get(profile)) is not None:
                bounds = known.latency_s.high, known.throughput_per_s.low, known.memory_mib.high
                found[:, number, place] = bounds
    return found[0], found[1], found[2]


def latency_codes(seconds: Array) -> Codes:
    """Return the codes of `Figures.latency_us`."""
    codes: Codes = np.searchsorted(SCALE, np.ceil(seconds * 1e6), "left").clip(max=len(SCALE) - 1)
    return codes


def rate_codes(per_second: Array) -> Codes:
    """Return the codes of `Figures.rate`."""
    codes: Codes = np.searchsorted(SCALE, np.floor(per_second * 1e3), "right") - 1
    return codes


def needs_mib(mib: Array) -> Codes:
    """Return `Figures.need_mib`."""
    need = np.ceil(mib).clip(max=MOST_MIB).astype(np.int64)
    step = np.maximum(1, 2.0 ** (np.floor(np.log2(np.maximum(need, 1))) - NEED_BITS)).astype(np.int64)
    rounded: Codes = -(-need // step) * step
    return rounded


def ladder_of(predictor: Predictor, block: Block, partition: Partition) -> Ladder:
    """Return what can be counted on of each plain profile of a partition at each batch of a block with one input size.

    Where several kinds of GPUs have a profile the worst counts, and what is not known of all of them is missing.
    """
    by_kind = [(kind, _counted(predictor, block, kind)) for kind in partition.kinds]
    ladder: dict[int, dict[str, Counted]] = {batch: {} for batch in block.batches}
    for offer in partition.plain:
        name = offer.profile.gres_type
        columns = [columns[name] for kind, columns in by_kind if offer.profile in kind.geometry]
        for batch, cells in zip(block.batches, zip(*columns, strict=True), strict=True):
            known = [cell for cell in cells if cell is not None]
            if len(known) == len(cells):
                latencies, rates, sizes = zip(*known, strict=True)
                ladder[batch][name] = Counted(max(latencies), min(rates), max(sizes))
    return ladder


def _counted(predictor: Predictor, block: Block, kind: GpuKind) -> Mapping[str, Sequence[Counted | None]]:
    """Return what can be counted on in each cell of a block, by GRES type; None where nothing is known."""
    seconds, per_second, mib = sheet_of(predictor, block, kind)
    known = ~np.isnan(seconds)
    latency = SCALE[latency_codes(np.where(known, seconds, 0.0))]
    rate = SCALE[rate_codes(np.where(known, per_second, 0.0))]
    numbers = np.stack([latency, rate, needs_mib(np.where(known, mib, 0.0))], axis=2).astype(np.int64).tolist()
    plain = [info.profile.gres_type for info in kind.geometry.profiles if not info.profile.suffix]
    return {
        name: [
            Counted(*row[place]) if there[place] else None for row, there in zip(numbers, known.tolist(), strict=True)
        ]
        for place, name in enumerate(plain)
    }

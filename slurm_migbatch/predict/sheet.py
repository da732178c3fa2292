"""Predict many cells of one model at once, with conservative figures in the integers of `candidate.Figures`.

The compiled table holds these integers for every cell, and the choice of a batch (`rightsize`) compares some of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from slurm_migbatch.predict.candidate import MOST_MIB, NEED_BITS, Figures, Interval
from slurm_migbatch.predict.cells import Array
from slurm_migbatch.workload.buckets import R20
from slurm_migbatch.workload.catalog import Partition

if TYPE_CHECKING:
    from slurm_migbatch.predict.learned import LearnedPredictor

Codes = npt.NDArray[np.int64]

SCALE: Final = np.array([*range(100), *(number * 10**decade for decade in range(13) for number in R20)], dtype=float)
"""The preferred numbers by code: 0 to 99 themselves, then twenty to a decade."""


@dataclass(frozen=True)
class Block:
    """Cells of one model and kind of work: each of the batches, and within it each of the inputs."""

    model: str
    role: str
    batches: Sequence[int]
    inputs: Sequence[int]

    def __len__(self) -> int:
        return len(self.batches) * len(self.inputs)


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


class Counted(NamedTuple):
    """Conservative figures of a slice at one batch, rounded as in `candidate.Figures`."""

    latency_us: int
    rate: int
    need_mib: int


@dataclass(frozen=True)
class Ladder:
    """Predictions at ascending batches of one model and input size, on slices by GRES type.

    `numbers`: slices x figures x ends x batches, the figures and ends of `LearnedPredictor.sheet`.
    """

    batches: tuple[int, ...]
    names: tuple[str, ...]
    numbers: Array

    @cached_property
    def _known(self) -> Array:
        return ~np.isnan(self.numbers[:, 0, 2])

    @cached_property
    def _counted(self) -> Mapping[str, Sequence[Sequence[int]]]:
        """Three integers for each batch, by slice; 0 if unknown."""
        numbers = np.where(self._known[:, None, None], self.numbers, 0.0)
        latency, rate = SCALE[latency_codes(numbers[:, 0, 2])], SCALE[rate_codes(numbers[:, 1, 0])]
        rounded = np.stack([latency, rate, needs_mib(numbers[:, 2, 2])], axis=2).astype(np.int64)
        return dict(zip(self.names, rounded.tolist(), strict=True))

    def on(self, name: str) -> Iterator[tuple[int, Counted]]:
        """Yield each batch with a prediction on a slice, ascending, with its conservative figures."""
        if name in self.names:
            known = self._known[self.names.index(name)].tolist()
            for batch, numbers, is_known in zip(self.batches, self._counted[name], known, strict=True):
                if is_known:
                    yield batch, Counted(*numbers)

    def figures(self, batch: int) -> Mapping[str, Figures]:
        """Return the figures at one batch by GRES type; unknown ones are missing."""
        index = self.batches.index(batch)
        rows = self.numbers[..., index].tolist()
        return {
            name: Figures(*(Interval(*ends) for ends in row))
            for name, row, is_known in zip(self.names, rows, self._known[:, index].tolist(), strict=True)
            if is_known
        }


def ladder_of(predictor: LearnedPredictor, block: Block, partition: Partition) -> Ladder:
    """Return predictions of each plain profile of a partition at each batch of a block with one input size.

    If several kinds of GPUs have a profile the worst counts (`Figures.worst`); without predictions for all of them
    it is unknown.
    """
    by_profile: dict[str, Array] = {}
    for kind in partition.kinds:
        sheet = predictor.sheet(block, kind)
        plain = [info.profile.gres_type for info in kind.geometry.profiles if not info.profile.suffix]
        for index, name in enumerate(plain):
            column = sheet[..., index]
            by_profile[name] = _worst(by_profile[name], column) if name in by_profile else column
    return Ladder(tuple(block.batches), tuple(by_profile), np.stack(list(by_profile.values())))


def _worst(one: Array, other: Array) -> Array:
    result: Array = np.maximum(one, other)
    result[:, 0] = np.minimum(one[:, 0], other[:, 0])
    result[1, 1] = np.minimum(one[1, 1], other[1, 1])
    return result

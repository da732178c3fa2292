"""Represent one sample's points of one process as plain columns, the input of simple rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.predict.cells import Array
from slurm_migbatch.predict.samples import Sample
from slurm_migbatch.profiling.measurement import Measurement


@dataclass(frozen=True)
class MeasuredCurves:
    """Columns of equal length, one entry for each cell of one process that ran.

    `index` is the cell's place in the sample; `share` the slice's share of the GPU (1 for the whole); `slices` its
    compute slices; `work` an item's operations against one of the sample's usual input size; `size` its input size (0
    where the table names none); `seconds` those of a batch.
    """

    sample: Sample
    index: npt.NDArray[np.intp]
    batch: Array
    share: Array
    slices: Array
    work: Array
    size: Array
    seconds: Array

    @classmethod
    def of(cls, sample: Sample) -> MeasuredCurves:
        """Return the curves of a sample."""
        cells = sample.cells
        index = np.flatnonzero(cells.procs == 1) if len(cells) else np.zeros(0, dtype=np.intp)
        rows = [sample.rows[i] for i in index]
        work = cells.work[index]
        whole = 4.0 if sample.gpu.facts.memory_slices == 4 else 7.0
        return cls(
            sample,
            index,
            cells.batch[index],
            cells.sm[index],
            np.array([compute_slices(row, whole) for row in rows]),
            work / np.median(work) if len(work) else work,
            np.array([float(row.input_size or 0) for row in rows]),
            np.exp(sample.logs[index]),
        )

    def __len__(self) -> int:
        return len(self.index)

    def take(self, places: npt.NDArray[np.intp]) -> MeasuredCurves:
        """Return the points at `places`."""
        columns = (self.batch, self.share, self.slices, self.work, self.size, self.seconds)
        return MeasuredCurves(self.sample, self.index[places], *(column[places] for column in columns))

    @property
    def full(self) -> npt.NDArray[np.bool_]:
        """True for the points on the largest slice that was measured."""
        mask: npt.NDArray[np.bool_] = self.share >= self.share.max(initial=0.0) - 1e-6
        return mask

    @property
    def logs(self) -> Array:
        """Logarithms of the seconds."""
        return np.asarray(np.log(self.seconds), dtype=np.float64)

    @property
    def load(self) -> Array:
        """Work of a batch, in items of the usual size, per unit of the slice's share."""
        return np.asarray(self.batch * self.work / self.share, dtype=np.float64)

    def on_full(self) -> npt.NDArray[np.intp]:
        """Return for each point the one of its batch and input on the largest slice; -1 if none was measured."""
        index_of = {(self.batch[i], self.size[i]): i for i in np.flatnonzero(self.full)}
        return np.array([index_of.get((self.batch[i], self.size[i]), -1) for i in range(len(self))], dtype=np.intp)

    def nearest(self, wishes: Sequence[tuple[float, float]]) -> tuple[int, ...]:
        """Return for each wish (share, batch) the nearest point in logarithms that no earlier wish took.

        Only points of the usual input size count. Returns fewer if none is left.
        """
        taken: list[int] = []
        for share, batch in wishes:
            remaining = [i for i in range(len(self)) if i not in taken]
            if not remaining:
                break
            distance = 4.0 * np.abs(np.log(self.share / share)) + np.abs(np.log(self.batch / batch))
            distance = distance + 4.0 * np.abs(np.log(self.work))
            taken.append(min(remaining, key=lambda i: (float(distance[i]), i)))
        return tuple(taken)


def compute_slices(row: Measurement, whole: float) -> float:
    """Return the compute slices of a row's slice; `whole` for a GPU without MIG."""
    if row.compute_slices is not None:
        return float(row.compute_slices)
    return float(Profile.parse(row.profile).compute) if row.profile else whole

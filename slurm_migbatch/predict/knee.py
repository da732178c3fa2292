"""Find knees, the batch sizes that fill a slice, and the bucket edges that follow from them.

The knee of a slice is the smallest batch that reaches a share (80 %) of the slice's best throughput (PARIS, section on
partitioning, with throughput in the place of utilisation: a reconstruction; D-STACK's knee is the same idea along the
other axis). Batch bucket edges come from the curves: every knee is an edge, and between edges the predicted time
grows by at most 42 % on any slice (a little over the square root of two), so a request that is rounded up to its edge
is charged at most that much more. Powers of two, which most requests are, are edges too, so they are charged nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from slurm_migbatch.predict.cells import Array

KNEE_SHARE: Final = 0.8
GROWTH: Final = 1.42
"""Largest ratio of predicted times at neighbouring batch edges."""
INPUT_GROWTH: Final = 1.5
LARGEST_BATCH: Final = 1024


def knee(batches: Sequence[int] | npt.NDArray[np.intp], seconds: Array) -> int:
    """Return the smallest of the ascending `batches` whose throughput reaches KNEE_SHARE of the best of them."""
    rates = np.asarray(batches, dtype=np.float64) / seconds
    return int(batches[int(np.argmax(rates >= KNEE_SHARE * rates.max()))])


def batch_edges(seconds: Array) -> tuple[int, ...]:
    """Return the edges of a model's batch buckets; row i of `seconds` are the times of batch i + 1 on each slice."""
    largest, slices = seconds.shape
    batches = np.arange(1, largest + 1)
    fixed = {knee(batches, seconds[:, i]) for i in range(slices)} | {2**i for i in range(largest.bit_length())}
    edges = [1]
    while (batch := edges[-1]) < largest:
        # a power of two is an edge, so the next edge is not beyond it
        within = (seconds[batch : 1 << batch.bit_length()] <= GROWTH * seconds[batch - 1]).all(axis=1)
        following = batch + max(int(np.argmin(within)) if not within.all() else len(within), 1)
        edges.append(min((edge for edge in fixed if batch < edge < following), default=following))
    return tuple(edges)


def input_edges(work: Callable[[float], float], anchors: Collection[int], largest: int) -> tuple[int, ...]:
    """Return the edges of the input buckets.

    They are multiples of 16 tokens or pixels, between which the work of an item grows by at most half, and the
    `anchors`: sizes that were measured or that the model is made for.
    """
    edges, size = {*anchors, largest}, 16
    while size < largest:
        edges.add(size)
        following, most = size + 16, INPUT_GROWTH * work(size)
        while following + 16 <= largest and work(following + 16) <= most:
            following += 16
        size = following
    return tuple(sorted(edges))

"""Advise how a job should use its slice: the batch size, and the number of processes that share it.

The batch has the best efficacy, `batch / latency**2` (D-STACK's objective at a given slice, without the time to
assemble a batch, which batch jobs do not wait for): while the host limits the speed a larger batch is free, and past
the knee it trades latency for throughput. A latency limit and the memory bound the batch.
Processes are added as long as each adds a tenth of throughput and memory holds them; they pay off if the host limits
the speed, and raise the latency of each, so a job with a latency limit runs one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from slurm_migbatch.predict.cells import Array

WORTH: Final = 1.1
"""Minimum ratio of throughputs for one more process."""
MOST_COPIES: Final = 4


@dataclass(frozen=True)
class Advice:
    """Items in a batch, and processes on the slice."""

    batch: int
    copies: int


def advise(batches: Sequence[int], seconds: Array, memory_mib: Array, capacity_mib: float) -> Advice | None:
    """Advise batch and copies for a slice of `capacity_mib`; None if not even the smallest batch should fit.

    Row p - 1 of `seconds` (median predictions) and `memory_mib` (conservative, all processes together) belong to p
    processes, columns to the ascending `batches`.
    """
    fits = memory_mib <= capacity_mib
    fitting = np.flatnonzero(fits[0])
    if not len(fitting):
        return None
    efficacy = np.asarray(batches, dtype=np.float64) / seconds[0] ** 2
    best = int(fitting[int(np.argmax(efficacy[fitting]))])
    copies = 1
    rate = batches[best] / seconds[0, best]
    for extra in range(1, len(seconds)):
        next_rate = (extra + 1) * batches[best] / seconds[extra, best]
        if not fits[extra, best] or next_rate < WORTH * rate:
            break
        copies, rate = extra + 1, next_rate
    return Advice(int(batches[best]), copies)

"""Limit what one user's queue costs a plan.

Each other combination of slices is looked for on every node where it may fit, so thousands of them, all by one user,
would delay every round on large sites.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Final

from slurm_migbatch.decide.capacity.by_kind import DemandQueue
from slurm_migbatch.decide.capacity.model import Demand, DemandShape
from slurm_migbatch.slurm.client import JobRow

MOST_COMBINATIONS: Final = 100
"""Kinds of demands of several slices that are planned at once for one user."""


def within_limits(demands: Sequence[Demand], rows: Mapping[int, JobRow]) -> tuple[Sequence[Demand], Sequence[Demand]]:
    """Return the demands to plan, and those to put off because their user has too many kinds before them.

    The components of a heterogeneous job are one kind together, which counts once for each. A user's first kind is
    never put off.
    """
    if len(demands) <= MOST_COMBINATIONS or len(DemandQueue.of(demands).kinds) <= MOST_COMBINATIONS:
        return demands, ()
    kinds = defaultdict[int | None, set[tuple[DemandShape, ...]]](set)
    counts = defaultdict[int | None, int](int)
    planned, put_off = list[Demand](), list[Demand]()
    for _, group in groupby(demands, key=lambda demand: -demand.job if demand.apart is None else demand.apart):
        together = list(group)
        first = together[0]
        if first.apart is None and first.kind.single:
            planned.append(first)
            continue
        user = rows[first.job].uid
        key = tuple([demand.kind for demand in together])
        if key not in kinds[user]:
            if counts[user] >= MOST_COMBINATIONS:
                put_off += together
                continue
            kinds[user].add(key)
            counts[user] += len(together)
        planned += together
    return planned, put_off

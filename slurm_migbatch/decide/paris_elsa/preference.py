"""Compute how to offer free space, from recent requests and pending jobs: PARIS for a live site.

PARIS gives every size of slice the batches that fill it, and partitions GPUs by the load of each (Kim et al., DAC 2022;
`decide.paris_elsa.partition` describes what is ours). Here the submit filter assigns a slice to a job's bucket, and the
history gives arrivals and run times. Supply needs one order of profiles in which it fills the free space of every GPU,
repeatedly until nothing fits; so only the mix of the computed partitioning matters. Orders that follow it, or one of
its GPUs, are tried on one stream of arrivals, filled by the placement rules of the GPU, and the best of them is used.

An order is a guess about future requests. A pending job gets capacity regardless of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from slurm_migbatch.decide.paris_elsa.assignment import StockCosts, WorkClass
from slurm_migbatch.decide.paris_elsa.partition import Cut, partition, ways
from slurm_migbatch.decide.paris_elsa.trial import bounded_rate, central, stream
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.layout import EMPTY
from slurm_migbatch.mig.planning import capacity, plan_free
from slurm_migbatch.mig.profile import Profile

HORIZON_S: Final = 600.0
"""Seconds of usual arrivals that weigh as much as the pending jobs."""
PATIENCE: Final = 2.0
"""Work should be done within so many times its longest duration."""
GPUS: Final = 8
"""Number of GPUs for which the mix is computed; more GPUs of a type are partitioned in the same way."""
TRIAL_JOBS: Final = 400
NEIGHBOURS: Final = 8
MOST_KINDS: Final = 6
"""Number of profiles of one GPU type in the mix, those with most work."""
MOST_WAYS: Final = 100
"""Maximum number of ways to partition a GPU that are searched; today's GPUs have up to 46, one that a node describes
wrongly may have hundreds, on which the integer program takes minutes. Its order follows the load only.
"""
NODE_LIMIT: Final = 500
"""Maximum nodes of an integer program; today's GPUs need about 100."""
MOST_TYPES: Final = 6
"""Number of GPU types that are searched, those with most GPUs; the order of others follows the load only."""
LONGEST: Final = 16
"""Maximum entries of an order; supply repeats it."""


@dataclass(frozen=True)
class Class:
    """Equal jobs: their number of slices, the profile, and the seconds they hold one."""

    count: float
    seconds: float
    profile: Profile


def preference(gpus: Mapping[Geometry, int], classes: Sequence[Class]) -> tuple[Profile, ...]:
    """Return the order in which to fill free space; empty if these GPUs could serve no known work.

    Args:
        gpus: how many of each type there are; profiles of one type mean nothing to another.
        classes: recent arrivals and pending work.
    """
    types = sorted(((geometry, n) for geometry, n in gpus.items() if n), key=lambda t: (-t[1], t[0].name))
    orders = [
        (geometry.name, _order(geometry, min(n, GPUS), classes, search=position < MOST_TYPES))
        for position, (geometry, n) in enumerate(types)
    ]
    return tuple(profile for _, order in sorted(orders, key=lambda o: o[0]) for profile in order)


def _order(geometry: Geometry, gpus: int, classes: Sequence[Class], *, search: bool) -> tuple[Profile, ...]:
    """Return the profiles to offer on empty GPUs, in the order with the highest rate of work in trials."""
    fitting = [
        job_class
        for job_class in classes
        if job_class.profile in geometry and job_class.count > 0 and job_class.seconds > 0
        # a node may list a profile that can be placed nowhere
        if capacity(geometry, EMPTY, job_class.profile)
    ]
    kinds = _kinds(fitting)
    works: list[WorkClass] = []
    for job_class in fitting:
        if job_class.profile in kinds:
            seconds = tuple(job_class.seconds if kind == job_class.profile else math.inf for kind in kinds)
            works.append(WorkClass(job_class.count, PATIENCE * job_class.seconds, seconds, len(works)))
    if not works:
        return ()
    if not search or len(ways(geometry, kinds)) > MOST_WAYS:
        return _by_load(kinds, works)
    cut = partition(geometry, kinds, works, gpus, job_count=TRIAL_JOBS, neighbours=NEIGHBOURS, node_limit=NODE_LIMIT)
    arrivals = stream(works, TRIAL_JOBS, np.random.Generator(np.random.PCG64(1)), exact=True)
    prices = [float(kind.compute) for kind in kinds]
    best: tuple[Profile, ...] = ()
    best_rate = 0.0
    for order in _candidates(cut, works):
        filled = plan_free(geometry, EMPTY, order * geometry.max_slots).counts()
        stock_costs = StockCosts(works, prices, [filled[kind] * gpus for kind in kinds])
        rate = bounded_rate(central, stock_costs, arrivals, best_rate or cut.rate or 1.0)
        if rate > best_rate or not best:
            best, best_rate = order, rate
    return best


def _kinds(classes: Sequence[Class]) -> list[Profile]:
    """Return the profiles with the most work, ascending."""
    load: dict[Profile, float] = {}
    for job_class in classes:
        load[job_class.profile] = (
            load.get(job_class.profile, 0.0) + job_class.count * job_class.seconds * job_class.profile.compute
        )
    return sorted(sorted(load, key=lambda profile: (-load[profile], profile))[:MOST_KINDS])


def _candidates(cut: Cut, works: Sequence[WorkClass]) -> list[tuple[Profile, ...]]:
    """Return orders that follow the mix of all GPUs, of one GPU (the most frequent first), or the load itself."""
    frequent = sorted(set(cut.gpus), key=lambda way: (-cut.gpus.count(way), way))
    mixes: list[Sequence[float]] = [cut.stock, *frequent]
    orders = [*(_sequence(cut.kinds, mix) for mix in mixes), _by_load(cut.kinds, works)]
    return list(dict.fromkeys(order for order in orders if order))


def _by_load(kinds: Sequence[Profile], works: Sequence[WorkClass]) -> tuple[Profile, ...]:
    load = [sum(w.share * w.seconds[k] for w in works if w.seconds[k] < math.inf) for k in range(len(kinds))]
    return _sequence(kinds, load)


def _sequence(kinds: Sequence[Profile], mix: Sequence[float]) -> tuple[Profile, ...]:
    """Return profiles in turn, in proportion to the mix.

    By the method of highest averages; of equals the larger first.
    """
    smallest = min((n for n in mix if n > 0), default=0.0)
    length = min(LONGEST, sum(round(n / smallest) for n in mix)) if smallest else 0
    counts = [0] * len(mix)
    order = []
    for _ in range(length):
        k = max(range(len(mix)), key=lambda k: (mix[k] / (2 * counts[k] + 1), kinds[k]))
        counts[k] += 1
        order.append(kinds[k])
    return tuple(order)

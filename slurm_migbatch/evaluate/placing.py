"""The fewest compute slices that serve a rate: instances of (slice, batch, processes), by what is said of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from slurm_migbatch.evaluate.heldout import Mask
from slurm_migbatch.predict.cells import Array

MOST_SLICES: Final = 5000
"""A service that needs more is scaled down: the remainder of one slice does not matter there."""


@dataclass(frozen=True)
class Plan:
    """How many instances of which cells, by index; their compute slices together."""

    instances: Mapping[int, int]
    slices: float


def plan(rates: Array, slices: Array, allowed: Mask, wanted: float) -> Plan | None:
    """The plan with the fewest slices whose `rates` reach `wanted`, of allowed cells; None where none is allowed.

    An unbounded knapsack: the most throughput for each number of slices.
    """
    best: dict[int, int] = {}
    for place in np.flatnonzero(allowed):
        size = round(float(slices[place]))
        if size not in best or rates[place] > rates[best[size]]:
            best[size] = int(place)
    if not best:
        return None
    scale = 1
    most = int(np.ceil(wanted / max(rates[i] / size for size, i in best.items()))) + max(best)
    if most > MOST_SLICES:
        scale = -(-most // MOST_SLICES)
        most = most // scale + max(best)
    reached = np.zeros(most + 1)
    taken = [0] * (most + 1)
    for n in range(1, most + 1):
        reached[n] = reached[n - 1]
        for size, i in best.items():
            if size <= n and reached[n - size] + rates[i] > reached[n]:
                reached[n], taken[n] = reached[n - size] + rates[i], size
    # the cells of the best plan, from its last instance backwards
    enough = np.flatnonzero(reached * (1 + 1e-9) >= wanted / scale)
    left = int(enough[0]) if len(enough) else most
    instances: dict[int, int] = {}
    while left > 0:
        size = taken[left]
        if size:
            instances[best[size]] = instances.get(best[size], 0) + scale
        left -= size or 1
    return Plan(instances, sum(count * float(slices[i]) for i, count in instances.items()))


def topped_up(made: Plan, rates: Array, slices: Array, wanted: float) -> float:
    """Slices of a plan after instances were added until the `rates` that turned out serve what is wanted."""
    served = sum(count * float(rates[i]) for i, count in made.instances.items())
    if served * (1 + 1e-9) >= wanted:
        return made.slices
    used = np.zeros(len(rates), dtype=bool)
    used[list(made.instances)] = True
    more = plan(rates, slices, used, wanted - served)
    return made.slices + (more.slices if more else 0.0)

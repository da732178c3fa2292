"""Find the fewest compute slices that serve a rate: instances of (slice, batch, processes), by predicted figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from slurm_migbatch.lab.evaluate.heldout import Mask
from slurm_migbatch.lab.papers.instances import fewest_slices
from slurm_migbatch.predict.cells import Array


@dataclass(frozen=True)
class InstancePlan:
    """Number of instances of each cell, by index; their compute slices in total."""

    instances: Mapping[int, int]
    slices: float


def plan(rates: Array, slices: Array, allowed: Mask, wanted: float) -> InstancePlan | None:
    """Plan the fewest slices whose `rates` reach `wanted`, of allowed cells; None if none is allowed."""
    cells = np.flatnonzero(allowed).tolist()
    if not cells:
        return None
    chosen = fewest_slices([float(rates[i]) for i in cells], [round(float(slices[i])) for i in cells], wanted)
    instances = {cells[i]: count for i, count in chosen.items()}
    return InstancePlan(instances, sum(count * float(slices[i]) for i, count in instances.items()))


def topped_up(made: InstancePlan, rates: Array, slices: Array, wanted: float) -> float:
    """Return the slices of a plan after instances were added until the measured `rates` serve the required one."""
    served = sum(count * float(rates[i]) for i, count in made.instances.items())
    if served * (1 + 1e-9) >= wanted:
        return made.slices
    used = np.zeros(len(rates), dtype=bool)
    used[list(made.instances)] = True
    addition = plan(rates, slices, used, wanted - served)
    return made.slices + (addition.slices if addition else 0.0)

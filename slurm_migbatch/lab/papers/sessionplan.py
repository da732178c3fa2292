"""Choose how to run a GPU by `sessions`: layouts in turn, one static layout, or one size for each model.

None of the three is best for every demand. Layouts in turn carry most if one layout alone does not suit the mix, one
static layout if changes cost more than they gain, and one size for each model, earliest deadline first, if few long
runs are due at different times. So all are tried: sessions are planned before they begin and take milliseconds to
simulate, and the plan that would carry the most of the demanded mix is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from slurm_migbatch.decide.paris_elsa.partition import flow, ways
from slurm_migbatch.lab.papers.sessions import (
    Frames,
    Hosted,
    Schedule,
    at_size,
    demand_of,
    framed,
    frames,
)
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.profile import Profile

PRECISION: Final = 0.005
"""Precision of the searched load, as a share of the demand."""


@dataclass(frozen=True)
class SessionPlan:
    """How a GPU is run: layouts with their shares of the time or, without layouts, the kind of slice of each model.

    A single layout is a static partition.
    """

    held: Frames = ()
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Carried:
    """Capacity of a plan: the largest load without a missed deadline, as a multiple of the demand."""

    plan: SessionPlan
    load: float


def plans(geometry: Geometry, kinds: Sequence[Profile], models: Sequence[Hosted]) -> list[SessionPlan]:
    """Return the plans to try: every layout alone, the best layouts in turn, and every model on its leanest slice."""
    candidates = [SessionPlan(held=((way, 1.0),)) for way in ways(geometry, kinds)]
    turns = frames(geometry, kinds, models)
    if len(turns) > 1:
        candidates.append(SessionPlan(held=turns))
    if all(any(model.rates) for model in models):
        candidates.append(SessionPlan(sizes=tuple(_leanest(model, kinds) for model in models)))
    return candidates


def carried(geometry: Geometry, kinds: Sequence[Profile], models: Sequence[Hosted]) -> tuple[Carried, ...]:
    """Return the capacity of every plan, in the order of `plans`."""
    works, possible = demand_of(models), ways(geometry, kinds)
    total_demand = sum(work.share for work in works)

    def of(plan: SessionPlan) -> Carried:
        alone = [way for way, _ in plan.held] if len(plan.held) == 1 else possible
        bound = flow(works, alone, 1, whole=False).rate / total_demand
        return Carried(plan, largest(lambda load: bool(play(geometry, kinds, models, plan, load).missed), bound))

    return tuple(of(plan) for plan in plans(geometry, kinds, models))


def best(candidates: Sequence[Carried]) -> Carried:
    """Return the plan with the largest capacity; of equal ones the first."""
    return max(candidates, key=lambda carried_plan: carried_plan.load)


def play(
    geometry: Geometry,
    kinds: Sequence[Profile],
    models: Sequence[Hosted],
    plan: SessionPlan,
    load: float,
    sessions: int = 1,
    *,
    fill: bool = False,
) -> Schedule:
    """Return the schedule of a plan at a multiple of the demand."""
    scaled = [at_load(model, load) for model in models]
    if plan.held:
        return framed(geometry, kinds, scaled, plan.held, sessions, fill=fill)
    return at_size(geometry, kinds, scaled, plan.sizes, sessions, fill=fill)


def at_load(model: Hosted, load: float) -> Hosted:
    """Return the model with `load` times its items, in runs of about the same length."""
    return replace(model, items=load * model.items, runs=max(1, math.ceil(load * model.runs - 1e-9)))


def largest(missed: Callable[[float], bool], bound: float = 1.0) -> float:
    """Return the largest load up to `bound` without a missed deadline, with `PRECISION`; 0 if there is none."""
    low, high = 0.9 * bound, bound
    while low >= PRECISION and missed(low):
        low, high = 0.8 * low, low
    if low < PRECISION:
        return 0.0
    while high - low > PRECISION:
        load = (low + high) / 2
        if missed(load):
            high = load
        else:
            low = load
    return low


def _leanest(model: Hosted, kinds: Sequence[Profile]) -> int:
    """Return the kind with the most items per second per compute slice, of equal ones the smaller."""
    return max(range(len(kinds)), key=lambda k: (model.rates[k] / kinds[k].compute, -kinds[k].compute))

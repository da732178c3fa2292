"""Train on GPUs that inference does not need, as in DeepBoot: the parts that migbatchd (`decide.lending`) does not use.

DeepBoot (Chen et al., IEEE TPDS 2023), as in its authors' simulator:

- `allocate`: the training half of adaptive task scaling. A group knapsack: one choice for each job, whose value is the
  speedup relative to its fair share; a change is worth less the more often the job was restarted (`ats_worth`). Slices
  of several kinds are our addition: a job runs on slices of one kind, and the knapsacks of the kinds are solved in
  turn, each exactly, until the sum of values grows no more. With one kind this is the authors' dynamic program.
- `Replica` and `serve`: a replica that has served stays ready, at first protected and then asleep. If slices are lent,
  it is better not to protect idle replicas: while they are protected, requests of other applications reclaim loans
  although slices are idle.

`Surge` (few large reclaims in a burst) is our addition.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import numpy as np

Kind = TypeVar("Kind", bound=Hashable)
Slot = TypeVar("Slot", bound=Hashable)

_GAIN: Final = 1e-9
PROTECT_S: Final = 30.0
PROTECT_PER_HIT_S: Final = 15.0
PROTECT_MOST_S: Final = 120.0


# -- the training half -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice(Generic[Kind]):
    """A number of slices of one kind for one job."""

    kind: Kind
    count: int


def ats_worth(speedup: float, fair: float, *, changed: bool, age_s: float, restarts: int) -> float:
    """Return DeepBoot's value: speedup relative to that on the fair share, reduced for a change by past restarts."""
    worth = speedup / fair
    return worth * max(age_s - 10.0 * restarts, 0.0) / (age_s + 10.0) if changed else worth


def allocate(worths: Sequence[Mapping[Choice[Kind], float]], capacity: Mapping[Kind, int]) -> list[Choice[Kind] | None]:
    """Return each job's choice that maximises the sum of values, within the capacity of every kind."""
    chosen: list[Choice[Kind] | None] = [None] * len(worths)
    kinds = [kind for kind, count in capacity.items() if count > 0]
    total = 0.0
    while True:
        for kind in kinds:
            _turn(worths, kind, capacity[kind], chosen)
        new_total = sum(worths[job][choice] for job, choice in enumerate(chosen) if choice is not None)
        if len(kinds) < 2 or new_total <= total + _GAIN:
            return chosen
        total = new_total


def _turn(
    worths: Sequence[Mapping[Choice[Kind], float]], kind: Kind, capacity: int, chosen: list[Choice[Kind] | None]
) -> None:
    """Solve the knapsack of one kind in `chosen`; a job's alternative is its present choice of another kind."""
    best = np.zeros(capacity + 1)
    taken = np.zeros((len(worths), capacity + 1), dtype=np.int64)
    for job, offers in enumerate(worths):
        have = chosen[job]
        new = best + (offers[have] if have is not None and have.kind != kind else 0.0)
        row = taken[job]
        for choice, worth in offers.items():
            count = choice.count
            if choice.kind == kind and 0 < count <= capacity and worth > 0:
                values = best[: capacity + 1 - count] + worth
                better = values > new[count:] + _GAIN
                new[count:][better] = values[better]
                row[count:][better] = count
        best = new
    capacity_left = capacity
    for job in range(len(worths) - 1, -1, -1):
        count = int(taken[job, capacity_left])
        have = chosen[job]
        if count:
            chosen[job] = Choice(kind, count)
            capacity_left -= count
        elif have is not None and have.kind == kind:
            chosen[job] = None


# -- the inference half ------------------------------------------------------------------------------------------------


@dataclass
class Replica(Generic[Slot]):
    """An instance of an application with its model loaded.

    Attributes:
        hits: number of requests that it has served. `busy`: whether it serves one now.
        idle_since: when its last request ended, if it is not busy.
    """

    slot: Slot
    app: str
    hits: int = 0
    busy: bool = True
    idle_since: float = 0.0

    def protected(self, now: float, times: float = 1.0) -> bool:
        """Return whether the replica may not be replaced: it is busy, or idle for less than `protect_s`."""
        return self.busy or now - self.idle_since < protect_s(self.hits, times)


def protect_s(hits: int, times: float = 1.0) -> float:
    """Return for how many seconds a replica with this many hits is protected after its last request."""
    return times * min(PROTECT_S + PROTECT_PER_HIT_S * hits, PROTECT_MOST_S)


def serve(app: str, replicas: Sequence[Replica[Slot]]) -> Replica[Slot] | None:
    """Return the idle replica of the application with the most hits, which needs no cold start; None without any."""
    ready = [replica for replica in replicas if replica.app == app and not replica.busy]
    return max(ready, key=lambda replica: replica.hits, default=None)


def displaced(replicas: Sequence[Replica[Slot]], now: float, times: float = 1.0) -> Replica[Slot] | None:
    """Return the replica whose slot another application takes: of those asleep the one with the fewest hits.

    Of equal ones, the one that has been idle longest; None if none is asleep.
    """
    asleep = [replica for replica in replicas if not replica.protected(now, times)]
    return min(asleep, key=lambda replica: (replica.hits, replica.idle_since), default=None)


@dataclass
class Surge:
    """Number of slices to reclaim at a time: more than are missing while reclaims follow one another.

    Requests of a burst arrive one by one. A job that returned one slice for each would be resized for each; so each
    reclaim that follows another within `window_s` requests `growth` times as many slices, and a burst of n requests
    takes about log n reclaims. Slices that return too early serve later requests of the burst.
    """

    growth: float = 2.0
    window_s: float = 90.0
    last: float = -math.inf
    size: float = 1.0

    def call(self, now: float, starts: int, available: int) -> int:
        """Return how many slices to reclaim if `starts` are missing; at most `available`, unless more are missing."""
        self.size = min(self.size * self.growth, float(max(available, 1))) if now - self.last < self.window_s else 1.0
        self.last = now
        return max(starts, int(self.size))

"""Train on GPUs that inference does not need, as in DeepBoot: the parts that migbatchd (`decide.lending`) does not use.

DeepBoot (Chen et al., IEEE TPDS 2023), as in its authors' simulator:

- `allocate`: the training half of adaptive task scaling. A group knapsack: one choice for each job, whose value is the
  speedup relative to its fair share; a change is worth less the more often the job was restarted (`ats_worth`). Slices
  of several kinds are our addition: a job runs on slices of one kind, and the knapsacks of the kinds are solved in
  turn, each exactly, until the sum of values grows no more. With one kind this is the authors' dynamic program.
- `reclaim`: the inference half of adaptive task scaling. Ends the loans with the lowest cost, one start at a time. The
  authors compare sums of speedups; adding the cost of the restart, choosing protected loans last and freeing one large
  slice by several loans on the same GPU are additions.
- `RestartCosts`: restarts with warm containers (AFE) cost less if less changes.
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
LOAN_PROTECT_S: Final = 60.0
"""Protection of a training job that has just started or changed, times 1 + its reclaims."""
PROTECT_S: Final = 30.0
PROTECT_PER_HIT_S: Final = 15.0
PROTECT_MOST_S: Final = 120.0


# -- the training half -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SliceCount(Generic[Kind]):
    """A number of slices of one kind for one job."""

    kind: Kind
    count: int


def ats_worth(speedup: float, fair: float, *, changed: bool, age_s: float, restarts: int) -> float:
    """Return DeepBoot's value: speedup relative to that on the fair share, reduced for a change by past restarts."""
    worth = speedup / fair
    return worth * max(age_s - 10.0 * restarts, 0.0) / (age_s + 10.0) if changed else worth


def allocate(
    worths: Sequence[Mapping[SliceCount[Kind], float]], capacity: Mapping[Kind, int]
) -> list[SliceCount[Kind] | None]:
    """Return each job's choice that maximises the sum of values, within the capacity of every kind."""
    chosen: list[SliceCount[Kind] | None] = [None] * len(worths)
    kinds = [kind for kind, count in capacity.items() if count > 0]
    total = 0.0
    while True:
        for kind in kinds:
            _solve_kind(worths, kind, capacity[kind], chosen)
        new_total = sum(worths[job][choice] for job, choice in enumerate(chosen) if choice is not None)
        if len(kinds) < 2 or new_total <= total + _GAIN:
            return chosen
        total = new_total


def _solve_kind(
    worths: Sequence[Mapping[SliceCount[Kind], float]], kind: Kind, capacity: int, chosen: list[SliceCount[Kind] | None]
) -> None:
    """Solve the knapsack of one kind in `chosen`; a job's alternative is its present choice of another kind."""
    of_kind = [{choice.count: worth for choice, worth in offers.items() if choice.kind == kind} for offers in worths]
    others = [
        offers[have] if have is not None and have.kind != kind else 0.0
        for offers, have in zip(worths, chosen, strict=True)
    ]
    for job, count in enumerate(knapsack(of_kind, capacity, others)):
        have = chosen[job]
        if count:
            chosen[job] = SliceCount(kind, count)
        elif have is not None and have.kind == kind:
            chosen[job] = None


def knapsack(worths: Sequence[Mapping[int, float]], capacity: int, others: Sequence[float] = ()) -> list[int]:
    """Return each job's count (0: none) that maximises the sum of values, within the capacity.

    Args:
        worths: value by count, for each job. Counts above the capacity and values that are not above 0 are not used.
        others: the value of each job that gets none, 0 by default.
    """
    offers = [
        [(count, worth) for count, worth in values.items() if 0 < count <= capacity and worth > 0] for values in worths
    ]
    others = others or [0.0] * len(offers)
    counts = _unbounded(offers, others)
    if sum(counts) <= capacity:
        return counts
    sums = [np.zeros(capacity + 1)]
    for choices, other in zip(offers, others, strict=True):
        best = sums[-1]
        new = best + other
        for count, worth in choices:
            values, rest = best[: capacity + 1 - count] + worth, new[count:]
            np.copyto(rest, values, where=values > rest + _GAIN)
        sums.append(new)
    for job in range(len(offers) - 1, -1, -1):
        best = sums[job]
        reached, counts[job] = best[capacity] + others[job], 0
        for count, worth in offers[job]:
            if count <= capacity and best[capacity - count] + worth > reached + _GAIN:
                reached, counts[job] = best[capacity - count] + worth, count
        capacity -= counts[job]
    return counts


def _unbounded(offers: Sequence[Sequence[tuple[int, float]]], others: Sequence[float]) -> list[int]:
    """Return each job's best count if the capacity suffices for all."""
    best, counts = 0.0, []
    for choices, other in zip(offers, others, strict=True):
        new, chosen = best + other, 0
        for count, worth in choices:
            if best + worth > new + _GAIN:
                new, chosen = best + worth, count
        best = new
        counts.append(chosen)
    return counts


# -- the inference half ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RestartCosts:
    """Cost of restarts, in seconds: `full` from nothing, `resize` if workers remain (AFE)."""

    full: float
    resize: float

    def seconds(self, before: int, after: int, kept: bool = True) -> float:
        """Return the cost of a change from `before` to `after` slices; `kept`: whether common slices stay the same."""
        if not before or not kept or before == after:
            return self.full if after else 0.0
        if after < before:
            return self.resize if after else 0.0
        return self.resize + (self.full - self.resize) * (after - before) / after


@dataclass(frozen=True)
class ReclaimCandidate(Generic[Slot]):
    """A training job with slices that can be reclaimed.

    Attributes:
        slots: those slices. `count`: number of all its slices, including its own.
        least: minimum number of slices; with fewer it must stop.
        speedups: speed with 0, 1, ... `count` slices.
        since: when it last started or changed.
        hits: number of reclaims so far.
        horizon_s: for how long it will lack the reclaimed slices.
    """

    job: Hashable
    slots: frozenset[Slot]
    count: int
    least: int
    speedups: Sequence[float]
    costs: RestartCosts
    since: float
    hits: int = 0
    horizon_s: float = 600.0

    def loss(self, given_back: int) -> float:
        """Return the work lost, in seconds of one slice's speed, when `given_back` slices are returned."""
        if not given_back:
            return 0.0
        after = self.count - given_back
        if after < max(1, self.least):
            return self.speedups[self.count] * self.horizon_s + self.costs.full * self.speedups[self.count]
        lost = max(0.0, self.speedups[self.count] - self.speedups[after]) * self.horizon_s
        return lost + self.costs.seconds(self.count, after) * self.speedups[after]

    def protected(self, now: float) -> bool:
        """Return whether it started so recently, for its number of reclaims, that other loans must end first."""
        return now - self.since < LOAN_PROTECT_S * (1 + self.hits)


@dataclass(frozen=True)
class Reclaim(Generic[Slot]):
    """Slots that are reclaimed, in the order of the starts that they serve, and the jobs that must stop for them.

    `served`: number of starts that fit.
    """

    slots: tuple[Slot, ...]
    stopped: tuple[Hashable, ...]
    served: int


def reclaim(
    loans: Sequence[ReclaimCandidate[Slot]],
    lent_sets: Sequence[frozenset[Slot]],
    starts: int,
    now: float,
) -> Reclaim[Slot]:
    """Return the loans to end, at the lowest cost, so that `starts` instances fit.

    Each of `lent_sets` is a set of lent slots all of which must end for one start: one slot if the instance has its
    size, three 1g for one 3g. Sets with a protected loan come after all others. A slot of a job that must stop
    is freed without further loss, so sets with it are taken next.
    """
    owner = {slot: loan for loan in loans for slot in loan.slots}
    given_back: dict[Hashable, int] = {}
    stopped: dict[Hashable, None] = {}
    taken: set[Slot] = set()
    order: list[Slot] = []
    served = 0
    open_sets = [lent_set for lent_set in lent_sets if lent_set and all(slot in owner for slot in lent_set)]
    while served < starts and open_sets:
        ranked = min(
            enumerate(open_sets),
            key=lambda numbered: (*_rank(numbered[1], owner, given_back, stopped, now), numbered[0]),
        )
        lent_set = open_sets.pop(ranked[0])
        for slot in sorted(lent_set, key=str):
            loan = owner[slot]
            taken.add(slot)
            order.append(slot)
            given_back[loan.job] = given_back.get(loan.job, 0) + 1
            if loan.count - given_back[loan.job] < max(1, loan.least):
                stopped[loan.job] = None
        open_sets = [other for other in open_sets if not other & taken]
        served += 1
    return Reclaim(tuple(order), tuple(stopped), served)


def _rank(
    lent_set: frozenset[Slot],
    owner: Mapping[Slot, ReclaimCandidate[Slot]],
    given_back: Mapping[Hashable, int],
    stopped: Mapping[Hashable, None],
    now: float,
) -> tuple[bool, float]:
    """Return whether a further protected job would be affected, and the added loss."""
    added: dict[Hashable, int] = {}
    loan_of: dict[Hashable, ReclaimCandidate[Slot]] = {}
    for slot in lent_set:
        loan = owner[slot]
        added[loan.job] = added.get(loan.job, 0) + 1
        loan_of[loan.job] = loan
    protected, loss = False, 0.0
    for job, count in added.items():
        if job in stopped:
            continue
        already = given_back.get(job, 0)
        loss += loan_of[job].loss(already + count) - loan_of[job].loss(already)
        protected = protected or (not already and loan_of[job].protected(now))
    return protected, loss


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

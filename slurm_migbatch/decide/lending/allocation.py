"""Rules for loans to training jobs: when they may change, what a change costs, and which end when inference needs room.

From DeepBoot (Chen et al., IEEE TPDS 2023), after its authors' simulator:

- `reclaim`: the inference half of adaptive task scaling. Ends the loans with the lowest cost, one start at a time. The
  authors compare sums of speedups; adding the cost of the restart, choosing protected loans last and freeing one large
  slice by several loans on the same GPU are additions.
- `RestartCosts`: restarts with warm containers (AFE) cost less if less changes.

Its weakness is churn (11 restarts per job in the authors' simulator). Added against it: `paid_worth` (a change must
recover the cost of its restart within the forecast time) and `Hysteresis` (the interval between voluntary changes
grows with their number; loans have a minimum length and slices rest after a reclaim).

The parts of DeepBoot that migbatchd does not use are in `lab.papers.deepboot`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Slot = TypeVar("Slot", bound=Hashable)


def paid_worth(speedup: float, fair: float, *, restart_s: float, stay_s: float) -> float:
    """Return a speedup relative to `fair`, less the part of `stay_s` that the restart takes; at least 0."""
    return speedup / fair * max(0.0, 1.0 - restart_s / stay_s) if stay_s > 0 else 0.0


@dataclass(frozen=True)
class Hysteresis:
    """When a job may be changed voluntarily, and when a slice may be lent.

    Attributes:
        first_s: minimum time between a job's start or last change and the next, `growth` times longer for each restart,
            but never longer than `most_s`.
        loan_s: minimum expected length of a gap to lend into it.
        idle_s: minimum idle time of a slice.
        rest_s: after a reclaim a slice is not lent again for so long.
        gain: minimum speedup of a change.
    """

    first_s: float = 300.0
    growth: float = 2.0
    most_s: float = 3600.0
    loan_s: float = 600.0
    idle_s: float = 120.0
    rest_s: float = 900.0
    gain: float = 1.25

    def may_change(self, now: float, changed: float, restarts: int) -> bool:
        """Return whether a job that was started or changed at `changed` may be changed again."""
        return now - changed >= min(self.most_s, self.first_s * self.growth ** min(restarts, 60))

    def may_lend(self, now: float, idle_since: float, reclaimed: float | None) -> bool:
        """Return whether a slice may be lent; `reclaimed`: when it was last reclaimed, None: never."""
        return now - idle_since >= self.idle_s and (reclaimed is None or now - reclaimed >= self.rest_s)


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
        """Work lost, in seconds of one slice's speed, when `given_back` slices are returned."""
        if not given_back:
            return 0.0
        after = self.count - given_back
        if after < max(1, self.least):
            return self.speedups[self.count] * self.horizon_s + self.costs.full * self.speedups[self.count]
        lost = max(0.0, self.speedups[self.count] - self.speedups[after]) * self.horizon_s
        return lost + self.costs.seconds(self.count, after) * self.speedups[after]

    def protected(self, now: float, protect: float = 60.0) -> bool:
        """Return whether it started so recently, for its number of reclaims, that other loans must end first."""
        return now - self.since < protect * (1 + self.hits)


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
    protect: float = 60.0,
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
            key=lambda numbered: (*_rank(numbered[1], owner, given_back, stopped, now, protect), numbered[0]),
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
    protect: float,
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
        protected = protected or (not already and loan_of[job].protected(now, protect))
    return protected, loss

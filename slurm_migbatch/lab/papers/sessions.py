"""Schedule models on the slices of one GPU.

D-STACK (IEEE TCC 12(4), 2024; arXiv 2304.13541) schedules in sessions. In a session every model has runs that are due
inside its own windows; they are placed earliest deadline first at the model's knee, never above the whole GPU. The
remaining gaps are given, out of turn, to the ready model with the least GPU time over the last sessions. The paper's
text was not available: this is a reconstruction. Its sessions last milliseconds; creating a MIG instance takes 0.2 s,
so ours last minutes to hours, and a run is some seconds or minutes of one model's batches.

- `at_size` is that rule with one size for each model and instances created and destroyed for the runs. With other
  orders and sizes it is also temporal sharing (every run takes the whole GPU), most throughput first, and least served
  first.
- `framed` is our own rule. One size for each model leaves space unused (two 3g slices leave a compute slice idle), and
  runs of different sizes fragment the GPU. Instead `frames` finds by a linear programme (`partition.flow` with parts of
  time instead of GPUs) the layouts, and the share of the time of each, that carry the most work in the demanded mix,
  and `pariselsa.split` finds how much of each model's work goes to each kind of slice. A free slice takes work from the
  model that is furthest behind its part on this kind of slice, then the cheapest work of any model; so no window falls
  behind another. In the shortest window every layout is held once; a run that would end after its slice is destroyed is
  not begun.

`sessionplan` chooses between them.

Times are seconds. Creating an instance takes `InstanceCosts.create_s`, destroying one `InstanceCosts.destroy_s`; the
next run waits for both.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from slurm_migbatch.decide.paris_elsa.assignment import WorkClass
from slurm_migbatch.decide.paris_elsa.partition import Counts, flow, ways
from slurm_migbatch.lab.papers.pariselsa import split
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.layout import EMPTY, Layout, Slot
from slurm_migbatch.mig.planning import choose, plan_free
from slurm_migbatch.mig.profile import Profile

HISTORY: Final = 10
"""Sessions over which GPU time is compared."""
LEAST_SHARE: Final = 0.02
"""Minimum share of the time for a layout, so that it is worth its changes."""
_GRAIN_S: Final = 1e-6


@dataclass(frozen=True)
class InstanceCosts:
    """Seconds to create and to destroy an instance."""

    create_s: float = 0.2
    destroy_s: float = 0.2


@dataclass(frozen=True)
class Hosted:
    """One model on the GPU.

    Attributes:
        rates: items per second on each kind of slice; 0 if it cannot run within its latency objective.
        window_s: length of its windows; work arrives at the start of each window and is due at its end.
        items: number of items in each window.
        runs: number of runs into which these items are divided.
    """

    name: str
    rates: tuple[float, ...]
    window_s: float
    items: float
    runs: int

    def seconds(self, kind: int) -> float:
        """Return the seconds that one run takes on a kind of slice."""
        return self.items / self.runs / self.rates[kind] if self.rates[kind] else math.inf


class SessionRun(NamedTuple):
    """One run of a model on a slice; `due` is infinite for a run out of turn."""

    model: int
    slot: Slot
    start: float
    end: float
    due: float


@dataclass(frozen=True)
class Schedule:
    """All runs of some sessions; numbers of created instances and of `missed` runs (late or never started)."""

    runs: tuple[SessionRun, ...]
    created: int
    missed: int


Frames = tuple[tuple[Counts, float], ...]
"""Layouts, as counts of each kind, and the share of the time for which each is held."""


def session_s(models: Sequence[Hosted]) -> float:
    """Return the length of a session: the longest window."""
    return max(model.window_s for model in models)


def _releases(models: Sequence[Hosted], sessions: int) -> list[tuple[float, float, int]]:
    """Return start, deadline and model of each run, in order of the start.

    These are the runs of all windows that end within the sessions.
    """
    horizon = sessions * session_s(models)
    releases = []
    for m, model in enumerate(models):
        for window in range(int(horizon / model.window_s + 1e-9)):
            releases += [(window * model.window_s, (window + 1) * model.window_s, m)] * model.runs
    return sorted(releases)


class _Ledger:
    """The recorded runs, and the GPU time of each model in the last sessions."""

    def __init__(self, models: Sequence[Hosted], sessions: int) -> None:
        self.models, self.length, self.horizon = models, session_s(models), sessions * session_s(models)
        self.runs: list[SessionRun] = []
        self.missed = self.created = 0
        self.spent = [0.0] * len(models)
        self._recent: deque[tuple[float, int, float]] = deque()
        self.ends = sorted(
            {n * m.window_s for m in models for n in range(1, int(self.horizon / m.window_s + 1e-9) + 1)}
        )

    def start(self, model: int, slot: Slot, start: float, seconds: float, due: float) -> float:
        """Record a run; return its end."""
        run = SessionRun(model, slot, start, start + seconds, due)
        self.runs.append(run)
        self.missed += run.end > due + _GRAIN_S
        amount = seconds * slot.profile.compute
        self.spent[model] += amount
        self._recent.append((start, model, amount))
        while self._recent[0][0] < start - HISTORY * self.length:
            _, old_model, old_amount = self._recent.popleft()
            self.spent[old_model] -= old_amount
        return run.end

    def next_release(self, now: float) -> float:
        """Return when the next window begins; the end of the sessions if none does."""
        while self.ends and self.ends[0] <= now + _GRAIN_S:
            self.ends.pop(0)
        return self.ends[0] if self.ends else self.horizon

    def fill(self, now: float, kind: int, before: float) -> int | None:
        """Return the model with the least GPU time that can run out of turn and end by `before`; None without any."""
        candidates = [m for m, model in enumerate(self.models) if now + model.seconds(kind) <= before + _GRAIN_S]
        return min(candidates, key=lambda m: (self.spent[m], m), default=None)

    def schedule(self, unserved: int) -> Schedule:
        return Schedule(tuple(self.runs), self.created, self.missed + unserved)


# -- one size for each model ---------------------------------------------------------------------------------------


class Ready(NamedTuple):
    """A run that may start: deadline and model."""

    due: float
    model: int


Order = Callable[[Ready, Sequence[float]], tuple[float, ...]]
"""The least goes first; it sees the run and the GPU time of each model so far."""


def earliest_due(ready: Ready, spent: Sequence[float]) -> tuple[float, ...]:
    """Return the key of an order by deadline; of equal ones, the model with the least GPU time comes first."""
    return (ready.due, spent[ready.model])


def at_size(
    geometry: Geometry,
    kinds: Sequence[Profile],
    models: Sequence[Hosted],
    sizes: Sequence[int],
    sessions: int,
    *,
    order: Order = earliest_due,
    fill: bool = False,
    costs: InstanceCosts = InstanceCosts(),
) -> Schedule:
    """Schedule runs at one size for each model, each where it can be placed next to running ones; see the module.

    Args:
        kinds: the profiles that `sizes` and rates refer to.
        sizes: the kind of slice for each model.
        order: order of the runs that may start. A run that does not fit is skipped.
        fill: whether runs out of turn fill gaps.
        costs: of creating and destroying instances. An idle instance of the right kind is reused.
    """
    ledger = _Ledger(models, sessions)
    coming = deque(_releases(models, sessions))
    ready: list[deque[float]] = [deque() for _ in models]
    busy: list[tuple[float, Slot]] = []
    used, idle = EMPTY, EMPTY

    def place(model: int) -> tuple[Slot, float, Layout] | None:
        return _place(geometry, used, idle, kinds[sizes[model]], costs)

    def start(model: int, slot: Slot, delay: float, due: float) -> None:
        nonlocal used
        ledger.created += delay > 0
        used = used.add(slot)
        end = ledger.start(model, slot, now + delay, models[model].seconds(sizes[model]), due)
        heapq.heappush(busy, (end, slot))

    while coming or busy:
        now = min(busy[0][0] if busy else math.inf, coming[0][0] if coming else math.inf)
        while busy and busy[0][0] <= now + _GRAIN_S:
            _, slot = heapq.heappop(busy)
            used, idle = used.remove(slot), idle.add(slot)
        while coming and coming[0][0] <= now + _GRAIN_S:
            _, due, model = coming.popleft()
            ready[model].append(due)
        full: set[int] = set()
        while heads := [Ready(r[0], m) for m, r in enumerate(ready) if r and sizes[m] not in full]:
            due, model = min(heads, key=lambda run: (order(run, ledger.spent), run))
            placed = place(model)
            if placed is None:
                full.add(sizes[model])
                continue
            slot, delay, idle = placed
            ready[model].popleft()
            start(model, slot, delay, due)
        before = ledger.next_release(now)
        while fill:
            filled = _fill_in(ledger, sizes, place, now, before)
            if filled is None:
                break
            model, slot, delay, idle = filled
            start(model, slot, delay, math.inf)
    return ledger.schedule(sum(map(len, ready)))


@lru_cache(maxsize=4096)
def _place(
    geometry: Geometry, used: Layout, idle: Layout, profile: Profile, costs: InstanceCosts
) -> tuple[Slot, float, Layout] | None:
    """Return the slot for a run, the seconds to create its instance, and the remaining idle instances.

    None if the run does not fit.
    """
    warm = next((slot for slot in idle if slot.profile == profile), None)
    if warm is not None:
        return warm, 0.0, idle.remove(warm)
    slot = choose(geometry, used.union(idle), profile)
    if slot is not None:
        return slot, costs.create_s, idle
    slot = choose(geometry, used, profile)
    if slot is None:
        return None
    remaining = EMPTY
    occupied = used.add(slot)
    for idle_slot in idle:
        if geometry.fits(occupied.union(remaining), idle_slot):
            remaining = remaining.add(idle_slot)
    destroyed = len(idle) - len(remaining)
    return slot, costs.create_s + destroyed * costs.destroy_s, remaining


def _fill_in(
    ledger: _Ledger,
    sizes: Sequence[int],
    place: Callable[[int], tuple[Slot, float, Layout] | None],
    now: float,
    before: float,
) -> tuple[int, Slot, float, Layout] | None:
    for m in sorted(range(len(sizes)), key=lambda m: (ledger.spent[m], m)):
        placed = place(m)
        if placed and now + placed[1] + ledger.models[m].seconds(sizes[m]) <= before + _GRAIN_S:
            return m, *placed
    return None


# -- ours ----------------------------------------------------------------------------------------------------------


def frames(geometry: Geometry, kinds: Sequence[Profile], models: Sequence[Hosted]) -> Frames:
    """Return the layouts that carry the most work in the demanded mix, and the share of time of each.

    They are sorted by this share, the largest first.
    """
    possible = ways(geometry, kinds)
    best = flow(demand_of(models), possible, 1, whole=False)
    held = [(way, share) for way, share in zip(possible, best.ways, strict=True) if share >= LEAST_SHARE]
    total_share = sum(share for _, share in held)
    return tuple(sorted(((way, share / total_share) for way, share in held), key=lambda frame: (-frame[1], frame[0])))


def framed(
    geometry: Geometry,
    kinds: Sequence[Profile],
    models: Sequence[Hosted],
    held: Frames,
    sessions: int,
    *,
    fill: bool = False,
    costs: InstanceCosts = InstanceCosts(),
) -> Schedule:
    """Schedule runs on the slices of layouts that change at planned times; see the module.

    Args:
        kinds: the profiles that counts and rates refer to.
        held: the layouts; a single one is a static partition.
        fill: whether runs out of turn fill gaps.
    """
    ledger = _Ledger(models, sessions)
    stock = [sum(way[k] * share for way, share in held) for k in range(len(kinds))]
    waiting = [
        _Window(model, shares, ledger.horizon)
        for model, shares in zip(models, split(demand_of(models), stock), strict=True)
    ]
    free = [
        (since, kinds.index(slot.profile), slot, until)
        for slot, since, until in _spans(geometry, kinds, held, min(m.window_s for m in models), ledger.horizon, costs)
    ]
    ledger.created = len(free)
    heapq.heapify(free)
    while free:
        now, kind, slot, until = heapq.heappop(free)
        ranks = [(rank, m) for m, window in enumerate(waiting) if (rank := window.rank(now, kind, until)) is not None]
        if ranks:
            _, m = min(ranks)
            end = ledger.start(m, slot, now, models[m].seconds(kind), waiting[m].take(kind))
        else:
            end = ledger.next_release(now)
            chosen = ledger.fill(now, kind, min(end, until)) if fill else None
            if chosen is not None:
                end = ledger.start(chosen, slot, now, models[chosen].seconds(kind), math.inf)
        if now < end < until - _GRAIN_S:
            heapq.heappush(free, (end, kind, slot, until))
    for window in waiting:
        window.advance(ledger.horizon)
    return ledger.schedule(sum(window.missed for window in waiting))


class _Window:
    """The work of one model's current window, and how much of it was done on each kind of slice."""

    def __init__(self, model: Hosted, shares: Sequence[float], horizon: float) -> None:
        self.model, self.horizon = model, horizon
        self.quota = [share * model.runs for share in shares]
        cost = [model.seconds(k) for k in range(len(shares))]
        self.loss = [seconds / min(cost) for seconds in cost]
        self.missed = 0
        self._open(0.0)

    def _open(self, begin: float) -> None:
        self.begin, self.due = begin, begin + self.model.window_s
        self.left = self.model.runs if self.due <= self.horizon + _GRAIN_S else 0
        self.done = [0] * len(self.quota)

    def advance(self, now: float) -> None:
        """Advance to the window at `now`; runs left in earlier windows count as missed."""
        while now >= self.due - _GRAIN_S:
            self.missed += self.left
            self._open(self.due)

    def rank(self, now: float, kind: int, until: float) -> tuple[float, ...] | None:
        """Return the model's rank for a free slice, the least first; None if no run can end on it in time.

        Models that are behind their part of this kind of slice come first, the one furthest behind as the first; then
        models by how much slower they are on it than on their fastest kind.
        """
        self.advance(now)
        if not self.left or now + self.model.seconds(kind) > min(self.due, until) + _GRAIN_S:
            return None
        done, quota = self.done[kind], self.quota[kind]
        if done < quota - _GRAIN_S:
            return (0.0, done / quota - (now - self.begin) / self.model.window_s)
        return (1.0, self.loss[kind])

    def take(self, kind: int) -> float:
        """Begin one run on a slice of this kind; return when it is due."""
        self.left -= 1
        self.done[kind] += 1
        return self.due


def demand_of(models: Sequence[Hosted]) -> list[WorkClass]:
    """Return one class of work for each model: items per second, and the seconds of one item on each kind of slice."""
    return [
        WorkClass(m.items / m.window_s, math.inf, tuple(1 / rate if rate else math.inf for rate in m.rates))
        for m in models
    ]


def _spans(
    geometry: Geometry, kinds: Sequence[Profile], held: Frames, shortest: float, horizon: float, costs: InstanceCosts
) -> list[tuple[Slot, float, float]]:
    """Return each slice, from when it can be used until when it must be free.

    In a round every layout is held once. Every second round has them in reverse order, so that the layout at the end of
    a round is also the first of the next one.
    """
    round_s = shortest if len(held) > 1 else horizon
    spans: list[tuple[Slot, float, float]] = []
    standing: dict[Slot, float] = {}
    layout = EMPTY
    for number in range(math.ceil(horizon / round_s - _GRAIN_S)):
        begin = number * round_s
        for way, share in held if number % 2 == 0 else held[::-1]:
            wanted = [kind for kind, n in zip(kinds, way, strict=True) for _ in range(n)]
            following = plan_free(geometry, EMPTY, sorted(wanted, reverse=True), layout)
            destroyed, created = layout.minus(following), following.minus(layout)
            spans += [(slot, standing.pop(slot), begin) for slot in destroyed]
            ready = begin + len(destroyed) * costs.destroy_s
            for i, slot in enumerate(created, start=1):
                standing[slot] = ready + i * costs.create_s
            layout = following
            begin += share * round_s
    return [*spans, *((slot, since, horizon) for slot, since in standing.items())]

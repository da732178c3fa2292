"""Assign pending jobs to stocked slices.

ELSA (Kim et al., DAC 2022, arXiv 2202.13481, the scheduler of PARIS) estimates for every partition when it would finish
a query, and gives the query to the smallest one that leaves slack before its deadline (`lab.papers.pariselsa.elsa`, a
reconstruction). It binds a query to a partition at once, so on equal partitions it stacks queries on the first that has
slack while others idle.

`Central` is ours and keeps ELSA's two ideas, slack and the cheapest slice first, but binds late: work waits in one
queue until a slice is idle.

- New work takes the idle slice on which it is cheapest and meets its limit. Cost is seconds times price; the price of a
  slice is its compute slices unless the caller knows better. The cheapest kind of slice is the work's **home**.
- A slice that becomes idle takes, of all work that it can still finish in time: first work without slack for its home,
  then its own (whose home it is) by least slack, then other work, the smallest increase of cost first. So postponed
  work moves to a larger slice exactly when waiting for the smaller one would break its limit.
- It never idles while some work that it can finish in time waits.
- Work that can no longer be in time yields to work that can, but only for `PATIENCE` of its limits; then it goes first.

Times are seconds on one clock; a kind is an index into the caller's list of slice profiles, a class one into its works.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

PATIENCE: Final = 2.0
"""After this many limits, late work goes before all other."""
_GRAIN_S: Final = 1e-9
"""Rounding of clocks: a smaller loss of slack is ignored."""
_SAME: Final = 1e-6
"""Costs that differ by less are equal: such work is at home on both."""
_URGENT: Final = 0.1
"""Ranks: urgent work is at 0 to 0.1 per unit of relative loss, own work at its share of remaining slack, other work at
1 and more. Own work with nearly no slack so comes before other work that would cost far more here.
"""


@dataclass(frozen=True)
class WorkClass:
    """A class of work: all its jobs have the same duration.

    Attributes:
        share: share of arriving jobs of this class; only ratios matter.
        limit_s: seconds from arrival within which a job has to be finished.
        seconds: duration of a job on each kind of slice; infinite if it does not fit.
        group: classes whose late jobs are counted together (a model).
    """

    share: float
    limit_s: float
    seconds: tuple[float, ...]
    group: int = 0


class Waiting(NamedTuple):
    """A pending job: its arrival, its class, and the caller's name of it."""

    arrived: float
    work: int
    name: int = 0


class StockCosts:
    """Costs and homes for given stocks of each kind, independent of arrivals.

    `prices` are the worth of one second of each kind of slice, above 0. Kinds without stock are not a home.
    """

    def __init__(self, works: Sequence[WorkClass], prices: Sequence[float], stock: Sequence[int]) -> None:
        self.works = tuple(works)
        self.stock = tuple(stock)
        kinds = [k for k, count in enumerate(stock) if count]
        self.fastest = [min((work.seconds[k] for k in kinds), default=math.inf) for work in works]
        self.allowed: list[list[int]] = []
        """Kinds that meet the limit of each class, cheapest first."""
        rows: list[list[tuple[float, float, float, float] | None]] = [[] for _ in stock]
        for work in works:
            cost = {k: prices[k] * work.seconds[k] for k in kinds if work.seconds[k] <= work.limit_s}
            order = sorted(cost, key=lambda k: (cost[k], k))
            self.allowed.append(order)
            for k, row in enumerate(rows):
                if k not in cost:
                    row.append(None)
                    continue
                home = order[0]
                loss = cost[k] / cost[home] - 1
                loss = 0.0 if loss < _SAME else loss
                row.append((work.limit_s - work.seconds[k], work.limit_s - work.seconds[home], loss, work.limit_s))
        self.rows = rows


class Central:
    """Pending work and the idle slices; see the module. One instance follows one stream of events in time order."""

    def __init__(self, stock_costs: StockCosts, idle: Sequence[int] | None = None) -> None:
        """`idle` slices of each kind at the start; default: all of the stock."""
        self.stock_costs = stock_costs
        self.idle = list(stock_costs.stock if idle is None else idle)
        self.late: dict[int, list[Waiting]] = {}
        """Work that can no longer be in time, by class, oldest first; no class without any."""
        self._queues: dict[int, deque[Waiting]] = {}

    def __len__(self) -> int:
        return sum(map(len, self.late.values())) + sum(map(len, self._queues.values()))

    def arrive(self, job: Waiting) -> int | None:
        """Add a job; return the kind of idle slice on which it starts immediately, or None if it waits."""
        for kind in self.stock_costs.allowed[job.work]:
            if self.idle[kind]:
                self.idle[kind] -= 1
                return kind
        self.wait(job)
        return None

    def wait(self, job: Waiting) -> None:
        """Add a job to the pending ones; within a class, in order of arrival."""
        self._queues.setdefault(job.work, deque()).append(job)

    def release(self, now: float, kind: int) -> Waiting | None:
        """Return the job that starts on a slice that becomes idle; None if the slice stays idle."""
        job = self._take(now, kind)
        if job is None:
            self.idle[kind] += 1
        return job

    def start_idle(self, now: float) -> list[tuple[Waiting, int]]:
        """Start jobs on idle slices, cheapest kinds first; return which on which kind."""
        started: list[tuple[Waiting, int]] = []
        for kind, count in enumerate(self.idle):
            for _ in range(count):
                if not (self._queues or self.late):
                    return started
                job = self._take(now, kind)
                if job is None:
                    break
                self.idle[kind] -= 1
                started.append((job, kind))
        return started

    def _take(self, now: float, kind: int) -> Waiting | None:
        """Remove and return the waiting job that a free slice of this kind should get; None: it stays free."""
        self._give_up(now)
        if self.late:
            first = min(queue[0] for queue in self.late.values())
            limit = self.stock_costs.works[first.work].limit_s
            if now - first.arrived > PATIENCE * limit and (job := self._take_late(kind)):
                return job
        row = self.stock_costs.rows[kind]
        best, best_place, best_rank = -1, 0, math.inf
        for work, queue in self._queues.items():
            cell = row[work]
            if cell is None:
                continue
            latest, home_latest, loss, limit = cell
            place, waited = 0, now - queue[0].arrived
            if waited > latest + _GRAIN_S:  # too late here, but perhaps not for later arrivals
                in_time = next((i for i, p in enumerate(queue) if now - p.arrived <= latest + _GRAIN_S), None)
                if in_time is None:
                    continue
                place, waited = in_time, now - queue[in_time].arrived
            slack = home_latest - waited
            rank = slack / limit if loss == 0.0 else _URGENT * loss if slack < 0 else 1.0 + loss
            if rank < best_rank or (rank == best_rank and work < best):
                best, best_place, best_rank = work, place, rank
        if best < 0:
            return self._take_late(kind)
        queue = self._queues[best]
        job = queue[best_place]
        del queue[best_place]
        if not queue:
            del self._queues[best]
        return job

    def _give_up(self, now: float) -> None:
        """Move work that can no longer be in time anywhere to the late queue."""
        works, fastest = self.stock_costs.works, self.stock_costs.fastest
        emptied = []
        for work, queue in self._queues.items():
            last = works[work].limit_s - fastest[work] + _GRAIN_S
            while queue and now - queue[0].arrived > last:
                insort(self.late.setdefault(work, []), queue.popleft())
            if not queue:
                emptied.append(work)
        for work in emptied:
            del self._queues[work]

    def _take_late(self, kind: int) -> Waiting | None:
        works = self.stock_costs.works
        able = [queue[0] for work, queue in self.late.items() if works[work].seconds[kind] < math.inf]
        if not able:
            return None
        job = min(able)
        queue = self.late[job.work]
        del queue[0]
        if not queue:
            del self.late[job.work]
        return job


def assign(
    now: float, waiting: Sequence[Waiting], idle: Sequence[int], stock_costs: StockCosts
) -> list[tuple[Waiting, int]]:
    """Return which jobs start on which kinds now, for a live dispatcher's rounds.

    Args:
        waiting: jobs in any order, each with a unique name.
        idle: idle slices of each kind; the stock of `stock_costs` counts the busy ones too.
    """
    central = Central(stock_costs, idle)
    for job in sorted(waiting):
        central.wait(job)
    return central.start_idle(now)

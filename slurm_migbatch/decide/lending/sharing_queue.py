"""Simulate training jobs that share GPUs: which start, with whom, and when each ends, under one rule.

A GPU here is a slice of one profile if migbatchd calls it (`decide.lending.pairs`), and each job needs one; jobs that
need several are the lab's (`lab.sim.policies.sharing.GangQueue`).

All times are seconds; a slowdown says how many times longer a job takes, at least 1.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import islice
from operator import attrgetter
from typing import Final, TypeAlias

Slowdown = Callable[[str, str], float]
"""How many times longer an application takes next to another one; infinite if the two must not share."""
Rank = Callable[[float, float, float, float], float | None]
"""When to share, and with which job first: (own, other, slow_own, slow_other) -> sort key of a possible partner. The
lowest is the first, ties in order of arrival; None: the two must not share, nor later, when less of the other one
remains.
"""
APART: Final = (math.inf, math.inf)
"""Slowdowns of two that must not share."""
_TaskState: TypeAlias = "tuple[float, int, dict[QueuedTraining, int], float, float, int]"
"""What changes of a job: `left`, `alone`, `partners`, `rate`, `since`, `version`."""
Started: TypeAlias = "tuple[QueuedTraining, int, list[tuple[QueuedTraining, int]]]"
"""A job that was started, the number of its empty GPUs, and its partners."""


@dataclass(slots=True)
class StepBudget:
    """Remaining steps of the simulation: one for each job that ends and for each partner that is tested."""

    left: int = sys.maxsize


@dataclass(slots=True, eq=False)
class QueuedTraining:
    """A running or pending job, as the plan sees it.

    Attributes:
        key: its id, as the caller knows it; `app`: the name that slowdowns are stored under; `need`: GPUs.
        left: seconds of work alone that remain, at the time `since`.
        turn: order in which jobs get GPUs of their own, the least first.
        cases: possible values of `left`, equally probable; empty: it is known.
        alone: number of its unshared GPUs. `partners`: number of GPUs shared with each other job.
        rate: seconds of work per second; 0 while it is pending.
    """

    key: int
    app: str
    need: int
    left: float
    turn: int = 0
    cases: tuple[float, ...] = ()
    alone: int = 0
    partners: dict[QueuedTraining, int] = field(default_factory=dict)
    rate: float = 0.0
    since: float = 0.0
    version: int = 0

    def remaining(self, now: float) -> float:
        """Return the seconds of work alone that remain."""
        return max(0.0, self.left - self.rate * (now - self.since))


class SharingQueue:
    """GPUs with no job, one job and two jobs; running jobs, and pending ones in the order in which they find partners.

    GPUs are interchangeable: a partner of a job can share any of its unshared GPUs.
    """

    def __init__(self, free: int, slowdown: Slowdown, budget: StepBudget | None = None) -> None:
        """Create a queue for `free` empty GPUs; `budget`: limit of all its simulations; None: no limit."""
        self.size = self.free = free
        self.slowdown = slowdown
        self.budget = StepBudget() if budget is None else budget
        #: slowdowns of both jobs of a pair, as far as they were computed
        self._pairs: dict[tuple[str, str], tuple[float, float]] = {}
        self.now = 0.0
        self.single: dict[QueuedTraining, None] = {}
        self.lone = 0
        #: the jobs of `single` with which `start` has not tested the whole queue
        self._untested: dict[QueuedTraining, None] = {}
        self.tasks: dict[int, QueuedTraining] = {}
        self.queue: list[QueuedTraining] = []
        #: seconds of work that running jobs lose in each second because they share
        self.loss = 0.0
        #: a heap of the ends of running jobs; entries with an earlier version of a job do not apply
        self.ends: list[tuple[float, int, int, QueuedTraining]] = []
        #: in a trial the earlier state of each job that it changed
        self._changed: dict[QueuedTraining, _TaskState] | None = None

    @contextmanager
    def trial(self, waiting: int = sys.maxsize, case: int | None = None) -> Iterator[None]:
        """Undo all changes at the end of the context, except those of the budget.

        Meanwhile the queue has its first `waiting` jobs, without those that can never fit; with `case`, each job has
        its length of that case.
        """
        if len(self.ends) > 2 * len(self.tasks):
            self._list_ends()
        counts = self.free, self.lone, self.now, self.loss
        jobs = self.single, self.tasks, self.queue, self.ends, self._changed
        self.single, self.tasks, self.ends, self._changed = dict(self.single), dict(self.tasks), self.ends.copy(), {}
        self.queue = list(islice((task for task in self.queue if task.need <= self.size), waiting))
        if case is not None:
            self._set_lengths(case)
        try:
            yield
        finally:
            for task, state in self._changed.items():
                task.left, task.alone, task.partners, task.rate, task.since, task.version = state
            self.free, self.lone, self.now, self.loss = counts
            self.single, self.tasks, self.queue, self.ends, self._changed = jobs

    def _set_lengths(self, case: int) -> None:
        for task in (*self.tasks.values(), *self.queue):
            if task.cases:
                self._save(task)
                task.left = task.cases[case % len(task.cases)]
        self._list_ends()

    def _list_ends(self) -> None:
        self.ends = [(task.since + task.left / task.rate, task.key, task.version, task) for task in self.tasks.values()]
        heapify(self.ends)

    def _save(self, task: QueuedTraining) -> None:
        """Save the state of a job that is about to change, if this is a trial."""
        changed = self._changed
        if changed is not None and task not in changed:
            changed[task] = (task.left, task.alone, task.partners.copy(), task.rate, task.since, task.version)

    def run(self, task: QueuedTraining, empty: int, partners: Sequence[tuple[QueuedTraining, int]]) -> None:
        """Start a job on `empty` GPUs of its own and next to partners, which slow down."""
        self._save(task)
        self.tasks[task.key] = task
        self.free -= empty
        task.alone = empty
        task.since = self.now
        for other, count in partners:
            self._save(other)
            other.partners[task] = task.partners[other] = count
            self._alone(other, -count)
        if empty:
            self._add_single(task)
            self.lone += empty
        self._pace(task)
        for other, _ in partners:
            self._pace(other)

    def end(self, task: QueuedTraining) -> None:
        """Remove a job that has ended; its partners speed up."""
        self._save(task)
        task.version += 1
        self.loss -= 1 - task.rate
        del self.tasks[task.key]
        if task.alone:
            self.free += task.alone
            self.lone -= task.alone
            del self.single[task]
            self._untested.pop(task, None)
        for other, count in task.partners.items():
            self._save(other)
            del other.partners[task]
            self._alone(other, count)
            self._pace(other)
        self.first_end()  # drops entries of ended jobs, which would add up if nothing was simulated

    def first_end(self) -> tuple[float, QueuedTraining] | None:
        """Return when the first running job ends, by its current rate, and the job; None if none runs."""
        ends = self.ends
        while ends:
            moment, _, version, task = ends[0]
            if version == task.version:
                return moment, task
            heappop(ends)
        return None

    def retest(self) -> None:
        """Let the next `start` test all pairs, because the rule or the queue is another one."""
        self._untested = dict(self.single)

    def start(self, rule: Rank | None) -> list[Started]:
        """Start jobs on empty GPUs in the order of turns, then those that the rule starts next to others."""
        started: list[Started] = []
        queue = self.queue
        while self.free and queue:
            task = min(queue, key=attrgetter("turn"))
            queue.remove(task)
            self.run(task, 1, [])
            started.append((task, 1, []))
        if rule is not None:
            self._start_beside(rule, started)
            self._untested.clear()
        return started

    def _start_beside(self, rank: Rank, started: list[Started]) -> None:
        """Start the jobs that a rule starts next to others, each on the one GPU that it needs; add them to `started`.

        Running jobs with which the whole queue was tested before are not tested again; the budget counts them anyway.
        """
        queue, single, untested, budget = self.queue, self.single, self._untested, self.budget
        pair_slowdowns, now = self._pairs, self.now
        position = 0
        while position < len(queue) and single:
            if not untested:
                budget.left -= len(single) * (len(queue) - position)
                return
            budget.left -= len(single)
            task = queue[position]
            app, own_left = task.app, task.left
            least, chosen = math.inf, None
            for other in untested:
                slowdowns = pair_slowdowns.get((app, other.app)) or self._both(app, other.app)
                if slowdowns is APART:
                    continue
                other_left = other.left - other.rate * (now - other.since)  # `remaining`, without a call
                ranked = rank(own_left, other_left if other_left > 0.0 else 0.0, slowdowns[0], slowdowns[1])
                if ranked is not None and (chosen is None or ranked < least):
                    least, chosen = ranked, other
            if chosen is None:
                position += 1
                continue
            del queue[position]
            partners = [(chosen, 1)]
            self.run(task, 0, partners)
            started.append((task, 0, partners))

    def _both(self, own: str, other: str) -> tuple[float, float]:
        slowdowns = self.slowdown(own, other), self.slowdown(other, own)
        factors = self._pairs[own, other] = APART if math.inf in slowdowns else slowdowns
        return factors

    def _add_single(self, task: QueuedTraining) -> None:
        self.single[task] = self._untested[task] = None

    def _alone(self, task: QueuedTraining, change: int) -> None:
        if not task.alone:
            self._add_single(task)
        task.alone += change
        self.lone += change
        if not task.alone:
            del self.single[task]
            self._untested.pop(task, None)

    def _pace(self, task: QueuedTraining) -> None:
        now = self.now
        left = task.left - task.rate * (now - task.since)  # `remaining`, without a call
        task.left = left if left > 0.0 else 0.0
        task.since = now
        slowest = 1.0
        for other in task.partners:
            slowdowns = self._pairs.get((task.app, other.app)) or self._both(task.app, other.app)
            slowest = max(slowest, slowdowns[0])
        rate = 1 / slowest
        self.loss += (task.rate or 1.0) - rate
        task.rate = rate
        task.version += 1
        heappush(self.ends, (now + task.left / task.rate, task.key, task.version, task))

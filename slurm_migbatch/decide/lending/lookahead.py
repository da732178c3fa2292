"""Decide between sharing and waiting: whether a job starts now next to another one, or after that one has ended.

SJF-BSBF of "wise resource sharing" (Lai et al., arXiv 2407.13088), after the authors' code (Lai-JX/Scheduler,
`cluster/switch.py` and `scheduler_impl/schedulers.py`): shortest first, at most two jobs on a GPU, and next to another
only if the pair's mean finish is earlier than if they run one after the other (`together`, `apart`, `pays`, `PAIR`).
FFS is the same without the test.

`plan` is an addition that is not in the paper: the pair test considers two jobs only. It shares too little if a queue
waits behind them (the rule refuses equal jobs from a slowdown of 1.5, and throughput grows up to 2), and too much for
gangs (each partner is tested separately, all are slowed down) and if the shared GPU would soon be needed by others.
`plan` simulates the whole queue to its end under several rules, starts like the best of them, and then tests for each
start whether omitting it is better. The simulation is limited by steps (`StepBudget`), not by time, so that the result
is the same on every machine.

A GPU here is a slice of one profile if migbatchd calls it (`decide.lending.pairs`), and each job needs one; jobs that
need several are the lab's (`lab.sim.policies.sharing.GangQueue`).

All times are seconds; a slowdown says how many times longer a job takes, at least 1.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import islice
from operator import attrgetter
from typing import Final, NamedTuple, TypeAlias

from slurm_migbatch.decide.lending.pair_finish import apart, pays, together

Slowdown = Callable[[str, str], float]
"""How many times longer an application takes next to another one; infinite if the two must not share."""

Rank = Callable[[float, float, float, float], float | None]
"""When to share, and with which job first: (own, other, slow_own, slow_other) -> sort key of a possible partner. The
lowest is the first, ties in order of arrival; None: the two must not share, nor later, when less of the other one
remains.
"""


_APART: Final = (math.inf, math.inf)
"""Slowdowns of two that must not share."""


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

    def copy(self, case: int | None) -> QueuedTraining:
        """Return the same job without partners; with `case`, with the length of that case."""
        cases = self.cases
        left = self.left if case is None or not cases else cases[case % len(cases)]
        copied = QueuedTraining(self.key, self.app, self.need, left, self.turn, cases)
        if self.rate:  # it runs
            copied.alone, copied.rate, copied.since = self.alone, self.rate, self.since
        return copied

    def remaining(self, now: float) -> float:
        """Return the seconds of work alone that remain."""
        return max(0.0, self.left - self.rate * (now - self.since))


Started: TypeAlias = "tuple[QueuedTraining, int, list[tuple[QueuedTraining, int]]]"
"""A job that was started, the number of its empty GPUs, and its partners."""


class TrainingStart(NamedTuple):
    """The start of a job on `empty` GPUs without jobs, and next to partners: (key, number of its GPUs to share)."""

    key: int
    empty: int
    partners: tuple[tuple[int, int], ...]


def pair_test(gain: float) -> Rank:
    """Return the authors' rule with a margin: share if the pair's mean finish is earlier by this ratio, at most 0.5."""

    def rank(own: float, other: float, slow_own: float, slow_other: float) -> float | None:
        mean, after = together(own, other, slow_own, slow_other), apart(own, other)
        return mean if mean < after and mean <= (1 - gain) * after else None

    return rank


def _gaining(own: float, other: float, slow_own: float, slow_other: float) -> float | None:
    mean, after = together(own, other, slow_own, slow_other), apart(own, other)
    return mean - after if mean < 0.8 * after else None


def _faster(than: float) -> Rank:
    def rank(_own: float, _other: float, slow_own: float, slow_other: float) -> float | None:
        rate = 1 / slow_own + 1 / slow_other
        return -rate if rate > than else None

    return rank


def _brief(own: float, other: float, slow_own: float, slow_other: float) -> float | None:
    return -1 / slow_own - 1 / slow_other if slow_own * own <= slow_other * other else None


def _brief_pair(own: float, other: float, slow_own: float, slow_other: float) -> float | None:
    return _brief(own, other, slow_own, slow_other) if pays(own, other, slow_own, slow_other) else None


NEVER: Final = None
"""The rule by which no jobs share."""
PAIR: Final = pair_test(0.0)
FASTEST: Final = _faster(1.0)
RULES: Final[tuple[Rank | None, ...]] = (NEVER, PAIR, FASTEST, _faster(1.3), _gaining, _brief, _brief_pair)
"""Rules that `plan` chooses from."""


class SharingQueue:
    """GPUs with no job, one job and two jobs; running jobs, and pending ones in the order in which they find partners.

    GPUs are interchangeable: a partner of a job can share any of its unshared GPUs.
    """

    def __init__(self, free: int, slowdown: Slowdown, budget: StepBudget | None = None) -> None:
        """Create a queue for `free` empty GPUs; copies of it use the same `budget`; None: no limit."""
        self.size = self.free = free
        self.slowdown = slowdown
        self.budget = StepBudget() if budget is None else budget
        #: slowdowns of both jobs of a pair, as far as they were computed
        self._pairs: dict[tuple[str, str], tuple[float, float]] = {}
        self.now = 0.0
        self.single: dict[QueuedTraining, None] = {}
        self.lone = 0
        #: the jobs of `single` that `_rule` has not tested with the whole queue
        self._untested: dict[QueuedTraining, None] = {}
        self._rule: Rank | None = None
        self.tasks: dict[int, QueuedTraining] = {}
        self.queue: list[QueuedTraining] = []

    @property
    def cases(self) -> int:
        """Number of simulated cases of unknown lengths; 0: all lengths are known."""
        return max((len(task.cases) for task in (*self.tasks.values(), *self.queue)), default=0)

    def copy(self, waiting: int, case: int | None = None) -> SharingQueue:
        """Return a copy with the first `waiting` of the queue, without those that can never fit."""
        copied = type(self)(self.size, self.slowdown, self.budget)
        copied._pairs = self._pairs
        copied.free = self.free
        copied.now, copied.lone = self.now, self.lone
        for task in self.tasks.values():
            copied.tasks[task.key] = task.copy(case)
        for task in self.tasks.values():
            if task.partners:
                copied.tasks[task.key].partners = {
                    copied.tasks[partner.key]: count for partner, count in task.partners.items()
                }
        copied.single = dict.fromkeys(copied.tasks[task.key] for task in self.single)
        fitting = islice((task for task in self.queue if task.need <= self.size), waiting)
        copied.queue = [task.copy(case) for task in fitting]
        return copied

    def run(
        self, task: QueuedTraining, empty: int, partners: Sequence[tuple[QueuedTraining, int]]
    ) -> list[QueuedTraining]:
        """Start a job on `empty` GPUs of its own and next to partners; return the partners, which slow down."""
        self.tasks[task.key] = task
        self.free -= empty
        task.alone = empty
        task.since = self.now
        for other, count in partners:
            other.partners[task] = task.partners[other] = count
            self._alone(other, -count)
        if empty:
            self.single[task] = self._untested[task] = None
            self.lone += empty
        self._pace(task)
        for other, _ in partners:
            self._pace(other)
        return [other for other, _ in partners]

    def end(self, task: QueuedTraining) -> list[QueuedTraining]:
        """Remove a job that has ended; return its partners, which speed up."""
        del self.tasks[task.key]
        if task.alone:
            self.free += task.alone
            self.lone -= task.alone
            del self.single[task]
            self._untested.pop(task, None)
        for other, count in task.partners.items():
            del other.partners[task]
            self._alone(other, count)
            self._pace(other)
        return list(task.partners)

    def start(self, rule: Rank | None) -> list[Started]:
        """Start jobs on empty GPUs in the order of turns, then those that the rule starts next to others."""
        started: list[Started] = []
        queue = self.queue
        while self.free and queue:
            task = min(queue, key=attrgetter("turn"))
            queue.remove(task)
            self.run(task, 1, [])
            started.append((task, 1, []))
        if self._rule is not rule:
            self._rule, self._untested = rule, dict(self.single)
        if rule is not None:
            self._share(rule, started)
            self._untested.clear()
        return started

    def _share(self, rank: Rank, started: list[Started]) -> None:
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
                if slowdowns is _APART:
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
        factors = self._pairs[own, other] = _APART if math.inf in slowdowns else slowdowns
        return factors

    def _alone(self, task: QueuedTraining, change: int) -> None:
        if not task.alone:
            self.single[task] = self._untested[task] = None
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
        task.rate = 1 / slowest
        task.version += 1


def rollout(sharing: SharingQueue, rule: Rank | None, max_total: float = math.inf, *, hold: bool = False) -> float:
    """Simulate all jobs of `sharing` to their ends; return the sum of their finish times, counted from now.

    No job is submitted meanwhile, and the rule stays the same. Stops early and returns infinity if the sum would exceed
    `max_total`, or the budget is spent. With `hold` nothing starts before the first job has ended.
    Each job must be able to fit at some time (`SharingQueue.copy` omits the others).
    """
    begin = sharing.now
    total = 0.0
    budget, tasks = sharing.budget, sharing.tasks
    ends = [(begin + task.remaining(begin) / task.rate, task.key, task.version, task) for task in tasks.values()]
    heapify(ends)
    changed = [] if hold and ends else _start(sharing, rule)
    while True:
        for task in changed:
            heappush(ends, (sharing.now + task.left / task.rate, task.key, task.version, task))
        while ends and ends[0][2] != ends[0][3].version:
            heappop(ends)
        if not ends:
            return total
        moment, _, _, task = heappop(ends)
        sharing.now = moment
        budget.left -= 1
        total += moment - begin
        if budget.left < 0 or total + (moment - begin) * (len(tasks) - 1 + len(sharing.queue)) > max_total:
            return math.inf
        task.version += 1
        changed = sharing.end(task)
        if sharing.queue:
            changed += _start(sharing, rule)


def _start(sharing: SharingQueue, rule: Rank | None) -> list[QueuedTraining]:
    """Start the jobs that a rule starts; return all jobs whose end changes: these and their partners."""
    return [
        affected for task, _, partners in sharing.start(rule) for affected in (task, *[other for other, _ in partners])
    ]


def choose(sharing: SharingQueue, rules: Sequence[Rank | None] = RULES, depth: int = 64) -> tuple[Rank | None, float]:
    """Return the rule with which the current queue has the lowest mean finish, and the sum of finishes.

    At most `depth` pending jobs are simulated. The first of equal rules is taken, also if the budget does not
    suffice for any; then the sum is infinite.
    """
    least, chosen = math.inf, rules[0]
    for rule in rules:
        if sharing.budget.left <= 0:
            break
        total = _total(sharing, rule, depth, least)
        if total < least:
            least, chosen = total, rule
    return chosen, least


def _total(
    sharing: SharingQueue, rule: Rank | None, depth: int, most: float, starts: Sequence[TrainingStart] | None = None
) -> float:
    """Return the sum of finishes over all cases; `starts`: the jobs that start before the first has ended."""
    total = 0.0
    for case in range(sharing.cases) if sharing.cases else (None,):
        copied = sharing.copy(depth, case)
        if starts is not None:
            apply(copied, starts)
        total += rollout(copied, rule, most - total, hold=starts is not None)
        if total > most:
            return math.inf
    return total


def plan(
    sharing: SharingQueue, rules: Sequence[Rank | None] = RULES, depth: int = 64, tries: int = 8
) -> list[TrainingStart]:
    """Return what to start now for the lowest mean finish of the current queue; changes `sharing`.

    Begins with the starts of the best rule. Then tries up to `tries` single changes of each kind: omitting a start that
    shares, or starting a job that would wait where it is fastest. A change is kept if a simulation under that rule has
    an earlier mean finish. Jobs further back than `depth` start only on GPUs that would stay empty, and share with no
    job.
    """
    if len(rules) == 1 or not any(sharing.free + sharing.lone >= task.need for task in sharing.queue):
        return begin(sharing, rules[0])
    rule, least = choose(sharing, rules, depth)

    def better(starts: list[TrainingStart], other: list[TrainingStart]) -> tuple[float, list[TrainingStart]]:
        total = _total(sharing, rule, depth, least, other)
        return (total, other) if total < least * (1 - 1e-9) else (least, starts)

    starts = begin(sharing.copy(depth), rule)
    tries = tries if sharing.budget.left > 0 else 0
    for start in [start for start in starts if start.partners][:tries]:
        if start in starts:
            least, starts = better(starts, _without(starts, start))
    for _ in range(tries):
        copied = sharing.copy(depth)
        apply(copied, starts)
        extra = next(iter(begin(copied, FASTEST)), None)
        if extra is None:
            break
        starts_before = starts
        least, starts = better(starts, [*starts, extra])
        if starts is starts_before:
            break
    apply(sharing, starts)
    if len(sharing.queue) > depth:
        starts = [*starts, *begin(sharing, NEVER)]
    return starts


def _without(starts: Sequence[TrainingStart], dropped: TrainingStart) -> list[TrainingStart]:
    """Return the starts without `dropped`, and without those that would start next to it."""
    keys = {dropped.key}
    remaining = []
    for start in starts:
        if start.key in keys or any(key in keys for key, _ in start.partners):
            keys.add(start.key)
        else:
            remaining.append(start)
    return remaining


def begin(sharing: SharingQueue, rule: Rank | None) -> list[TrainingStart]:
    """Return what one rule starts now; changes `sharing`."""
    return [
        TrainingStart(task.key, empty, tuple((other.key, count) for other, count in partners))
        for task, empty, partners in sharing.start(rule)
    ]


def apply(sharing: SharingQueue, starts: Sequence[TrainingStart]) -> None:
    """Carry out the starts in `sharing`."""
    waiting = {task.key: task for task in sharing.queue}
    for start in starts:
        task = waiting.pop(start.key)
        sharing.run(task, start.empty, [(sharing.tasks[key], count) for key, count in start.partners])
    if starts:
        sharing.queue = list(waiting.values())

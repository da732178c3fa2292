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

All times are seconds; a slowdown says how many times longer a job takes, at least 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heapify
from typing import Final, NamedTuple

from slurm_migbatch.decide.lending.pair_finish import apart, pays, together
from slurm_migbatch.decide.lending.sharing_queue import Rank, SharingQueue

_ROUNDING: Final = 1e-9
"""By what part two equal sums of finishes may differ."""


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


def rollout(sharing: SharingQueue, rule: Rank | None, max_total: float = math.inf, *, hold: bool = False) -> float:
    """Simulate all jobs of `sharing` to their ends; return the sum of their finish times, counted from now.

    No job is submitted meanwhile, and the rule stays the same. Stops early and returns infinity if the sum would exceed
    `max_total`, or the budget is spent. With `hold` nothing starts before the first job has ended.
    Each job must be able to fit at some time (`SharingQueue.trial` omits the others). Changes `sharing`.
    """
    budget, tasks = sharing.budget, sharing.tasks
    # the sum if every job ran alone from now on, and then, as time passes, what they wait and lose
    total = sum(task.remaining(sharing.now) for task in tasks.values()) + sum(task.left for task in sharing.queue)
    sharing.retest()
    if not (hold and tasks):
        sharing.start(rule)
    waiting = True
    while total <= max_total:
        if waiting and not sharing.queue:
            waiting = False
            total += _finish(sharing)
        first = sharing.first_end()
        if first is None or budget.left <= 0:
            break
        moment, task = first
        if moment > sharing.now:
            total += (moment - sharing.now) * (len(sharing.queue) + sharing.loss)
            sharing.now = moment
        budget.left -= 1
        sharing.end(task)
        if sharing.queue:
            sharing.start(rule)
    return math.inf if tasks or budget.left < 0 or total > max_total else total


def _finish(sharing: SharingQueue) -> float:
    """End the jobs whose ends follow from closed forms if no other job starts: those alone, and two next to each other.

    Return by how much later they end than if each ran alone from now on.
    """
    now, tasks = sharing.now, sharing.tasks
    delay, loss, count = 0.0, 0.0, len(tasks)
    others = []
    for entry in sharing.ends:
        moment, key, version, task = entry
        if version != task.version:
            continue
        if task.partners:
            other, *more = task.partners
            if more or len(other.partners) > 1:
                others.append(entry)
                loss += 1 - task.rate
                continue
            first = max(now, other.since + other.left / other.rate)
            if first < moment:
                moment = first + task.remaining(first)  # alone from then on
            delay += max(0.0, moment - now - task.remaining(now))
        del tasks[key]
    heapify(others)
    sharing.ends, sharing.loss = others, loss
    sharing.budget.left -= count - len(tasks)
    return delay


def choose(sharing: SharingQueue, rules: Sequence[Rank | None] = RULES, depth: int = 64) -> tuple[Rank | None, float]:
    """Return the rule with which the current queue has the lowest mean finish, and the sum of finishes.

    At most `depth` pending jobs are simulated. The first of equal rules is taken, also if the budget does not
    suffice for any; then the sum is infinite.
    """
    least, chosen = math.inf, rules[0]
    cases = _cases(sharing)
    for rule in rules:
        if sharing.budget.left <= 0:
            break
        total = _total(sharing, rule, depth, cases, least)
        if total < least * (1 - _ROUNDING):
            least, chosen = total, rule
    return chosen, least


def _cases(sharing: SharingQueue) -> Sequence[int | None]:
    """Return the numbers of the simulated cases of unknown lengths; None: the one case of known lengths."""
    most = max((len(task.cases) for task in (*sharing.tasks.values(), *sharing.queue)), default=0)
    return range(most) if most else (None,)


def _total(
    sharing: SharingQueue,
    rule: Rank | None,
    depth: int,
    cases: Sequence[int | None],
    most: float,
    starts: Sequence[TrainingStart] | None = None,
) -> float:
    """Return the sum of finishes over all cases; `starts`: the jobs that start before the first has ended."""
    total = 0.0
    for case in cases:
        with sharing.trial(depth, case):
            if starts is not None:
                apply(sharing, starts)
            total += rollout(sharing, rule, most - total, hold=starts is not None)
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
    job. Fewer than `depth` are simulated if so many run that the budget would not suffice for all rules.
    """
    depth = max(1, min(depth, sharing.budget.left // (4 * max(1, len(sharing.tasks)))))
    if len(rules) == 1 or not any(sharing.free + sharing.lone >= task.need for task in sharing.queue):
        return begin(sharing, rules[0])
    rule, least = choose(sharing, rules, depth)
    cases = _cases(sharing)

    def better(starts: list[TrainingStart], other: list[TrainingStart]) -> tuple[float, list[TrainingStart]]:
        total = _total(sharing, rule, depth, cases, least, other)
        return (total, other) if total < least * (1 - _ROUNDING) else (least, starts)

    with sharing.trial(depth):
        starts = begin(sharing, rule)
    tries = tries if sharing.budget.left > 0 else 0
    for start in [start for start in starts if start.partners][:tries]:
        if start in starts:
            least, starts = better(starts, _without(starts, start))
    for _ in range(tries):
        with sharing.trial(depth):
            apply(sharing, starts)
            extra = next(iter(begin(sharing, FASTEST)), None)
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
    sharing.retest()
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

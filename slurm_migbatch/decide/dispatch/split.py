"""Split the remaining time of a pipeline over its stages at the lowest cost.

Each stage has several choices (a profile: predicted seconds, and a cost). The result is the cheapest choice for each
with which the longest path through the stages takes at most the remaining time: ESG's problem for one queue (Hui et
al., HPDC 2024, section 3), which ESG solves by A* over the stages with pruning from both sides. Here, a reconstruction,
it is solved by dynamic programming over Pareto fronts of (seconds, cost), which for a chain finds the same optimum: of
all choices for the first k stages those are kept that are not dominated, and that leave the rest enough time.

Parallel stages are joined by level, the number of stages before one on the longest path to it: a level takes as long as
its slowest stage and costs the sum of all. The levels' seconds add up to no less than any path, so a split meets the
time; with uneven paths it may leave some, which `_relaxed` then gives to stages that become cheaper by it. (ESG divides
large graphs by dominators instead.)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

T = TypeVar("T")

MOST_KEPT: Final = 256
"""Maximum points of a front: above that some are dropped, and the split may cost a little more."""
MOST_OF_LEVEL: Final = 32
"""The same for one level of parallel stages."""
SENSIBLE: Final = 1.1
"""If the remaining time is too short anyway, a stage gets the cheapest choice within so many times its fastest."""


class StageChoice(NamedTuple):
    """One choice for a stage: predicted seconds, and cost."""

    seconds: float
    price: float


@dataclass(frozen=True)
class SplitStage:
    """A stage: its choices, at least one, and the positions of the stages before it, all lower than its own."""

    choices: tuple[StageChoice, ...]
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class Split:
    """The choice of each stage by its index.

    Attributes:
        seconds: of the longest path.
        price: of all stages.
        kept: whether the longest path takes at most the remaining time.
    """

    chosen: tuple[int, ...]
    seconds: float
    price: float
    kept: bool

    @classmethod
    def of(cls, stages: Sequence[SplitStage], chosen: Sequence[int], left_s: float) -> Split:
        """Return the time and cost of these choices."""
        seconds = path_s(stages, chosen)
        price = sum(stage.choices[number].price for stage, number in zip(stages, chosen, strict=True))
        return cls(tuple(chosen), seconds, price, seconds <= left_s)


class _Point(NamedTuple):
    """A point of a front; `of` is the point of the levels before, and the choices of the last level."""

    seconds: float
    price: float
    of: tuple[_Point | None, tuple[int, ...]]


def split(stages: Sequence[SplitStage], left_s: float) -> Split:
    """Return the cheapest choices that meet the remaining time, or fast ones if none do.

    Args:
        stages: in an order in which each comes after those it waits for.
        left_s: seconds until the end of the last.
    """
    fastest = tuple(_first(stage.choices, key=lambda c: (c.seconds, c.price)) for stage in stages)
    if path_s(stages, fastest) > left_s:
        sensible = tuple(_sensible(stage.choices) for stage in stages)
        return Split.of(stages, sensible, left_s)
    levels = _levels(stages)
    return Split.of(stages, _relaxed(stages, _by_fronts(stages, levels, left_s) or fastest, left_s), left_s)


def path_s(stages: Sequence[SplitStage], chosen: Sequence[int]) -> float:
    """Return the seconds of the longest path."""
    ends: list[float] = []
    for stage, number in zip(stages, chosen, strict=True):
        begin = max((ends[before] for before in stage.after), default=0.0)
        ends.append(begin + stage.choices[number].seconds)
    return max(ends, default=0.0)


def _first(choices: Sequence[StageChoice], key: Callable[[StageChoice], Any]) -> int:
    return min(range(len(choices)), key=lambda number: key(choices[number]))


def _sensible(choices: Sequence[StageChoice]) -> int:
    limit = SENSIBLE * min(choice.seconds for choice in choices)
    return _first(choices, key=lambda c: (c.seconds > limit, c.price, c.seconds))


# -- fronts ------------------------------------------------------------------------------------------------------------


def _levels(stages: Sequence[SplitStage]) -> list[list[int]]:
    levels: list[list[int]] = []
    level_of: list[int] = []
    for number, stage in enumerate(stages):
        level = max((level_of[before] + 1 for before in stage.after), default=0)
        level_of.append(level)
        if level == len(levels):
            levels.append([])
        levels[level].append(number)
    return levels


def _by_fronts(stages: Sequence[SplitStage], levels: Sequence[Sequence[int]], left_s: float) -> tuple[int, ...] | None:
    """Return the cheapest choices with which the levels' seconds add up to the remaining time; None if none."""
    fronts = [_front_of_level([stages[number].choices for number in level]) for level in levels]
    rest_s = sum(front[0].seconds for front in fronts)  # fronts ascend in seconds
    front = [_Point(0.0, 0.0, (None, ()))]
    for level in fronts:
        rest_s -= level[0].seconds
        front = _spread(_undercut(_added(front, level, left_s - rest_s)), MOST_KEPT)
        if not front:
            return None
    chosen = [0] * len(stages)
    point: _Point | None = front[-1]  # the cheapest
    for members in reversed(levels):
        assert point is not None
        before, numbers = point.of
        for stage, number in zip(members, numbers, strict=True):
            chosen[stage] = number
        point = before
    return tuple(chosen)


def _added(front: Sequence[_Point], level: Sequence[_Point], most_s: float) -> list[_Point]:
    # a path that fits exactly must not be lost to rounding
    most_s += 1e-9 * max(1.0, abs(most_s))
    ends = [point.seconds for point in front]
    added = []
    for point in level:
        fitting = front[: bisect_right(ends, most_s - point.seconds)]
        added += [
            _Point(before.seconds + point.seconds, before.price + point.price, (before, point.of[1]))
            for before in fitting
        ]
    return added


def _front_of_level(members: Sequence[Sequence[StageChoice]]) -> list[_Point]:
    """Return the possible times and costs of a level: for each time the cheapest choices that are not slower."""
    fronts = [
        _undercut(_Point(*choice, (None, (number,))) for number, choice in enumerate(choices)) for choices in members
    ]
    if len(fronts) == 1:
        return fronts[0]
    least_s = max(front[0].seconds for front in fronts)
    moments = sorted({least_s, *(point.seconds for front in fronts for point in front if point.seconds > least_s)})
    ends = [[point.seconds for point in front] for front in fronts]
    points = []
    for moment in _spread(moments, MOST_OF_LEVEL):
        picked = [front[bisect_right(end, moment) - 1] for front, end in zip(fronts, ends, strict=True)]
        numbers = tuple(point.of[1][0] for point in picked)
        points.append(_Point(moment, sum(point.price for point in picked), (None, numbers)))
    return _undercut(points)


def _undercut(points: Iterable[_Point]) -> list[_Point]:
    """Return the points that are not dominated, ascending in seconds and descending in cost."""
    front: list[_Point] = []
    for point in sorted(points, key=lambda p: (p.seconds, p.price)):
        if not front or point.price < front[-1].price:
            front.append(point)
    return front


def _spread(ordered: Sequence[T], most: int) -> list[T]:
    """Return at most `most` of the items, evenly spaced, including the first and the last."""
    if len(ordered) <= most:
        return list(ordered)
    return [ordered[round(number * (len(ordered) - 1) / (most - 1))] for number in range(most)]


def _relaxed(stages: Sequence[SplitStage], chosen: tuple[int, ...], left_s: float) -> tuple[int, ...]:
    """Return cheaper choices as far as the remaining time allows, made in the order of their savings."""
    relaxed = list(chosen)
    savings = sorted(
        (
            (stage.choices[now].price - choice.price, number, choice_number)
            for number, (stage, now) in enumerate(zip(stages, chosen, strict=True))
            for choice_number, choice in enumerate(stage.choices)
            if choice.price < stage.choices[now].price
        ),
        reverse=True,
    )
    for _, number, choice_number in savings:
        if stages[number].choices[choice_number].price < stages[number].choices[relaxed[number]].price:
            trial = [*relaxed[:number], choice_number, *relaxed[number + 1 :]]
            if path_s(stages, trial) <= left_s:
                relaxed = trial
    return tuple(relaxed)

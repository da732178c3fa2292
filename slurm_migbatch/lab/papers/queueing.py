"""Queue jobs that need several units of a resource (GPUs, slices) at once, in the orders of published schedulers.

- First come, first served, with the head blocking the rest.
- Shortest job first, starting whatever fits (Lai et al., "wise resource sharing", the SJF baseline of their code).
- EASY backfilling: Lifka, "The ANL/IBM SP scheduling system", JSSPP 1995; Mu'alem and Feitelson, TPDS 2001. The head
  of the queue has a reservation; others may start if they do not delay it.
- Least attained service in levels: Gu et al., "Tiresias", NSDI 2019, section 3 (discretised 2D-LAS). A reconstruction:
  promotion of starved jobs is omitted, and the thresholds are parameters.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from heapq import merge
from itertools import chain, islice
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")
Need = TypeVar("Need", bound=Hashable)


class Lanes(Generic[Need, T]):
    """Waiting items, each with a key (its order) and a need (for example a number of GPUs), in a sorted lane per need.

    Finding the first item by key that fits examines one item per distinct need and never the whole queue. Traces have
    about ten distinct needs, so this takes microseconds for a queue of any length. Keys must be comparable and unique.
    """

    def __init__(self) -> None:
        self._lanes: dict[Need, _Lane[T]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, key: Any, need: Need, item: T) -> None:
        """Insert an item into the lane of its need."""
        lane = self._lanes.get(need)
        if lane is None:
            lane = self._lanes[need] = _Lane()
        entries = lane.entries
        if not entries or key > entries[-1][0]:
            entries.append((key, item))  # the usual case: items arrive in order
        else:
            insort(entries, (key, item), lane.start)
        self._count += 1

    def first(self, fits: Callable[[Need], bool] | None = None) -> tuple[Need, T] | None:
        """Return need and item with the least key among the needs that fit; None if there is none."""
        best: tuple[Any, Need, T] | None = None
        for need, lane in self._lanes.items():
            if lane.start < len(lane.entries):
                key, item = lane.entries[lane.start]
                if (best is None or key < best[0]) and (fits is None or fits(need)):
                    best = key, need, item
        return None if best is None else best[1:]

    def pop(self, need: Need) -> T:
        """Remove and return the first item of a lane."""
        lane = self._lanes[need]
        item = lane.entries[lane.start][1]
        lane.start += 1
        if lane.start > 1024 and lane.start * 2 > len(lane.entries):
            del lane.entries[: lane.start]
            lane.start = 0
        self._count -= 1
        return item

    def ordered(self, count: int) -> list[tuple[Need, T]]:
        """Return the first `count` items by key, with their needs, without removing them."""
        streams = [_stream(need, lane.entries[lane.start : lane.start + count]) for need, lane in self._lanes.items()]
        merged = merge(*streams, key=_key) if len(streams) > 1 else chain.from_iterable(streams)
        return [(need, item) for _, need, item in islice(merged, count)]

    def drop(self, key: Any, need: Need) -> None:
        """Remove the item with this key; raises KeyError if there is none."""
        lane = self._lanes[need]
        index = bisect_left(lane.entries, key, lane.start, key=_key)
        if index == len(lane.entries) or lane.entries[index][0] != key:
            raise KeyError(key)
        del lane.entries[index]
        self._count -= 1


class _Lane(Generic[T]):
    """Entries by key from `start` on; those before it were removed."""

    __slots__ = ("entries", "start")

    def __init__(self) -> None:
        self.entries: list[tuple[Any, T]] = []
        self.start = 0


def _stream(need: Need, entries: Iterable[tuple[Any, T]]) -> Iterator[tuple[Any, Need, T]]:
    return ((key, need, item) for key, item in entries)


def _key(entry: tuple[Any, ...]) -> Any:
    return entry[0]


class RunningClaim(NamedTuple):
    """A running job: its estimated end, and the number of units that it holds."""

    end: float
    need: int


class Shadow(NamedTuple):
    """The latest time at which the head of a queue can start, and the units that it leaves free then."""

    time: float
    spare: int


def shadow(need: int, free: int, holdings: Iterable[RunningClaim], now: float) -> Shadow:
    """Return EASY's reservation for a job that needs `need` units; `holdings` are sorted by their ends.

    Ends in the past (estimates that were too short) count as now. Raises ValueError if all units together are too few.
    """
    for end, held in holdings:
        if free >= need:
            break
        free += held
        now = max(now, end)
    if free < need:
        raise ValueError(f"{need} are needed and there will never be more than {free}")
    return Shadow(now, free - need)


def may_backfill(need: int, claimed: float, free: int, now: float, reserved: Shadow) -> bool:
    """Return whether a job that needs `need` for `claimed` seconds can start now and not delay the reservation."""
    return need <= free and (now + claimed <= reserved.time or need <= reserved.spare)


def level(attained: float, limits: Sequence[float]) -> int:
    """Return the number of Tiresias's queue for a job that has attained this much service; 0 is served first."""
    return sum(attained >= limit for limit in limits)


def victims(need: int, free: int, running: Iterable[tuple[int, T]]) -> list[T] | None:
    """Return the jobs that must stop so that `need` units are free; None if stopping all does not suffice.

    `running` are (held, job) in the order in which jobs are stopped. A job that turns out not to be needed, because
    later ones free enough, is not stopped.
    """
    chosen: list[tuple[int, T]] = []
    for held, job in running:
        if free >= need:
            break
        chosen.append((held, job))
        free += held
    if free < need:
        return None
    needed: list[T] = []
    for held, job in chosen:
        if free - held >= need:
            free -= held
        else:
            needed.append(job)
    return needed

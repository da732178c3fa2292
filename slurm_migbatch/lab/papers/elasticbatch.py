"""Queues by input size, and as many instances as their load needs: more at once, fewer when the load has fallen.

ElasticBatch (Xiao et al., IEEE TPDS 35(10), 2024) gathers batch inference in buckets and makes its instances elastic.
Its text is not public beyond the abstract; everything here is a reconstruction from its parts' public neighbours:

- one queue for each range of input sizes, with a batch of its own (`next_batch`). PREBA does so for an inference
  server: an item waits for its batch to fill at most the time of a batch over the number of slices, and a batch that
  would be short takes items of neighbouring ranges, never more than the longest item in it allows.
- instances for a rate: n of the best kind and the smallest slice for the rest (`instances.compose`), ParvaGPU's
  configurator with any table of speeds.
- elasticity (`decide`): the rate to serve is what keeps arriving and what must be worked off by the deadline. It grows
  the set at once and without touching what runs. It shrinks it, down to nothing, only to the highest rate of the last
  `hold_s` seconds, since a slice that is given back and fetched again costs a start.

migbatchd does not run this: Slurm starts jobs. For job arrays it decides by `decide.dispatch.elasticity`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from slurm_migbatch.lab.papers.instances import Service, compose
from slurm_migbatch.lab.papers.settings import Setting

_TOLERANCE: Final = 1e-9
SHORTEST_S: Final = 1.0
"""A deadline that is nearer, or past, counts as this far away: the rate that it asks for stays finite."""


# -- batches of like sizes ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bucket:
    """A range of input sizes: those above the next smaller bucket's, up to `upto`.

    `batch` is the largest batch that items of this size are run in; `patience_s` how long an item waits for others.
    """

    upto: int
    batch: int
    patience_s: float


@dataclass(frozen=True, order=True)
class Item:
    """Something to infer from, waiting `since` a time in seconds."""

    since: float
    name: str
    size: int


def patience(setting: Setting, instances: int) -> float:
    """How long an item may wait for its batch to fill: with several instances one is free the sooner (PREBA)."""
    return setting.seconds / max(instances, 1)


def bucket_of(buckets: Sequence[Bucket], size: int) -> int:
    """The index of the first bucket that is large enough (buckets ascend); the last one's for what is larger."""
    return next((i for i, bucket in enumerate(buckets) if size <= bucket.upto), len(buckets) - 1)


def next_batch(buckets: Sequence[Bucket], waiting: Sequence[Item], now: float) -> tuple[Item, ...]:
    """The batch to run now, oldest items first; empty where it is better to wait.

    A full batch goes first, that of the oldest item if there are several. Else the bucket with an item that has waited
    out its patience, with what else waits there; what is missing is taken from smaller buckets, the nearest first, and
    then from the next larger one as far as its own batch allows.
    """
    queues: list[list[Item]] = [[] for _ in buckets]
    for item in sorted(waiting):
        queues[bucket_of(buckets, item.size)].append(item)
    full = [i for i, queue in enumerate(queues) if len(queue) >= buckets[i].batch]
    if full:
        i = min(full, key=lambda i: queues[i][0])
        return tuple(queues[i][: buckets[i].batch])
    overdue = [i for i, q in enumerate(queues) if q and now - q[0].since >= buckets[i].patience_s * (1 - _TOLERANCE)]
    if not overdue:
        return ()
    i = min(overdue, key=lambda i: queues[i][0])
    batch = list(queues[i])
    for smaller in reversed(queues[:i]):
        batch += smaller[: buckets[i].batch - len(batch)]
    if i + 1 < len(buckets) and len(batch) < min(buckets[i].batch, buckets[i + 1].batch):
        batch += queues[i + 1][: min(buckets[i].batch, buckets[i + 1].batch) - len(batch)]
    return tuple(sorted(batch))


# -- instances for a load ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """The work of one bucket at one moment.

    `waiting` are items that nobody has begun, to be done by `deadline` (seconds on the same clock as `now`; None: as
    fast as they arrive is fast enough); `arriving` items a second keep coming.
    """

    waiting: int
    arriving: float = 0.0
    deadline: float | None = None

    def rate(self, now: float, start_s: float = 0.0) -> float:
        """Items a second that must be served from `start_s` seconds from now on."""
        due = 0.0
        if self.waiting and self.deadline is not None:
            due = self.waiting / max(self.deadline - now - start_s, SHORTEST_S)
        return self.arriving + due


@dataclass(frozen=True)
class Elasticity:
    """How instances follow the load: seconds until a new one serves, seconds that a fall of load must last before any
    is given back, and the most compute slices."""

    start_s: float = 10.0
    hold_s: float = 120.0
    most_slices: int | None = None


@dataclass(frozen=True)
class Peaks:
    """The rates of the last seconds that may still be the highest: by time, each lower than the one before."""

    seen: tuple[tuple[float, float], ...] = ()

    def add(self, now: float, rate: float, hold_s: float) -> Peaks:
        """With one more rate, and without those older than `hold_s`."""
        kept = [(at, value) for at, value in self.seen if value > rate and now - at < hold_s]
        return Peaks((*kept, (now, rate)))

    @property
    def highest(self) -> float:
        """The highest rate kept, in items a second."""
        return self.seen[0][1] if self.seen else 0.0


@dataclass(frozen=True)
class Decision:
    """Instances to have from now on, what that changes, and what the next decision needs to know.

    New instances serve before old ones are stopped; an old one finishes its batch first. `short` is the rate (items a
    second) that is left unserved because of `most_slices`.
    """

    target: Counter[Setting]
    start: Counter[Setting]
    stop: Counter[Setting]
    peaks: Peaks
    short: float = 0.0


def decide(
    load: Load,
    now: float,
    running: Mapping[Setting, int],
    settings: Sequence[Setting],
    rules: Elasticity,
    peaks: Peaks = Peaks(),
) -> Decision:
    """How many instances of which kind this load needs; raises Unservable where it needs some and `settings` is empty.

    Args:
        load: the bucket's work.
        now: seconds.
        running: instances that serve or are being started.
        settings: kinds to choose from, those that keep the latency limit.
        rules: see `Elasticity`.
        peaks: of the last decision.
    """
    have = Counter({setting: count for setting, count in running.items() if count > 0})
    need = load.rate(now, rules.start_s)
    seen = peaks.add(now, need, rules.hold_s)
    if load.waiting and not need and not have:
        need = math.ulp(0.0)  # no deadline and nothing that serves: the smallest slice will do
    floor = max(need, seen.highest)
    capacity = _rate(have)
    target = have
    if need > capacity * (1 + _TOLERANCE):
        target = have + _composed(need - capacity, settings)
    elif capacity >= floor:
        least = _composed(floor, settings) if floor else Counter[Setting]()
        if load.waiting and not least:
            least = _smallest(have)
        if _slices(least) < _slices(have):
            target = least
    target = _within(target, have, rules.most_slices)
    return Decision(target, target - have, have - target, seen, max(need - _rate(target), 0.0))


def _composed(rate: float, settings: Sequence[Setting]) -> Counter[Setting]:
    return compose(Service("the queue", rate, tuple(settings)))


def _smallest(running: Counter[Setting]) -> Counter[Setting]:
    return Counter([min(running, key=lambda setting: (setting.profile.compute, setting))]) if running else Counter()


def _within(target: Counter[Setting], have: Counter[Setting], most: int | None) -> Counter[Setting]:
    """Without instances above the limit: new ones are left out first, the least efficient of them first."""
    if most is None:
        return target
    kept = Counter(target)
    order = sorted(kept, key=lambda s: (s in have, s.rate / s.profile.compute, s))
    for setting in order:
        while kept[setting] and _slices(kept) > most:
            kept[setting] -= 1
    return +kept


def _rate(instances: Mapping[Setting, int]) -> float:
    return sum(setting.rate * count for setting, count in instances.items())


def _slices(instances: Mapping[Setting, int]) -> int:
    return sum(setting.profile.compute * count for setting, count in instances.items())

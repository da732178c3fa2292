"""Implement PARIS and ELSA as published, and first idle, first served: baselines of `decide.paris_elsa`.

PARIS and ELSA (Kim et al., DAC 2022, arXiv 2202.13481) give a multi-GPU inference server partitions of several sizes,
each for the batches that fill it, and send a query to the smallest one that leaves slack before its deadline. Only the
abstract was available, so `paris` and `elsa` are reconstructions from definitions in public use: the knee is the
smallest batch at 80 % of the partition's best throughput (theirs uses utilisation), R_k are the seconds of partition k
for one query, and N_k = R_k C / sum_j size_j R_j is the number of partitions of size k. How PARIS rounds, and whether
its counts can be placed, is not public; here it rounds by largest remainder, and `packed` then divides real GPUs as
close to that as the placement rules allow. `elsa` has two parameters, alpha and beta, for how pessimistic its estimates
are.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from scipy.optimize import linprog

from slurm_migbatch.decide.capacity.bundles import holds
from slurm_migbatch.decide.paris_elsa.assignment import StockCosts, WorkClass
from slurm_migbatch.decide.paris_elsa.partition import Cut
from slurm_migbatch.decide.paris_elsa.trial import Latencies, Stream
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.profile import Profile

KNEE_SHARE: Final = 0.8
_GRAIN_S: Final = 1e-9


class PartitionChoice(NamedTuple):
    """A partition chosen for a query: its kind, its index within the kind, and when it finishes the query."""

    kind: int
    number: int
    finish: float


def elsa(
    now: float, work: WorkClass, free_at: Sequence[Sequence[float]], alpha: float = 1.0, beta: float = 1.0
) -> PartitionChoice | None:
    """Return ELSA's choice (reconstruction): the first partition, smallest kinds first, with slack of 0 or more.

    slack = limit - alpha * (wait + beta * seconds). If no partition has slack, the choice is the one that finishes
    first, which exceeds the limit least (step B). None if the work fits on no partition.

    Args:
        now: the arrival time of the query.
        work: its class.
        free_at: for each kind, and each of its partitions, when all work queued there will have ended.
        alpha: how pessimistic the whole estimate is, 1 or more.
        beta: how pessimistic the query's own time is, 1 or more.
    """
    best: PartitionChoice | None = None
    best_finish = math.inf
    for kind, times in enumerate(free_at):
        seconds = work.seconds[kind]
        if not times or seconds == math.inf:
            continue
        last = now + work.limit_s / alpha - beta * seconds + _GRAIN_S
        for number, free in enumerate(times):
            finish = max(free, now) + seconds
            if free <= last and now <= last:
                return PartitionChoice(kind, number, finish)
            if finish < best_finish:
                best_finish = finish
                best = PartitionChoice(kind, number, finish)
    return best


def paris(works: Sequence[WorkClass], sizes: Sequence[float], capacity: float) -> list[float]:
    """Return PARIS's number of partitions of each size, before rounding (reconstruction).

    Args:
        works: the batches 1, 2, ... of one model, with their shares; limits are ignored.
        sizes: compute slices of each kind, ascending.
        capacity: compute slices of all GPUs together.
    """
    edges = []
    for k in range(len(sizes)):
        rates = [(b + 1) / work.seconds[k] for b, work in enumerate(works)]
        best = max(rates)
        edges.append(next(b + 1 for b, rate in enumerate(rates) if rate >= KNEE_SHARE * best) if best > 0 else 0)
    edges[-1] = len(works)
    need, before = [], 0
    for k, edge in enumerate(edges):
        owned = works[before : max(edge, before)]
        need.append(sum(work.share * work.seconds[k] for work in owned))
        before = max(edge, before)
    whole = sum(size * seconds for size, seconds in zip(sizes, need, strict=True))
    return [seconds * capacity / whole for seconds in need]


def largest_remainder(wanted: Sequence[float], sizes: Sequence[float], capacity: float) -> list[int]:
    """Return integer counts near the wanted ones.

    They are rounded down; then, by largest remainder, counts get one more as long as compute slices are left.
    """
    counts = [math.floor(n + 1e-9) for n in wanted]
    slices_left = capacity - sum(n * size for n, size in zip(counts, sizes, strict=True))
    for k in sorted(range(len(sizes)), key=lambda k: (counts[k] - wanted[k], k)):
        if wanted[k] > counts[k] and sizes[k] <= slices_left:
            counts[k] += 1
            slices_left -= sizes[k]
    return counts


def packed(geometry: Geometry, kinds: Sequence[Profile], gpus: int, counts: Sequence[int], origin: str = "") -> Cut:
    """Return a division of the GPUs that can be placed and is near these counts.

    The largest slices are placed first, each on the first GPU that has a legal place. Slices that fit on no GPU are
    dropped, and free space is filled with the largest slices that fit.
    """
    gpus_held: list[list[Profile]] = [[] for _ in range(gpus)]
    order = sorted(range(len(kinds)), key=lambda k: kinds[k], reverse=True)
    for k in order:
        for _ in range(counts[k]):
            for gpu in gpus_held:
                if holds(geometry, [*gpu, kinds[k]]):
                    gpu.append(kinds[k])
                    break
    for gpu in gpus_held:
        for k in order:
            while holds(geometry, [*gpu, kinds[k]]):
                gpu.append(kinds[k])
    return Cut(tuple(kinds), tuple(tuple(gpu.count(kind) for kind in kinds) for gpu in gpus_held), origin=origin)


def split(works: Sequence[WorkClass], stock: Sequence[float]) -> list[list[float]]:
    """Return the optimal split of the work of each class over a fixed stock, as fractions by class and kind.

        minimise u  such that  sum_c share_c seconds_ck f_ck <= u stock_k  for each kind k,  sum_k f_ck = 1

    with f_ck = 0 if the limit is not kept or the stock has no slice of kind k. A class that fits on no kind has zeros.
    """
    fractions = [[0.0] * len(stock) for _ in works]
    cells = [
        (c, k)
        for c, work in enumerate(works)
        for k, n in enumerate(stock)
        if n and work.seconds[k] <= work.limit_s and work.seconds[k] < math.inf
    ]
    if not cells:
        return fractions
    served = sorted({c for c, _ in cells})
    unit = max(works[c].share * works[c].seconds[k] for c, k in cells)
    load = np.zeros((len(stock), len(cells) + 1))
    whole = np.zeros((len(served), len(cells) + 1))
    for j, (c, k) in enumerate(cells):
        load[k, j] = works[c].share * works[c].seconds[k] / unit
        whole[served.index(c), j] = 1.0
    load[:, -1] = [-float(n) for n in stock]
    cost = np.zeros(len(cells) + 1)
    cost[-1] = 1.0
    solution = linprog(cost, A_ub=load, b_ub=np.zeros(len(stock)), A_eq=whole, b_eq=np.ones(len(served)))
    for (c, k), value in zip(cells, solution.x[:-1].tolist(), strict=True):
        fractions[c][k] = max(0.0, value)
    return fractions


def first_idle(stock_costs: StockCosts, stream: Stream, rate: float) -> list[float] | None:
    """Simulate one queue whose head is served on the partition that becomes idle first.

    Return the latencies that `Latencies` gives, None if the stream cannot be served at this rate.
    """
    works, ledger = stock_costs.works, Latencies(stream)
    free = [(0.0, number, kind) for number, kind in enumerate(_kinds_of(stock_costs.stock))]
    for index, (now, number) in enumerate(zip(stream.at(rate), stream.works, strict=True)):
        since, which, kind = free[0]
        seconds = works[number].seconds[kind]
        if seconds == math.inf:
            return None
        finish = max(now, since) + seconds
        heapq.heapreplace(free, (finish, which, kind))
        ledger.note(index, works[number], finish - now)
        if ledger.lost:
            return None
    return ledger.result()


def early(stock_costs: StockCosts, stream: Stream, rate: float) -> list[float] | None:
    """Simulate `elsa`, which assigns each query to a partition on its arrival; see `first_idle` for the result."""
    works, ledger = stock_costs.works, Latencies(stream)
    free_at = [[0.0] * count for count in stock_costs.stock]
    for index, (now, number) in enumerate(zip(stream.at(rate), stream.works, strict=True)):
        chosen = elsa(now, works[number], free_at)
        if chosen is None:
            return None
        free_at[chosen.kind][chosen.number] = chosen.finish
        ledger.note(index, works[number], chosen.finish - now)
        if ledger.lost:
            return None
    return ledger.result()


def _kinds_of(stock: Sequence[int]) -> list[int]:
    return [kind for kind, count in enumerate(stock) for _ in range(count)]

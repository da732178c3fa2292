"""Partition the GPUs of a stock into slices.

PARIS (Kim et al., DAC 2022, arXiv 2202.13481) gives a multi-GPU inference server partitions of several sizes, each for
the batches that fill it: partition k has the batches between the knee of the next smaller one and its own, and there
are as many partitions of each size as the load of its batches needs. `lab.papers.pariselsa` reconstructs that, because
the full text was not available.

`partition` is ours. Three steps in PARIS lose capacity: knees split the batches by filling, not by the value of each
size; rounding comes after the optimum; and placement comes after rounding. Instead one integer program over what one
GPU can hold (`capacity.bundles`) finds the partitioning of all GPUs with the highest flow of work that meets its limits
(`flow`). A flow has no bursts, so short trials of random arrivals (`trial.bounded_rate`, the same stream for all) then
evaluate the program's partitioning and every homogeneous one, and from the best of them GPU by GPU its neighbours as
long as that helps. So it is never worse than the best homogeneous one in the trials used for the choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from slurm_migbatch.decide.capacity.bundles import bundles
from slurm_migbatch.decide.paris_elsa.assignment import StockCosts, WorkClass
from slurm_migbatch.decide.paris_elsa.trial import ALLOWED, bounded_rate, central, stream
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.layout import EMPTY
from slurm_migbatch.mig.planning import capacity
from slurm_migbatch.mig.profile import Profile

TRIAL_JOBS: Final = 2000
"""Jobs in a trial while searching."""
MARGIN: Final = 0.8
"""Share of the allowed late work that may be late in trials: a partitioning that just meets the bound on one short
stream breaks it on another.
"""
NEIGHBOURS: Final = 24
"""Maximum trials of neighbours: each costs a few milliseconds when it fails, ten times as much when it helps."""
GAIN: Final = 1.005
"""Minimum improvement of a neighbour."""
_GAP: Final = 0.005
_TIME_LIMIT_S: Final = 10.0

Counts = tuple[int, ...]


@dataclass(frozen=True)
class Cut:
    """GPUs partitioned into slices.

    Attributes:
        kinds: the profiles of the counts.
        gpus: for each GPU, how many slices of each kind.
        rate: the latency-bounded rate found by trials, in jobs a second; 0 if not tried.
        origin: the candidate it came from.
    """

    kinds: tuple[Profile, ...]
    gpus: tuple[Counts, ...]
    rate: float = 0.0
    origin: str = ""

    @property
    def stock(self) -> Counts:
        """Slices of each kind on all GPUs."""
        return total(self.gpus, len(self.kinds))


def total(gpus: Sequence[Counts], kinds: int) -> Counts:
    """Count the slices of each kind on all these GPUs."""
    return tuple([sum([gpu[kind] for gpu in gpus]) for kind in range(kinds)])


def ways(geometry: Geometry, kinds: Sequence[Profile]) -> tuple[Counts, ...]:
    """Return every maximal way to fill one GPU, as counts in the order of `kinds`."""
    return bundles(geometry, tuple(kinds))


def homogeneous(geometry: Geometry, kinds: Sequence[Profile], gpus: int) -> list[Cut]:
    """Return one partitioning for each kind, with as many slices of it as each GPU can hold and nothing else."""
    cuts = []
    for k, kind in enumerate(kinds):
        counts = tuple(capacity(geometry, EMPTY, kind) if i == k else 0 for i in range(len(kinds)))
        cuts.append(Cut(tuple(kinds), (counts,) * gpus, origin=f"only {kind}"))
    return cuts


@dataclass(frozen=True)
class Flow:
    """The highest rate of work for even arrivals: `rate` jobs a second, ways by number."""

    rate: float
    ways: tuple[float, ...]


def flow(
    works: Sequence[WorkClass],
    ways: Sequence[Counts],
    gpus: int,
    *,
    whole: bool,
    late: float = 0.0,
    node_limit: int | None = None,
) -> Flow:
    """Return the best flow over all ways to partition the GPUs.

        maximise   r
        such that  sum_k x_ck + z_ck = r share_c                     for each class c
                   sum_c seconds_ck (x_ck + z_ck) <= sum_w n_w way_wk   for each kind k
                   sum of z over a group <= late * r * its share,   sum_w n_w <= gpus

    with x_ck the rate of class c on kind k where it meets its limit, z_ck where it does not. A class that meets its
    limit nowhere may run anywhere.

    Args:
        ways: counts of each kind on one GPU, `ways()` or a part of them.
        whole: whole numbers of GPUs (an integer program); else fractions, which give an upper bound.
        late: the share of each group's work that may be late.
        node_limit: maximum nodes of the integer program, after which the best result so far counts; None: no limit.
    """
    from scipy.optimize import milp  # slow to import, and migbatchd starts without

    timely, tardy = _cells(works, range(len(ways[0])), late)
    if {c for c, _ in timely} != set(range(len(works))):
        return Flow(0.0, (0.0,) * len(ways))
    total_share = sum(work.share for work in works)
    unit = sum(work.share / total_share * min(work.seconds) for work in works)  # scale numbers to about 1
    n = len(timely) + len(tardy)
    cost = np.zeros(n + 1 + len(ways))
    cost[n] = -1.0
    solution = milp(
        cost,
        constraints=_constraint(works, ways, timely, tardy, gpus, late, unit),
        integrality=np.concatenate([np.zeros(n + 1), np.full(len(ways), int(whole))]),
        options={"mip_rel_gap": _GAP, "time_limit": _TIME_LIMIT_S, "node_limit": node_limit},
    )
    if solution.x is None:
        return Flow(0.0, (0.0,) * len(ways))
    chosen = solution.x[n + 1 :]
    return Flow(float(solution.x[n]) / unit, tuple((np.rint(chosen) if whole else chosen).tolist()))


Cells = list[tuple[int, int]]
"""Of the program of `flow`: a class and a kind that it may run on, by number."""


def _cells(works: Sequence[WorkClass], kinds: Sequence[int], late: float) -> tuple[Cells, Cells]:
    """Return the cells in which classes meet their limits, or which a class has that meets it nowhere; and the others,
    which some classes use if work may be late.
    """
    timely, tardy = [], []
    for c, work in enumerate(works):
        fits = [k for k in kinds if work.seconds[k] < math.inf]
        in_time = [k for k in fits if work.seconds[k] <= work.limit_s]
        timely += [(c, k) for k in in_time or fits]
        if late and in_time:
            tardy += [(c, k) for k in fits if k not in in_time]
    return timely, tardy


def _constraint(
    works: Sequence[WorkClass], ways: Sequence[Counts], timely: Cells, tardy: Cells, gpus: int, late: float, unit: float
) -> Any:
    """Return the rows of the program of `flow`; its columns are the rates of the cells, r, and the numbers of ways.

    Times are in units of `unit` seconds.
    """
    from scipy import sparse
    from scipy.optimize import LinearConstraint

    kinds, cells = range(len(ways[0])), [*timely, *tardy]
    total_share = sum(work.share for work in works)
    n, groups = len(cells), 1 + max(work.group for work in works)
    share = [0.0] * groups
    for work in works:
        share[work.group] += work.share / total_share
    rows: list[tuple[int, int, float]] = []
    for j, (c, k) in enumerate(cells):
        rows += [(c, j, 1.0), (len(works) + k, j, works[c].seconds[k] / unit)]
    rows += [(c, n, -work.share / total_share) for c, work in enumerate(works)]
    for w, way in enumerate(ways):
        rows += [(len(works) + k, n + 1 + w, -float(way[k])) for k in kinds if way[k]]
    gpus_row = len(works) + len(kinds)
    rows += [(gpus_row, n + 1 + w, 1.0) for w in range(len(ways))]
    for j, (c, _) in enumerate(tardy, len(timely)):
        rows.append((gpus_row + 1 + works[c].group, j, 1.0))
    rows += [(gpus_row + 1 + g, n, -late * share[g]) for g in range(groups)]
    row_indices, column_indices, values = zip(*rows, strict=True)
    shape = (gpus_row + 1 + groups, n + 1 + len(ways))
    matrix = sparse.csc_array((values, (row_indices, column_indices)), shape=shape)
    upper = np.zeros(gpus_row + 1 + groups)
    upper[gpus_row] = gpus
    lower = np.full(gpus_row + 1 + groups, -np.inf)
    lower[: len(works)] = 0.0
    return LinearConstraint(matrix, lower, upper)


def partition(
    geometry: Geometry,
    kinds: Sequence[Profile],
    works: Sequence[WorkClass],
    gpus: int,
    *,
    job_count: int = TRIAL_JOBS,
    neighbours: int = NEIGHBOURS,
    node_limit: int | None = None,
) -> Cut:
    """Return the partitioning with the highest latency-bounded rate that the search finds; see the module.

    Args:
        kinds: profiles that may be stocked.
        works: classes of work, their seconds in the order of `kinds`.
        gpus: how many GPUs; the search is meant for up to a few dozen that serve the same models.
        node_limit: see `flow`.
    """
    gpu_ways = ways(geometry, kinds)
    prices = [float(kind.compute) for kind in kinds]
    generator = np.random.Generator(np.random.PCG64(0))
    arrivals = stream(works, job_count, generator, allowed=MARGIN * ALLOWED, exact=True)

    def rate_of(stock: Counts, guess: float, must_beat: float) -> float:
        """Return the latency-bounded rate, or 0 if it is clearly no better than `must_beat`."""
        stock_costs = StockCosts(works, prices, stock)
        if must_beat and central(stock_costs, arrivals, must_beat * GAIN) is None:
            return 0.0
        return bounded_rate(central, stock_costs, arrivals, guess)

    candidates = [*homogeneous(geometry, kinds, gpus)]
    for late, origin in ((0.0, "flow"), (MARGIN * ALLOWED, "flow with late work")):
        best = flow(works, gpu_ways, gpus, whole=True, late=late, node_limit=node_limit)
        if best.rate:
            chosen = [way for way, n in zip(gpu_ways, best.ways, strict=True) for _ in range(round(n))]
            candidates.append(Cut(tuple(kinds), tuple(chosen), origin=origin))
    bound = flow(works, gpu_ways, gpus, whole=False, late=ALLOWED).rate
    tried: dict[Counts, float] = {}
    best_cut = Cut(tuple(kinds), candidates[0].gpus, 0.0, "no partition serves this work within its limits")
    for cut in reversed(candidates):
        rate = rate_of(cut.stock, best_cut.rate or 0.8 * bound, best_cut.rate)
        tried[cut.stock] = rate
        if rate > best_cut.rate:
            best_cut = Cut(cut.kinds, cut.gpus, rate, cut.origin)
    if not best_cut.rate:
        return best_cut
    return _climb(best_cut, gpu_ways, rate_of, tried, neighbours)


def _climb(
    cut: Cut,
    possible: Sequence[Counts],
    rate_of: Callable[[Counts, float, float], float],
    tried: dict[Counts, float],
    most: int,
) -> Cut:
    """Change one GPU at a time as long as that helps, beginning with the change that helped last."""
    steps = _moves(possible)
    trials_left, position = most, 0
    since = 0
    while trials_left and since < len(steps):
        old_way, new_way = steps[position % len(steps)]
        position += 1
        since += 1
        if old_way not in cut.gpus:
            continue
        gpus = list(cut.gpus)
        gpus[gpus.index(old_way)] = new_way
        stock = total(gpus, len(cut.kinds))
        if stock in tried:
            continue
        trials_left -= 1
        tried[stock] = rate = rate_of(stock, cut.rate * GAIN, cut.rate)
        if rate > cut.rate:
            cut = Cut(cut.kinds, tuple(sorted(gpus, reverse=True)), rate, f"{cut.origin.split(',')[0]}, then improved")
            position -= 1
            since = 0
    return cut


def _moves(possible: Sequence[Counts]) -> list[tuple[Counts, Counts]]:
    """Return the changes from one way to another, those of few slices first."""
    changed = [(sum(abs(m - n) for m, n in zip(a, b, strict=True)), a, b) for a in possible for b in possible]
    return [(a, b) for distance, a, b in sorted(changed) if distance]

"""Which point to measure next: the one rule by which few measurements are chosen, for users and for evaluations alike.

The rule, for a grid of slices and batches:

1. the largest slice at batch 4 (what the host costs, and for a heavy model what an item costs);
2. the middle slice at batch 32 (what an item costs, far from both ends of the grid);
3. the smallest slice at batch 8 (how the cost grows as the slice shrinks);
4. from then on the point that is likeliest to be worth choosing and least sure.

Where the grid lacks such a point, the nearest in the logarithms of slice and batch is taken. A point that turns out not
to fit is left out and the next best is taken. No figure of the grid is looked at before its point is chosen.

The fourth step: a point is worth choosing where no quicker one gives as much throughput for the SMs that it takes; how
likely that is, is the share of parameters drawn from the belief for which it holds, and it is weighed with the standard
deviation of the point's prediction. (Ours. The points after which the whole grid is expected to be surest would teach
the curve, but measure much that nobody would ever choose; the first three are corners because a model that is like no
other is caught only there.)

Where the longest time that a batch may take is known, other points are worth measuring: those that a service under this
limit would run (`choose_within`). By the best guess so far, on each slice the cell with the most throughput that keeps
the limit; of those that were not measured the one with the most throughput for its SMs. A cell that turns out too slow
or over the limit makes way for the next best. Where the best of every slice is measured, the cell that comes closest to
the limit from above is, of those with more throughput than what is known to keep it. Figures more hopeful than the best
guess choose no better points (`migbatch eval services`, made-up services).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from slurm_migbatch.predict.cells import Array, Cells, GpuSpec
from slurm_migbatch.predict.fewshot import adapt, even_draws
from slurm_migbatch.predict.known import ModelKnowledge
from slurm_migbatch.predict.population import pool
from slurm_migbatch.predict.samples import NOISE
from slurm_migbatch.predict.surface import TIME, Belief, Surface
from slurm_migbatch.profiling.measurement import Measurement

FIRST_BATCH: Final = 4.0
MIDDLE_BATCH: Final = 32.0
SMALL_BATCH: Final = 8.0


def next_point(surface: Surface, belief: Belief, cells: Cells, done: Sequence[int], left: Sequence[int]) -> int | None:
    """Return the index of the point of `cells` to measure next among those `left`; None where none is left.

    `done` are the points that ran.
    """
    if not left:
        return None
    wanted = _corner(cells, len(done))
    if wanted is not None:
        sm, batch = wanted
        return min(
            left,
            key=lambda i: (
                abs(np.log(cells.sm[i] / sm)) + abs(np.log(cells.batch[i] / batch)) + 3.0 * np.log(cells.procs[i]),
                i,
            ),
        )
    unsure = belief.predict(surface, cells)[1]
    worth = (worth_choosing(surface, belief, cells) + 1e-3) * unsure
    return max(left, key=lambda index: (float(worth[index]), -index))


def choose(done: Sequence[Measurement], open_: Sequence[Measurement], knowledge: ModelKnowledge) -> int | None:
    """Return the index of the point to measure next among the rows `open_`, which have no figures yet.

    None where none is left.

    `done` are the rows of the same model on the same kind of GPU, on whichever slice. Measuring one point on the whole
    GPU, one on a middle slice and one on the smallest, each in a job of its own, follows the rule as three points of
    one grid would.
    """
    if not open_:
        return None
    ran = _that_ran(done)
    cells, belief = _believed(ran, open_, knowledge)
    count = len(ran)
    chosen = next_point(TIME, belief, cells, range(count), range(count, len(cells)))
    return None if chosen is None else chosen - count


@dataclass(frozen=True)
class Skew:
    """How an evaluation changes predicted times: shorter by `hope` standard deviations, then multiplied by `wrong`."""

    hope: float = 0.0
    wrong: Array | float = 1.0


NO_SKEW: Final = Skew()


def choose_within(
    done: Sequence[Measurement],
    open_: Sequence[Measurement],
    knowledge: ModelKnowledge,
    limit_s: float,
    skew: Skew = NO_SKEW,
) -> int | None:
    """Return the index of the row of `open_` to measure next for a service whose batches may take `limit_s`.

    None where nothing is left that could do more on its slice. `done` is as for `choose`.
    """
    if not open_:
        return None
    ran = _that_ran(done)
    cells, belief = _believed(ran, open_, knowledge)
    value, deviation = belief.predict(TIME, cells)
    seconds = np.exp(value - skew.hope * deviation)
    seconds[: len(ran)] = [row.seconds or 1.0 for row in ran]
    seconds[len(ran) :] *= skew.wrong
    chosen = next_within(cells, seconds, len(ran), limit_s)
    return None if chosen is None else chosen - len(ran)


def next_within(cells: Cells, seconds: Array, measured: int, limit_s: float) -> int | None:
    """Return the index of the cell to measure next, of those after the first `measured`.

    None where none of them could do more on its slice, at its input size, than what is measured. `seconds` are what a
    batch takes at each cell: as measured, and the best guess.
    """
    rates = cells.batch * cells.procs / seconds
    slices = list(zip(cells.sm.tolist(), cells.memory.tolist(), cells.work.tolist(), strict=True))
    best: dict[tuple[float, float, float], int] = {}
    for i in np.flatnonzero(seconds <= limit_s).tolist():
        if slices[i] not in best or rates[i] > rates[best[slices[i]]]:
            best[slices[i]] = i
    new = [i for i in best.values() if i >= measured]
    if new:
        return max(new, key=lambda i: (float(rates[i] / cells.sm[i]), -i))
    over = [i for i in range(measured, len(cells)) if slices[i] not in best or rates[i] > rates[best[slices[i]]]]
    return min(over, key=lambda i: (float(seconds[i]), i), default=None)


def _that_ran(rows: Sequence[Measurement]) -> list[Measurement]:
    return [row for row in rows if row.seconds is not None]


def _believed(
    ran: Sequence[Measurement], open_: Sequence[Measurement], knowledge: ModelKnowledge
) -> tuple[Cells, Belief]:
    """Return the cells of all rows, and what public facts and the rows that ran say of the model."""
    rows = [*ran, *open_]
    known, gpu = knowledge.of(rows[0].model, rows), GpuSpec.of_rows(rows)
    cells = Cells.of_rows(rows, gpu, known)
    logs = np.array([np.log(row.seconds or 1.0) for row in ran])
    prior = pool(TIME, rows[0].kind, ()).prior(rows[0].model, known, gpu)
    return cells, adapt(TIME, prior, cells.take(list(range(len(ran)))), logs, NOISE)


def _corner(cells: Cells, step: int) -> tuple[float, float] | None:
    """Return the SM share and batch of the rule's first three points."""
    sizes = np.unique(cells.sm)
    if step == 0:
        return float(sizes[-1]), FIRST_BATCH
    if step == 1:
        return float(sizes[(len(sizes) - 1) // 2]), MIDDLE_BATCH
    if step == 2:
        return float(sizes[0]), SMALL_BATCH
    return None


def worth_choosing(surface: Surface, belief: Belief, cells: Cells) -> Array:
    """Return for each point the probability that no quicker one gives as much throughput for the SMs that it takes."""
    root = np.linalg.cholesky(belief.covariance)
    draws = even_draws(len(belief.mean))[::4]
    items = np.log(cells.batch * cells.procs) - np.log(cells.sm)
    share = np.zeros(len(cells))
    for draw in draws:
        value, _ = surface.value(belief.mean + root @ draw, cells)
        order = np.argsort(value, kind="stable")
        efficiency = (items - value)[order]
        best = np.concatenate([[-np.inf], np.maximum.accumulate(efficiency)[:-1]])
        share[order] += efficiency > best
    found: Array = share / len(draws)
    return found

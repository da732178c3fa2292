"""Choose which point to measure next: one rule for users and evaluations.

The rule, for a grid of slices and batches:

1. the largest slice at batch 4 (the host's cost, and for a heavy model the cost of an item);
2. the middle slice at batch 32 (the cost of an item, far from both ends of the grid);
3. the smallest slice at batch 8 (how the cost grows as the slice shrinks);
4. then the point with the highest product of its probability of being worth choosing and its uncertainty.

If the grid's smallest batch is larger than 4, these batches are larger by the same factor: three points of one batch
would not show how the time grows with it. If the grid lacks such a point, the nearest in the logarithms of slice and
batch is taken, of several input sizes the model's usual one. A point that turns out not to fit is dropped and the next
best is taken. No figure of the grid is read before its point is chosen.

In the fourth step a point is worth choosing if no faster one gives as much throughput for its SMs; the probability of
that is the share of parameters drawn from the belief for which it holds, and it is multiplied by the standard
deviation of the point's prediction. (Ours. The points that reduce the uncertainty of the whole grid most would
determine the curve, but many of them nobody would ever choose; the first three are corners because a model that is
unlike all others is detected only there.)

If the longest time of a batch is given, other points are worth measuring: those that a service under this
limit would run (`next_within`). By the median prediction so far, this is on each slice the cell with the most
throughput within the limit; of the unmeasured ones the one with the most throughput for its SMs. A cell that turns out
too slow or over the limit is replaced by the next best. If the best of every slice is measured, the cell closest to the
limit from above is next, among those with more throughput than any known to keep it. More optimistic figures than the
median choose no better points (`migbatch eval services`, synthetic services).
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """Return the index of the point of `cells` to measure next among those `left`; None if none is left.

    `done` are the points that ran.
    """
    if not left:
        return None
    corner = _corner(cells, len(done))
    if corner is not None:
        sm, batch = corner
        return min(
            left,
            key=lambda i: (
                abs(np.log(cells.sm[i] / sm)) + abs(np.log(cells.batch[i] / batch)) + 3.0 * np.log(cells.procs[i]),
                abs(np.log(cells.work[i])),
                i,
            ),
        )
    unsure = belief.predict(surface, cells)[1]
    worth = (worth_choosing(surface, belief, cells) + 1e-3) * unsure
    return max(left, key=lambda index: (float(worth[index]), -index))


def choose(
    done: Sequence[Measurement], open_: Sequence[Measurement], knowledge: ModelKnowledge, limit_s: float | None = None
) -> int | None:
    """Return the index of the point to measure next among the rows `open_`, which have no figures yet.

    None if none is left, or with `limit_s`, for a service whose batches may take that long, if no remaining row could
    have more throughput on its slice.

    `done` are the rows of the same model on the same kind of GPU, on any slice. Measuring one point on the whole
    GPU, one on a middle slice and one on the smallest, each in a job of its own, follows the rule like three points of
    one grid.
    """
    if not open_:
        return None
    ran = [row for row in done if row.seconds is not None]
    count = len(ran)
    if limit_s is None:
        cells, belief = _believed(ran, open_, knowledge)
        chosen = next_point(TIME, belief, cells, range(count), range(count, len(cells)))
    else:
        chosen = next_within(*expected_seconds(ran, open_, knowledge), count, limit_s)
    return None if chosen is None else chosen - count


def next_within(cells: Cells, seconds: Array, measured: int, limit_s: float) -> int | None:
    """Return the index of the cell to measure next, of those after the first `measured`.

    None if none of them could have more throughput on its slice, at its input size, than the measured ones. `seconds`
    are the times of a batch at each cell: measured, else the median prediction.
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


def expected_seconds(
    ran: Sequence[Measurement], open_: Sequence[Measurement], knowledge: ModelKnowledge, hope: float = 0.0
) -> tuple[Cells, Array]:
    """Return the cells of all rows and the seconds of a batch at each: measured for `ran`, else the median prediction.

    `hope`: standard deviations by which predictions are reduced, for evaluations.
    """
    cells, belief = _believed(ran, open_, knowledge)
    value, deviation = belief.predict(TIME, cells)
    seconds = np.exp(value - hope * deviation)
    seconds[: len(ran)] = [row.seconds or 1.0 for row in ran]
    return cells, seconds


def _believed(
    ran: Sequence[Measurement], open_: Sequence[Measurement], knowledge: ModelKnowledge
) -> tuple[Cells, Belief]:
    """Return the cells of all rows, of which `ran` have figures, and the belief about their model.

    Its specifications are those of public data and of the rows that ran.
    """
    rows = [*ran, *open_]
    known, gpu = knowledge.of(rows[0].model, rows), GpuSpec.of_rows(rows)
    cells = Cells.of_rows(rows, gpu, known)
    logs = np.array([np.log(row.seconds or 1.0) for row in ran])
    prior = pool(TIME, rows[0].kind, ()).prior(rows[0].model, known, gpu)
    return cells, adapt(TIME, prior, cells.take(list(range(len(ran)))), logs, NOISE)


def _corner(cells: Cells, step: int) -> tuple[float, float] | None:
    """Return the SM share and batch of the rule's first three points."""
    sizes = np.unique(cells.sm)
    scale = max(float(cells.batch.min()) / FIRST_BATCH, 1.0)
    if step == 0:
        return float(sizes[-1]), scale * FIRST_BATCH
    if step == 1:
        return float(sizes[(len(sizes) - 1) // 2]), scale * MIDDLE_BATCH
    if step == 2:
        return float(sizes[0]), scale * SMALL_BATCH
    return None


def worth_choosing(surface: Surface, belief: Belief, cells: Cells) -> Array:
    """Return for each point the probability that no faster one gives as much throughput for its SMs."""
    root = np.linalg.cholesky(belief.covariance)
    draws = even_draws(len(belief.mean))[::4]
    items = np.log(cells.batch * cells.procs) - np.log(cells.sm)
    share = np.zeros(len(cells))
    for draw in draws:
        value = surface.curve(belief.mean + root @ draw, cells)
        order = np.argsort(value, kind="stable")
        efficiency = (items - value)[order]
        best = np.concatenate([[-np.inf], np.maximum.accumulate(efficiency)[:-1]])
        share[order] += efficiency > best
    probability: Array = share / len(draws)
    return probability

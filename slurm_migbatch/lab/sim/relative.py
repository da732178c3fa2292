"""Predict a job's speed on a slice relative to the whole GPU, for lending and sharing of training jobs."""

from __future__ import annotations

import numpy as np

from slurm_migbatch.predict.cells import Array, Cells
from slurm_migbatch.predict.fewshot import even_draws
from slurm_migbatch.predict.surface import Belief, Surface


def relative_speed(surface: Surface, belief: Belief, cells: Cells, whole: Cells) -> Array:
    """Return the expected speed at each of `cells` relative to the same work on `whole`, usually in (0, 1].

    The expectation is taken over parameters drawn from the belief, not at their mean: for an uncertain model
    the mean may lie clearly on one side of the knee while the true value is as likely on the other, and a decision on
    half of a GPU must not be made on 0.3 or 0.9 if only 0.6 is known.
    """
    if len(cells) != len(whole):
        raise ValueError("every cell needs its counterpart on the whole GPU")
    root = np.linalg.cholesky(belief.covariance)
    both = cells.join(whole)
    total = np.zeros(len(cells))
    draws = even_draws(len(belief.mean))
    for draw in draws:
        value, _ = surface.value(belief.mean + root @ draw, both)
        total += np.exp(value[len(cells) :] - value[: len(cells)])
    expected: Array = total / len(draws)
    return expected

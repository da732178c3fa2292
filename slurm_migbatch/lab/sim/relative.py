"""Predict a job's speed on a slice relative to the whole GPU, for lending and sharing of training jobs."""

from __future__ import annotations

import numpy as np

from slurm_migbatch.predict.cells import Array, Cells
from slurm_migbatch.predict.fewshot import even_draws
from slurm_migbatch.predict.surface import TIME, Belief


def relative_speed(belief: Belief, cells: Cells, whole: Cells) -> Array:
    """Return the expected speed at each of `cells` relative to the same work on `whole`, usually in (0, 1].

    The expectation is taken over parameters drawn from the belief, not at their mean. For an uncertain model the mean
    of the parameters may give a speed clearly on one side of the knee (0.3 or 0.9) although the true speed is as likely
    on the other side; a decision about half a GPU must then use the expected speed, 0.6.
    """
    if len(cells) != len(whole):
        raise ValueError("every cell needs its counterpart on the whole GPU")
    root = np.linalg.cholesky(belief.covariance)
    drawn = belief.mean + even_draws(len(belief.mean)) @ root.T
    value, _ = TIME.value(drawn.T[:, :, None], cells.join(whole))
    expected: Array = np.exp(value[:, len(cells) :] - value[:, : len(cells)]).mean(axis=0)
    return expected

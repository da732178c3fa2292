"""Adapt the belief about a model to its measured points: none, one, two, three or many.

Maximum a posteriori under a Gaussian prior, with the posterior's Gaussian approximation (Laplace). With few points the
surface has several explanations (a host-bound point fits a slow host or a slow device), so the search starts at several
places of the prior and keeps the best optimum. One point leaves the choice open: its optima are averaged by their
evidence if the model's specifications keep them close to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from slurm_migbatch.predict.cells import Array, Cells
from slurm_migbatch.predict.surface import Belief, Surface, places_of, single_noise

STARTS: Final = 3
"""Starting points of the search besides the prior's mean."""
DRAWS: Final = 128
FAR: Final = 2.0
"""Distance in standard deviations from the prior's mean, along each parameter, of extra starting points with one
measured point.
"""
APART: Final = 0.05
"""Squared distance above which two optima are distinct."""
NEAR: Final = 1.1
"""Largest standard deviation of a prior whose optima are averaged: that of a model with public specifications. Without
them optima are factors apart, and nothing measured lies between them. Chosen by leaving models out of the three public
tables.
"""
MOST_PLACES: Final = 256
"""Measured points that are kept to correct nearby predictions."""


def adapt(surface: Surface, prior: Belief, cells: Cells, logs: Array, noise: Array | float) -> Belief:
    """Return the belief after measuring `logs` of the figure at `cells`, with standard deviations `noise`.

    Without points it is the prior.
    """
    if not len(cells):
        return prior
    from scipy.optimize import leastsq  # slow to import, and not needed to answer requests

    root: Array = np.asarray(np.linalg.cholesky(prior.covariance), dtype=np.float64)
    weight: Array = np.asarray(np.ones(len(logs)) / noise, dtype=np.float64)
    column, own = weight[:, None], np.eye(len(root))
    last: tuple[bytes, Array, Array] = (b"", logs, logs)

    def evaluated(z: Array) -> tuple[Array, Array]:
        nonlocal last  # the search requests the gradient at the point where it has just requested the value
        if last[0] != (place := z.tobytes()):
            last = (place, *surface.value(prior.mean + root @ z, cells))
        return last[1], last[2]

    def residual(z: Array) -> Array:
        return np.concatenate([(evaluated(z)[0] - logs) * weight, z])

    def slopes(z: Array) -> Array:
        return np.concatenate([(evaluated(z)[1] * column) @ root, own])

    starts = _starts(surface, prior, root, cells, logs, weight)
    average = len(cells) == 1 and float(np.max(np.diag(prior.covariance))) < NEAR**2
    if average:
        starts += [*(FAR * own), *(-FAR * own)]
    optima: list[tuple[float, Array]] = []
    for start in starts:
        solution = leastsq(
            residual,
            start,
            Dfun=slopes,
            full_output=True,
            ftol=1e-8,
            xtol=1e-8,
            gtol=1e-8,
            maxfev=200,
            diag=np.ones(len(root)),
        )
        optima.append((float(np.sum(solution[2]["fvec"] ** 2)), solution[0]))
    if average:
        best, inner = _averaged(optima, slopes)
    else:
        best = min(optima, key=lambda end: end[0])[1]
        inner = _inner(slopes(best))
    covariance = root @ inner @ root.T
    mean = prior.mean + root @ best
    indices = _evenly_spaced(len(cells), MOST_PLACES)
    return Belief(
        mean,
        0.5 * (covariance + covariance.T),
        places_of(cells)[indices],
        (logs - surface.curve(mean, cells))[indices],
        single_noise(1.0 / weight)[indices],
    )


def _inner(slopes: Array) -> Array:
    return np.asarray(np.linalg.inv(slopes.T @ slopes), dtype=np.float64)


def _averaged(ends: Sequence[tuple[float, Array]], slopes: Callable[[Array], Array]) -> tuple[Array, Array]:
    """Return mean and covariance over the distinct optima, weighted by cost and Laplace's evidence."""
    distinct: list[tuple[float, Array]] = []
    for cost, end in sorted(ends, key=lambda end: end[0]):
        if all(float(np.sum((end - other) ** 2)) > APART for _, other in distinct):
            distinct.append((cost, end))
    spreads = [_inner(slopes(end)) for _, end in distinct]
    evidence = np.array(
        [np.linalg.slogdet(spread)[1] - cost for spread, (cost, _) in zip(spreads, distinct, strict=True)]
    )
    weights = np.exp(0.5 * (evidence - evidence.max()))
    weights = weights / weights.sum()
    places = np.array([end for _, end in distinct])
    mean = weights @ places
    offsets = places - mean
    spread = np.einsum("i,ijk->jk", weights, np.array(spreads)) + (offsets.T * weights) @ offsets
    return np.asarray(mean), np.asarray(spread)


def _evenly_spaced(count: int, most: int) -> npt.NDArray[np.intp]:
    """Return all indices, or an even choice if there are too many."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.intp))


def _starts(surface: Surface, prior: Belief, root: Array, cells: Cells, logs: Array, weight: Array) -> list[Array]:
    draws = even_draws(len(prior.mean))
    values = surface.curve((prior.mean + draws @ root.T).T[:, :, None], cells)
    # a quarter of the weight: the draws are coarse, and a good basin must not lose to a lucky draw in a bad one
    costs = np.sum(((values - logs) * weight * 0.25) ** 2, axis=1) + np.sum(draws**2, axis=1)
    return [np.zeros(len(prior.mean)), *(draws[i] for i in np.argsort(costs)[:STARTS])]


@lru_cache(maxsize=8)
def even_draws(size: int) -> Array:
    """Return standard normal points that fill the space evenly and reproducibly."""
    from scipy.stats import norm, qmc

    points = qmc.Sobol(size, seed=20).random(DRAWS)
    drawn: Array = norm.ppf(0.002 + 0.996 * points)
    return drawn

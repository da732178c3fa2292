"""Model how fast a data-parallel training job learns (goodput): throughput times statistical efficiency.

Pollux (Qiao et al., OSDI 2021), section 3, as in its authors' code (adaptdl, `goodput.py` and `speedup.py`), which
DeepBoot (Chen et al., IEEE TPDS 2023) uses unchanged:

- a step computes gradients for `alpha_c + beta_c m` seconds, m being the batch of one replica, and exchanges them: this
  takes no time on one replica and `alpha + beta (K - 2)` seconds on K replicas, with one pair of parameters inside a
  node and another across nodes;
- both overlap: `(grad^gamma + sync^gamma)^(1/gamma)`; accumulated steps only compute gradients;
- an item in a batch of size M teaches `(phi + M0) / (phi + M)` of what it teaches in a batch of size M0; phi is the
  gradient noise scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

POINTS: Final = 50
"""Batches to try between the smallest and the largest, in geometric steps."""
_LEAST: Final = 1e-8
_ACROSS: Final = 1.1
"""Minimum cost of an exchange across nodes relative to one inside a node, if it was not measured."""


class GoodputError(ValueError):
    """The given figures do not define a model; the message says why."""


@dataclass(frozen=True)
class Steps:
    """Parameters of the duration of steps, in seconds; see the module.

    `alpha_r` and `beta_r` are for exchanges inside a node, `alpha_n` and `beta_n` for exchanges across nodes. `gamma`
    is 1 if gradients and exchange do not overlap, and up to 10 if the longer one hides the other.
    """

    alpha_c: float
    beta_c: float
    alpha_n: float
    beta_n: float
    alpha_r: float
    beta_r: float
    gamma: float

    def gradient_s(self, local: float) -> float:
        """Return the seconds for gradients of a batch of `local` items on a GPU."""
        return self.alpha_c + self.beta_c * local

    def exchange_s(self, replicas: int, nodes: int) -> float:
        """Return the seconds of an exchange of gradients between replicas."""
        if replicas < 2:
            return 0.0
        alpha, beta = (self.alpha_n, self.beta_n) if nodes > 1 else (self.alpha_r, self.beta_r)
        return alpha + beta * (replicas - 2)

    def iteration_s(self, replicas: int, nodes: int, local: float, accumulated: int = 0) -> float:
        """Return the seconds of one update: `accumulated` steps without an exchange, and one with it."""
        gradient, exchange = self.gradient_s(local), self.exchange_s(replicas, nodes)
        longer, shorter = max(gradient, exchange), min(gradient, exchange)
        overlapped: float = longer * (1.0 + (shorter / longer) ** self.gamma) ** (1.0 / self.gamma)
        return accumulated * gradient + overlapped

    def throughput(self, replicas: int, nodes: int, local: float, accumulated: int = 0) -> float:
        """Return items per second of all replicas."""
        items = replicas * local * (accumulated + 1)
        return items / self.iteration_s(replicas, nodes, local, accumulated)


class Best(NamedTuple):
    """The batch with which a job learns fastest, and its goodput.

    Goodput is in items per second, counted by what an item teaches in a batch of size M0. The batch consists of a
    `local` batch on each replica in `accumulated` + 1 steps.
    """

    goodput: float
    batch: int
    local: int
    accumulated: int


@dataclass(frozen=True)
class Goodput:
    """One training job.

    Attributes:
        steps: duration of its steps.
        noise: gradient noise scale phi, in items.
        first_batch: M0, the batch that its user chose.
        largest_batch: the largest batch with which it still learns well.
        least_local, most_local: bounds of the batch of one replica; the upper one is what fits into its memory.
    """

    steps: Steps
    noise: float
    first_batch: int
    largest_batch: int
    least_local: int
    most_local: int

    def __post_init__(self) -> None:
        if not (self.noise >= 0 and 1 <= self.first_batch <= self.largest_batch):
            raise GoodputError(
                f"the first batch ({self.first_batch}) must be 1 to the largest ({self.largest_batch}), and the "
                f"noise scale ({self.noise}) 0 or more"
            )
        if not 1 <= self.least_local <= self.most_local:
            raise GoodputError(f"a replica's batch cannot be {self.least_local} to {self.most_local}")

    def efficiency(self, batch: float) -> float:
        """Return how much an item teaches in a batch of this size, relative to a batch of size M0."""
        return (self.noise + self.first_batch) / (self.noise + batch)

    def best(self, replicas: int, nodes: int = 1) -> Best | None:
        """Return the best batch; None if the largest batch is too small for this many replicas."""
        least = max(self.first_batch, self.least_local * replicas)
        if replicas < 1 or nodes > replicas or least > self.largest_batch:
            return None
        best: Best | None = None
        for wanted in np.geomspace(least, self.largest_batch, POINTS).tolist():
            share = wanted / replicas
            accumulated = max(math.ceil(share / self.most_local - _LEAST) - 1, 0)
            if replicas == 1 and wanted > self.first_batch + _LEAST:
                accumulated = max(accumulated, 1)  # a single replica needs two gradients to estimate the noise scale
            local = math.ceil(share / (accumulated + 1) - _LEAST)
            if local > self.most_local or (local < self.least_local and accumulated):
                continue
            batch = replicas * local * (accumulated + 1)
            if batch > self.largest_batch and best is not None:
                continue
            rate = self.steps.throughput(replicas, nodes, local, accumulated) * self.efficiency(batch)
            if best is None or rate > best.goodput:
                best = Best(rate, batch, local, accumulated)
        return best

    def speedup(self, replicas: int, nodes: int = 1) -> float:
        """Return the speedup over one whole GPU; 0 if either cannot run."""
        single, many = self.best(1), self.best(replicas, nodes)
        return many.goodput / single.goodput if single is not None and many is not None else 0.0


class Observed(NamedTuple):
    """A measured step without accumulation: the seconds of its gradients and of the whole step."""

    nodes: int
    replicas: int
    local: float
    gradient_s: float
    step_s: float


def fit(rows: Sequence[Observed]) -> Steps:
    """Return the parameters that fit the measurements best.

    They minimise the sum of the root mean square logarithmic errors of gradients and of whole steps, with small
    penalties for a gamma above 1 and for exchanges that grow fast with replicas. Parameters without measurements are
    optimistic: several replicas cost as much as one, several nodes a tenth more than one.

    Raises:
        GoodputError: there are no rows, or they hold times or batches that are not above 0.
    """
    from scipy.optimize import minimize  # slow to import, and needed only to fit

    if not rows:
        raise GoodputError("no measured steps to fit a model to")
    table = np.array(rows, dtype=np.float64)
    if not (np.isfinite(table).all() and (table > 0).all()):
        raise GoodputError("measured steps need times, batches, nodes and replicas above 0")
    nodes, replicas, local, gradient, step = table.T
    step = np.maximum(step, gradient)
    inside, across = (nodes == 1) & (replicas > 1), nodes > 1
    start = np.array([gradient.min() / 2, (gradient / local).min() / 2, 0.1, 0.01, 0.05, 0.005, 1.5])
    bounds: list[tuple[float, float | None]] = [(_LEAST, None)] * 6 + [(1.0, 10.0)]
    if not (across & (replicas > 2)).any():
        start[3], bounds[3] = _LEAST, (_LEAST, _LEAST)
    if not across.any():
        start[2], bounds[2] = _LEAST, (_LEAST, _LEAST)
    if not (inside & (replicas > 2)).any():
        start[5], bounds[5] = _LEAST, (_LEAST, _LEAST)
    if not inside.any():
        start[4], bounds[4] = _LEAST, (_LEAST, _LEAST)

    def error(x: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
        alpha_c, beta_c, alpha_n, beta_n, alpha_r, beta_r, gamma = x
        grad = alpha_c + beta_c * local
        alone = replicas == 1
        wire = np.where(
            alone,
            _LEAST,
            np.where(across, alpha_n + beta_n * (replicas - 2), alpha_r + beta_r * (replicas - 2)),
        )
        longer, shorter = np.maximum(grad, wire), np.minimum(grad, wire)
        both = longer * (1.0 + (shorter / longer) ** gamma) ** (1.0 / gamma)
        loss = _rmsle(grad, gradient) + _rmsle(both, step)
        growth = (beta_n / alpha_n) ** 2 + (beta_r / alpha_r) ** 2
        return float(loss + 1e-3 * (gamma - 1.0) ** 2 + 1e-2 * growth)

    x = minimize(error, np.maximum(start, _LEAST), method="L-BFGS-B", bounds=bounds, options={"maxiter": 500}).x
    alpha_c, beta_c, alpha_n, beta_n, alpha_r, beta_r, gamma = (float(value) for value in x)
    if not across.any():
        alpha_n, beta_n = max(alpha_n, _ACROSS * alpha_r), max(beta_n, _ACROSS * beta_r)
    return Steps(alpha_c, beta_c, alpha_n, beta_n, alpha_r, beta_r, gamma)


def _rmsle(
    estimated: np.ndarray[tuple[int], np.dtype[np.float64]], true: np.ndarray[tuple[int], np.dtype[np.float64]]
) -> float:
    return float(np.sqrt(np.mean((np.log(estimated) - np.log(true)) ** 2)))

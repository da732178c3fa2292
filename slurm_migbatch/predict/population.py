"""What measured models have in common, from which the first guess for any other model follows.

Each measured model (on one GPU, by one laboratory: a *unit*) has fitted parameters. Their distance from what physics
lets expect is explained by the mean of all, a shift for the software stack (one laboratory on one GPU: host speed,
precision, framework), a learned dependence on the model's features (ridge regression), and the same model's own
distance where it was measured elsewhere. What is left is the spread, a covariance shrunk to the physical prior's;
without any unit it is the physical prior itself. (Empirical Bayes; ours.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from slurm_migbatch.predict.cells import Array, GpuSpec
from slurm_migbatch.predict.known import TEXT_FAMILIES, Known
from slurm_migbatch.predict.samples import RUNS, SITE
from slurm_migbatch.predict.surface import Belief, Surface

PSEUDO: Final = 2.0
"""Weight of the physical spread, in models."""
STACK_WEIGHT: Final = 1.0
"""Models of one stack that make its own shift count half."""
SAME_MODEL: Final = 0.8
"""How much of a model's own distance carries over to another GPU or laboratory."""
RIDGE: Final = 10.0
"""Penalty of the dependence on features: with ten models it explains little, with hundreds what there is."""
ELSEWHERE: Final = 0.5
"""Part of the physical spread by which one laboratory's software differs from another's (the same model on the same
slice differs by 17 % at the median between two public laboratories)."""
LOCAL: Final = (SITE, RUNS)
"""Sources of rows that this site measured itself."""
OF_THE_STACK: Final = ("host", "item", "serial", "base")
"""Parameters that the software decides on."""
TAIL: Final = 4.0
"""Degrees of freedom of the spread: an outlying model counts less."""


@dataclass(frozen=True)
class Unit:
    """One model on one GPU by one laboratory, with its fitted parameters."""

    model: str
    known: Known
    gpu: GpuSpec
    stack: str
    theta: Array


@dataclass(frozen=True)
class Population:
    """The distribution of parameters over models, for one surface and one kind of work (infer or train)."""

    surface: Surface
    kind: str
    count: int
    mean: Array
    covariance: Array | None
    shifts: dict[str, Array] = field(default_factory=dict)
    slopes: Array | None = None
    centre: Array | None = None
    own: dict[str, Array] = field(default_factory=dict)
    stacks: tuple[str, ...] = ()

    def prior(self, model: str, known: Known, gpu: GpuSpec, stack: str | None = None) -> Belief:
        """Return the prior of a model on a GPU and software stack (None: a typical stack there)."""
        expected = self.surface.expected(known, gpu.facts, self.kind)
        spread = np.diag(self.surface.spread(known.doubt) ** 2)
        if self.covariance is None:
            return Belief(expected, spread)
        distance = self.mean + self._shift(gpu, stack)
        if self.slopes is not None and self.centre is not None:
            distance = distance + self.slopes @ (features(known) - self.centre)
        covariance = self.covariance
        if not self._at_home(gpu, stack):
            theirs = np.isin(self.surface.names, OF_THE_STACK)
            covariance = covariance + np.diag(theirs * ELSEWHERE**2 * self.surface.spread(0) ** 2)
        if known.doubt:
            # what the features would have said of launches and work is not known
            covariance = covariance + spread - np.diag(self.surface.spread(0) ** 2)
        own = self.own.get(model)
        if own is not None:
            distance = distance + SAME_MODEL * own
            covariance = covariance * (1.0 - SAME_MODEL**2)
        return Belief(expected + distance, covariance)

    def _at_home(self, gpu: GpuSpec, stack: str | None) -> bool:
        """Return whether models were measured on this stack, or (None) by this site on such a GPU."""
        if stack is not None:
            return stack in self.stacks
        return any(f"{gpu.name}|{source}" in self.stacks for source in LOCAL)

    def _shift(self, gpu: GpuSpec, stack: str | None) -> Array:
        if stack is not None and stack in self.shifts:
            return self.shifts[stack]
        near = [shift for name, shift in self.shifts.items() if name.split("|", 1)[0] == gpu.name]
        return np.mean(near, axis=0) if near else np.zeros_like(self.mean)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-able form."""

        def plain(value: Array | None) -> Any:
            return None if value is None else value.tolist()

        return {
            "kind": self.kind,
            "count": self.count,
            "mean": plain(self.mean),
            "covariance": plain(self.covariance),
            "shifts": {name: plain(shift) for name, shift in self.shifts.items()},
            "slopes": plain(self.slopes),
            "centre": plain(self.centre),
            "own": {name: plain(own) for name, own in self.own.items()},
            "stacks": list(self.stacks),
        }

    @classmethod
    def from_dict(cls, surface: Surface, data: dict[str, Any]) -> Population:
        """Read `to_dict`'s form; raises KeyError, TypeError or ValueError where it is none."""
        size = len(surface.names)

        def vector(value: Any) -> Array:
            array = np.asarray(value, dtype=np.float64)
            if array.shape != (size,) or not np.isfinite(array).all():
                raise ValueError(f"{size} finite numbers are needed")
            return array

        def matrix(value: Any, columns: int) -> Array | None:
            if value is None:
                return None
            array = np.asarray(value, dtype=np.float64)
            if array.shape != (size, columns) or not np.isfinite(array).all():
                raise ValueError(f"a matrix of {size} by {columns} is needed")
            return array

        covariance = matrix(data["covariance"], size)
        if covariance is not None:
            np.linalg.cholesky(covariance)
        centre = data["centre"]
        return cls(
            surface,
            str(data["kind"]),
            int(data["count"]),
            vector(data["mean"]),
            covariance,
            {str(name): vector(shift) for name, shift in data["shifts"].items()},
            matrix(data["slopes"], len(FEATURES)),
            None if centre is None else np.asarray(centre, dtype=np.float64).reshape(len(FEATURES)),
            {str(name): vector(own) for name, own in data["own"].items()},
            tuple(str(name) for name in data["stacks"]),
        )


FEATURES: Final = ("intensity", "flops", "kernels", "text")


def features(known: Known) -> Array:
    """Return what a model's distance from physics may depend on, each of the order of one."""
    return np.array(
        [
            0.5 * np.log(known.flops / (known.traffic_mib * 2**20)),
            0.5 * np.log(known.flops / 1e10),
            0.5 * np.log(known.kernels / 200.0),
            1.0 if known.family in TEXT_FAMILIES else 0.0,
        ]
    )


def pool(surface: Surface, kind: str, units: Sequence[Unit]) -> Population:
    """Return the population of the units; without units the physical prior."""
    size = len(surface.names)
    if not units:
        return Population(surface, kind, 0, np.zeros(size), None)
    from sklearn.linear_model import Ridge  # a second to import, and only learning needs it

    distances = np.array([u.theta - surface.expected(u.known, u.gpu.facts, kind) for u in units])
    spread = surface.spread(0) ** 2
    # a model that many laboratories measured counts once
    of_model: dict[str, list[int]] = {}
    for i, unit in enumerate(units):
        of_model.setdefault(unit.model, []).append(i)
    share = np.array([1.0 / len(of_model[unit.model]) for unit in units])
    weight = share.copy()
    mean = np.zeros(size)
    covariance = np.diag(spread)
    slopes = np.zeros((size, len(FEATURES)))
    design = np.array([features(unit.known) for unit in units])
    centre = np.average(design, axis=0, weights=share)
    shifts: dict[str, Array] = {}
    for _ in range(4):
        shifted = np.array([shifts.get(unit.stack, np.zeros(size)) for unit in units])
        rest = distances - shifted
        mean = (weight @ rest) / (weight.sum() + 0.25)
        learned = Ridge(alpha=RIDGE, fit_intercept=False)
        learned.fit((design - centre), rest - mean, sample_weight=weight)
        slopes = np.asarray(learned.coef_, dtype=np.float64)
        rest = rest - mean - (design - centre) @ slopes.T
        shifts = _shifts(units, rest + shifted, share)
        left = rest
        far = np.einsum("ij,jk,ik->i", left, np.linalg.inv(covariance), left)
        weight = share * (TAIL + size) / (TAIL + far)
        covariance = (PSEUDO * np.diag(spread) + (left * weight[:, None]).T @ left) / (PSEUDO + share.sum())
    total = share.sum()
    own = {name: np.mean(left[mine], axis=0) for name, mine in sorted(of_model.items())}
    return Population(
        surface, kind, len(own), mean, covariance * (1.0 + 1.0 / (total + 1.0)), shifts, slopes, centre, own,
        tuple(sorted({unit.stack for unit in units})),
    )  # fmt: skip


def _shifts(units: Sequence[Unit], rest: Array, share: Array) -> dict[str, Array]:
    stacks = sorted({unit.stack for unit in units})
    if len(stacks) < 2:
        return {}
    found = {}
    for stack in stacks:
        mine = np.array([unit.stack == stack for unit in units])
        weight = share[mine]
        found[stack] = (weight @ rest[mine]) / (weight.sum() + STACK_WEIGHT)
    return found

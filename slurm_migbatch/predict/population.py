"""Learn what measured models have in common, which gives the first prediction for any other model.

Each measured model (on one GPU, by one laboratory: a *unit*) has fitted parameters. Their distance from physics is a
sum: an effect common to all, one of the GPU, one of the software stack (one laboratory on one GPU: host speed,
framework), one of the stack on models of a kind (precision), a dependence on the model's features, and the model's own
effect. Each has a prior variance, so it is trusted only as far as several models agree (partial
pooling; a linear mixed model, solved for each parameter by itself). The rest is the spread, a covariance shrunk to
the physical prior's; without any unit it is the physical prior itself. (Empirical Bayes; ours.)

A table may be wrong. A unit's weight falls with its distance from physics and with the misfit of its best curve, to 0
beyond LIMIT, and outliers within their group weigh less. One model alone hardly changes a common effect: its distance
may be its own. A model's own points always count for itself.

The variances were chosen by leaving models, families and laboratories out in turn over the tables of ParvaGPU, MIGPerf
and MISO together (31 units of 23 models); halving or doubling one of them changes mean errors by about a tenth.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slurm_migbatch.predict.cells import Array, GpuSpec
from slurm_migbatch.predict.known import LISTED, TEXT_FAMILIES, TRANSFORMERS, Known
from slurm_migbatch.predict.samples import RUNS, SITE
from slurm_migbatch.predict.surface import Belief, Surface
from slurm_migbatch.values.grouping import grouped

EVERYWHERE: Final = 0.1
ON_GPU: Final = 0.05
IN_STACK: Final = 0.2
OF_KIND: Final = 0.1
"""Variance of the effects common to all models, those on one GPU, in one stack, and of one kind in one stack; in
variances of the physical prior.
"""
PRECISION: Final = 2.0
"""Upper limit of the same for the effect of a stack's precision on matrix products: one transformer differs by a factor
of up to eight on an A100 (PyTorch computes products in fp32 since 1.12, convolutions in tf32; containers differ). It is
a property of the stack, so one model determines it if it lies further off than models do by chance.
"""
CONTEXT: Final = 2.0
"""The same for memory that a stack's software takes for any model (contexts, libraries, their workspaces)."""
PACE: Final = 1.0
"""The same for how slow a stack is on all its models (clocks, framework): the less, the fewer they are; two may agree
by chance. None is much faster than data sheets say, so a faster table is probably wrong.
"""
SLOPE: Final = 0.02
"""The same for the dependence on each feature."""
RESIDUAL: Final = 0.5
"""The same for a model's own effect."""
PSEUDO: Final = 2.0
"""Weight of RESIDUAL in the learned spread, in models."""
SAME_MODEL: Final = 0.8
"""Share of a model's own effect that carries over to another GPU or laboratory; of what is wrong in its specifications
all does.
"""
LIMIT: Final = 45.0
"""Squared distance from physics, in standard deviations, from which a unit is ignored. No unit with public
specifications is beyond 38; times that are wrong by a factor of ten are beyond 48.
"""
MISFIT: Final = 0.05
"""Standard deviation of measured logarithms around an acceptable curve; the square of a unit's over this one is added
to the squared distance.
"""
TAIL: Final = 8.0
"""Degrees of freedom of the spread: an outlying model counts less."""
LOCAL: Final = (SITE, RUNS)
"""Sources of rows that this site measured itself."""
_ROUNDS: Final = 4


@dataclass(frozen=True)
class Unit:
    """One model on one GPU by one laboratory, with its fitted parameters, their variances, and the standard deviation
    of the measured logarithms around the fitted curve.
    """

    model: str
    known: Known
    gpu: GpuSpec
    stack: str
    theta: Array
    variance: Array
    misfit: float


@dataclass(frozen=True)
class Effect:
    """A distance from physics and its variance, one entry for each parameter."""

    mean: Array
    variance: Array


class _Level(NamedTuple):
    """One random effect: its name, its column of the design matrix (an entry for each unit), and for each parameter its
    variance and the limit to which it grows if the effect is clear, both relative to the physical prior's variance, and
    whether it grows only if the effect is to be slower.
    """

    name: str
    column: Array
    variance: Array
    most: Array
    slower: NDArray[np.bool_]


@dataclass(frozen=True)
class Population:
    """The distribution of parameters over models, for one surface and one kind of work (infer or train).

    `levels`: the common effects by name: those of a kind of model in a stack, of a stack, of a GPU, and of all models
    (""). `own`: each model's own effect, with the share of the variance that remains. `stacks`: the families that were
    measured in each stack.
    """

    surface: Surface
    kind: str
    count: int
    covariance: Array | None = None
    levels: Mapping[str, Effect] = field(default_factory=dict)
    slopes: Array | None = None
    centre: Array | None = None
    own: Mapping[str, Effect] = field(default_factory=dict)
    stacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def is_stranger(self, known: Known, gpu: GpuSpec, stack: str | None = None) -> bool:
        """Return whether no model of the family was measured on the stack (None: this site's on such a GPU)."""
        return not any(known.family in self.stacks.get(name, ()) for name in _stacks(gpu, stack))

    def prior(self, model: str, known: Known, gpu: GpuSpec, stack: str | None = None) -> Belief:
        """Return the prior of a model on a GPU and software stack (None: this site's, or a typical one there)."""
        expected = self.surface.expected(known, gpu.facts, self.kind)
        spread = np.diag(self.surface.spread(known.doubts(self.kind)) ** 2)
        if self.covariance is None:
            return Belief(expected, spread)
        level = self._level(known, gpu, stack)
        distance = level.mean
        if self.slopes is not None and self.centre is not None:
            distance = distance + self.slopes @ (features(known) - self.centre)
        # uncertainty about the model itself, its launches and its work, remains
        covariance = self.covariance + spread - np.diag(self.surface.spread(LISTED) ** 2)
        own, variance = self.own.get(model), level.variance
        if own is not None:
            distance = distance + own.mean
            covariance = covariance * np.sqrt(np.outer(own.variance, own.variance))
            # whatever is known of the model, another GPU or stack may change it
            variance = variance * np.maximum(own.variance, 1.0 - SAME_MODEL**2)
        return Belief(expected + distance, covariance + np.diag(variance))

    def _level(self, known: Known, gpu: GpuSpec, stack: str | None) -> Effect:
        names = [name for stack_name in _stacks(gpu, stack) for name in (_of_kind(stack_name, known), stack_name)]
        return next(self.levels[name] for name in (*names, gpu.name, "") if name in self.levels)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-able form."""

        def plain(value: Array | None) -> Any:
            return None if value is None else value.tolist()

        def effects(found: Mapping[str, Effect]) -> Any:
            return {name: [effect.mean.tolist(), effect.variance.tolist()] for name, effect in found.items()}

        return {
            "kind": self.kind,
            "count": self.count,
            "covariance": plain(self.covariance),
            "levels": effects(self.levels),
            "slopes": plain(self.slopes),
            "centre": plain(self.centre),
            "own": effects(self.own),
            "stacks": {name: list(families) for name, families in self.stacks.items()},
        }

    @classmethod
    def from_dict(cls, surface: Surface, data: dict[str, Any]) -> Population:
        """Read the form of `to_dict`; raises KeyError, TypeError or ValueError if it is invalid."""
        size = len(surface.names)

        def effects(value: Any) -> dict[str, Effect]:
            by_name = {}
            for name, pair in value.items():
                array = np.asarray(pair, dtype=np.float64)
                if array.shape != (2, size) or not np.isfinite(array).all() or (array[1] < 0).any():
                    raise ValueError(f"{size} finite numbers and their variances are needed")
                by_name[str(name)] = Effect(array[0], array[1])
            return by_name

        def matrix(value: Any, columns: int) -> Array | None:
            if value is None:
                return None
            array = np.asarray(value, dtype=np.float64)
            if array.shape != (size, columns) or not np.isfinite(array).all():
                raise ValueError(f"a matrix of {size} by {columns} is needed")
            return array

        covariance = matrix(data["covariance"], size)
        levels = effects(data["levels"])
        if covariance is not None:
            np.linalg.cholesky(covariance)
            if "" not in levels:
                raise ValueError("the shared prior is missing")
        centre = data["centre"]
        return cls(
            surface,
            str(data["kind"]),
            int(data["count"]),
            covariance,
            levels,
            matrix(data["slopes"], len(FEATURES)),
            None if centre is None else np.asarray(centre, dtype=np.float64).reshape(len(FEATURES)),
            effects(data["own"]),
            {str(name): tuple(str(family) for family in families) for name, families in data["stacks"].items()},
        )


FEATURES: Final = ("intensity", "flops", "kernels", "text")


def features(known: Known) -> Array:
    """Return the features that a model's distance from physics may depend on, each of the order of one."""
    return np.array(
        [
            0.5 * np.log(known.flops / (known.traffic_mib * 2**20)),
            0.5 * np.log(known.flops / 1e10),
            0.5 * np.log(known.kernels / 200.0),
            1.0 if known.family in TEXT_FAMILIES else 0.0,
        ]
    )


def pool(surface: Surface, kind: str, units: Sequence[Unit]) -> Population:
    """Return the population of the units; the physical prior without units, or without a plausible one."""
    trusts = [_trust(surface, kind, unit) for unit in units]
    believed = [(unit, trust) for unit, trust in zip(units, trusts, strict=True) if trust > 0]
    count = len({unit.model for unit in units})
    if not believed:
        return Population(surface, kind, count)
    return _Pooled(surface, kind, [unit for unit, _ in believed], np.array([t for _, t in believed])).population(count)


def _trust(surface: Surface, kind: str, unit: Unit) -> float:
    """Return the weight of a unit: from 1 near physics, to 0 at LIMIT (Tukey's biweight)."""
    distance = unit.theta - surface.expected(unit.known, unit.gpu.facts, kind)
    squares = float(np.sum(distance**2 / surface.spread(unit.known.doubts(kind)) ** 2)) + (unit.misfit / MISFIT) ** 2
    return max(0.0, 1.0 - squares / LIMIT) ** 2


def _stacks(gpu: GpuSpec, stack: str | None) -> tuple[str, ...]:
    return tuple(f"{gpu.name}|{source}" for source in LOCAL) if stack is None else (stack,)


def _of_kind(stack: str, known: Known) -> str:
    return f"{stack}/{'transformers' if known.family in TRANSFORMERS else 'others'}"


class _Pooled:
    """The mixed model of some units, fitted in a few rounds: effects, then spread and outliers, and again."""

    def __init__(self, surface: Surface, kind: str, units: Sequence[Unit], trust: Array) -> None:
        self.surface, self.units = surface, units
        self.physical = surface.spread(LISTED) ** 2
        self.distance = np.array([unit.theta - surface.expected(unit.known, unit.gpu.facts, kind) for unit in units])
        self.kind = kind
        self.of_model, self.trust = grouped(range(len(units)), lambda i: units[i].model), trust
        # a model that many laboratories measured counts once
        self.weight = trust * np.array([1.0 / len(self.of_model[unit.model]) for unit in units])
        spread = np.array([surface.spread(unit.known.doubts(kind)) ** 2 for unit in units])
        variance = np.array([unit.variance for unit in units])
        # a parameter that a unit's points do not determine has kept the physical prior's variance
        unsure = variance / (1.0 - np.minimum(variance / spread, 0.999))
        self.doubted = spread - self.physical
        self.noise = self.doubted + unsure
        design = np.array([features(unit.known) for unit in units])
        self.centre = np.average(design, axis=0, weights=self.weight)
        self.levels = [*self._levels(), *self._slopes(design - self.centre)]
        self._fit()

    def _levels(self) -> Iterator[_Level]:
        products = np.array([name in self.surface.by_precision for name in self.surface.names])
        contexts = np.array([name in self.surface.by_context for name in self.surface.names])
        paces = np.array([name in self.surface.by_stack for name in self.surface.names])
        stacks = {unit.stack for unit in self.units}
        groups = (
            (EVERYWHERE * self.surface.common, [""] * len(self.units)),
            (ON_GPU, [unit.gpu.name for unit in self.units]),
            (IN_STACK, [unit.stack for unit in self.units]),
            (OF_KIND, [_of_kind(unit.stack, unit.known) for unit in self.units]),
        )
        for variance, names in groups:
            for name in sorted(set(names)):
                column = np.array([float(other == name) for other in names])
                models = len({unit.model for unit, other in zip(self.units, names, strict=True) if other == name})
                # one model's distance may be its own effect; the more models agree, the less likely is chance
                variances = np.full(len(products), max(variance * (1.0 - 1.0 / models) ** 2, 1e-9))
                most = 0.0 * variances
                if name.endswith("/transformers"):
                    most = PRECISION * products
                elif name in stacks or not name:
                    agreeing = max(0.0, 1.0 - 2.0 / models) ** 2 if name else 0.0
                    most = CONTEXT * contexts + PACE * agreeing * paces
                yield _Level(name, column, variances, most, paces & (name in stacks))

    def _slopes(self, design: Array) -> Iterator[_Level]:
        for name, column in zip(FEATURES, design.T, strict=True):
            variance = np.full(len(self.physical), SLOPE * self.surface.common)
            yield _Level(name, column, variance, 0.0 * variance, variance < 0.0)

    def _fit(self) -> None:
        columns = np.column_stack([level.column for level in self.levels])
        least = np.array([level.variance for level in self.levels]) * self.physical
        most = np.array([level.most for level in self.levels]) * self.physical
        self.mean = 0.0 * least
        residual = np.diag(RESIDUAL * self.physical)
        outlier = np.ones(len(self.units))
        for _ in range(_ROUNDS):
            noise = (residual.diagonal() + self.noise) / (outlier * self.weight)[:, None]
            prior = least + np.minimum(self._squared_distances(columns, noise), most)
            self.variance = np.array(
                [
                    np.linalg.inv((columns.T / noise[:, j]) @ columns + np.diag(1.0 / prior[:, j]))
                    for j in range(len(self.physical))
                ]
            )
            scaled = columns.T @ (self.distance / noise)
            self.mean = np.einsum("jkl,lj->kj", self.variance, scaled)
            self.left = self.distance - columns @ self.mean
            squares = [
                float(left @ np.linalg.solve(residual + np.diag(noise), left))
                for left, noise in zip(self.left, self.noise, strict=True)
            ]
            outlier = (TAIL + len(self.physical)) / (TAIL + np.array(squares))
            effect = residual.diagonal()
            self.explained = effect / (effect + self.noise)
            # what is wrong in a model's specifications is wrong everywhere, of its own effect SAME_MODEL carries over
            everywhere = self.doubted + SAME_MODEL * effect
            self.carried = everywhere / (effect + self.noise)
            self.settled = self.carried * everywhere / (effect + self.doubted)
            known = self.left * np.sqrt(self.explained)
            scatter = (known * (outlier * self.weight)[:, None]).T @ known
            total = float(self.weight.sum())
            residual = (PSEUDO * np.diag(RESIDUAL * self.physical) + scatter) / (PSEUDO + total)
        self.residual = residual

    def _squared_distances(self, columns: Array, noise: Array) -> Array:
        """Return the squared distance of each level's units from the other effects, beyond what chance explains
        (the positive part of an effect's variance, as in James and Stein).
        """
        left = self.distance - columns @ self.mean
        total = np.maximum(np.abs(columns.T) @ (1.0 / noise), 1e-12)
        apart = self.mean + columns.T @ (left / noise) / total
        apart = np.where((apart < 0.0) & np.array([level.slower for level in self.levels]), 0.0, apart)
        return np.asarray(np.maximum(apart**2 - 1.0 / total, 0.0), dtype=np.float64)

    def _effect(self, names: Sequence[str]) -> Effect:
        """Return the sum of the named levels. Deeper levels, without units, add only their prior variance."""
        selected = np.array([float(level.name in names) for level in self.levels])
        variance = np.einsum("k,jkl,l->j", selected, self.variance, selected)
        deeper = sum((ON_GPU, IN_STACK, OF_KIND)[len(names) - 1 :])
        return Effect(selected @ self.mean, variance + deeper * self.physical)

    def population(self, count: int) -> Population:
        """Return the fitted population."""
        levels = {"": self._effect([""])}
        for unit in self.units:
            path = ["", unit.gpu.name, unit.stack, _of_kind(unit.stack, unit.known)]
            for depth in (2, 3, 4):
                levels[path[depth - 1]] = self._effect(path[:depth])
        slopes = np.array([mean for level, mean in zip(self.levels, self.mean, strict=True) if level.name in FEATURES])
        own = {}
        for name, indices in sorted(self.of_model.items()):
            trust = self.trust[indices, None]
            carried = np.mean(trust * self.carried[indices] * self.left[indices], axis=0)
            own[name] = Effect(carried, 1.0 - np.mean(trust * self.settled[indices], axis=0))
        families: dict[str, tuple[str, ...]] = {}
        for unit in self.units:
            families[unit.stack] = tuple(sorted({*families.get(unit.stack, ()), unit.known.family}))
        return Population(self.surface, self.kind, count, self.residual, levels, slopes.T, self.centre, own, families)

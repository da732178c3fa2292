"""Choose instances that serve every service on the fewest GPUs.

ElasticBatch (Xiao et al., IEEE TPDS 35(10), 2024) serves batch inference with fewer GPU instances by choosing slice,
batch and copies for each job. Its text is not public beyond the abstract, so this is a reconstruction (`compose`): each
service gets n instances of the setting with the most throughput per compute slice, and for the rest of its rate the
smallest slice that covers it. ParvaGPU's configurator and allocator (SC'24) are the closest public work and do the same
with a measured table.

`compose` decides for each service alone, and its results are packed onto GPUs afterwards. But the best instances
depend on what else a GPU can hold: three 2g slices leave a compute slice idle, a 4g needs a 3g next to it.
`allocate` therefore chooses instances and layouts together. It is a small integer programme over what one GPU can hold
(`decide.capacity.bundles`: 12 for the five plain profiles of an A100):

    minimise   sum_b x_b
    such that  sum_p n_sp rate_sp >= rate_s              for each service s
               sum_s n_sp <= sum_b x_b count_bp          for each profile p

with the integers n_sp, the number of instances of service s on slices of profile p (each at its best setting within the
limit: no other can be better), and x_b, the number of GPUs filled as bundle b. Any solution can be placed, because each
bundle has a legal layout. Among the solutions with the fewest GPUs the one with the fewest compute slices is taken, so
that whole slices stay free. The size of the programme does not depend on rates or on the number of GPUs.

With predicted rates, a setting's own rate is conservative, and a service may have higher, hoped-for rates for some of
its settings (`hopes`). They never count towards the rate to serve and never cost a GPU; but among the solutions with
the fewest GPUs those are preferred that try such settings, because their measurements save slices when planning again.
(This part is our own.)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from slurm_migbatch.decide.capacity.bundles import bundles
from slurm_migbatch.decide.dispatch.instances import TOLERANCE, fewest
from slurm_migbatch.lab.papers.settings import InstanceSetting
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.layout import EMPTY, Slot
from slurm_migbatch.mig.planning import plan_free
from slurm_migbatch.mig.profile import Profile

_SOLVER_TOLERANCE: Final = 1e-6
"""The solver may miss a rate by this share; the missing rate is requested again, so that no result does."""
MOST_SLICES: Final = 5000
"""A larger demand is scaled down before the fewest slices for it are sought."""
TIME_LIMIT_S: Final = 20.0
"""Time limit of each programme. At the limit the best solution so far is used, and `Allocation.exact` is False."""


class Unservable(ValueError):
    """No slice keeps the latency limit of a service; the message names the service."""


class Undecided(RuntimeError):
    """The time was too short to find any allocation, or to prove that there is none."""


@dataclass(frozen=True)
class ServiceDemand:
    """A rate to serve (items per second, above 0) and the settings that keep the latency limit.

    One setting for each slice is sufficient (`best_settings`). `hopes` are rates above the conservative ones; to prefer
    some settings among equal ones, for example because they were measured, give them a slightly higher hope.
    """

    name: str
    rate: float
    settings: tuple[InstanceSetting, ...]
    hopes: Mapping[InstanceSetting, float] = field(default_factory=dict)

    @property
    def best(self) -> InstanceSetting:
        """The setting with the highest rate per compute slice, of equal ones the smaller slice.

        Raises Unservable.
        """
        if not self.settings:
            raise Unservable(f"{self.name}: no slice keeps the latency limit")
        return max(self.settings, key=lambda s: (s.rate / s.profile.compute, -s.profile.compute))


@dataclass(frozen=True, order=True)
class PlacedInstance:
    """One instance: its service, setting and place."""

    service: str
    setting: InstanceSetting
    gpu: int
    slot: Slot


@dataclass(frozen=True)
class Allocation:
    """Instances on GPUs 0 to `gpus` - 1.

    `exact`: it is proven that no allocation has fewer GPUs.
    """

    gpus: int
    placed: tuple[PlacedInstance, ...]
    exact: bool

    @property
    def slices(self) -> int:
        """Compute slices of all instances."""
        return sum(instance.slot.profile.compute for instance in self.placed)

    def of(self, service: str) -> Counter[InstanceSetting]:
        """Count the instances of each setting that a service has."""
        return Counter(instance.setting for instance in self.placed if instance.service == service)


def compose(service: ServiceDemand) -> Counter[InstanceSetting]:
    """Return the instances of ElasticBatch's configuration step for one service alone (reconstruction).

    These are the fewest instances of the setting with the highest rate per compute slice, as in a job array of one
    profile (`decide.dispatch.instances.fewest`); the last one is replaced by the smallest slice that covers the rest of
    the rate. Raises Unservable.
    """
    base = service.best
    count = fewest(service.rate, base.rate) - 1
    rate_left = service.rate - count * base.rate
    enough = [
        s for s in service.settings if rate_left < base.rate * (1 - TOLERANCE) and s.rate * (1 + TOLERANCE) >= rate_left
    ]
    last = min(enough, key=lambda s: (s.profile.compute, s.profile.memory_gb), default=base)
    return Counter({base: count} if count else {}) + Counter([last])


def fewest_slices(rates: Sequence[float], slices: Sequence[int], wanted: float) -> Counter[int]:
    """Return the instances, by index of their kind, that reach the wanted rate with the fewest compute slices.

    `rates` and `slices` are those of one instance of each kind; kinds without a rate above 0 are not used. Packing is
    ignored. This is an unbounded knapsack, with the highest rate for each number of slices. A demand of more than
    `MOST_SLICES` is scaled down: one slice more or less does not matter then. Raises ValueError if there is no kind.
    """
    best: dict[int, int] = {}
    for i, (rate, size) in enumerate(zip(rates, slices, strict=True)):
        if rate > 0 and (size not in best or rate > rates[best[size]]):
            best[size] = i
    if not best:
        raise ValueError("there is no instance type to choose from")
    scale = 1
    max_slices = math.ceil(wanted / max(rates[i] / size for size, i in best.items())) + max(best)
    if max_slices > MOST_SLICES:
        scale = -(-max_slices // MOST_SLICES)
        max_slices = max_slices // scale + max(best)
    sizes = _fewest({size: rates[i] for size, i in best.items()}, max_slices, wanted / scale)
    return Counter({best[size]: count * scale for size, count in sizes.items()})


def _fewest(rates: Mapping[int, float], max_slices: int, wanted: float) -> Counter[int]:
    """Return how many of each size reach the wanted rate with the least sum of sizes, at most `max_slices`."""
    reached, taken = [0.0] * (max_slices + 1), [0] * (max_slices + 1)
    end = max_slices
    for n in range(1, max_slices + 1):
        reached[n] = reached[n - 1]
        for size, rate in rates.items():
            if size <= n and reached[n - size] + rate > reached[n]:
                reached[n], taken[n] = reached[n - size] + rate, size
        if reached[n] * (1 + TOLERANCE) >= wanted:
            end = n
            break
    chosen: Counter[int] = Counter()
    while end > 0:
        size = taken[end]
        if size:
            chosen[size] += 1
        end -= size or 1
    return chosen


def fluid(services: Iterable[ServiceDemand], slices: int) -> float:
    """Return the number of GPUs needed if compute slices could be divided arbitrarily.

    This is a lower bound for every allocation on GPUs of `slices` compute slices. Raises Unservable.
    """
    return sum(s.rate * s.best.profile.compute / s.best.rate for s in services) / slices


def allocate(
    geometry: Geometry, services: Sequence[ServiceDemand], *, time_limit_s: float = TIME_LIMIT_S
) -> Allocation:
    """Return the instances and places that serve everything on the fewest GPUs.

    Raises Unservable; UnknownProfile if a setting is for a slice that the GPU does not have; Undecided.
    """
    programme = _Programme(geometry, services)
    if not services:
        return Allocation(0, (), True)
    values, bound = programme.solve(programme.gpus, None, time_limit_s)
    gpus = round(float(programme.gpus @ values))
    with suppress(Undecided):
        values, _ = programme.solve(programme.slices, gpus, time_limit_s)
    used, placed = programme.lay_out(values)
    return Allocation(used, placed, math.ceil(bound - 1e-6) >= gpus)


def pack(geometry: Geometry, instances: Mapping[str, Mapping[InstanceSetting, int]]) -> Allocation:
    """Place given instances (for example of `compose`) on the fewest GPUs; exact unless the time limit is reached."""
    services = [
        ServiceDemand(f"{name}\x1f{i}", count * setting.rate, (setting,))
        for name, settings in instances.items()
        for i, (setting, count) in enumerate(sorted(settings.items()))
        if count
    ]
    allocation = allocate(geometry, services)
    placed = tuple(PlacedInstance(p.service.partition("\x1f")[0], p.setting, p.gpu, p.slot) for p in allocation.placed)
    return replace(allocation, placed=placed)


class _Programme:
    """The integer programme; its variables are the n_sp, in the order of `columns`, and then the x_b."""

    def __init__(self, geometry: Geometry, services: Sequence[ServiceDemand]) -> None:
        self.geometry = geometry
        self.services = services
        self.columns: list[tuple[int, InstanceSetting]] = []
        worth: list[float] = []
        for i, service in enumerate(services):
            per_slice = service.best.rate / service.best.profile.compute
            for setting in sorted(service.settings):
                geometry.info(setting.profile)
                self.columns.append((i, setting))
                hoped = max(service.hopes.get(setting, 0.0) - setting.rate, 0.0)
                worth.append(setting.profile.compute - hoped / per_slice)
        used = {setting.profile for _, setting in self.columns}
        self.profiles = tuple(info.profile for info in geometry.profiles if info.profile in used)
        self.bundles = bundles(geometry, self.profiles)
        n, b = len(self.columns), len(self.bundles)
        self.gpus = np.array([0.0] * n + [1.0] * b)
        self.slices = np.array(worth + [0.0] * b)
        index = {profile: i for i, profile in enumerate(self.profiles)}
        rows = len(services) + len(self.profiles)
        matrix = np.zeros((rows, n + b))
        lower, upper = np.full(rows, -np.inf), np.full(rows, np.inf)
        for i, service in enumerate(services):
            lower[i] = 1.0
            for column, (service_index, setting) in enumerate(self.columns):
                if service_index == i:
                    matrix[i, column] = setting.rate / service.rate
        for column, (_, setting) in enumerate(self.columns):
            matrix[len(services) + index[setting.profile], column] = 1.0
        for column, counts in enumerate(self.bundles, start=n):
            matrix[len(services) :, column] = [-float(count) for count in counts]
        upper[len(services) :] = 0.0
        self.matrix, self.lower, self.upper = matrix, lower, upper

    def solve(self, objective: Any, most_gpus: int | None, time_limit_s: float) -> tuple[Any, float]:
        """Return the best solution for the objective, and a lower bound on its value. Raises Undecided."""
        demanded = self.lower.copy()
        for _ in range(3):
            constraints = [LinearConstraint(sparse.csr_array(self.matrix), demanded, self.upper)]
            if most_gpus is not None:
                constraints.append(LinearConstraint(self.gpus[None, :], -np.inf, most_gpus))
            solution = milp(
                objective,
                constraints=constraints,
                integrality=np.ones(len(objective)),
                bounds=Bounds(0, np.inf),
                options={"time_limit": time_limit_s, "mip_rel_gap": 0.0},
            )
            if solution.x is None:
                raise Undecided(f"no allocation was found within {time_limit_s:g} s: {solution.message}")
            values = np.round(solution.x)
            short = (self.matrix[: len(self.services)] @ values) * (1 + TOLERANCE) < 1.0
            if not short.any():
                bound = solution.mip_dual_bound if solution.mip_dual_bound is not None else solution.fun
                return values, float(bound)
            demanded[: len(self.services)][short] += 10 * _SOLVER_TOLERANCE
        raise Undecided(f"the solver misses a rate by more than {_SOLVER_TOLERANCE:g}")

    def lay_out(self, values: Any) -> tuple[int, tuple[PlacedInstance, ...]]:
        """Return the number of GPUs in use and every instance with its place.

        Bundles are filled one by one with the instances of their profiles.
        """
        n = len(self.columns)
        waiting: dict[Profile, list[tuple[int, InstanceSetting]]] = {profile: [] for profile in self.profiles}
        for (i, setting), count in zip(self.columns, values[:n], strict=True):
            waiting[setting.profile] += [(i, setting)] * int(count)
        placed: list[PlacedInstance] = []
        gpu = 0
        for counts, times in zip(self.bundles, values[n:], strict=True):
            for _ in range(int(times)):
                on_gpu = [
                    waiting[profile].pop()
                    for profile, count in zip(self.profiles, counts, strict=True)
                    for _ in range(min(count, len(waiting[profile])))
                ]
                if not on_gpu:
                    continue
                layout = plan_free(self.geometry, EMPTY, sorted((s.profile for _, s in on_gpu), reverse=True))
                slots: dict[Profile, list[Slot]] = {}
                for slot in layout.slots:
                    slots.setdefault(slot.profile, []).append(slot)
                for i, setting in on_gpu:
                    placed.append(PlacedInstance(self.services[i].name, setting, gpu, slots[setting.profile].pop()))
                gpu += 1
        assert not any(waiting.values())
        return gpu, tuple(sorted(placed))

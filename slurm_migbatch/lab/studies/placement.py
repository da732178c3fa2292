"""Study placement rules of the literature: jobs that are accepted at once (E8), by rule.

migbatchd places by `decide.supply.planner`, which `bench fragmentation` measures. So there are no targets.

100 GPUs; jobs arrive at random times (Poisson), each a pod of Alibaba's openb trace drawn with its share of a GPU, its
class and its duration. The share becomes the smallest sufficient slice. A job that does not fit is rejected; none is
moved. No rule may reject a job that fits somewhere. Arrivals and jobs are the same for all rules of one seed, so gains
over first fit are paired.

For comparison: the best division of all GPUs into equal slices, chosen in hindsight for each load; and one pool of all
compute and memory slices, without fragmentation. The pool is the ideal of any rule that rejects nothing that fits:
it accepts more of the large jobs, which leaves less for the small ones, so it bounds accepted slices, and
indicates but does not bound accepted jobs.
"""

from __future__ import annotations

import heapq
import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from slurm_migbatch.lab.bars import NotMeasurable, rounded_interval
from slurm_migbatch.lab.papers.placement import BestFit, Fgd, FirstFit, LeastLoss, Mix, PlacementRule, mix
from slurm_migbatch.lab.papers.settings import plain
from slurm_migbatch.lab.progress import Progress, silent
from slurm_migbatch.lab.sim.gpus import geometry
from slurm_migbatch.lab.sim.job import SimulatedJob
from slurm_migbatch.lab.traces.csvlines import lines
from slurm_migbatch.lab.traces.openb import read
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.layout import EMPTY, Layout, Slot
from slurm_migbatch.mig.planning import capacity
from slurm_migbatch.mig.profile import Profile

GPU: Final = "a100-80gb"
GPUS: Final = 100
LOADS: Final = (0.8, 1.0, 1.2, 1.5, 2.0, 3.0)
HEAVY: Final = 1.5
ARRIVALS: Final = 8000
WARM: Final = 2000
"""Arrivals that are not counted: the cluster fills up."""
LONGEST_S: Final = 86400.0
"""Longer jobs count as this long: otherwise no run would reach a steady state."""
FIRST, OURS, POOL, EQUAL = "first fit", "least loss", "pool without fragmentation", "best equal slices"
FILE: Final = "openb_pod_list_default.csv"


@dataclass(frozen=True)
class PodKind:
    """A pod to draw: its slice, seconds, and whether it is latency sensitive."""

    profile: Profile
    seconds: float
    served: bool


@dataclass(frozen=True)
class PlacementOutcome:
    """Counts after warm-up: offered and accepted by profile, accepted by class, and the busy share of compute
    slices.
    """

    offered: Counter[Profile]
    accepted: Counter[Profile]
    by_class: Counter[bool]
    offered_by_class: Counter[bool]
    busy: float

    @property
    def jobs(self) -> int:
        """Accepted jobs."""
        return self.accepted.total()

    @property
    def slices(self) -> int:
        """Compute slices of the accepted jobs."""
        return sum(profile.compute * count for profile, count in self.accepted.items())


Place = Callable[[PodKind], Callable[[], None] | None]
"""Place a job and return the function that removes it; None if it does not fit."""


def measure(data: Path, seeds: int = 10, progress: Progress = silent) -> dict[str, Any]:
    """Run all rules at all loads for both populations; `data` is openb's directory, or one that holds it. Raises
    NotMeasurable.
    """
    gpu = geometry(GPU)
    drawn_from, notices = populations(data, gpu)
    results = {}
    for name, kinds in drawn_from.items():
        request_mix = mix(Counter(kind.profile for kind in kinds))
        loads = []
        for load in LOADS:
            progress(f"{name}, load {load:g}", len(drawn_from) * len(LOADS))
            loads.append({"load": load, "rules": _rules(gpu, kinds, request_mix, load, seeds)})
        results[name] = {
            "pods": len(kinds),
            "mix": {profile.name: round(weight, 4) for profile, weight in request_mix},
            "latency_sensitive": round(statistics.fmean(kind.served for kind in kinds), 4),
            "loads": loads,
        }
    return {
        "data": str(data),
        "gpu": GPU,
        "gpus": GPUS,
        "seeds": seeds,
        "arrivals": ARRIVALS - WARM,
        "notes": [
            *notices,
            f"jobs longer than {LONGEST_S / 3600:g} h count as that long; pods of several GPUs are skipped",
            *_ceilings(results),
        ],
        "populations": results,
        "bars": [],
    }


def populations(data: Path, gpu: Geometry) -> tuple[dict[str, list[PodKind]], tuple[str, ...]]:
    """Return the kinds of jobs to draw from, by population, and what was skipped. Raises NotMeasurable, TraceError."""
    folder = data / "alibaba_gpu2023_openb" if (data / "alibaba_gpu2023_openb").is_dir() else data
    path = next((p for p in (folder / f"{FILE}.gz", folder / FILE) if p.is_file()), None)
    if path is None:
        raise NotMeasurable(f"{folder} holds no {FILE}(.gz): name the folder of the openb trace")
    trace = read(path, gpu)
    partial = {line.text("name") for line in lines(path, ("name", "gpu_milli")) if line.number_of("gpu_milli") < 1000}
    on_one_gpu = [job for job in trace.jobs if job.gpus == 1]

    def kinds(jobs: Sequence[SimulatedJob]) -> list[PodKind]:
        full = gpu.full.profile
        return [PodKind(job.profile or full, min(job.work, LONGEST_S), job.kind == "infer") for job in jobs]

    kinds_by_population = {
        "parts of a GPU": kinds([job for job in on_one_gpu if job.name in partial]),
        "parts and whole GPUs": kinds(on_one_gpu),
    }
    if not all(kinds_by_population.values()):
        raise NotMeasurable(f"{path} has no pods that request a share of a GPU after the trace's first 105 days")
    return kinds_by_population, trace.notices


def _rules(gpu: Geometry, kinds: Sequence[PodKind], asked: Mix, load: float, seeds: int) -> list[dict[str, Any]]:
    work = statistics.fmean(kind.profile.compute * kind.seconds for kind in kinds)
    rate = load * GPUS * gpu.compute_slices / work
    rules: Mapping[str, Callable[[], Place]] = {
        FIRST: lambda: PlacementCluster(gpu, GPUS, FirstFit()).place,
        "best fit": lambda: PlacementCluster(gpu, GPUS, BestFit()).place,
        "best fit, careful place": lambda: PlacementCluster(gpu, GPUS, BestFit(careful=True)).place,
        "FGD": lambda: PlacementCluster(gpu, GPUS, fgd).place,
        OURS: lambda: PlacementCluster(gpu, GPUS, least_loss).place,
        "least loss, mix unknown": lambda: PlacementCluster(gpu, GPUS, unknown).place,
        POOL: lambda: SlicePool(gpu, GPUS).place,
        **{
            f"equal {profile}": lambda profile=profile: Equal(gpu, GPUS, profile).place  # type: ignore[misc]
            for profile, _ in asked
        },
    }
    fgd, least_loss, unknown = Fgd(asked), LeastLoss(asked), LeastLoss(mix(dict.fromkeys(plain(gpu), 1.0)))
    outcomes: dict[str, list[PlacementOutcome]] = {name: [] for name in rules}
    for seed in range(seeds):
        rng = np.random.Generator(np.random.PCG64(seed))
        drawn = [kinds[i] for i in rng.integers(0, len(kinds), ARRIVALS).tolist()]
        times = np.cumsum(rng.exponential(1.0 / rate, ARRIVALS)).tolist()
        for name, make in rules.items():
            outcomes[name].append(run(make(), times, drawn, GPUS * gpu.compute_slices))
    equal = [name for name in rules if name.startswith("equal ")]
    best = max(equal, key=lambda name: sum(outcome.jobs for outcome in outcomes[name]))
    chosen = {name: found for name, found in outcomes.items() if name not in equal}
    chosen[f"{EQUAL} ({best.removeprefix('equal ')})"] = outcomes[best]
    first = outcomes[FIRST]
    return [_row(name, found, first) for name, found in chosen.items()]


def run(place: Place, times: Sequence[float], drawn: Sequence[PodKind], slices: int) -> PlacementOutcome:
    """Run one simulation over all arrivals; count those after the first WARM."""
    offered: Counter[Profile] = Counter()
    accepted: Counter[Profile] = Counter()
    classes: Counter[bool] = Counter()
    offered_classes: Counter[bool] = Counter()
    ends: list[tuple[float, int, int, Callable[[], None]]] = []
    number = itertools.count()
    busy, area = 0, 0.0
    warm = times[min(WARM, len(times) - 1)]
    clock = warm
    for i, (now, kind) in enumerate(zip(times, drawn, strict=True)):
        while ends and ends[0][0] <= now:
            end, _, freed, give_back = heapq.heappop(ends)
            if end > clock:
                area += busy * (end - clock)
                clock = end
            busy -= freed
            give_back()
        if now > clock:
            area += busy * (now - clock)
            clock = now
        release = place(kind)
        if i >= WARM:
            offered[kind.profile] += 1
            offered_classes[kind.served] += 1
        if release is None:
            continue
        busy += kind.profile.compute
        heapq.heappush(ends, (now + kind.seconds, next(number), kind.profile.compute, release))
        if i >= WARM:
            accepted[kind.profile] += 1
            classes[kind.served] += 1
    span = times[-1] - warm
    return PlacementOutcome(offered, accepted, classes, offered_classes, area / (span * slices) if span > 0 else 0.0)


class PlacementCluster:
    """GPUs on which a rule places slices."""

    def __init__(self, gpu: Geometry, count: int, rule: PlacementRule) -> None:
        self.gpu, self.rule = gpu, rule
        self.layouts = [EMPTY] * count
        self._having: dict[Layout, set[int]] = {EMPTY: set(range(count))}
        self._first: dict[Layout, int] = {EMPTY: 0}

    def place(self, kind: PodKind) -> Callable[[], None] | None:
        """See `Place`."""
        found = self.rule.place(self.gpu, self._first, kind.profile)
        if found is None:
            return None
        layout, slot = found
        number = self._first[layout]
        self._change(number, layout.add(slot))
        return lambda: self._give_back(number, slot)

    def _give_back(self, number: int, slot: Slot) -> None:
        self._change(number, self.layouts[number].remove(slot))

    def _change(self, number: int, layout: Layout) -> None:
        before = self.layouts[number]
        having = self._having[before]
        having.discard(number)
        if not having:
            del self._having[before], self._first[before]
        elif self._first[before] == number:
            self._first[before] = min(having)
        self._having.setdefault(layout, set()).add(number)
        self._first[layout] = min(number, self._first.get(layout, number))
        self.layouts[number] = layout


class SlicePool:
    """All compute and memory slices together, as if placements did not matter."""

    def __init__(self, gpu: Geometry, count: int) -> None:
        self.gpu = gpu
        self.compute, self.memory = count * gpu.compute_slices, count * gpu.memory_slices

    def place(self, kind: PodKind) -> Callable[[], None] | None:
        """See `Place`."""
        info = self.gpu.info(kind.profile)
        if info.compute_slices > self.compute or info.memory_slices > self.memory:
            return None
        self._take(info.compute_slices, info.memory_slices)
        return lambda: self._take(-info.compute_slices, -info.memory_slices)

    def _take(self, compute: int, memory: int) -> None:
        self.compute -= compute
        self.memory -= memory


class Equal:
    """Every GPU divided permanently into as many slices of one profile as it holds; a job takes a sufficient one."""

    def __init__(self, gpu: Geometry, count: int, profile: Profile) -> None:
        self.gpu, self.info = gpu, gpu.info(profile)
        self.free = count * capacity(gpu, EMPTY, profile)

    def place(self, kind: PodKind) -> Callable[[], None] | None:
        """See `Place`."""
        asked = self.gpu.info(kind.profile)
        small = asked.compute_slices > self.info.compute_slices or asked.memory_slices > self.info.memory_slices
        if small or not self.free:
            return None
        self.free -= 1
        return self._give_back

    def _give_back(self) -> None:
        self.free += 1


def _row(name: str, found: Sequence[PlacementOutcome], first: Sequence[PlacementOutcome]) -> dict[str, Any]:
    profiles = sorted({profile for outcome in found for profile in outcome.offered})
    return {
        "rule": name,
        "accepted": rounded_interval([outcome.jobs / outcome.offered.total() for outcome in found]),
        "gain_jobs": rounded_interval([outcome.jobs / of.jobs - 1 for outcome, of in zip(found, first, strict=True)]),
        "gain_slices": rounded_interval(
            [outcome.slices / of.slices - 1 for outcome, of in zip(found, first, strict=True)]
        ),
        "busy": rounded_interval([outcome.busy for outcome in found]),
        "by_profile": {
            profile.name: round(sum(outcome.accepted[profile] for outcome in found) / offered, 4)
            for profile in profiles
            if (offered := sum(outcome.offered[profile] for outcome in found))
        },
        "by_class": {
            label: round(sum(outcome.by_class[served] for outcome in found) / offered, 4)
            for label, served in (("latency sensitive", True), ("best effort", False))
            if (offered := sum(outcome.offered_by_class[served] for outcome in found))
        },
    }


def _ceilings(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the gain of a pool without placements over first fit: the total cost of placements."""
    notes = []
    for name, population in found.items():
        pool = {
            entry["load"]: next(row for row in entry["rules"] if row["rule"] == POOL)["gain_jobs"][0]
            for entry in population["loads"]
        }
        best = max(pool, key=lambda load: pool[load])
        notes.append(
            f"{name}: without any fragmentation (the pool) {pool[HEAVY]:+.1%} jobs over first fit at load {HEAVY:g}, "
            f"{pool[best]:+.1%} at most, at load {best:g}"
        )
    return notes

"""Evaluate GPUs for services by a few measured points of each model: which points, and the effect of wrong predictions.

Points are measured by one of two rules, both of `predict.points`, which `migbatch profile run --points` follows: the
grid's (`choose`), or for the limit of the service (`next_within`, option `--slo`), that is the cells that a plan by
median predictions would use. They are chosen one by one, by public specifications and the model's own points alone.

Then all services of a scenario are placed at once by `lab.papers.instances.allocate`. A measured cell counts as
measured, another with the slow end of its interval, from a predictor without the model. Two more rules keep
the limits (`ServicePlanner`): among plans of the same GPUs measured cells are preferred, and the predictions of a model
are corrected if one of its points took longer than the slow end predicted before, or all of its points took less.
migbatchd does not place services this way; only the points are part of the product.

After a placement the cells in use are measured, and as many of the rule's next points as initially: a round. Each plan
is replayed on the measured table. A limit is exceeded if a cell in use takes longer than allowed, a rate is not met if
the instances serve less.

Median or more optimistic figures, and the number of points per round, were chosen on synthetic services of every second
model of ParvaGPU's; synthetic services of the other models, and its scenarios, are reported separately. `DOUBTFUL`, for
wrong predictions, was set after all of them had been seen.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from slurm_migbatch.lab.bars import Bar, NotMeasurable
from slurm_migbatch.lab.evaluate.scenarios import ServiceLoad
from slurm_migbatch.lab.papers.instances import ServiceDemand, allocate
from slurm_migbatch.lab.papers.settings import InstanceSetting, best_settings
from slurm_migbatch.lab.progress import Progress, silent
from slurm_migbatch.lab.studies.instances import MEASURED, MIG_OFF, PROCS, HeldOutModel, InstanceBench
from slurm_migbatch.predict.cells import Array
from slurm_migbatch.predict.learned import CONFIDENCE
from slurm_migbatch.predict.points import expected_seconds, next_within
from slurm_migbatch.profiling.table import read_folder

POINTS: Final = 3
ROUNDS: Final = 4
"""Placements to replay: the first, and one after each round of measuring."""
MADE: Final = 20
"""Synthetic scenarios of each half of the models."""
DOUBTFUL: Final = 1.1
"""How much longer than predicted a point may take before its model is served by measured cells alone. If one
took longer at all, predicted cells count as that much slower, and by this factor more; if all took less, as
that much faster than predicted, less its square.
"""
PREFERENCE: Final = 1.03
"""Weight of a measured cell among plans of the same GPUs, so that predicted ones are used only if they save."""
FACTORS: Final = (0.5, 0.71, 1.41, 2.0)
SEEDS: Final = (1, 2, 3)
HOPES: Final = (0.5, 1.0, 1.5)
"""Standard deviations of the more optimistic figures that were tried."""
FIRST_TARGET, ROUND_TARGET, LOSS_TARGET = 47, 45, 1.02
CHOSEN_ON, GRID, LIMIT = "chosen on", "grid's", "for the limit"
FEWER_TWICE: Final = 1.5
SAME_AGAIN: Final = 1.25

WrongFactor = Callable[[str, int], float]
"""Factor on a predicted time of a model's cell."""
Known = Mapping[str, tuple[int, ...]]
"""The measured cells of each model, in the order in which they were measured."""


def right(_model: str, _cell: int) -> float:
    """Leave predictions unchanged."""
    return 1.0


@dataclass(frozen=True)
class PlacedServices:
    """One plan for a scenario, replayed: GPUs, services with an exceeded limit or unmet rate, cells in use."""

    gpus: int
    broken: int
    short: int
    used: Mapping[str, frozenset[int]]


class ServicePlanner:
    """Place services by measured points and predicted figures.

    The latter may be made `wrong`; `hope` is the number of standard deviations by which predicted times are reduced
    before. With `trusting` a model's predictions are not corrected by its points.
    """

    def __init__(
        self, bench: InstanceBench, wrong: WrongFactor = right, *, hope: float = 0.0, trusting: bool = False
    ) -> None:
        self._bench, self._wrong, self._hope, self._trusting = bench, wrong, hope, trusting

    def points(self, load: ServiceLoad, done: Sequence[int], count: int) -> tuple[int, ...]:
        """Return the cells `done` and up to `count` more that the rule for the limit measures, in order."""
        subject = self._bench.subjects[load.sample.model]
        known, rows = list(done), subject.sample.rows
        for _ in range(count):
            candidates = [i for i in subject.usable if i not in known]
            if not candidates:
                break
            ran = [i for i in known if rows[i].seconds is not None]
            measured, candidate_rows = [rows[i] for i in ran], [rows[i] for i in candidates]
            cells, seconds = expected_seconds(measured, candidate_rows, subject.knowledge, self._hope)
            seconds[len(ran) :] *= [self._wrong(load.sample.model, i) for i in candidates]
            chosen = next_within(cells, seconds, len(ran), load.limit_s)
            if chosen is None:
                break
            known.append(candidates[chosen - len(ran)])
        return tuple(known)

    def place(self, loads: Sequence[ServiceLoad], known: Known) -> PlacedServices:
        """Plan for all services, and replay the plan."""
        cells = {load.sample.model: self._counted(load.sample.model, known[load.sample.model]) for load in loads}
        demands = [self._demand(load, cells[load.sample.model], known[load.sample.model]) for load in loads]
        allocation = allocate(self._bench.geometry, demands)
        broken = short = 0
        used: dict[str, frozenset[int]] = {}
        for load in loads:
            model = load.sample.model
            instances = {cells[model][setting]: count for setting, count in allocation.of(model).items()}
            truth = self._bench.subjects[model].settings
            used[model] = frozenset(instances)
            broken += any(truth[i].seconds > load.limit_s for i in instances)
            short += sum(count * truth[i].rate for i, count in instances.items()) < load.rate * (1 - 1e-9)
        return PlacedServices(allocation.gpus, broken, short, used)

    def rounds(self, loads: Sequence[ServiceLoad], first: Known, more: int) -> Iterator[tuple[PlacedServices, Known]]:
        """Yield each placement and the cells measured before it, endlessly; a round has `more` points of the rule."""
        known = dict(first)
        while True:
            placed = self.place(loads, known)
            yield placed, dict(known)
            for load in loads:
                model = load.sample.model
                done = (*known[model], *sorted(placed.used[model] - set(known[model])))
                known[model] = self.points(load, done, more)

    def _slow(self, model: str, done: Sequence[int]) -> Array:
        slow: Array = self._bench.slow(model, tuple(done)).copy()
        for i in set(range(len(slow))) - set(done):
            slow[i] *= self._wrong(model, i)
        return slow

    def surprise(self, model: str, done: Sequence[int]) -> float:
        """Return the largest ratio of measured points to the slow end predicted before.

        Only the first points count, each of which was measured after a prediction; 1 without any.
        """
        if self._trusting or not done:
            return 1.0
        truth = self._bench.subjects[model].settings
        return max(truth[i].seconds / float(self._slow(model, done[:k])[i]) for k, i in enumerate(done[: 2 * POINTS]))

    def _counted(self, model: str, done: Sequence[int]) -> dict[InstanceSetting, int]:
        """Return every cell that may be used, with its conservative seconds, and its index."""
        subject, surprise = self._bench.subjects[model], self.surprise(model, done)
        slow, sure = self._slow(model, done), set(done)
        longer = surprise * DOUBTFUL if surprise > 1.0 else min(1.0, surprise * DOUBTFUL**2)
        return {
            replace(subject.settings[i], seconds=float(slow[i]) * (1.0 if i in sure else longer)): i
            for i in subject.usable
        }

    def _demand(self, load: ServiceLoad, cells: Mapping[InstanceSetting, int], done: Sequence[int]) -> ServiceDemand:
        kept = [setting for setting in cells if setting.seconds <= load.limit_s]
        kept = kept or [min(cells, key=lambda setting: setting.seconds)]
        sure = [setting for setting in kept if cells[setting] in done]
        if sure and self.surprise(load.sample.model, done) > DOUBTFUL:
            kept = sure
        settings = tuple(sorted({*best_settings(kept).values(), *best_settings(sure).values()}))
        preferred = {setting: PREFERENCE * setting.rate for setting in settings if cells[setting] in done}
        return ServiceDemand(load.sample.model, load.rate, settings, preferred)


def out_of_line(settings: Sequence[InstanceSetting]) -> frozenset[InstanceSetting]:
    """Return settings whose batch takes hardly longer than half of it, though that took much longer than a quarter.

    If a batch took `FEWER_TWICE` times as long as its half, the device limits the speed, and the next doubling cannot
    cost less than `SAME_AGAIN`. ParvaGPU's table has such cells; no curve predicts them.
    """
    seconds = {(s.profile, s.procs, s.batch): s.seconds for s in settings}
    outliers = set()
    for setting in settings:
        half = seconds.get((setting.profile, setting.procs, setting.batch // 2))
        quarter = seconds.get((setting.profile, setting.procs, setting.batch // 4))
        if half and quarter and half > FEWER_TWICE * quarter and setting.seconds < SAME_AGAIN * half:
            outliers.add(setting)
    return frozenset(outliers)


def made_up(subjects: Sequence[HeldOutModel], count: int, seed: int) -> dict[str, list[ServiceLoad]]:
    """Return scenarios of services for all models: limits of 1.5 to 6 times the largest slice's batch of 8, rates of a
    tenth to four times the largest slice's best."""
    drawn = random.Random(seed)  # noqa: S311 - reproducible, not a secret
    scenarios: dict[str, list[ServiceLoad]] = {}
    for number in range(count):
        scale, loads = drawn.choice((1, 2, 4)), []
        for subject in subjects:
            largest = max(setting.profile.compute for setting in subject.settings)
            full = [s for s in subject.settings if s.profile.compute == largest and s.procs == 1]
            limit_s = math.exp(drawn.uniform(math.log(1.5), math.log(6.0)))
            limit_s *= min(full, key=lambda s: abs(math.log(s.batch / 8))).seconds
            rate = scale * max(s.rate for s in full) * math.exp(drawn.uniform(math.log(0.1), 0.0))
            if best_settings([s for s in subject.settings if s.procs == 1], limit_s):
                loads.append(ServiceLoad(f"made {number}", subject.sample, rate, limit_s))
        scenarios[f"made {number}"] = loads
    return scenarios


def evaluate(data: Path, progress: Progress = silent) -> dict[str, Any]:
    """Compute all rows; `data` is ParvaGPU's folder, or one that holds it as `parvagpu`. Raises NotMeasurable."""
    folder = data / "parvagpu" if (data / "parvagpu").is_dir() else data
    bench = InstanceBench(folder, read_folder(folder), progress)
    if len(bench.subjects) < 2:
        raise NotMeasurable(f"{folder} has services of one model, {min(bench.subjects)}: at least two are needed")
    mig_off = next(row for row in bench.baselines() if row["name"] == MIG_OFF)
    rows = [mig_off, bench.measured(MEASURED, PROCS), _in_line(bench), _hindsight(bench)]
    planner = ServicePlanner(bench)
    progress("points", 2)
    placed = [
        _rounds(ServicePlanner(bench, trusting=True), bench.loads, GRID, _grid_points(bench, bench.loads)),
        _rounds(planner, bench.loads, LIMIT, _limit_points(planner, bench.loads)),
    ]
    wrong = []
    for name, factor in _wrongs(SEEDS):
        progress(f"predictions wrong: {name}", len(FACTORS) + 2 * len(SEEDS))
        planner = ServicePlanner(bench, factor)
        wrong.append(_rounds(planner, bench.loads, name, _limit_points(planner, bench.loads), rounds=2))
    planner = ServicePlanner(bench, _times(FACTORS[0]), trusting=True)
    points = _limit_points(planner, bench.loads)
    trusted = [_rounds(planner, bench.loads, f"all x{FACTORS[0]:g}, taken at its word", points, rounds=2)]
    names = sorted(bench.subjects)
    synthetic = []
    for name, half, seed in ((CHOSEN_ON, names[0::2], 1), ("others", names[1::2], 2)):
        progress(f"synthetic services, models {name}", 2)
        scenarios = made_up([bench.subjects[model] for model in half], MADE, seed)
        synthetic += _made(bench, name, scenarios)
    return {
        "data": str(data),
        "scenarios": list(bench.loads),
        "services": sum(len(loads) for loads in bench.loads.values()),
        "points": POINTS,
        "confidence": CONFIDENCE,
        "notes": [*bench.notes, *_odd_cells(_odd_settings(bench))],
        "rows": rows,
        "placed": placed,
        "wrong": wrong,
        "trusted": trusted,
        "made": synthetic,
        "bars": [bar.to_dict() for bar in _bars(placed[1], wrong, mig_off["total"], synthetic)],
    }


def _in_line(bench: InstanceBench) -> dict[str, Any]:
    """Plan with everything measured, except the cells that no curve predicts."""
    odd = _odd_settings(bench)
    counts = []
    for loads in bench.loads.values():
        demands = []
        for load in loads:
            settings = bench.subjects[load.sample.model].settings
            kept = [s for s in settings if s.procs <= PROCS and s not in odd[load.sample.model]]
            demands.append(
                ServiceDemand(load.sample.model, load.rate, tuple(best_settings(kept, load.limit_s).values()))
            )
        allocation = allocate(bench.geometry, demands)
        counts.append(allocation.gpus)
    return _row(f"{MEASURED}, without {sum(map(len, odd.values()))} outlier cells", counts)


def _odd_settings(bench: InstanceBench) -> dict[str, frozenset[InstanceSetting]]:
    usable = {model: [s for s in subject.settings if s.procs <= PROCS] for model, subject in bench.subjects.items()}
    return {model: out_of_line(settings) for model, settings in usable.items()}


def _hindsight(bench: InstanceBench) -> dict[str, Any]:
    """Place with the points that the best plan by measured figures uses.

    Optimistic predictions of other cells may make it smaller than that plan, so its name says what it does not keep.
    """
    counts, max_points, broken, short = [], 0, 0, 0
    for loads in bench.loads.values():
        best = allocate(bench.geometry, bench.services(loads))
        known: dict[str, tuple[int, ...]] = {}
        for load in loads:
            settings = bench.subjects[load.sample.model].settings
            known[load.sample.model] = tuple(settings.index(setting) for setting in sorted(best.of(load.sample.model)))
        max_points = max(max_points, *map(len, known.values()))
        placed = ServicePlanner(bench).place(loads, known)
        counts.append(placed.gpus)
        broken, short = broken + placed.broken, short + placed.short
    name = f"points with hindsight, at most {max_points} a model"
    return _row(f"{name}: {broken} limits exceeded, {short} rates not met", counts)


def _odd_cells(odd: Mapping[str, frozenset[InstanceSetting]]) -> list[str]:
    cells = [
        f"{model} {s.profile} batch {s.batch} of {s.procs} processes"
        for model, settings in odd.items()
        for s in sorted(settings)
    ]
    return [f"outliers, hardly slower than half the batch: {', '.join(cells)}"] if cells else []


def _row(name: str, gpus: Sequence[int]) -> dict[str, Any]:
    return {"name": name, "gpus": list(gpus), "total": sum(gpus)}


def _grid_points(bench: InstanceBench, scenarios: Mapping[str, Sequence[ServiceLoad]]) -> list[Known]:
    return [
        {load.sample.model: bench.subjects[load.sample.model].points(POINTS) for load in loads}
        for loads in scenarios.values()
    ]


def _limit_points(planner: ServicePlanner, scenarios: Mapping[str, Sequence[ServiceLoad]]) -> list[Known]:
    return [{load.sample.model: planner.points(load, (), POINTS) for load in loads} for loads in scenarios.values()]


def _rounds(
    planner: ServicePlanner,
    scenarios: Mapping[str, Sequence[ServiceLoad]],
    name: str,
    first: Sequence[Known],
    rounds: int = ROUNDS,
) -> dict[str, Any]:
    """Replay all scenarios round by round; points of a round are counted for each service."""
    runs = []
    for loads, known in zip(scenarios.values(), first, strict=True):
        steps = planner.rounds(loads, known, POINTS)
        runs.append([next(steps) for _ in range(rounds)])
    services = sum(map(len, scenarios.values()))
    return {
        "name": name,
        "services": services,
        "rounds": [
            {
                "gpus": [run[n][0].gpus for run in runs],
                "total": sum(run[n][0].gpus for run in runs),
                "points": round(sum(len(done) for run in runs for done in run[n][1].values()) / services, 2),
                "broken": sum(run[n][0].broken for run in runs),
                "short": sum(run[n][0].short for run in runs),
            }
            for n in range(rounds)
        ],
    }


def _made(bench: InstanceBench, half: str, scenarios: Mapping[str, Sequence[ServiceLoad]]) -> list[dict[str, Any]]:
    measured = mig_off = 0
    for loads in scenarios.values():
        mig_off += bench.without_mig(loads)
        allocation = allocate(bench.geometry, bench.services(loads))
        measured += allocation.gpus
    trusting, planner = ServicePlanner(bench, trusting=True), ServicePlanner(bench)
    ways = [(GRID, trusting, _grid_points(bench, scenarios)), (LIMIT, planner, _limit_points(planner, scenarios))]
    others = [(f"{LIMIT}, hoping for {hope:g} deviations", ServicePlanner(bench, hope=hope)) for hope in HOPES]
    if half != CHOSEN_ON:
        others = [(f"{LIMIT}, {name}", ServicePlanner(bench, wrong)) for name, wrong in _wrongs(SEEDS[:1])]
    ways += [(name, planner, _limit_points(planner, scenarios)) for name, planner in others]
    return [
        {"half": half, "off": mig_off, "measured": measured, **_rounds(planner, scenarios, name, first, rounds=2)}
        for name, planner, first in ways
    ]


def _wrongs(seeds: Sequence[int]) -> Iterator[tuple[str, WrongFactor]]:
    """Yield the kinds of wrong predictions, by a factor of 0.5 to 2."""
    for factor in FACTORS:
        yield f"all x{factor:g}", _times(factor)
    for seed in seeds:
        yield f"each model its own ({seed})", _drawn_for_each(seed, by_cell=False)
    for seed in seeds:
        yield f"each cell its own ({seed})", _drawn_for_each(seed, by_cell=True)


def _times(factor: float) -> WrongFactor:
    return lambda _model, _cell: factor


def _drawn_for_each(seed: int, *, by_cell: bool) -> WrongFactor:
    return lambda model, cell: _drawn(f"{seed} {model} {cell}" if by_cell else f"{seed} {model}")


def _drawn(seed: str) -> float:
    return float(2.0 ** random.Random(seed).uniform(-1.0, 1.0))  # noqa: S311 - reproducible, not a secret


def _bars(
    placed: Mapping[str, Any], wrong: Sequence[Mapping[str, Any]], off: int, made: Sequence[Mapping[str, Any]]
) -> list[Bar]:
    first, second = placed["rounds"][:2]
    others = [way for way in made if way["half"] != CHOSEN_ON and way["name"] != GRID]
    return [
        Bar("first placement: GPUs", first["total"], FIRST_TARGET),
        Bar("first placement: limits exceeded and rates not met", first["broken"] + first["short"], 0),
        Bar("after one round: GPUs", second["total"], ROUND_TARGET),
        Bar("after one round: limits exceeded and rates not met", second["broken"] + second["short"], 0),
        Bar(
            "predictions wrong by x0.5 to x2: GPUs of the first placement over MIG off, at worst",
            max(way["rounds"][0]["total"] for way in wrong) / off,
            LOSS_TARGET,
        ),
        Bar(
            "predictions wrong by x0.5 to x2: limits exceeded in the first placement, at worst",
            max(way["rounds"][0]["broken"] for way in wrong),
            0,
        ),
        Bar(
            "predictions wrong by x0.5 to x2: rates not met in the first placement, at worst",
            max(way["rounds"][0]["short"] for way in wrong),
            0,
        ),
        Bar(
            "predictions wrong by x0.5 to x2: limits exceeded and rates not met after one round, at worst",
            max(way["rounds"][1]["broken"] + way["rounds"][1]["short"] for way in wrong),
            0,
        ),
        Bar(
            "the same on synthetic services of other models: GPUs of the first placement over MIG off, at worst",
            max(way["rounds"][0]["total"] / way["off"] for way in others),
            LOSS_TARGET,
        ),
        Bar(
            "the same on synthetic services of other models: limits exceeded and rates not met initially, at worst",
            max(way["rounds"][0]["broken"] + way["rounds"][0]["short"] for way in others),
            0,
        ),
    ]

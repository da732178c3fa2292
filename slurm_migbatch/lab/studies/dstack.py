"""Study D-STACK: sizes and sessions on one GPU (E5), work done under all deadlines, relative to a fractional GPU.

migbatchd plans no sessions: the compared rules are in `lab.papers`, and there are no targets.

Random mixes of 2 to 7 models share one GPU. Each model has a latency objective for its batches (25 to 100 ms, more
if nothing would fit; a batch may take half of it), and its work arrives in windows of half an hour to two hours and is
due at their ends. The demanded mix is random too. For every scheduler the load is raised until a deadline is missed:
measured is the largest load without a miss, as items per second and relative to the ideal.

Batches are either **chosen** by the scheduler, the best within the objective on each slice, or they are the jobs'
**own**: at most 1, 2, 4, 8 or 16 items, as users request. The ideal and all schedulers have the same batches to choose
from.

**Ideal.** A GPU whose compute slices can be divided arbitrarily, without placement rules, instance creation or
indivisible work. A model's items per second at g slices are interpolated by straight lines through 0 and the
measured sizes; the linear programme "highest load in the demanded mix, slice-seconds within the GPU's" then puts every
model at its best measured items per slice, and has the closed form 7 / sum(items_m / max_k(rate_mk / k)).

**Schedulers.** Temporal sharing (one run at a time on the whole GPU, at its best batch there); D-STACK, reconstructed
(one setting for each model, of highest efficacy at most at its knee, earliest deadline first); the same at each model's
leanest slice, with the most items per slice; most items first, and least served first (max-min), at that slice too; one
layout for all mixes, the best on average; the best static layout of each mix, found by trying; frames of layouts; and
ours, the plan that `lab.papers.sessionplan` chooses among the last two and EDF at the leanest slice.

Utilisation and fairness are measured at half the ideal load, with gaps used out of turn. A run uses its
compute slices up to the knee of its batch, so a whole GPU that runs a batch with a knee of 3 slices is used to 3/7.
Fairness is Jain's index of compute-slice time.

Seconds are those of the measured table, one process on a slice; there is no predictor, so no
models have to be held out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from slurm_migbatch.decide.paris_elsa.partition import flow, ways
from slurm_migbatch.lab.bars import NotMeasurable, rounded_interval
from slurm_migbatch.lab.papers.rightsize import GUARD, leanest, rightsize, useful
from slurm_migbatch.lab.papers.sessionplan import SessionPlan, at_load, best, carried, largest, play
from slurm_migbatch.lab.papers.sessions import (
    Hosted,
    Order,
    Ready,
    Schedule,
    at_size,
    demand_of,
    earliest_due,
    session_s,
)
from slurm_migbatch.lab.papers.settings import InstanceSetting, best_settings
from slurm_migbatch.lab.progress import Progress, silent
from slurm_migbatch.lab.sim.gpus import geometry
from slurm_migbatch.lab.sim.metrics import jain
from slurm_migbatch.lab.studies.pariselsa import GPU, kinds_of
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.profiling.measurement import Measurement
from slurm_migbatch.profiling.table import read_folder

SIZES: Final = (2, 3, 4, 5, 6, 7)
SLO_S: Final = (0.025, 0.1)
LEAST_SLO: Final = 2.2
"""Objectives are at least this multiple of the fastest batch."""
WINDOWS_S: Final = (1800.0, 3600.0, 7200.0)
RUN_S: Final = 30.0
"""About how long one run takes on the model's most efficient slice."""
SESSIONS: Final = 1
"""For the largest load: every window begins anew, so one is as informative as many."""
FILLED_SESSIONS: Final = 2
OWN_BATCHES: Final = (1, 2, 4, 8, 16)
BATCHES: Final = ("chosen", "own")
HALF: Final = 0.5
"""The load at which utilisation and fairness are measured."""

Settings = Mapping[Profile, InstanceSetting]


@dataclass(frozen=True)
class Guest:
    """A model in a mix: its settings, the best within its objective on each kind, window, and items per second at the
    ideal load.
    """

    name: str
    settings: tuple[InstanceSetting, ...]
    best: Mapping[Profile, InstanceSetting]
    slo_s: float
    window_s: float
    items_per_s: float


def settings_of(rows: Sequence[Measurement], kinds: Sequence[Profile]) -> dict[str, tuple[InstanceSetting, ...]]:
    """Return the measurements of each model with one process; only models that were measured on all kinds."""
    names = {kind.name: kind for kind in kinds}
    settings: dict[str, dict[tuple[Profile, int], InstanceSetting]] = {}
    for row in rows:
        if row.kind == "infer" and row.procs == 1 and row.gpu == GPU and row.profile in names and row.seconds:
            setting = InstanceSetting(names[row.profile], row.batch, 1, row.seconds)
            settings.setdefault(row.model, {}).setdefault((setting.profile, setting.batch), setting)
    return {
        model: tuple(points.values())
        for model, points in sorted(settings.items())
        if {profile for profile, _ in points} == set(kinds)
    }


def draw(
    models: Mapping[str, tuple[InstanceSetting, ...]], size: int, slices: int, batches: str, chance: np.random.Generator
) -> list[Guest]:
    """Draw a random mix whose demand is exactly the ideal GPU's capacity; `batches` is one of BATCHES."""
    guests = []
    for i in sorted(chance.choice(len(models), size=size, replace=False).tolist()):
        name = list(models)[i]
        slo = math.exp(chance.uniform(math.log(SLO_S[0]), math.log(SLO_S[1])))
        window = float(chance.choice(WINDOWS_S))
        demand = float(chance.uniform(0.5, 1.5))
        max_batch = int(chance.choice(OWN_BATCHES))
        settings = tuple(s for s in models[name] if batches == "chosen" or s.batch <= max_batch)
        slo = max(slo, LEAST_SLO * min(s.seconds for s in settings))
        guests.append(Guest(name, settings, best_settings(settings, GUARD * slo), slo, window, demand))
    total = sum(guest.items_per_s for guest in guests)
    return [replace(g, items_per_s=g.items_per_s / total * slices * per_slice(g.best)) for g in guests]


def per_slice(settings: Mapping[Profile, InstanceSetting]) -> float:
    """Return the most items per second for one compute slice."""
    best = leanest(settings)
    return best.rate / best.profile.compute


class Mix:
    """Guests on one GPU, at any load relative to the ideal, in the schedulers' form."""

    def __init__(self, guests: Sequence[Guest], gpu: Geometry, kinds: Sequence[Profile]) -> None:
        self.guests, self.gpu, self.kinds = guests, gpu, kinds
        self.best: list[Settings] = [guest.best for guest in guests]
        self.lean: list[Settings] = [_by_profile(leanest(guest.best)) for guest in guests]
        self.whole: list[Settings] = [{p: s for p, s in guest.best.items() if p == kinds[-1]} for guest in guests]
        sized = [rightsize(guest.settings, guest.slo_s, gpu.compute_slices) for guest in guests]
        self.knee: list[Settings] = [_by_profile(s) if s else {} for s in sized]
        self.demand = demand_of(self.hosted(1.0, self.best))
        self.ideal = sum(guest.items_per_s for guest in guests)

    def hosted(self, load: float, settings: Sequence[Settings]) -> list[Hosted]:
        """Return the guests at a load, with these settings."""
        hosted = []
        for guest, by_kind in zip(self.guests, settings, strict=True):
            items = guest.items_per_s * guest.window_s
            runs = max(1, math.ceil(items / (RUN_S * leanest(guest.best).rate)))
            rates = tuple(by_kind[kind].rate if kind in by_kind else 0.0 for kind in self.kinds)
            hosted.append(at_load(Hosted(guest.name, rates, guest.window_s, items, runs), load))
        return hosted

    def sized(self, settings: Sequence[Settings], load: float, fill: bool, order: Order = earliest_due) -> Schedule:
        """Schedule one setting for each model."""
        sizes = [self.kinds.index(next(iter(by_kind))) for by_kind in settings]
        hosted = self.hosted(load, settings)
        return at_size(self.gpu, self.kinds, hosted, sizes, _sessions(fill), fill=fill, order=order)

    def planned(self, plan: SessionPlan, load: float, fill: bool) -> Schedule:
        """Schedule by one of the policy's plans."""
        hosted = self.hosted(1.0, self.best)
        return play(self.gpu, self.kinds, hosted, plan, load, _sessions(fill), fill=fill)


def _sessions(fill: bool) -> int:
    return FILLED_SESSIONS if fill else SESSIONS


def _by_profile(setting: InstanceSetting) -> Settings:
    return {setting.profile: setting}


@dataclass(frozen=True)
class Scheduler:
    """A way to run a mix: settings of each guest, and schedules at a load, with or without runs out of turn."""

    settings: Sequence[Settings]
    run: Callable[[float, bool], Schedule]

    def misses(self, load: float) -> bool:
        """Return whether a deadline is missed at a load."""
        return self.run(load, False).missed > 0


def schedulers(mix: Mix) -> dict[str, Scheduler]:
    """Return the schedulers that need no layout to be chosen."""
    shares = [guest.items_per_s / per_slice(guest.best) for guest in mix.guests]
    items = [per_slice(guest.best) for guest in mix.guests]

    def most_items(ready: Ready, _spent: Sequence[float]) -> tuple[float, ...]:
        return (-items[ready.model], ready.due)

    def least_served(ready: Ready, spent: Sequence[float]) -> tuple[float, ...]:
        return (spent[ready.model] / shares[ready.model], ready.due)

    def sized(settings: Sequence[Settings], order: Order) -> Scheduler:
        return Scheduler(settings, lambda load, fill: mix.sized(settings, load, fill, order))

    by_name = {
        "temporal sharing": sized(mix.whole, earliest_due),
        "most items first": sized(mix.lean, most_items),
        "least served first": sized(mix.lean, least_served),
    }
    if all(mix.knee):
        by_name["D-STACK"] = sized(mix.knee, earliest_due)
    return by_name


def by_plan(mix: Mix, plan: SessionPlan) -> Scheduler:
    """Return the scheduler of one of the policy's plans."""
    return Scheduler(mix.best, lambda load, fill: mix.planned(plan, load, fill))


def measure(
    data: Path,
    mixes: int = 10,
    sizes: Sequence[int] = SIZES,
    batches: Sequence[str] = BATCHES,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Run the whole experiment on a directory with measured tables.

    Raises:
        NotMeasurable: too few models were measured on all slices.
        TableError, OSError: the directory cannot be read.
    """
    gpu = geometry(GPU)
    kinds = kinds_of(gpu)
    models = settings_of(read_folder(data), kinds)
    if len(models) < max(sizes):
        raise NotMeasurable(
            f"{data} has {len(models)} models that were measured with one process on "
            f"{', '.join(k.name for k in kinds)} of an {GPU}; mixes of {max(sizes)} are requested"
        )
    results = []
    for batch_choice in batches:
        rows = []
        for size in sizes:
            for number in range(mixes):
                progress(f"batches {batch_choice}: {size} models, mix {number + 1}", len(batches) * len(sizes) * mixes)
                chance = np.random.Generator(np.random.PCG64([size, number]))
                mix = Mix(draw(models, size, gpu.compute_slices, batch_choice, chance), gpu, kinds)
                rows.append({"size": size, "mix": number, **_row(mix)})
        _common_layout(rows)
        by_size = {str(size): _summary([row for row in rows if row["size"] == size]) for size in sizes}
        results.append({"batches": batch_choice, "all": _summary(rows), "sizes": by_size, "rows": rows})
    return {
        "bench": "dstack",
        "data": str(data),
        "gpu": GPU,
        "mixes": mixes,
        "notes": [
            f"{len(models)} models; seconds as measured, no predictor; legal layouts only; creating and destroying "
            "instances costs time",
            "D-STACK is a reconstruction; utilisation and fairness at half the ideal load with gaps filled out of turn",
            *(_ceiling(result) for result in results),
        ],
        "results": results,
        "bars": [],
    }


def _row(mix: Mix) -> dict[str, Any]:
    by_name = schedulers(mix)
    loads = {name: largest(schedule.misses) for name, schedule in by_name.items()}
    tried = carried(mix.gpu, mix.kinds, mix.hosted(1.0, mix.best))
    static = [carried_plan for carried_plan in tried if len(carried_plan.plan.held) == 1]
    frames = [carried_plan for carried_plan in tried if len(carried_plan.plan.held) > 1]
    named_plans = {
        "EDF at the leanest slice": next(carried_plan for carried_plan in tried if not carried_plan.plan.held),
        "best static layout": best(static),
        "frames of layouts": best(frames or static),
    }
    chosen = best(tried)
    for name, carried_plan in (*named_plans.items(), ("ours", chosen)):
        by_name[name], loads[name] = by_plan(mix, carried_plan.plan), carried_plan.load
    return {
        "models": [guest.name for guest in mix.guests],
        "ideal_items_per_s": round(mix.ideal, 1),
        "bound": round(flow(mix.demand, ways(mix.gpu, mix.kinds), 1, whole=False).rate / mix.ideal, 4),
        "load": {name: round(load, 4) for name, load in loads.items()},
        "ours": next(name for name, carried_plan in named_plans.items() if carried_plan.plan == chosen.plan),
        "frames": [[list(way), round(share, 3)] for way, share in named_plans["frames of layouts"].plan.held],
        "static": [[list(carried_plan.plan.held[0][0]), round(carried_plan.load, 4)] for carried_plan in static],
        "filled": {name: _filled(mix, scheduler) for name, scheduler in by_name.items()},
    }


def _common_layout(rows: Sequence[dict[str, Any]]) -> None:
    """Add the one static layout that carries most on average over all mixes."""
    best = max(range(len(rows[0]["static"])), key=lambda i: sum(row["static"][i][1] for row in rows))
    for row in rows:
        way, load = row["static"][best]
        row["load"]["one layout for all mixes"] = load
        row["common_layout"] = way


def _filled(mix: Mix, scheduler: Scheduler) -> dict[str, float]:
    """Measure utilisation and fairness at half the ideal load, with gaps used out of turn.

    Runs after the end are cut off.
    """
    schedule = scheduler.run(HALF, True)
    horizon = FILLED_SESSIONS * session_s(mix.hosted(HALF, mix.best))
    whole = mix.gpu.compute_slices * horizon
    knees = [
        {p: useful(s, guest.settings) for p, s in by_kind.items()}
        for guest, by_kind in zip(mix.guests, scheduler.settings, strict=True)
    ]
    used, held = 0.0, [0.0] * len(mix.guests)
    for run in schedule.runs:
        seconds = max(0.0, min(run.end, horizon) - run.start)
        used += seconds * knees[run.model][run.slot.profile]
        held[run.model] += seconds * run.slot.profile.compute
    return {
        "utilisation": round(used / whole, 4),
        "busy": round(sum(held) / whole, 4),
        "jain": round(jain(held) or 1.0, 4),
        "missed": schedule.missed,
    }


def _summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    names = list(dict.fromkeys(name for row in rows for name in row["load"]))
    items = [
        sum(row["load"]["ours"] * row["ideal_items_per_s"] for row in rows),
        sum(row["ideal_items_per_s"] for row in rows),
    ]
    return {
        "load": {name: rounded_interval([row["load"][name] for row in rows if name in row["load"]]) for name in names},
        "least": {name: min(row["load"][name] for row in rows if name in row["load"]) for name in names},
        "bound": rounded_interval([row["bound"] for row in rows]),
        "items_over_ideal": round(items[0] / items[1], 4),
        "filled": {
            name: {
                figure: round(statistics.fmean(row["filled"][name][figure] for row in rows if name in row["filled"]), 4)
                for figure in ("utilisation", "busy", "jain", "missed")
            }
            for name in names
            if name in rows[0]["filled"]
        },
        "utilisation_over_temporal": rounded_interval(
            [row["filled"]["ours"]["utilisation"] / row["filled"]["temporal sharing"]["utilisation"] for row in rows]
        ),
        "items_over_temporal": rounded_interval(
            [row["load"]["ours"] / row["load"]["temporal sharing"] for row in rows]
        ),
    }


def _ceiling(result: Mapping[str, Any]) -> str:
    """Return how much better than temporal sharing any scheduler could use the GPU."""
    used = result["all"]["filled"]["temporal sharing"]["utilisation"]
    return (
        f"batches {result['batches']}: temporal sharing uses {used:.0%} of the GPU on average, so no policy can use "
        f"more than about {1 / used:.2f} times as much"
    )

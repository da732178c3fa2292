"""Measure lending with wrong data: the jobs and the simulated Slurm of `lending`.

The wrong data are the inputs of the decision: the record's previous days, the predictions of training, the jobs'
statements of their time, and the assumed restart costs. The jobs' true times are unchanged, so each row
is relative to the same training on its own half with correct data; if restarts take another time, to that
half with the same restarts.

- *history ... h later / earlier*: the record's days lag or lead by that much, twelve hours being the opposite.
- *history x0.5*: every second use of each profile is missing; *x2*: each occurs twice.
- *speeds*: of each model, batch and profile wrong by a random factor; or of all slices but the whole GPU by one, so
  that slices seem slower or faster relative to it than they are. Nothing corrects them: these jobs report no items.
- *restarts and checkpoints*: each takes a multiple of its normal time; `[lending] restart_s` is the default. A
  reclaim for inference waits for a checkpoint.
- *limits*: each training job has a time limit, a multiple of its time on the smallest slice that holds it.
"""

from __future__ import annotations

import math
import statistics
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from slurm_migbatch.decide.lending.forecast import DAY_S
from slurm_migbatch.lab.bars import Bar, mean_with_interval
from slurm_migbatch.lab.experiments import lending, lendslices
from slurm_migbatch.lab.experiments.lending import KnownSpeeds, PlayedLoad
from slurm_migbatch.lab.experiments.lendslices import HISTORY_DAYS, Load
from slurm_migbatch.lab.processes import pool
from slurm_migbatch.lab.progress import Progress, silent
from slurm_migbatch.lab.sim.gpus import geometry
from slurm_migbatch.lab.sim.job import JobCosts
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.workload.loans import LoanHints

LOADS: Final = lendslices.LOADS[:3]
LOSS_TARGET: Final = 1.02
WORKLOADS: Final = 10
"""Seeds of Pollux's workloads, used cyclically; as many as in the experiment with correct predictions and ten seeds."""
_SLACK_S: Final = 120.0
"""Of time limits, for checkpoints of a run."""

Uses = Sequence[tuple[str, float, float | None]]


@dataclass(frozen=True)
class WrongLendingData:
    """Differences between migbatchd's data and the truth.

    Attributes:
        later_s: by which the record's days lag; below 0: lead.
        height: of demand in the record: 0.5, 1 or 2 times.
        cells: the speed of each model, batch and profile is wrong by up to this factor, up or down (uniform in the
            logarithm); 1: none is.
        slices: speed of all slices but the whole GPU, relative to the truth.
        restarts, checkpoints: their time relative to the normal one.
        limits: time limits over the time on the smallest slice, from the first to the second (uniform in the
            logarithm); None: no limits.
    """

    later_s: float = 0.0
    height: float = 1.0
    cells: float = 1.0
    slices: float = 1.0
    restarts: float = 1.0
    checkpoints: float = 1.0
    limits: tuple[float, float] | None = None

    def with_errors(self, case: PlayedLoad, found: lendslices.Miso, seed: int) -> PlayedLoad:
        """Return the load with this record, these limits and these costs."""
        end = HISTORY_DAYS * DAY_S + case.begin_s
        uses = _scaled(_shifted(case.uses, self.later_s, end), self.height)
        limits = {} if self.limits is None else _limits(case, found, self.limits, seed)
        return replace(self.with_true_costs(case), uses=uses, limits=limits)

    def with_true_costs(self, case: PlayedLoad) -> PlayedLoad:
        """Return the load with these costs."""
        usual = lendslices.TRAIN
        costs = JobCosts(usual.cold_start_s, usual.restart_s * self.restarts, usual.checkpoint_s * self.checkpoints)
        return replace(case, training=[replace(job, costs=costs) for job in case.training])

    @property
    def costs(self) -> tuple[float, float]:
        """Relative to normal: restarts, checkpoints."""
        return self.restarts, self.checkpoints

    def predictions(self, found: lendslices.Miso, seed: int) -> KnownSpeeds:
        """Return the (wrong) predictions."""
        return WrongSpeeds(found, self, seed)


ROWS: Final[Mapping[str, WrongLendingData]] = {
    "right": WrongLendingData(),
    "history 3 h later": WrongLendingData(later_s=DAY_S / 8),
    "history 3 h earlier": WrongLendingData(later_s=-DAY_S / 8),
    "history 12 h later": WrongLendingData(later_s=DAY_S / 2),
    "history x0.5": WrongLendingData(height=0.5),
    "history x2": WrongLendingData(height=2.0),
    "speeds x0.5 to x2, each its own": WrongLendingData(cells=2.0),
    "speeds of slices x0.5": WrongLendingData(slices=0.5),
    "speeds of slices x2": WrongLendingData(slices=2.0),
    "restarts and checkpoints x0.5": WrongLendingData(restarts=0.5, checkpoints=0.5),
    "restarts and checkpoints x2": WrongLendingData(restarts=2.0, checkpoints=2.0),
    "limits x1 to x8, each its own": WrongLendingData(limits=(1.0, 8.0)),
}


class WrongSpeeds(KnownSpeeds):
    """Measured speeds times their errors."""

    def __init__(self, found: lendslices.Miso, wrong: WrongLendingData, seed: int) -> None:
        super().__init__(found)
        self._wrong, self._seed = wrong, seed
        self._full = geometry(lendslices.GPU).full.profile

    def training_speeds(self, hints: LoanHints, partition: str, /) -> Mapping[Profile, float]:
        """See Predictions."""
        right = super().training_speeds(hints, partition)
        return {profile: speed * self._factor(hints, profile) for profile, speed in right.items()}

    def _factor(self, hints: LoanHints, profile: Profile) -> float:
        cell = zlib.crc32(f"{hints.model} {hints.batch} {profile}".encode())
        chance = np.random.Generator(np.random.PCG64([self._seed, cell]))
        factor: float = self._wrong.cells ** float(chance.uniform(-1.0, 1.0))
        return factor if profile == self._full else factor * self._wrong.slices


def _shifted(uses: Uses, later_s: float, end: float) -> list[tuple[str, float, float | None]]:
    """Return a record whose days lag; entries after its end are dropped, days that lead begin one later.

    A record that leads by three hours is one that lags by 21, so that its last hours are not empty.
    """
    lag_s = later_s % DAY_S
    return [
        (name, since + lag_s, None if until is None else min(until + lag_s, end))
        for name, since, until in uses
        if since + lag_s < end
    ]


def _scaled(uses: Uses, height: float) -> list[tuple[str, float, float | None]]:
    """Return every use this many times; less than one is distributed as evenly as possible over each profile."""
    counts: dict[str, float] = {}
    scaled = []
    for use in uses:
        before = counts.get(use[0], 0.0)
        counts[use[0]] = before + height
        scaled += [use] * (math.floor(before + height) - math.floor(before))
    return scaled


def _limits(case: PlayedLoad, found: lendslices.Miso, span: tuple[float, float], seed: int) -> dict[int, int]:
    chance = np.random.Generator(np.random.PCG64([seed, len(case.training)]))
    profiles = [info.profile for info in geometry(lendslices.GPU).profiles if not info.profile.suffix]
    limits = {}
    for job in case.training:
        speeds = [found.speeds.relative(job, profile) for profile in profiles]
        slowest = min(speed for speed in speeds if speed > 0)
        takes = job.work / slowest + job.costs.cold_start_s + _SLACK_S
        limits[job.id] = math.ceil(takes * span[0] * (span[1] / span[0]) ** float(chance.random()))
    return limits


def measure(
    data: Path,
    seeds: int = 10,
    loads: Sequence[Load] | None = None,
    progress: Progress = silent,
    processes: int = 1,
    window_s: float = lending.WINDOW_S,
) -> dict[str, Any]:
    """Simulate every load (None: `LOADS`), seed and row on a directory with Pollux's data, MISO's and a request trace.

    Seed n has the jobs of seed n of `lending.measure` with ten seeds. Raises NotMeasurable, TraceError, OSError.
    """
    _, moments, miso = lendslices.inputs(data, WORKLOADS)
    loads = LOADS if loads is None else loads
    results = [_of_load(load, moments, miso, seeds, progress, processes, window_s, len(loads)) for load in loads]
    return {
        "bench": "lending, wrong predictions",
        "data": str(data),
        "seeds": seeds,
        **lending.settings(),
        "notes": [
            "every row is relative to training on its own half with correct data, with the same jobs and restarts",
            f"95 of 100 requests are to start within {lendslices.PROMISE_S:g} s, and at most "
            f"{lending.TARGET_DELAY_S:g} s (p95) later than without lending",
        ],
        "results": results,
        "bars": [bar.to_dict() for result in results for bar in bars(result)],
    }


def _of_load(
    load: Load,
    moments: lendslices.Moments,
    found: lendslices.Miso,
    seeds: int,
    progress: Progress,
    processes: int,
    window_s: float,
    of: int,
) -> dict[str, Any]:
    halves = {
        wrong.costs: WrongLendingData(restarts=wrong.restarts, checkpoints=wrong.checkpoints) for wrong in ROWS.values()
    }
    with pool(processes, (moments, found)) as submit:
        runs = {
            (seed, name): submit(_case, load, seed, window_s, wrong, way)
            for seed in range(seeds)
            for way, named in (("half", halves), ("ours", ROWS))
            for name, wrong in named.items()
        }
        figures = {}
        for (seed, name), run in runs.items():
            progress(f"{load.name}: seed {seed}, {name if isinstance(name, str) else 'half'}", of * len(runs))
            figures[seed, name] = run()
    rows = {
        name: _row(
            [figures[seed, name] for seed in range(seeds)], [figures[seed, wrong.costs] for seed in range(seeds)]
        )
        for name, wrong in ROWS.items()
    }
    return {"load": load.name, "seeds": seeds, "rows": rows}


def _case(
    inputs: lending.Inputs, load: Load, seed: int, window_s: float, wrong: WrongLendingData, way: str
) -> dict[str, float]:
    moments, miso = inputs
    case = PlayedLoad.of(load, moments, miso, seed, window_s)
    if way == "half":
        return lending.play(wrong.with_true_costs(case), miso, lending.WAYS[way])
    return lending.play(wrong.with_errors(case, miso, seed), miso, lending.WAYS[way], wrong.predictions(miso, seed))


def _row(runs: Sequence[Mapping[str, float]], halves: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    ratios = [run["jct_s"] / half["jct_s"] for run, half in zip(runs, halves, strict=True)]
    keys = ("jct_s", "restarts", "delay_p95_s", "reclaimed", "preempted")
    return {
        "over_half": [round(value, 4) for value in mean_with_interval(ratios) if math.isfinite(value)],
        "over_half_worst": round(max(ratios), 4),
        "half_delay_p95_s": round(statistics.fmean(half["delay_p95_s"] for half in halves), 3),
        **{key: round(statistics.fmean(run[key] for run in runs), 3) for key in keys},
    }


def bars(result: Mapping[str, Any]) -> list[Bar]:
    """Return the bars of the worst row of a load."""
    rows = result["rows"]
    figures_by_bar: dict[str, tuple[float, dict[str, float]]] = {
        "mean JCT over training half only": (LOSS_TARGET, {name: row["over_half"][0] for name, row in rows.items()}),
        "p95 start delay [s]": (lendslices.PROMISE_S, {name: row["delay_p95_s"] for name, row in rows.items()}),
        "p95 start delay beyond a dedicated half [s]": (
            lending.TARGET_DELAY_S,
            {name: row["delay_p95_s"] - row["half_delay_p95_s"] for name, row in rows.items()},
        ),
    }
    found = []
    for what, (target, values) in figures_by_bar.items():
        value, worst = max((value, name) for name, value in values.items())
        found.append(Bar(f"{result['load']}, at worst ({worst}): {what}", value, target))
    return found

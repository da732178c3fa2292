"""Score the slowdowns that migbatchd expects of two training jobs on one slice, on measured pairs.

Tables have the columns of `COLUMNS`: two models, the SMs that both had (`sm_count`), the SM activity of each alone (a
share of these SMs), and how many times longer each took next to the other one. `sharing` is how the driver shared the
SMs: in `TIME_SLICES`, or by MPS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

import numpy as np

from slurm_migbatch.decide.lending.pair_slowdowns import SWITCHING, time_sliced, together_rate
from slurm_migbatch.decide.lending.pairs import SharingRules
from slurm_migbatch.lab.bars import Bar, NotMeasurable
from slurm_migbatch.lab.progress import Progress, silent
from slurm_migbatch.profiling import csvfile
from slurm_migbatch.profiling.csvfile import LineError, Problems, number, whole

COLUMNS: Final = (
    "gpu", "sm_count", "sharing", "model1", "batch1", "input1", "model2", "batch2", "input2", "activity1", "activity2",
    "slowdown1", "slowdown2",
)  # fmt: skip
TIME_SLICES: Final = "time slices"
TARGET: Final = 12.0
"""Largest mean error of slowdowns, %."""
TRIED: Final = tuple(float(factor) for factor in np.arange(1.0, 2.01, 0.05).round(2))
"""Values of SWITCHING that are tried."""

Both = tuple[float, float]


@dataclass(frozen=True)
class MeasuredPair:
    """Two jobs, as `model batch x input`, on `sm_count` SMs: the SM activity of each alone, and its slowdown."""

    gpu: str
    sm_count: int
    sharing: str
    jobs: tuple[str, str]
    activity: Both
    slowdown: Both

    @property
    def size(self) -> str:
        """The GPU and the number of SMs."""
        return f"{self.sm_count} SMs of {self.gpu}"


def read(folder: Path) -> list[MeasuredPair]:
    """Return the pairs of all tables below a folder. Raises TableError, NotMeasurable, OSError."""
    problems = Problems()
    pairs = [
        pair
        for path in csvfile.find(folder)
        if csvfile.header(path) == COLUMNS
        for _, pair in csvfile.read(path, problems, _pair)
    ]
    problems.check()
    if not any(pair.sharing == TIME_SLICES for pair in pairs):
        raise NotMeasurable(f"{folder} has no table of pairs of jobs ({', '.join(COLUMNS)})")
    return pairs


def _pair(row: Mapping[str, str]) -> MeasuredPair:
    activity = number(row, "activity1"), number(row, "activity2")
    slowdown = number(row, "slowdown1"), number(row, "slowdown2")
    if not all(0 <= share <= 1 for share in activity):
        raise LineError("activity1 and activity2 must be between 0 and 1")
    if min(slowdown) <= 0:
        raise LineError("slowdown1 and slowdown2 must be above 0")
    # a job that was faster next to another one was not slowed down
    slowdown = max(1.0, slowdown[0]), max(1.0, slowdown[1])
    return MeasuredPair(
        row["gpu"], whole(row, "sm_count"), row["sharing"], (_job(row, 1), _job(row, 2)), activity, slowdown
    )


def _job(row: Mapping[str, str], number: int) -> str:
    return f"{row[f'model{number}']} {row[f'batch{number}']} x {row[f'input{number}']}"


def measure(data: Path, progress: Progress = silent) -> dict[str, Any]:
    """Evaluate the tables of a directory. Raises NotMeasurable, TableError."""
    pairs = read(data)
    progress(f"{len(pairs)} pairs", 0)
    return {"data": str(data), **evaluate(pairs)}


def evaluate(pairs: Sequence[MeasuredPair]) -> dict[str, Any]:
    """Return for each number of SMs what pairs cost, and the errors of expected slowdowns; all errors are in %."""
    sliced = [pair for pair in pairs if pair.sharing == TIME_SLICES]
    sizes = dict.fromkeys(pair.size for pair in sorted(sliced, key=lambda pair: pair.sm_count))
    rows = [_size(size, sliced) for size in sizes]
    mean_error = fmean(row["errors"]["held out"] for row in rows)
    return {
        "jobs": sorted({job for pair in pairs for job in pair.jobs}),
        "sizes": rows,
        "sharing": _by_sharing(pairs),
        "switching": {"shipped": SWITCHING, "fitted": fitted(sliced)},
        "bars": [Bar("mean error of slowdowns of pairs (%), held out", mean_error, TARGET).to_dict()],
    }


def _size(size: str, pairs: Sequence[MeasuredPair]) -> dict[str, Any]:
    of_size = [pair for pair in pairs if pair.size == size]
    others = [pair for pair in pairs if pair.size != size]
    usual, constant = SharingRules().slowdown, median(slowdown for pair in of_size for slowdown in pair.slowdown)
    factor = fitted(others) if others else SWITCHING
    ways = {
        "as shipped": _by_activity(SWITCHING),
        "held out": _by_activity(factor),
        "assumed": _by_constant(usual),
        "best constant": _by_constant(constant),
    }
    work = [together_rate(*pair.slowdown) for pair in of_size]
    return {
        "size": size,
        "pairs": len(of_size),
        "activity": round(median(share for pair in of_size for share in pair.activity), 3),
        "slowdown": round(constant, 3),
        "work": round(median(work), 3),
        "losing": round(fmean(part < 1 for part in work), 3),
        "fitted": factor,
        "errors": {name: round(_error(of_size, way), 2) for name, way in ways.items()},
        "work_errors": {name: round(_work_error(of_size, way), 2) for name, way in ways.items()},
    }


def _by_activity(factor: float) -> Callable[[MeasuredPair], Both]:
    return lambda pair: time_sliced(*pair.activity, factor)


def _by_constant(slowdown: float) -> Callable[[MeasuredPair], Both]:
    return lambda pair: (slowdown, slowdown)


def fitted(pairs: Sequence[MeasuredPair]) -> float:
    """Return the value of SWITCHING with the smallest mean error, each size counting equally."""
    sizes = {pair.size for pair in pairs}
    by_size = [[pair for pair in pairs if pair.size == size] for size in sorted(sizes)]

    def error(factor: float) -> float:
        return fmean(_error(of_size, _by_activity(factor)) for of_size in by_size)

    return min(TRIED, key=error)


def _by_sharing(pairs: Iterable[MeasuredPair]) -> list[dict[str, Any]]:
    """Return by size and way of sharing the median work of the pairs that were measured in every way there."""
    work: dict[str, dict[str, dict[tuple[str, str], float]]] = {}
    for pair in pairs:
        ways = work.setdefault(pair.size, {})
        ways.setdefault(pair.sharing, {})[pair.jobs] = together_rate(*pair.slowdown)
    rows = []
    for size, ways in sorted(work.items()):
        common = set.intersection(*(set(of_way) for of_way in ways.values()))
        if len(ways) > 1 and common:
            medians = {way: round(median(of_way[jobs] for jobs in common), 3) for way, of_way in sorted(ways.items())}
            rows.append({"size": size, "pairs": len(common), "work": medians})
    return rows


def _error(pairs: Iterable[MeasuredPair], expected: Callable[[MeasuredPair], Both]) -> float:
    return fmean(
        100.0 * abs(guess / real - 1)
        for pair in pairs
        for guess, real in zip(expected(pair), pair.slowdown, strict=True)
    )


def _work_error(pairs: Iterable[MeasuredPair], expected: Callable[[MeasuredPair], Both]) -> float:
    return fmean(100.0 * abs(together_rate(*expected(pair)) / together_rate(*pair.slowdown) - 1) for pair in pairs)

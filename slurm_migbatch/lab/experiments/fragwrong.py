"""Measure the planner with wrong time limits and run times: the draws and the simulated Slurm of `fragmentation`.

Ends of running jobs are known by time limits: reservations, Slurm's backfilling and moves use them. The offers for free
space (`[supply] preference`) follow from the run times by profile in the site's record. Both are wrong
here, and nothing else differs; first fit uses neither. A time limit cannot be below the job's run time, because Slurm
would end it; learned run times can.

- *limits x2*: correct, as in `fragmentation`; *x1 to x4*: random for each job, these wrong by 0.5 to 2 times.
- *learned*: the run time of each profile is wrong by a random factor from 0.5 to 2, drawn for each seed;
  *nothing learned*: the default configuration, on its first day.
- *nothing moved*: with `[moves] enabled = false`, so that the loss in placement is not hidden by the gain of moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from slurm_migbatch.config import Config
from slurm_migbatch.lab.bars import Bar
from slurm_migbatch.lab.experiments import fragmentation
from slurm_migbatch.lab.experiments.fragmentation import FIRST, GPU, LIMIT, QUEUED, Draw
from slurm_migbatch.lab.progress import Progress, silent
from slurm_migbatch.lab.shipped import DECIDES, provenance
from slurm_migbatch.lab.sim.gpus import geometry
from slurm_migbatch.lab.studies.placement import PodKind

WAIT_TARGET: Final = 1.02
SLICES_TARGET: Final = 0.98


@dataclass(frozen=True)
class WrongJobData:
    """Differences to `fragmentation`.

    Attributes:
        limits: time limits over run times, from the first to the second (uniform in the logarithm); None: no
            limits.
        learned: learned run times are wrong by up to this factor, up or down; None: none were learned.
        moves: whether training jobs may be moved (`[moves] enabled`).
    """

    limits: tuple[float, float] | None = (LIMIT, LIMIT)
    learned: float | None = 1.0
    moves: bool = True

    def limits_of(self, found: Draw, seed: int) -> list[int | None]:
        """Return the time limit of each job, seconds."""
        if self.limits is None:
            return [None] * len(found.kinds)
        low, high = self.limits
        factors = (low * np.power(high / low, _chance(seed).random(len(found.kinds)))).tolist()
        return [int(factor * kind.seconds) + 60 for factor, kind in zip(factors, found.kinds, strict=True)]

    def config(self, right: Config, kinds: Sequence[PodKind], seed: int) -> Config:
        """Return default settings on a site that has learned this; `right`: with correct values."""
        settings = right
        if self.learned is None:
            settings = replace(right, supply=replace(right.supply, preference=()))
        elif self.learned != 1.0:
            profiles = sorted({kind.profile for kind in kinds})
            factors = np.power(self.learned, _chance(seed).uniform(-1.0, 1.0, len(profiles))).tolist()
            settings = fragmentation.config_of(kinds, dict(zip(profiles, factors, strict=True)))
        return settings if self.moves else replace(settings, moves=replace(settings.moves, enabled=False))


ROWS: Final[Mapping[str, WrongJobData]] = {
    "limits x2 (right)": WrongJobData(),
    "limits x1": WrongJobData(limits=(1.0, 1.0)),
    "limits x1 to x4, each its own": WrongJobData(limits=(0.5 * LIMIT, 2 * LIMIT)),
    "limits x8": WrongJobData(limits=(8.0, 8.0)),
    "no limits": WrongJobData(limits=None),
    "learned x0.5 to x2, each profile its own": WrongJobData(learned=2.0),
    "nothing learned": WrongJobData(learned=None),
    "nothing moved, limits x2 (right)": WrongJobData(moves=False),
    "nothing moved, limits x1 to x4, each its own": WrongJobData(limits=(0.5 * LIMIT, 2 * LIMIT), moves=False),
    "nothing moved, limits x8": WrongJobData(limits=(8.0, 8.0), moves=False),
    "nothing moved, no limits": WrongJobData(limits=None, moves=False),
}


def _chance(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64([seed, 1]))


def measure(data: Path, seeds: int = 10, progress: Progress = silent, processes: int = 1) -> dict[str, Any]:
    """Run all rows at all loads for both populations, in `processes` at once; `data` as in `fragmentation.measure`.

    Raises:
        NotMeasurable, TraceError: as `fragmentation.measure`.
    """
    result_of = partial(_population, seeds=seeds, processes=processes)
    results, notices = fragmentation.of_populations(data, progress, result_of)
    return {
        "bench": "fragmentation, wrong predictions",
        "data": str(data),
        "seeds": seeds,
        "notes": [*notices, "draws and first fit are those of the table with right predictions"],
        "populations": results,
        "bars": [bar.to_dict() for bar in bars(results)],
    }


def _population(name: str, kinds: Sequence[PodKind], progress: Progress, seeds: int, processes: int) -> dict[str, Any]:
    right = fragmentation.config_of(kinds)
    found_by_load = fragmentation.run_cases(_run, (kinds, right), name, seeds, (FIRST, *ROWS), progress, processes)
    loads = []
    for load, by_row in found_by_load.items():
        base, queued = by_row.pop(FIRST), load in QUEUED
        rows = {row: _row(found, base, queued) for row, found in by_row.items()}
        loads.append({"load": load, "queued": queued, "rows": rows})
    return {"jobs": len(kinds), **provenance(DECIDES, right), "loads": loads}


def _run(inputs: fragmentation.Inputs, load: float, seed: int, row: str) -> dict[str, float]:
    """Return the figures of one row, or of first fit, on one draw."""
    if row == FIRST:
        return fragmentation.run_way(inputs, load, seed, row)
    kinds, right = inputs
    drawn, queued, wrong = fragmentation.draw(kinds, load, seed), load in QUEUED, ROWS[row]
    outcome = fragmentation.shipped(drawn, wrong.config(right, kinds, seed), queued, wrong.limits_of(drawn, seed))
    return fragmentation.figures(drawn, outcome, geometry(GPU), queued)


def _row(runs: Sequence[Mapping[str, float]], base: Sequence[Mapping[str, float]], queued: bool) -> dict[str, Any]:
    """Return the row of `fragmentation`, and the ratio to first fit of the worst seed."""
    ratios = fragmentation.ratios(runs, base, "wait_s" if queued else "slices")
    return {**fragmentation.row(runs, base), "worst": round(max(ratios) if queued else min(ratios), 4)}


def bars(results: Mapping[str, Mapping[str, Any]]) -> list[Bar]:
    """Return the bars of the worst rows of each population and load, with and without moves, against first fit."""
    found = []
    for name, population in results.items():
        for load in population["loads"]:
            kept = (("wait_s", "mean wait"), ("jct_s", "mean completion time"))
            for key, what in kept if load["queued"] else (("slices", "accepted slices"),):
                for moves in (True, False):
                    over = [
                        (figures["over_first_fit"][key][0], row)
                        for row, figures in load["rows"].items()
                        if ROWS[row].moves == moves
                    ]
                    value, worst = max(over) if load["queued"] else min(over)
                    label = f"{name}, load {load['load']:g}, at worst ({worst}): {what} over first fit"
                    target = WAIT_TARGET if load["queued"] else SLICES_TARGET
                    found.append(Bar(label, value, target, at_least=not load["queued"]))
    return found

"""Study GPUs for services with a rate and a latency limit, by an integer programme (E2), compared with others.

migbatchd does not do this: it serves Slurm's jobs, and has no services with rates. The programme is
`lab.papers.instances`, after ElasticBatch and ParvaGPU. So there are no targets.

Each scenario is a set of services that run at the same time. Its baselines: GPUs without MIG for each model, as many
as its rate needs, one process on each; all models sharing whole GPUs in time without any loss (optimistic: no queueing,
no interference); ParvaGPU's own results; and two lower bounds, compute slices divided arbitrarily and whole instances
without packing. MIG off counts as the full profile, because the table has no other. Every row may run up to `PROCS`
processes on a slice (under MPS), like ParvaGPU's code, unless its name says otherwise; one row is without MPS.

`migbatch eval services` plans with predicted figures.

Cells that did not run in the table are not part of any grid: memory is not considered here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from slurm_migbatch.lab.bars import NotMeasurable
from slurm_migbatch.lab.evaluate.heldout import Fold, folds
from slurm_migbatch.lab.evaluate.scenarios import ServiceLoad as Load
from slurm_migbatch.lab.evaluate.scenarios import services
from slurm_migbatch.lab.papers.instances import ServiceDemand, allocate, compose, fewest_slices, fluid, pack
from slurm_migbatch.lab.papers.settings import InstanceSetting, best_settings
from slurm_migbatch.lab.progress import Progress, silent
from slurm_migbatch.lab.sim.gpus import models, named
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.predict.cells import Array
from slurm_migbatch.predict.known import ModelKnowledge
from slurm_migbatch.predict.learned import CONFIDENCE, LearnedPredictor
from slurm_migbatch.predict.points import choose
from slurm_migbatch.predict.samples import Sample
from slurm_migbatch.predict.training import settle
from slurm_migbatch.profiling.measurement import Measurement
from slurm_migbatch.profiling.table import read_folder

PARVAGPU: Final = {"S1": 2, "S2": 3, "S3": 5, "S4": 7, "S5": 13, "S6": 17}
"""GPUs that its published code needs on its own scenarios, run again with its own table."""
PROCS: Final = 3
"""Most processes on a slice in every row that does not say otherwise: as many as ParvaGPU's code uses."""
MOST_PROCS: Final = 5
"""As many as were measured."""


@dataclass(frozen=True)
class HeldOutModel:
    """A held-out model: its measured cells as settings, and the state learned without it."""

    sample: Sample
    settings: tuple[InstanceSetting, ...]
    fold: Fold
    knowledge: ModelKnowledge

    @property
    def usable(self) -> tuple[int, ...]:
        """The cells of at most `PROCS` processes."""
        return tuple(i for i, setting in enumerate(self.settings) if setting.procs <= PROCS)

    def points(self, count: int) -> tuple[int, ...]:
        """Return the cells that the product's rule measures, in order."""
        done: list[int] = []
        candidates = list(self.usable)
        while candidates and len(done) < count:
            rows = self.sample.rows
            chosen = choose([rows[i] for i in done], [rows[i] for i in candidates], self.knowledge)
            assert chosen is not None
            done.append(candidates.pop(chosen))
        return tuple(done)

    def slow(self, done: Sequence[int]) -> Array:
        """Return seconds by cell after the cells `done` were measured: those, and the slow ends of the intervals."""
        sample, known = self.sample, list(done)
        learned = settle(self.fold.learned, [sample.rows[i] for i in known], self.knowledge)
        predictor = LearnedPredictor(learned, (), confidence=CONFIDENCE)
        slow: Array
        _, _, slow = predictor.interval("time", sample.model, sample.known, sample.gpu, sample.kind, sample.cells)
        slow[known] = np.exp(sample.logs[known])
        return slow


def measure(data: Path, progress: Progress = silent) -> dict[str, Any]:
    """Compute all rows; `data` is ParvaGPU's directory, or one that holds it as `parvagpu`. Raises NotMeasurable."""
    folder = data / "parvagpu" if (data / "parvagpu").is_dir() else data
    bench = InstanceBench(folder, read_folder(folder), progress)
    rows = bench.baselines()
    progress("measured figures", 0)
    rows.append(bench.measured(MEASURED, PROCS))
    rows.append(bench.measured(f"{MEASURED}, up to {MOST_PROCS} processes", MOST_PROCS))
    rows.append(bench.measured(f"{MEASURED}, without MPS", 1))
    rows.append(bench.composed())
    return {
        "data": str(data),
        "gpu": bench.gpu,
        "scenarios": list(bench.loads),
        "services": sum(len(loads) for loads in bench.loads.values()),
        "notes": bench.notes,
        "rows": rows,
        "bars": [],
    }


MEASURED: Final = "integer programme, measured figures"
MIG_OFF: Final = "MIG off, a GPU for each model"


class InstanceBench:
    """The scenarios of one table, with one subject for each model."""

    def __init__(self, data: Path, rows: Sequence[Measurement], progress: Progress) -> None:
        knowledge = ModelKnowledge()
        found: list[tuple[Sample, Fold]] = []
        for fold in folds(rows, knowledge):
            progress(f"without {', '.join(sorted({sample.model for sample in fold.samples}))}", fold.of)
            found += [(sample, fold) for sample in fold.samples]
        loads, origin = services(data, [sample for sample, _ in found])
        count = Counter((load.sample.gpu.name, shape) for load in loads if (shape := named(load.sample.gpu.name)))
        if not count:
            raise NotMeasurable(f"{data} has no services on one of {', '.join(models())}: name ParvaGPU's folder")
        self.gpu, self.geometry = count.most_common(1)[0][0]
        self.subjects: dict[str, HeldOutModel] = {}
        for sample, fold in found:
            if sample.gpu.name == self.gpu and any(load.sample is sample for load in loads):
                settings = tuple(_setting(self.geometry, row) for row in sample.rows)
                self.subjects[sample.model] = HeldOutModel(sample, settings, fold, knowledge)
        self.loads: dict[str, list[Load]] = {}
        left_out = 0
        for load in loads:
            subject = self.subjects.get(load.sample.model)
            if subject is not None and subject.sample is load.sample:
                if best_settings([s for s in subject.settings if s.procs == 1], load.limit_s):
                    self.loads.setdefault(load.scenario, []).append(load)
                else:
                    left_out += 1
        self.notes = [
            origin,
            "MIG off counts as the full profile; GPUs with MIG off are 3.4 % faster on average in other data",
        ]
        if left_out:
            self.notes.append(f"{left_out} services have a limit that no measured cell of one process keeps: skipped")
        self._slow: dict[tuple[str, tuple[int, ...]], Array] = {}

    def services(self, loads: Sequence[Load], procs: int = PROCS) -> list[ServiceDemand]:
        """Return the services of a scenario with their best measured settings of at most `procs` processes."""
        return [
            ServiceDemand(
                load.sample.model, load.rate, tuple(best_settings(self._all(load, procs), load.limit_s).values())
            )
            for load in loads
        ]

    def _all(self, load: Load, procs: int = PROCS) -> list[InstanceSetting]:
        return [s for s in self.subjects[load.sample.model].settings if s.procs <= procs]

    def baselines(self) -> list[dict[str, Any]]:
        """Return the rows of other approaches, and of bounds."""
        slices = self.geometry.compute_slices
        dedicated, several, shared, divided, whole = [], [], [], [], []
        for loads in self.loads.values():
            share, with_mps = self._of_whole(loads, 1), self._of_whole(loads, PROCS)
            dedicated.append(_rounded_up(share))
            several.append(self.without_mig(loads))
            shared.append(sum(share for share in with_mps if math.isfinite(share)))
            services = self.services(loads)
            divided.append(fluid(services, slices))
            whole.append(sum(self._fewest(service) for service in services) / slices)
        rows = [
            _row(f"{MIG_OFF}, one process", dedicated),
            _row(MIG_OFF, several),
            _row("MIG off, ideal sharing in time", shared),
        ]
        if set(self.loads) == set(PARVAGPU):
            rows.append(_row("ParvaGPU", [PARVAGPU[name] for name in self.loads]))
        rows.append(_row("bound: slices divided at will", divided))
        rows.append(_row("bound: whole instances, no packing", whole))
        return rows

    def without_mig(self, loads: Sequence[Load]) -> int:
        """Return the GPUs that a scenario needs with MIG off and a GPU, or several, for each model."""
        return _rounded_up(self._of_whole(loads, PROCS))

    def _of_whole(self, loads: Sequence[Load], procs: int) -> list[float]:
        """Return the whole GPUs for the rate of each service; infinite if a whole GPU does not keep its limit."""
        full = self.geometry.full.profile
        gpus = []
        for load in loads:
            best = best_settings([s for s in self._all(load, procs) if s.profile == full], load.limit_s)
            gpus.append(load.rate / best[full].rate if best else math.inf)
        return gpus

    @staticmethod
    def _fewest(service: ServiceDemand) -> int:
        sizes = [setting.profile.compute for setting in service.settings]
        chosen = fewest_slices([setting.rate for setting in service.settings], sizes, service.rate)
        return sum(count * sizes[i] for i, count in chosen.items())

    def measured(self, name: str, procs: int) -> dict[str, Any]:
        """Run the programme with everything measured, at most so many processes on a slice."""
        allocations = [allocate(self.geometry, self.services(loads, procs)) for loads in self.loads.values()]
        row = _row(name, [allocation.gpus for allocation in allocations])
        return {**row, "exact": all(allocation.exact for allocation in allocations)}

    def composed(self) -> dict[str, Any]:
        """Run ElasticBatch's configuration step for each service alone, then pack."""
        configured = [{s.name: compose(s) for s in self.services(loads)} for loads in self.loads.values()]
        return _row("each service alone, then packed", [pack(self.geometry, each).gpus for each in configured])

    def slow(self, model: str, done: tuple[int, ...]) -> Array:
        """Return `HeldOutModel.slow`, computed once."""
        key = (model, done)
        if key not in self._slow:
            self._slow[key] = self.subjects[model].slow(done)
        return self._slow[key]


def _setting(gpu: Geometry, row: Measurement) -> InstanceSetting:
    assert row.seconds is not None
    profile = Profile.parse(row.profile) if row.profile else gpu.full.profile
    return InstanceSetting(profile, row.batch, row.procs, row.seconds)


def _rounded_up(gpus: Sequence[float]) -> int:
    """Return the number of whole GPUs, at least one for each service."""
    return sum(math.ceil(count - 1e-9) if math.isfinite(count) else 1 for count in gpus)


def _row(name: str, gpus: Sequence[float]) -> dict[str, Any]:
    """Return the GPUs of each scenario; fractional bounds are rounded up for the total."""
    return {
        "name": name,
        "gpus": [round(float(count), 2) for count in gpus],
        "total": sum(math.ceil(count - 1e-9) for count in gpus),
        "sum": round(float(sum(gpus)), 2),
    }

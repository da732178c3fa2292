"""Define services to place: a model with a rate to serve and a latency limit, read from ParvaGPU's files or synthetic.

ParvaGPU's artifact has six scenarios in two files without header, one line for each, one column for each of its models
in alphabetical order; N/A if a model is not served. A batch must take less than 0.45 of the SLO (ms), its own guard:
a request may have to wait for the previous batch.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from slurm_migbatch.lab.evaluate.curves import MeasuredCurves
from slurm_migbatch.lab.evaluate.heldout import identity
from slurm_migbatch.lab.traces.files import below
from slurm_migbatch.predict.samples import Sample

GUARD: Final = 0.45
LATENCY_FILE: Final = "slo_latency.csv"
RATE_FILE: Final = "slo_req_rate.csv"
PARVAGPU: Final = "ParvaGPU"
MADE_LIMITS: Final = (1.5, 2.0, 4.0)
"""Limits of synthetic scenarios, in latencies of the largest slice at batch 8."""
MADE_RATES: Final = (0.3, 3.0)
"""Rates of synthetic scenarios, in the best throughput of the largest slice."""


@dataclass(frozen=True)
class ServiceLoad:
    """One model's load in one scenario: items per second, and the most seconds that a batch may take."""

    scenario: str
    sample: Sample
    rate: float
    limit_s: float


def services(data: Path, samples: Sequence[Sample]) -> tuple[list[ServiceLoad], str]:
    """Return the services of the scenarios in a directory, else synthetic ones; and a sentence about their origin."""
    samples = [sample for sample in samples if sample.kind == "infer" and len(sample.cells)]
    loads, why = _read(data, samples)
    if loads:
        return loads, why
    synthetic = [service for sample in samples for service in _made(sample)]
    return synthetic, f"{why}: synthetic rates and limits, from each model's largest slice"


def _read(data: Path, samples: Sequence[Sample]) -> tuple[list[ServiceLoad], str]:
    files = {path.name.lower(): path for path in below(data, "*.csv")} if data.is_dir() else {}
    if not {LATENCY_FILE, RATE_FILE} <= set(files):
        return [], "there are no scenarios in the directory"
    columns = sorted(
        (sample for sample in samples if sample.stack.endswith(f"|{PARVAGPU}")), key=lambda sample: sample.model
    )
    latency, rate = _lines(files[LATENCY_FILE]), _lines(files[RATE_FILE])
    if len(latency) != len(rate) or any(len(line) != len(columns) for line in (*latency, *rate)):
        return [], f"the scenarios in {files[LATENCY_FILE].parent} do not fit the {len(columns)} models of {PARVAGPU}"
    loads = []
    for number, (limits, rates) in enumerate(zip(latency, rate, strict=True), start=1):
        for sample, limit, wanted in zip(columns, limits, rates, strict=True):
            if limit is not None and wanted is not None:
                loads.append(ServiceLoad(f"S{number}", sample, wanted, GUARD * limit / 1e3))
    return loads, f"{len(latency)} scenarios of {PARVAGPU}; a batch may take {GUARD:g} of the SLO"


def _lines(path: Path) -> list[list[float | None]]:
    """Read the cells of a file without header; cells that are not positive numbers are None."""

    def cell(text: str) -> float | None:
        try:
            value = float(text)
        except ValueError:
            return None
        return value if 0 < value < float("inf") else None

    with path.open(encoding="utf-8", newline="") as file:
        return [[cell(text) for text in line] for line in csv.reader(file) if line]


def _made(sample: Sample) -> list[ServiceLoad]:
    curves = MeasuredCurves.of(sample)
    if len(curves) < 2:
        return []
    full = np.flatnonzero(curves.full)
    reference = float(curves.seconds[full[int(np.argmin(np.abs(np.log(curves.batch[full] / 8.0))))]])
    best = float((curves.batch[full] / curves.seconds[full]).max())
    return [
        ServiceLoad(f"limit x{limit:g}, rate x{rate:g}", sample, rate * best, limit * reference)
        for limit in MADE_LIMITS
        for rate in MADE_RATES
    ]


def models_of(loads: Sequence[ServiceLoad]) -> set[str]:
    """Return the identities of the models that are served."""
    return {identity(service.sample.model) for service in loads}

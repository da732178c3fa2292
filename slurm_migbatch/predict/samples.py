"""Group measured rows for the learner: one model, one kind of work, one GPU, one laboratory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from slurm_migbatch.predict.cells import Array, Cells, GpuSpec
from slurm_migbatch.predict.known import Known, ModelKnowledge
from slurm_migbatch.predict.llm import precision
from slurm_migbatch.profiling.measurement import SERVE, Measurement
from slurm_migbatch.values.grouping import grouped
from slurm_migbatch.workload.gpufacts import facts_of, model_of

NOISE: Final = 0.05
"""Standard deviation of a measured time's logarithm, including what the surface cannot model."""
MEMORY_NOISE: Final = 0.05
SITE: Final = "site"
"""Source of all tables that `migbatch profile run` made, at any time: this site's own software."""
OWN_TABLES: Final = "migbatch profile run"
"""Prefix of the source of such rows."""
RUNS: Final = "runs"
"""Source of rows that finished jobs reported; they include a job's other work, so they count less."""
RUNS_NOISE: Final = 0.15
SILENT: Final = "runs without a report"
"""Source of rows of jobs without reports: their items over their whole lifetime."""
SILENT_NOISE: Final = 0.5
ALONE: Final = "runs of one user beyond those of others"
"""Source of rows of runs with larger or smaller batches than those of all other users of the model: nobody confirms
them, and the curve follows them as far as they reach.
"""
ALONE_NOISE: Final = 0.3
SHORT: Final = "runs that ran out of memory"
"""Source of rows of jobs that needed more memory than their slice has; the memory of the row is less than that."""
OF_RUNS: Final = frozenset({RUNS, SILENT, ALONE, SHORT})
"""Sources of rows of finished jobs."""
_NOISES: Final = {RUNS: RUNS_NOISE, SILENT: SILENT_NOISE, ALONE: ALONE_NOISE}


@dataclass(frozen=True)
class Sample:
    """All measurements of one model by one laboratory on one GPU.

    `cells` and `logs` are the points that ran, with the logarithm of seconds per batch; `noise` their standard
    deviations. `memory_cells` and `memory_logs` (of MiB) are the points whose memory is known. `rows` and
    `memory_rows` are the rows of both, `bits` the width of their arithmetic. `failed` are the rows of one process that
    ran out of memory.
    """

    model: str
    kind: str
    gpu: GpuSpec
    stack: str
    known: Known
    rows: tuple[Measurement, ...]
    bits: float
    cells: Cells
    logs: Array
    noise: Array
    memory_rows: tuple[Measurement, ...]
    memory_cells: Cells
    memory_logs: Array
    failed: tuple[Measurement, ...] = ()

    @property
    def key(self) -> tuple[str, str, str]:
        """Key of a prediction: model, kind of work, GPU."""
        return (self.model, self.kind, self.gpu.name)


def samples_of(rows: Iterable[Measurement], knowledge: ModelKnowledge) -> list[Sample]:
    """Return the samples of a table, in a stable order. Rows that did not run give no time and are dropped.
    Servers of language models are handled in `llm.served`, and training jobs that do not take the whole model's usual
    step in `llm.trained`. Of rows in several precisions the widest counts: the curves are those of 32 bits, whatever
    precision a request gives.
    """
    rows = [_with_need(row) for row in rows if row.kind != SERVE and row.trained.usual]
    by_model = grouped(rows, lambda row: knowledge.canonical(row.model))
    gpus = _joined({name: GpuSpec.of_rows(group) for name, group in grouped(rows, lambda row: row.gpu).items()})
    known = {name: knowledge.of(name, group) for name, group in by_model.items()}
    groups: dict[tuple[str, str, str, str], list[Measurement]] = {}
    for name, group in by_model.items():
        for row in group:
            gpu = gpus[row.gpu]
            source = RUNS if row.source in OF_RUNS else SITE if row.source.startswith(OWN_TABLES) else row.source
            groups.setdefault((name, row.kind, gpu.name, f"{gpu.name}|{source}"), []).append(row)
    return [
        _sample(name, kind, gpus[group[0].gpu], stack, known[name], group)
        for (name, kind, _, stack), group in sorted(groups.items())
    ]


def _joined(gpus: Mapping[str, GpuSpec]) -> dict[str, GpuSpec]:
    """Return the GPUs, with one description of each unlisted one under all its names: its exact memory follows from the
    site's short name, but not from the driver's name and slices.
    """
    short = [gpu for name, gpu in gpus.items() if name == gpu.name and facts_of(name) is None]

    def joined(gpu: GpuSpec) -> GpuSpec:
        same = [other for other in short if model_of(other.name) == model_of(gpu.name)]
        return min(same, key=lambda other: abs(other.memory_gb - gpu.memory_gb), default=gpu)

    return {name: gpu if name == gpu.name or facts_of(name) else joined(gpu) for name, gpu in gpus.items()}


def _with_need(row: Measurement) -> Measurement:
    """Return a measured row without its memory if it ran out of memory: what was in use then was not enough."""
    ran = row.ran or row.source in OF_RUNS or row.memory_mib is None
    return row if ran else replace(row, memory_mib=None)


def bits_of(row: Measurement) -> float:
    """Return the bits of a row's arithmetic: 32 if it states no precision, 0 for an unknown word."""
    if row.precision in ("", "auto"):
        return 32.0
    if row.precision == "tf32":
        return 19.0
    found = precision.plain(row.precision) if row.precision in precision.DTYPES else precision.quantized(row.precision)
    return 0.0 if found is None else found.bits


def _sample(model: str, kind: str, gpu: GpuSpec, stack: str, known: Known, rows: Sequence[Measurement]) -> Sample:
    bits = max((bits_of(row) for row in rows if row.ran), default=0.0)
    rows = [row for row in rows if bits_of(row) >= bits]
    ran = [row for row in rows if row.seconds is not None]
    weighed = [row for row in rows if row.memory_mib is not None]
    return Sample(
        model,
        kind,
        gpu,
        stack,
        known,
        tuple(ran),
        bits,
        Cells.of_rows(ran, gpu, known),
        np.array([np.log(row.seconds or 1.0) for row in ran]),
        np.array([_NOISES.get(row.source, NOISE) for row in ran]),
        tuple(weighed),
        Cells.of_rows(weighed, gpu, known),
        np.array([np.log(row.memory_mib or 1.0) for row in weighed]),
        tuple(row for row in rows if not row.ran and row.memory_mib is None and row.procs == 1),
    )

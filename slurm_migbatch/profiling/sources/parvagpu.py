"""Import ParvaGPU (SC24): inference on slices of an A100 80GB, one to five processes in each, from its artifact.

It reads the files of `prof_data/`, one for each model, and the same data in one table with a column `model`.

- The throughput is that of one process; here it is multiplied by the processes.
- The latency is rounded to whole milliseconds, which is up to half of a short one; batch / throughput is the same mean
  to five digits.
- Rows of zeros did not run, mostly for lack of memory. But its runtime never enters `torch.no_grad()` and so keeps what
  only training needs; ResNet-50 ends at batch 32 on 10 GB. As memory limits of inference the zeros would be far
  off, so they are dropped.
- Its "bert" is BERT-large with 128 tokens. All images, those for Inception too, have 224 pixels (the runtime script).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from slurm_migbatch.profiling.csvfile import LineError, Problems, header, number, read, whole
from slurm_migbatch.profiling.measurement import Measurement
from slurm_migbatch.profiling.sources.laboratory import A100_80, Laboratory, Reading, known
from slurm_migbatch.workload.refusal import show

GPU = "a100-80gb"
PIXELS, TOKENS = 224, 128
_STACKED = frozenset({"model", "gpc", "batch", "procs", "throughput_per_s", "latency_s"})
_RAW = {"mig instance": "gpc", "batch size": "batch", "workload number": "procs", "throughput": "throughput_per_s"}
_BY_SLICES = {mig_slice.compute: name for name, mig_slice in A100_80.items()}
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


def _read(_root: Path, files: Sequence[Path], problems: Problems) -> Reading:
    rows: list[Measurement] = []
    zeros: set[tuple[str, str, int, int]] = set()
    for path in files:
        stacked = "model" in header(path)
        for _, row in read(path, problems, partial(_row, None if stacked else path.name.partition(".")[0])):
            if row.ran:
                rows.append(row)
            else:
                zeros.add((row.model, row.profile, row.batch, row.procs))
    notices = []
    if zeros:
        notices.append(
            f"{len(zeros)} points of ParvaGPU that did not run are skipped: they ran without no_grad and do not limit "
            "inference"
        )
    return Reading(rows, notices)


_ITS_OWN = {"bert": "bert-large"}
"""Names that usually mean another model."""


def _row(model: str | None, cells: dict[str, str]) -> Measurement:
    cells = {_RAW.get(name, name): text for name, text in cells.items()}
    name = (cells["model"] if model is None else model).strip().lower()
    if not _NAME.fullmatch(name):
        raise LineError(f"'{show(name)}' is not a model name")
    gpc, batch, procs = (whole(cells, column) for column in ("gpc", "batch", "procs"))
    if gpc not in _BY_SLICES:
        raise LineError(f"gpc must be one of {', '.join(map(str, _BY_SLICES))}, not {gpc}")
    rate = number(cells, "throughput_per_s")
    facts = known(_ITS_OWN.get(name, name))
    size = (TOKENS if facts.unit == "tok" else PIXELS) if facts else None
    mig_slice = A100_80[_BY_SLICES[gpc]]
    return Measurement(
        gpu=GPU,
        model=facts.name if facts else name,
        family=facts.family if facts else "",
        kind="infer",
        profile=_BY_SLICES[gpc],
        compute_slices=mig_slice.compute,
        memory_slices=mig_slice.memory,
        sm_count=mig_slice.sms,
        batch=batch,
        input_size=size,
        procs=procs,
        throughput_per_s=rate * procs or None,
        latency_s=batch / rate if rate else None,
        params=facts.params_m * 1e6 if facts else None,
        flops_per_item=facts.operations(size) if facts and size else None,
        source="ParvaGPU",
    )


LABORATORY = Laboratory("ParvaGPU", (_STACKED, frozenset({*_RAW, "latency"})), _read)

"""Measurements in closed form from host time and time per item by model, exact or with a little noise."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from slurm_migbatch.predict.known import ModelKnowledge
from slurm_migbatch.predict.samples import Sample, samples_of
from slurm_migbatch.profiling.measurement import Measurement
from slurm_migbatch.profiling.table import write

GPU = "a100-80gb"
SLICES = {"1g.10gb": (1, 1), "2g.20gb": (2, 2), "3g.40gb": (3, 4), "7g.80gb": (7, 8)}
BATCHES = (1, 4, 8, 16, 32)
MODELS = {  # milliseconds: of the host, of an item on seven slices
    "resnet50": (7.0, 0.5),
    "resnet101": (13.0, 0.8),
    "densenet121": (18.0, 0.6),
    "vgg16": (1.5, 0.9),
    "bert-base": (9.0, 1.1),
}
Form = Callable[[float, float, int, float], float]


def sharp(host: float, item: float, batch: int, share: float) -> float:
    """Return the larger of host time and device time."""
    return max(host, item * batch / share)


def added(host: float, item: float, batch: int, share: float) -> float:
    """Return the sum of host time and device time."""
    return host + item * batch / share


def proportional(host: float, item: float, batch: int, share: float) -> float:
    """Return the device time alone."""
    return item * batch / share


def laboratory(
    form: Form = sharp,
    *,
    noise: float = 0.0,
    models: Sequence[str] = tuple(MODELS),
    batches: Sequence[int] = BATCHES,
    procs: Sequence[int] = (1,),
    kind: str = "infer",
    source: str = "here",
    memory: bool = False,
) -> list[Measurement]:
    chance = random.Random(4)
    rows = []
    for model in models:
        host, item = (ms / 1e3 for ms in MODELS[model])
        for profile, (slices, parts) in SLICES.items():
            for batch in batches:
                for count in procs:
                    seconds = form(host, item * count, batch, slices / 7) * math.exp(noise * chance.gauss(0, 1))
                    rows.append(
                        Measurement(
                            gpu=GPU,
                            model=model,
                            kind=kind,
                            profile=profile,
                            compute_slices=slices,
                            memory_slices=parts,
                            sm_count=14 * slices,
                            batch=batch,
                            procs=count,
                            latency_s=seconds,
                            throughput_per_s=batch * count / seconds,
                            memory_mib=count * (900.0 + 40 * batch) if memory else None,
                            source=source,
                        )
                    )
    return rows


def samples(rows: Sequence[Measurement]) -> list[Sample]:
    return samples_of(rows, ModelKnowledge())


def save(rows: Sequence[Measurement], folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    with (folder / "table.csv").open("w", encoding="utf-8", newline="") as file:
        write(rows, file)
    return folder

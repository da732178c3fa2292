"""Measurements with known true parameters: models with drawn parameters, measured on the slices of one GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from slurm_migbatch.predict.cells import Cells, GpuSpec
from slurm_migbatch.predict.facts import BUILT_IN
from slurm_migbatch.predict.known import LISTED, Known, from_facts
from slurm_migbatch.predict.surface import MEMORY, TIME
from slurm_migbatch.profiling.measurement import Measurement
from slurm_migbatch.workload.gpufacts import facts_of

PROFILES = (
    ("1g.10gb", 1, 1, 14),
    ("2g.20gb", 2, 2, 28),
    ("3g.40gb", 3, 4, 42),
    ("4g.40gb", 4, 4, 56),
    ("7g.80gb", 7, 8, 98),
)
NAME = "NVIDIA A100-SXM4-80GB"
A100 = GpuSpec("a100-80gb", facts_of(NAME), 80)  # type: ignore[arg-type]
FACTS = {facts.name: facts for facts in BUILT_IN}
MODELS = ("resnet50", "resnet101", "densenet121", "mobilenet-v2", "vgg16", "bert-base", "bert-large", "vit-b-16")


def known(name: str) -> Known:
    return from_facts(FACTS[name])


def truth(name: str, seed: int, shift: float = 0.0) -> np.ndarray:
    """Return the parameters of one model, with a time per item of `exp(shift)` times what physics predicts."""
    rng = np.random.default_rng([seed, *name.encode()])
    theta = TIME.expected(known(name), A100.facts, "infer") + 0.3 * TIME.spread(LISTED) * rng.standard_normal(9)
    theta[1] += shift
    return theta


def measure(
    name: str,
    theta: np.ndarray,
    *,
    noise: float = 0.02,
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128),
    procs: tuple[int, ...] = (1,),
    source: str = "lab",
) -> list[Measurement]:
    """Return measurements of one model at every point of the grid."""
    model = known(name)
    rng, of_memory = (np.random.default_rng([seed, *name.encode()]) for seed in (1, 2))
    memory = MEMORY.expected(model, A100.facts, "infer")
    rows = []
    for profile, compute, slices, sms in PROFILES:
        for batch in batches:
            for count in procs:
                row = Measurement(
                    NAME, name, model.family, "infer", profile, compute, slices, sms, batch, model.reference, count,
                    source=source,
                )  # fmt: skip
                cell = Cells.of_rows([row], A100, model)
                seconds = float(np.exp(TIME.value(theta, cell)[0][0] + noise * rng.standard_normal()))
                # never exactly the expected figure, for which the search for a fit finds no end
                mib = float(np.exp(MEMORY.value(memory, cell)[0][0] + 0.01 * of_memory.standard_normal()))
                rate = batch * count / seconds
                rows.append(replace(row, latency_s=seconds, throughput_per_s=rate, memory_mib=mib))
    return rows


def table(shift: float = 0.4) -> list[Measurement]:
    """Return measurements of several models."""
    return [row for name in MODELS for row in measure(name, truth(name, 0, shift))]

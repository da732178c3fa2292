"""What no GPU can do: measured rows that are faster than their slice computes or reads, or hold less than the weights.

Every bound takes the side of the row, so that what is refused is wrong and not only surprising: the rate of the GPU's
data sheet with structured sparsity in the narrowest type that the row may be of, weights in the fewest bits, caches
that hold as much of them as any GPU's does, and as many tokens of one pass as speculative decoding is used with. A row
of a language model is in the precision that it tells, or else the model's name. Of
models and GPUs of which nothing public is known there is no bound.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.predict.cells import GpuSpec, shares_of
from slurm_migbatch.predict.known import ModelKnowledge, from_facts
from slurm_migbatch.predict.llm import names, precision
from slurm_migbatch.predict.llm.architecture import Architecture
from slurm_migbatch.predict.llm.memory import MIB, weights_mib
from slurm_migbatch.predict.llm.precision import Precision
from slurm_migbatch.predict.llm.speed import weights_read_mib
from slurm_migbatch.predict.llm.workload import OLLAMA
from slurm_migbatch.profiling.measurement import SERVE, Measurement
from slurm_migbatch.workload.gpufacts import GpuModelFacts, facts_of

SPARSE: Final = 2.0
"""How many times faster structured sparsity makes products."""
FEWEST_BITS: Final = 4.0
"""Of a weight whose precision is not told."""
NARROW: Final = 4.0
"""How many times the dense 16-bit rate the narrowest type reaches (4 bits)."""
CACHED_MIB: Final = 160.0
"""Of weights, what may stay in the GPU's cache from one batch to the next: more than any GPU's L2 holds."""
AT_ONCE: Final = 8.0
"""Tokens of a sequence that one pass may make, by speculative decoding."""
TRAINING: Final = 2.0
"""Operations of a step against those of a forward pass, at least: adapters need no gradients of the weights."""
ROOM: Final = 1.1
"""How far beyond the memory in its profile's name a slice may hold something: names are rounded."""
PARTLY: Final = frozenset({"llamacpp", "ollama"})
"""Engines that may keep a part of the weights on the host."""


@dataclass(frozen=True)
class _Model:
    """What is known of a model: parameters, operations of a forward pass over an item of the row's size, and what it
    is made of; None: not known."""

    params: float | None
    operations: float | None
    architecture: Architecture | None = None


def impossible(row: Measurement, knowledge: ModelKnowledge) -> str:
    """Say why a row cannot have been measured; "" where it can."""
    facts = facts_of(row.gpu)
    if facts is None:
        return ""
    gpu = GpuSpec.of_rows([row])
    sm, memory = shares_of(row, gpu)
    where = row.profile or row.gpu
    model = _model(row, knowledge)
    bits = _bits(row)
    return (
        _held(row, model, bits, gpu, where)
        or _computed(row, model, bits, facts.tflops * 1e12 * sm, where)
        or _read(row, model, bits, facts, memory, where)
    )


def possible(rows: Iterable[Measurement], knowledge: ModelKnowledge) -> list[Measurement]:
    """Return the rows that can have been measured."""
    return [row for row in rows if not impossible(row, knowledge)]


def _model(row: Measurement, knowledge: ModelKnowledge) -> _Model:
    facts = knowledge.facts.get(knowledge.canonical(row.model))
    if facts is not None and row.kind != SERVE:
        known = from_facts(facts)
        operations = None if row.input_size is None else known.flops * known.work(row.input_size)
        return _Model(known.params, operations)
    found = names.resolve(row.model)
    if found is not None and found.how == "public" and found.architecture.kind != "plain":
        made = found.architecture
        passed = row.output if row.kind == SERVE else row.input_size
        return _Model(float(made.parameters), None if passed is None else made.operations(float(passed)), made)
    return _Model(row.params, row.flops_per_item)


def _bits(row: Measurement) -> Precision | None:
    """Return the precision that a row or the name of its language model tells; None: it may be any."""
    word = "qlora" if row.trained.method == "qlora" else row.precision
    if not word:
        found = names.resolve(row.model)
        if found is None or found.how != "public" or found.architecture.kind in ("plain", "encoder"):
            return None
        return precision.quantised(OLLAMA) if row.engine == "ollama" else found.precision
    return precision.plain(word) if word in ("bf16", "fp16", "fp32") else precision.quantised(word)


def _least_mib(model: _Model, bits: Precision | None) -> float | None:
    """Return the MiB of the weights, in the fewest bits that they may have."""
    if bits is not None and model.architecture is not None:
        return weights_mib(model.architecture, bits)
    each = FEWEST_BITS if bits is None else min(bits.bits, bits.embedding_bits)
    return None if model.params is None else model.params * each / 8 / MIB


def _held(row: Measurement, model: _Model, bits: Precision | None, gpu: GpuSpec, where: str) -> str:
    if row.memory_mib is None:
        return ""
    most = (Profile.parse(row.profile).memory_gb if row.profile else gpu.memory_gb) * 1024
    if most and row.memory_mib > ROOM * most:
        return f"memory_mib {row.memory_mib:.4g} is more than {where} has"
    least = _least_mib(model, bits)
    if least is not None and row.engine not in PARTLY and row.memory_mib < least * row.procs:
        need = f"{least * row.procs:.4g}"
        told = f"memory_mib {row.memory_mib:.4g} is less than the weights of {row.model} ({need})"
        return told + ("" if bits is None or row.precision else f" in {bits.name}: specify the precision if it differs")
    return ""


def _computed(row: Measurement, model: _Model, bits: Precision | None, flops: float, where: str) -> str:
    if row.rate is None or model.operations is None:
        return ""
    wide = bits is not None and bits.bits >= 16
    peak = flops * SPARSE * (1.0 if wide else NARROW)
    needed = model.operations * (TRAINING if row.kind == "train" else 1.0)
    rate = _fastest(row)
    if rate * needed <= peak:
        return ""
    return (
        f"{rate:.4g} items/s of {row.model} would be {rate * needed / 1e12:.3g} TFLOPS, and {where} does at most "
        f"{peak / 1e12:.3g} in any type"
    )


def _fastest(row: Measurement) -> float:
    """Return the items a second by whichever figure tells more of them."""
    told = [row.throughput_per_s or 0.0, row.batch * row.procs / row.latency_s if row.latency_s else 0.0]
    return max(told)


def _read(
    row: Measurement, model: _Model, bits: Precision | None, facts: GpuModelFacts, memory: float, where: str
) -> str:
    """Every batch reads all weights; a token of a served model those that one sequence visits."""
    speed = facts.bandwidth_gbs * 1e9 * memory
    if row.kind == SERVE:
        if row.tpot_s is None or model.architecture is None:
            return ""
        kept = bits or Precision("", FEWEST_BITS, FEWEST_BITS)
        read, seconds, what = weights_read_mib(model.architecture, kept, 1.0), AT_ONCE * row.tpot_s, "tpot_s"
        told = row.tpot_s
    else:
        least = _least_mib(model, bits)
        rate = _fastest(row)
        if least is None or rate <= 0:
            return ""
        # operations that visit a part of the weights only are those of experts
        share = 1.0 if model.architecture is None else model.architecture.active / model.architecture.parameters
        read, seconds, what = least * min(share, 1.0), row.batch * row.procs / rate, "seconds of a batch"
        told = seconds
    needed = max(read - CACHED_MIB, 0.0) * MIB / speed
    if seconds >= needed:
        return ""
    least_s = needed * told / seconds
    return f"{what} {told:.3g} is too short to read the weights of {row.model} on {where} (at least {least_s:.3g})"

"""Reject measured rows that no GPU can produce: faster than the slice can compute or read, or smaller than the weights.

Every bound favours the row, so only impossible rows are rejected: the data-sheet rate with structured sparsity in the
narrowest type that the row may use, weights in the fewest bits, caches that hold as large a part of them as any GPU's
does, and as many tokens in one pass as speculative decoding produces. The precision of a language model's row is the
one it names, or else the one in the model's name, but at most 16 bits: whoever states none may have cast the model.
Parameters that a row states count if they are fewer than the model's. A row without an input size counts at its own
operations per item, or else at the model's usual size, of a generative model at one token. Models and GPUs without
public specifications have no bound.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.predict.cells import GpuSpec, shares_of
from slurm_migbatch.predict.known import REFERENCE, ModelKnowledge, from_facts
from slurm_migbatch.predict.llm import names, precision
from slurm_migbatch.predict.llm.architecture import Architecture
from slurm_migbatch.predict.llm.memory import MIB, weights_mib
from slurm_migbatch.predict.llm.precision import Precision
from slurm_migbatch.predict.llm.speed import weights_read_mib
from slurm_migbatch.predict.llm.workload import OLLAMA
from slurm_migbatch.profiling.measurement import CPU, LEAST_COUNT, SERVE, Measurement
from slurm_migbatch.workload.gpufacts import GpuModelFacts, facts_of, memory_gb_of

SPARSE: Final = 2.0
"""Speedup of matrix products by structured sparsity."""
FEWEST_BITS: Final = 4.0
"""Fewest bits of a weight of unknown precision."""
UNSTATED_BITS: Final = 16.0
"""Most bits of a weight of a model that is published in more, if the row does not state its precision."""
PART: Final = 0.95
"""Share of a model's parameters below which a row's own number is that of a part, such as an encoder alone."""
NARROW: Final = 4.0
"""Speedup of the narrowest type (4 bits) over the dense 16-bit rate."""
CACHED_MIB: Final = 160.0
"""MiB of the weights that may stay in the GPU's cache between batches: more than any GPU's L2 holds."""
AT_ONCE: Final = 8.0
"""Tokens of one sequence that a single pass may produce with speculative decoding."""
TRAINING: Final = 2.0
"""Operations of a training step in forward passes, at least: adapters need no gradients of the weights."""
CONTEXT: Final = 64.0
"""MiB of the smallest context of CUDA: every process on a GPU has more in use."""
MEMORY_MARGIN: Final = 1.1
"""Tolerance on the memory in a profile's name, which is rounded."""
WHOLE: Final = 0.75
"""Share of a listed GPU's SMs from which a row may be one of the whole GPU: some variants have fewer."""
_TIMES: Final = r"[x*\N{MULTIPLICATION SIGN}]"
SEVERAL: Final = re.compile(
    rf"^([0-9]{{1,4}})(?: ?{_TIMES} ?| )(?=[a-z])|[ (]([0-9]{{1,4}}) ?{_TIMES}(?=[ )]|$)|"
    rf"(?:[ (]|(?<=[0-9b])){_TIMES} ?(2|4|8|16)[)]?$|(?<![0-9a-z])([0-9]{{1,2}})(?:-gpu| ?gpus)\b",
    re.IGNORECASE,
)
"""The number of GPUs with a name: `8x NVIDIA H100`, `2 A100`, `DGX (8x H100)`, `H100-SXM-80GBx8`, `H100 (8 GPUs)`."""
PARTLY: Final = frozenset({"llamacpp", "ollama"})
"""Engines that can keep part of the weights on the host."""


@dataclass(frozen=True)
class _Model:
    """Public specifications of a model: parameters, operations of a forward pass over an item of the row's size, and
    architecture; None: unknown. `usual_size`: the input size that is assumed because the row states none.
    """

    params: float | None
    operations: float | None
    architecture: Architecture | None = None
    usual_size: int | None = None


def impossible(row: Measurement, knowledge: ModelKnowledge) -> str:
    """Return why a row is impossible, "" if it is possible."""
    facts = facts_of(row.gpu)
    if unnamed := _unnamed(row, facts):
        return unnamed
    if facts is None:
        return ""
    gpu = GpuSpec.of_rows([row])
    sm, memory = shares_of(row, gpu)
    where = row.profile or row.gpu
    model = _model(row, knowledge)
    bits = precision_of(row)
    return (
        _sliced(row)
        or _held(row, model, bits, gpu, where)
        or _computed(row, model, bits, facts.tflops * 1e12 * sm, where)
        or _read(row, model, bits, facts, memory, where)
    )


def _unnamed(row: Measurement, facts: GpuModelFacts | None) -> str:
    """Return that a row is of several GPUs, or of a part of one but names no profile: it would count as one of the
    whole GPU.
    """
    several = SEVERAL.search(row.gpu)
    if several is not None and int(several[several.lastindex or 0]) > 1:
        return f"{row.gpu} is more than one GPU: leave out what ran on several"
    if row.profile or row.gpu == CPU:
        return ""
    parts = {"compute_slices": (row.compute_slices, 7 if facts is None else facts.compute_slices)}
    if facts is not None and facts.sm_count:
        parts["sm_count"] = row.sm_count, math.ceil(WHOLE * facts.sm_count)
    for name, (count, whole) in parts.items():
        if count is not None and count < whole:
            return f"{name} {count} is a part of {row.gpu}, and profile is empty: name the slice there (3g.40gb)"
    return ""


def _sliced(row: Measurement) -> str:
    """Compare the profile with the memory in the GPU's name."""
    memory_gb = memory_gb_of(row.gpu)
    if not row.profile or not memory_gb or Profile.parse(row.profile).memory_gb <= MEMORY_MARGIN * memory_gb:
        return ""
    return f"{row.profile} is more than {row.gpu} has: write the GPU's name with its memory (a100-80gb)"


def _model(row: Measurement, knowledge: ModelKnowledge) -> _Model:
    stated = row.params if row.params is not None and row.params >= LEAST_COUNT else math.inf
    facts = knowledge.facts.get(knowledge.canonical(row.model))
    known = None if facts is None or row.kind == SERVE else from_facts(facts)
    if known is not None and stated >= PART * known.params:
        usual = None if known.family == "decoder" else known.reference
        operations, usual = _operations(row, lambda size: known.flops * known.work(size), usual)
        return _Model(known.params, operations, usual_size=usual)
    resolved = names.resolve(row.model)
    whole = resolved is not None and stated >= PART * resolved.architecture.parameters
    if resolved is not None and whole and resolved.how == "public" and resolved.architecture.kind != "plain":
        architecture = resolved.architecture
        usual = REFERENCE["tok"] if architecture.kind == "encoder" else None
        if row.kind == SERVE:
            operations = None if row.output is None else architecture.operations(float(row.output))
        else:
            operations, usual = _operations(row, architecture.operations, usual)
        return _Model(float(architecture.parameters), operations, architecture, usual)
    return _Model(row.params, row.flops_per_item)


def _operations(
    row: Measurement, of_size: Callable[[float], float], usual: int | None
) -> tuple[float | None, int | None]:
    """Return the operations of an item, and the input size if the usual one had to be assumed.

    Without a usual size, an item may be one generated token.
    """
    if row.input_size is not None:
        return of_size(float(row.input_size)), None
    if row.flops_per_item is not None and row.flops_per_item >= LEAST_COUNT:
        return row.flops_per_item, None
    return of_size(float(usual or 1)), usual


def precision_of(row: Measurement) -> Precision | None:
    """Return the precision that a row or its model's name states; None: any."""
    stated = "qlora" if row.trained.method == "qlora" else row.precision
    if not stated:
        resolved = names.resolve(row.model)
        if resolved is None or resolved.how != "public" or resolved.architecture.kind in ("plain", "encoder"):
            return None
        if row.engine == "ollama":
            return precision.quantized(OLLAMA)
        return resolved.precision if resolved.precision.bits <= UNSTATED_BITS else precision.plain("bf16")
    return precision.plain(stated) if stated in precision.UNQUANTIZED else precision.quantized(stated)


def _least_mib(model: _Model, bits: Precision | None) -> float | None:
    """Return the MiB of the weights, in the fewest bits possible."""
    if bits is not None and model.architecture is not None:
        return weights_mib(model.architecture, bits)
    bits_each = FEWEST_BITS if bits is None else min(bits.bits, bits.embedding_bits)
    return None if model.params is None else model.params * bits_each / 8 / MIB


def _held(row: Measurement, model: _Model, bits: Precision | None, gpu: GpuSpec, where: str) -> str:
    if row.memory_mib is None:
        return ""
    capacity = (Profile.parse(row.profile).memory_gb if row.profile else gpu.memory_gb) * 1024
    if capacity and row.memory_mib > MEMORY_MARGIN * capacity:
        return f"memory_mib {row.memory_mib:.0f} is more than {where} has"
    if capacity and row.memory_mib in (capacity, capacity / 1.024):
        return f"memory_mib {row.memory_mib:.0f} is all that {where} has, not what was in use"
    least = _least_mib(model, bits)
    if least is not None and row.engine not in PARTLY and row.memory_mib < least * row.procs:
        need = f"{least * row.procs:.0f}"
        error = f"memory_mib {row.memory_mib:.0f} is less than the weights of {row.model} ({need})"
        return error + (
            "" if bits is None or row.precision else f" in {bits.name}: specify the precision if it differs"
        )
    if row.memory_mib < CONTEXT:
        return f"memory_mib {row.memory_mib:g} is less than any process has in use on a GPU: it counts MiB, not GiB"
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
    size, advice = model.usual_size, ""
    if size is not None:
        advice = f", at input_size {size}: specify the input_size if it differs"
    return (
        f"{rate:.4g} items/s of {row.model} would be {rate * needed / 1e12:.3g} TFLOPS, and {where} does at most "
        f"{peak / 1e12:.3g} in any type{advice}"
    )


def _fastest(row: Measurement) -> float:
    """Return items per second by the larger of the two figures."""
    rates = [row.throughput_per_s or 0.0, row.batch * row.procs / row.latency_s if row.latency_s else 0.0]
    return max(rates)


def _read(
    row: Measurement, model: _Model, bits: Precision | None, facts: GpuModelFacts, memory: float, where: str
) -> str:
    """Check memory bandwidth: every batch reads all weights; a token of a served model reads those that one sequence
    uses.
    """
    speed = facts.bandwidth_gbs * 1e9 * memory
    if row.kind == SERVE:
        if row.tpot_s is None or model.architecture is None:
            return ""
        weights = bits or Precision("", FEWEST_BITS, FEWEST_BITS)
        read, seconds, figure = weights_read_mib(model.architecture, weights, 1.0), AT_ONCE * row.tpot_s, "tpot_s"
        measured_s = row.tpot_s
    else:
        least = _least_mib(model, bits)
        rate = _fastest(row)
        if least is None or rate <= 0:
            return ""
        # operations that use only a part of the weights are those of experts
        share = 1.0 if model.architecture is None else model.architecture.active / model.architecture.parameters
        read, seconds, figure = least * min(share, 1.0), row.batch * row.procs / rate, "seconds of a batch"
        measured_s = seconds
    needed = max(read - CACHED_MIB, 0.0) * MIB / speed
    if seconds >= needed:
        return ""
    least_s = needed * measured_s / seconds
    return (
        f"{figure} {measured_s:.3g} is too short to read the weights of {row.model} on {where} (at least {least_s:.3g})"
    )

"""Compute the memory that a workload needs: weights, cache, optimizer states, activations, runtime.

Training keeps 16 bytes per parameter with AdamW in mixed precision: weights and gradients at 2, a master copy and two
moments at 4 each (ZeRO, arXiv 1910.02054, section 3.1). Activations are what PyTorch keeps for the backward pass of
each layer with memory-efficient attention (after arXiv 2205.05198, section 4, for gated feed-forwards and RMS norms in
32 bits), or, with activation checkpointing, those of one layer and the input of each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from slurm_migbatch.predict.llm import precision
from slurm_migbatch.predict.llm.architecture import Architecture
from slurm_migbatch.predict.llm.precision import Precision
from slurm_migbatch.predict.llm.workload import USUAL_RANK, Serving, Training, Workload
from slurm_migbatch.values.figures import gib

MIB: Final = 2**20
CONTEXT_MIB: Final = 600.0
"""CUDA's context, its libraries and an engine's own buffers: with the activations of Llama-3.1-8B they make up the 0.8
GiB that vLLM reports besides weights and cache.
"""
TRAINER_MIB: Final = 1024.0
"""The same for a trainer, with the workspaces of matrix products."""
STEP_TOKENS: Final = 2048
LARGE_STEP_TOKENS: Final = 8192
LARGE_MIB: Final = 70 * 1024
"""Most tokens that vLLM passes at once (max_num_batched_tokens), the larger number on GPUs of 70 GiB and above."""
LLAMA_CPP: Final = ("llamacpp", "ollama")
LLAMA_CPP_TOKENS: Final = 512
"""Tokens that llama.cpp passes at once, with logits of 32 bits for each of them (its compute buffer)."""
LLAMA_CPP_FREE_MIB: Final = 1024.0
"""What llama.cpp leaves free (--fit-target): it keeps layers in the host's memory otherwise."""
LLAMA_CPP_SEEN: Final = 0.25
"""Share of the largest image of Qwen's models that llama.cpp passes (clip.cpp: 4096 of its 16384 tokens)."""
SGLANG: Final = ((20, 2048, 8), (35, 2048, 24), (60, 4096, 32), (160, 8192, 256), (10**6, 16384, 512))
"""SGLang's defaults below this many GiB: tokens of a chunk, sequences of the largest CUDA graph."""
STATES: Final[Mapping[str, float]] = MappingProxyType(
    {"adamw": 8.0, "adam": 8.0, "adamw_8bit": 2.0, "adafactor": 0.1, "lion": 4.0, "sgd": 0.0, "sgd_momentum": 4.0}
)
"""Bytes of optimizer state per trained parameter."""
LOGIT_BYTES: Final = 12
"""Bytes per logit in training: 16 bits, 32 bits for the loss, and both gradients."""
SCORE_BYTES: Final = 12
"""Bytes per score of T5's encoder, whose only attention in transformers keeps them, their positions and their softmax,
in 32 bits.
"""
LOOKED_UP_BITS: Final = 7.1
"""Least bits of embeddings of each layer in GGUF: files of Gemma 4 E2B without its encoders have 2.99 GB in Q2_K and
3.43 GB in Q4_K_M.
"""
DOUBT: Final = 0.25
"""Half of the interval around estimates (activations and runtime), as a share of them."""


@dataclass(frozen=True)
class Need:
    """MiB that a workload takes on a slice, the share of the slice that it may fill, and the MiB that it leaves."""

    weights: float
    cache: float
    states: float
    activations: float
    runtime: float
    share: float
    free: float = 0.0

    @property
    def used(self) -> float:
        """MiB in use."""
        return self.weights + self.cache + self.states + self.activations + self.runtime

    @property
    def slice_mib(self) -> int:
        """Memory in MiB of the smallest slice that holds it."""
        return math.ceil(max(self.used / self.share, self.used + self.free))

    @property
    def doubt(self) -> float:
        """Uncertainty of the need in MiB, either way."""
        return DOUBT * (self.activations + self.runtime)

    @property
    def parts(self) -> str:
        """Parts of the need in words."""
        named = {
            "weights": self.weights, "KV cache": self.cache, "gradients and optimizer": self.states,
            "activations": self.activations, "runtime": self.runtime,
        }  # fmt: skip
        parts = ", ".join(f"{gib(mib)} {name}" for name, mib in named.items() if mib >= 5)
        return f"{parts}; {self.share:.0%} of the slice usable"


def weights_mib(architecture: Architecture, kept: Precision) -> float:
    """Return the MiB of a model's weights; parts that a quantization leaves out count 16 bits."""
    if kept.name == precision.OF_EXPERTS and architecture.routed:
        plain = architecture.parameters - architecture.routed
        return (plain * 16.0 + architecture.routed * kept.bits) / 8 / MIB
    if architecture.kind == "plain" or kept.bits == kept.embedding_bits:
        return architecture.parameters * kept.bits / 8 / MIB + widened_mib(architecture, kept)
    body = architecture.body - architecture.extra
    return (body * kept.bits + (architecture.embedding + architecture.extra) * kept.embedding_bits) / 8 / MIB


def widened_mib(architecture: Architecture, kept: Precision) -> float:
    """Return the MiB that a quantization adds back because GGUF keeps encoders of images and sound in 16 bits, and
    embeddings of each layer in LOOKED_UP_BITS at least.
    """
    if kept.bits != kept.embedding_bits:
        return 0.0
    widened = architecture.tower * max(16.0 - kept.bits, 0.0)
    return (widened + architecture.looked_up * max(LOOKED_UP_BITS - kept.bits, 0.0)) / 8 / MIB


def need_of(workload: Workload, slice_mib: int) -> Need:
    """Return what a workload needs on a slice of this size."""
    if workload.training is not None:
        return _training(workload, workload.training)
    return _serving(workload, workload.served, slice_mib)


def _serving(workload: Workload, serving: Serving, slice_mib: int) -> Need:
    architecture, weights = workload.architecture, weights_mib(workload.architecture, workload.precision)
    if architecture.kind == "plain":
        return Need(weights, 0.0, 0.0, workload.item_mib * serving.concurrency, CONTEXT_MIB, serving.share)
    values = max(serving.concurrency * workload.cache_values(serving.length), workload.cache_values(serving.reserve))
    cache = values * serving.cache_bits / 8 / MIB
    longest = serving.length if architecture.kind == "encoder" else max(serving.input, architecture.source)
    all_tokens = serving.concurrency * longest
    if serving.engine in LLAMA_CPP:
        tokens = LLAMA_CPP_TOKENS
    elif serving.engine == "transformers" or architecture.kind in ("encoder", "both"):
        tokens = all_tokens
    else:
        tokens = LARGE_STEP_TOKENS if slice_mib >= LARGE_MIB else STEP_TOKENS
    width, inner, keys = architecture.width, architecture.query_width, 2 * architecture.key_width
    bytes_each = workload.precision.bits / 8 if workload.precision.bits > 16 else 2.0
    values_per_token = 2 * _passed(architecture) + 4 * width + inner + keys + architecture.scored(longest)
    logits = 6 * architecture.logits * serving.concurrency
    if serving.engine in LLAMA_CPP:
        logits = 4 * architecture.logits * LLAMA_CPP_TOKENS
    scores = SCORE_BYTES * architecture.heads * longest * all_tokens if architecture.unbounded else 0
    activations = (tokens * values_per_token * bytes_each + scores + logits) / MIB
    # servers make room for the largest image or sound at their start; it is read before the text
    seen = architecture.seen_mib * (LLAMA_CPP_SEEN if serving.engine in LLAMA_CPP else 1.0)
    if serving.engine == "sglang":
        reserve = sglang_reserve_mib(slice_mib) + seen if serving.share == 1.0 else 0.0
        return Need(weights, cache, 0.0, 0.0, reserve, serving.share)
    free = LLAMA_CPP_FREE_MIB if serving.engine == "llamacpp" else 0.0
    return Need(weights, cache, 0.0, max(activations, seen), CONTEXT_MIB, serving.share, free)


def sglang_reserve_mib(slice_mib: int) -> float:
    """Return SGLang's default reserve (without `mem_fraction_static`): metadata, activations of a prompt chunk
    (1.5 MiB per token), CUDA graphs (2 MiB per sequence) and its own process.
    """
    slice_gib = slice_mib / 1024
    tokens, graphs = next((row[1:] for row in SGLANG if slice_gib < row[0]), SGLANG[-1][1:])
    reserve = 512.0 + 1.5 * tokens + 2.0 * graphs + 128.0
    return max(reserve, 10240.0) if slice_gib > 60 else reserve


def _passed(architecture: Architecture) -> int:
    """Return the total width of the feed-forwards that a token passes in one layer."""
    experts = architecture.experts
    if experts is None:
        return architecture.ffn
    return max(experts.active * experts.ffn + experts.shared, architecture.ffn if experts.dense_layers else 0)


def _training(workload: Workload, training: Training) -> Need:
    architecture, kept = workload.architecture, workload.precision
    base = weights_mib(architecture, kept)
    # 32-bit weights need no master copy; below that, a 2-byte gradient and a 4-byte master copy are added
    bytes_beside = 4.0 if kept.bits > 16 else 6.0
    if training.method == "full":
        states = architecture.parameters * (bytes_beside + STATES[training.optimizer]) / MIB
    else:
        states = lora_parameters(architecture, training.rank) * (8.0 + STATES[training.optimizer]) / MIB
    if architecture.kind == "plain":
        activations = training.micro_batch * (workload.item_mib if training.checkpointing else workload.kept_mib)
    else:
        activations = activations_mib(architecture, training, 4.0 if kept.bits > 16 else 2.0)
    runtime = TRAINER_MIB + cast_mib(architecture, kept, training.method)
    return Need(base, 0.0, states, activations * workload.beside, runtime * workload.beside, training.share)


def cast_mib(architecture: Architecture, kept: Precision, method: str) -> float:
    """Return the MiB that adapters on weights of bitsandbytes add because peft keeps what is not quantized, mostly the
    embedding and the output, in 32 bits (`prepare_model_for_kbit_training`). Not all trainers do: it is no weight that
    measurements cannot correct.
    """
    if method == "full" or architecture.kind == "plain" or not precision.is_cast(kept):
        return 0.0
    return architecture.embedding * (32.0 - kept.embedding_bits) / 8 / MIB


def lora_parameters(architecture: Architecture, rank: int) -> int:
    """Return the parameters of adapters of a rank on all matrices that every token passes (arXiv 2106.09685)."""
    if architecture.kind == "plain":
        return architecture.extra // 100 * rank // USUAL_RANK
    return architecture.adapters(rank)


def activations_mib(architecture: Architecture, training: Training, bytes_each: float) -> float:
    """Return the MiB of activations that training keeps for its backward pass."""
    width, inner, keys = architecture.width, architecture.query_width, architecture.key_width
    passed = _passed(architecture) * (4 if architecture.gated else 2)
    bytes_per_token = (9 * width + 3 * inner + 3 * keys + passed) * bytes_each
    kept = largest = 0.0
    read = architecture.source or training.seq
    for layers, tokens in ((architecture.layers, training.seq), (architecture.encoder_layers, read)):
        layer = bytes_per_token
        if architecture.scores:  # eager attention keeps them, their mask and the dropout result
            layer += 2.5 * bytes_each * architecture.heads * tokens
        kept += tokens * layers * (width * bytes_each if training.checkpointing else layer)
        largest = max(largest, tokens * layer if layers and training.checkpointing else 0.0)
    logits = architecture.logits * LOGIT_BYTES
    return training.micro_batch * (kept + largest + training.seq * logits) / MIB


def resized(workload: Workload, kept: Precision) -> Workload:
    """Return the workload with its weights in another precision."""
    return replace(workload, model=replace(workload.model, precision=kept))

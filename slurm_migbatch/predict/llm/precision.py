"""Map the precision names of engines and file names to bits of parameters and cached values.

Bits of a quantized parameter include its scales: 4 bits in groups of 128 with a 16-bit scale and a 4-bit zero point
(AWQ, GPTQ: 4.16), in blocks of 64 with a 32-bit scale (bitsandbytes NF4: 4.5; with double quantization 4.127, QLoRA,
arXiv 2305.14314, section 3), of 32 with an 8-bit scale (MXFP4: 4.25, OCP MX specification 1.0), of 16 with an 8-bit
scale (NVFP4: 4.5). The bits of GGUF levels are those of llama.cpp's own table (examples/quantize, Llama-3.1-8B).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

DTYPES: Final[Mapping[str, float]] = MappingProxyType(
    {
        "auto": 0.0, "bf16": 16.0, "bfloat16": 16.0, "fp16": 16.0, "float16": 16.0, "half": 16.0, "fp32": 32.0,
        "float32": 32.0, "float": 32.0, "tf32": 32.0,
    }
)  # fmt: skip
"""Bits by the name of a data type; 0: as the model is published. `tf32`: 32-bit weights whose products are in TF32."""
UNQUANTIZED: Final = frozenset({"bf16", "fp16", "fp32", "tf32"})
"""Names of precisions that are no quantization."""
CACHE: Final[Mapping[str, float]] = MappingProxyType(
    {
        "auto": 16.0, "bf16": 16.0, "bfloat16": 16.0, "fp16": 16.0, "float16": 16.0, "f16": 16.0, "fp32": 32.0,
        "f32": 32.0, "fp8": 8.0, "fp8-e4m3": 8.0, "fp8-e5m2": 8.0, "int8": 8.0, "q8-0": 8.5, "q5-1": 6.0, "q5-0": 5.5,
        "q4-1": 5.0, "q4-0": 4.5, "int4": 4.5, "fp4": 4.5, "nvfp4": 4.5,
    }
)  # fmt: skip
"""Bits of a value in the key-value cache."""
WEIGHTS: Final[Mapping[str, float]] = MappingProxyType(
    {
        "awq": 4.16, "awq-marlin": 4.16, "gptq": 4.16, "gptq-marlin": 4.16, "gptq-int4": 4.16, "gptq-int8": 8.16,
        "int4": 4.16, "autoround": 4.16, "auto-round": 4.16, "compressed-tensors": 8.1, "marlin": 4.16,
        "hqq": 4.5, "aqlm": 4.16, "quip": 4.16, "bitsandbytes": 4.5, "bnb": 4.5, "bnb-4bit": 4.5,
        "nf4": 4.5, "fp4": 4.5, "nvfp4": 4.5, "mxfp4": 4.25, "modelopt-fp4": 4.5, "qlora": 4.127,
        "int8": 8.1, "w8a8": 8.1, "w8a16": 8.1, "8bit": 8.1, "bnb-8bit": 8.1, "llm-int8": 8.1, "smoothquant": 8.1,
        "eetq": 8.1, "fp8": 8.1, "fp8-dynamic": 8.1, "fbgemm-fp8": 8.1, "modelopt": 8.1, "w8a8-fp8": 8.1, "none": 0.0,
        "fp8-e4m3": 8.1, "fp8-e5m2": 8.1, "fp8-block": 8.1, "ptpc-fp8": 8.1, "modelopt-fp8": 8.1, "w8a8-int8": 8.1,
        "blockwise-int8": 8.1, "int8-sq": 8.1, "int4-awq": 4.16, "w4a8-awq": 4.16, "gptq-marlin-24": 4.16,
        "nvfp4a16": 4.5, "mxfp4a16": 4.5, "petit-nvfp4": 4.5,
    }
)  # fmt: skip
"""Bits of a parameter of the body; embedding and output stay at 16. 0: not quantized."""
GGUF: Final[Mapping[str, float]] = MappingProxyType(
    {
        "iq1-s": 2.01, "iq1-m": 2.15, "iq2-xxs": 2.39, "iq2-xs": 2.6, "iq2-s": 2.75, "iq2-m": 2.95, "q2-k-s": 2.97,
        "q2-k": 3.17, "q3-k-s": 3.65, "q3-k-m": 4.01, "q3-k-l": 4.31, "q3-k": 4.01, "iq3-xxs": 3.26, "iq3-xs": 3.51,
        "iq3-s": 3.67, "iq3-m": 3.78, "iq4-xs": 4.46, "iq4-nl": 4.68, "q4-0": 4.68, "q4-1": 5.13, "q4-k-s": 4.67,
        "q4-k-m": 4.9, "q4-k": 4.9, "q5-0": 5.6, "q5-1": 6.07, "q5-k-s": 5.57, "q5-k-m": 5.7, "q5-k": 5.7,
        "q6-k": 6.57, "q8-0": 8.5, "f16": 16.0, "f32": 32.0, "gguf": 8.5,
        "q2": 3.17, "q3": 4.31, "q4": 5.13, "q5": 6.07, "q6": 6.57, "q8": 8.5, "tq1-0": 2.01, "tq2-0": 2.39,
        "q3km": 4.01, "q4km": 4.9, "q4ks": 4.67, "q5km": 5.7,
        "mxfp4-moe": 4.9,
        "q2-k-xl": 4.01, "q3-k-xl": 4.9, "q4-k-xl": 5.7, "q5-k-xl": 6.57, "q6-k-xl": 8.5, "q8-k-xl": 16.0,
    }
)  # fmt: skip
"""Bits of every parameter of a GGUF file; plain `gguf` counts as the largest common level, Q8_0. An `xl` level has some
layers in wider ones and counts as the next, a level without its variant (`q4`) as the widest of its common ones.
`mxfp4-moe` has routed experts in MXFP4 and the rest in Q8_0.
"""
_LOADED_WIDE: Final = re.compile(r"(?:mx|nv)?fp[48].*|modelopt.*|(?:fbgemm|ptpc|w8a8)-fp8|petit-nvfp4")
"""Quantizations that trainers undo when they load weights, as they do with GGUF: adapters of LoRA are trained on those
of bitsandbytes, GPTQ, AWQ and the like (peft's guide on quantization; OpenAI's on gpt-oss).
"""
_CAST: Final = frozenset({"qlora", "nf4", "fp4", "bitsandbytes", "bnb", "bnb-4bit", "bnb-8bit", "llm-int8"})
"""Quantizations of bitsandbytes."""
OF_EXPERTS: Final = "mxfp4"
"""Where a model has routed experts, only these have this precision and the rest is at 16 bits (gpt-oss)."""
NAMES: Final = frozenset({*WEIGHTS, *GGUF})
UNDONE: Final = frozenset({"unquantized", "unquantised", "dequantized", "dequantised"})
"""Words of a name whose other words on quantization are about the past: the weights are 16-bit ones."""
_BITS: Final = (
    (re.compile(r"([1-8](?:\.[0-9]{1,2})?)bpw"), 0.1),
    (re.compile(r"([1-8](?:\.[0-9]{1,2})?)-?bits?|q([2-8])f(?:16|32)(?:-[0-9])?"), 0.5),
    (re.compile(r"mxfp([468])"), 0.25),
    (re.compile(r"int([48])wo|w([2-8])a(?:fp)?(?:4|8|16)"), 0.16),
)
"""Forms that state the bits, and what scales add to a parameter: little where an average is stated, at most those of
groups of 32.
"""


@dataclass(frozen=True)
class Precision:
    """Precision of a model's weights: `name` for messages, bits of a parameter of the body and of the embedding."""

    name: str
    bits: float
    embedding_bits: float


def plain(dtype: str) -> Precision:
    """Return the precision of unquantized weights."""
    bits = DTYPES[dtype] or 16.0
    halves = "fp16" if dtype in ("fp16", "float16", "half") else "bf16"
    wide = "tf32" if dtype == "tf32" else "fp32"
    return Precision(wide if bits == 32.0 else halves, bits, bits)


def tuned(kept: Precision) -> Precision:
    """Return the precision in which a trainer of adapters loads weights of this one."""
    return plain("bf16") if kept.name in GGUF or _LOADED_WIDE.fullmatch(kept.name) else kept


def is_cast(kept: Precision) -> bool:
    """Return whether trainers of adapters keep what weights of this precision leave out in 32 bits."""
    return kept.name in _CAST


def known(name: str) -> Precision:
    """Return the precision of a quantization that this module lists."""
    found = quantized(name)
    assert found is not None
    return found


def quantized(name: str) -> Precision | None:
    """Return the precision of a quantization by its name; None if it is unknown."""
    if name in GGUF:
        return Precision(name, GGUF[name], GGUF[name])
    if name in WEIGHTS:
        return Precision(name, WEIGHTS[name], 16.0) if WEIGHTS[name] else plain("bf16")
    for form, scales in _BITS:
        if found := form.fullmatch(name):
            return Precision(name, float(next(filter(None, found.groups()))) + scales, 16.0)
    return None

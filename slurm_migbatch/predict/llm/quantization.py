"""Read how weights are quantized from a configuration's `quantization_config`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from slurm_migbatch.predict.llm.precision import NAMES

NESTED: Final = 6
"""Depth to which the settings of a method are read."""
_BY_NAME: Final = (
    (re.compile(r"mx_?fp_?4"), "mxfp4a16"),
    (re.compile(r"nv_?fp_?4|fp_?4"), "nvfp4"),
    (re.compile(r"u?int_?4|w4"), "int4"),
    (re.compile(r"u?int_?2"), "2bit"),
    (re.compile(r"u?int_?8|float_?8|fp_?8|w8"), "int8"),
)
"""Kinds of values, and a name of as many bits."""


def quantization_of(config: object) -> str:
    """Return a name of the quantization that has its bits; "" if there is none or it is not known."""
    if not isinstance(config, dict):
        return ""
    method = str(config.get("quant_method", "")).replace("_", "-").lower()
    if method == "bitsandbytes" or (not method and True in (config.get("load_in_4bit"), config.get("load_in_8bit"))):
        return "bnb-4bit" if config.get("load_in_4bit") is True else "bnb-8bit"
    if method == "compressed-tensors":
        return _compressed(config)
    if method == "modelopt":
        return _of_modelopt(config)
    if method == "bitnet":  # ternary weights, of which four are packed into a byte
        return "2bit"
    kind = {"torchao": "quant_type", "quark": "global_quant_config", "quanto": "weights", "fp-quant": "forward_dtype"}
    if method in kind:
        return _by_kind(config.get(kind[method]))
    bits = next(_bits(config), None)
    if method == "gptq" and bits == 8:
        return "gptq-int8"
    # the names of methods mean 4 bits
    if bits is not None and (bits != 4 or method not in NAMES):
        return f"{bits:.3g}bit"
    return method if method in NAMES else ""


def _compressed(config: Mapping[str, Any]) -> str:
    """Return the kind of a quantization by compressed-tensors; its groups are layers in one kind, and sparse weights
    may have none.
    """
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        return ""
    weights = [group.get("weights") for group in groups.values() if isinstance(group, dict)]
    bits = [kind.get("num_bits") for kind in weights if isinstance(kind, dict)]
    if bits and all(number == 4 for number in bits):
        form = str(config.get("format"))
        return "nvfp4" if "nvfp4" in form else "mxfp4a16" if "mxfp4" in form else "w4a16"
    return "w8a8" if bits and all(number in (4, 8) for number in bits) else ""


def _of_modelopt(config: Mapping[str, Any]) -> str:
    """Return the kind of ModelOpt's quantization, that of most layers if they have several."""
    layers = config.get("quantized_layers")
    own = (
        [layer.get("quant_algo") for layer in layers.values() if isinstance(layer, dict)]
        if isinstance(layers, dict)
        else []
    )
    algorithms = [str(name).lower() for name in own or [config.get("quant_algo")]]
    algorithm = max(sorted({*algorithms}), key=algorithms.count)
    return "modelopt-fp4" if "fp4" in algorithm else "int4" if "4" in algorithm else "modelopt"


def _by_kind(value: object) -> str:
    """Return the quantization that a description names; activations in other kinds follow the weights there."""
    weight = value.get("weight", value) if isinstance(value, dict) else value
    text = json.dumps(weight).lower()
    places = [(match.start(), name) for form, name in _BY_NAME if (match := form.search(text))]
    return min(places, default=(0, ""))[1]


def _bits(config: Mapping[str, Any], depth: int = 0) -> Iterator[float]:
    """Yield the bits of a weight that a configuration states, those of its own before those of its parts (HQQ)."""
    for key in ("bits", "w_bit", "nbits"):
        bits = config.get(key)
        if isinstance(bits, (int, float)) and not isinstance(bits, bool) and 1 <= bits <= 8:
            yield float(bits)
    for part in config.values():
        if isinstance(part, dict) and depth < NESTED:
            yield from _bits(part, depth + 1)

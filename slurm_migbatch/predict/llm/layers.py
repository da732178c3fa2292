"""Read which kinds of layers a model has from its `config.json`: attention, windows, states, experts."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final

from slurm_migbatch.predict.llm.architecture import Architecture, state_window
from slurm_migbatch.predict.llm.configuration import KEYS, LIMITS, number

STATEFUL: Final = re.compile(r"(?:falcon_)?mamba2?|rwkv[0-9]*")
"""Model types without any attention."""
STATEFUL_HEADS: Final = 8
"""Heads that stand for the state of such a layer: so few that a usual sequence fills the window."""
ATTENTION: Final = re.compile(r"(?!linear_)(?:[a-z_]+_)?attention|hybrid")
"""Kinds of layers that keep keys and values; some keep fewer (`compressed_sparse_attention` of DeepSeek V4). `hybrid`
ones of Zamba2 have attention, a feed-forward and a state.
"""
_LETTERS: Final = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""Kinds of layers in Nemotron-H's pattern; each layer has one of these parts only."""


def kinds_of(text: Mapping[str, Any], layers: int) -> list[object] | None:
    """Return the kind of each layer; None if the configuration does not state kinds."""
    for key in ("layer_types", "layers_block_type"):
        if isinstance(text.get(key), list):
            return list(text[key][:layers])
    flags = text.get("attn_type_list")  # of MiniMax
    if isinstance(flags, list):
        return ["linear_attention" if flag == 0 else "attention" for flag in flags[:layers]]
    letters, interval = text.get("sliding_window_pattern"), number(text, ("full_attention_interval",)) or 1
    if isinstance(letters, str) and letters:  # LLLG of EXAONE 4, repeated
        usual = {"L": "sliding_attention", "G": "full_attention"}
        return [usual.get(letters[layer % len(letters)]) for layer in range(layers)]
    if interval > 1:  # of Qwen3-Next
        return ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(layers)]
    blocks = text.get("block_types") or text.get("_block_types")  # of RecurrentGemma, repeated
    if isinstance(blocks, list) and blocks:
        return [blocks[layer % len(blocks)] for layer in range(layers)]
    pattern, attending = text.get("hybrid_override_pattern"), text.get("attn_layer_indices")  # Nemotron-H, Bamba
    if isinstance(pattern, str):
        return [_LETTERS.get(letter) for letter in pattern[:layers]]
    period, offset = number(text, ("attn_layer_period",)) or 1, number(text, ("attn_layer_offset",))  # of Jamba
    if period > 1:
        attending = range(offset or 0, layers, period)
    if not isinstance(attending, (list, range)):
        return None
    return ["attention" if layer in attending[:layers] else "mamba" for layer in range(layers)]


def feed_forwards(text: Mapping[str, Any], numbers: Mapping[str, int], kinds: list[object]) -> dict[str, int]:
    """Return the layers without experts and their mean feed-forward, where not all layers have the same."""
    layers, ffn, dense = numbers.get("layers", 0), numbers.get("ffn", 0), numbers.get("layers", 0)
    found: dict[str, int] = {}
    if numbers.get("experts"):
        step = number(text, ("expert_layer_period", "interleave_moe_layer_step")) or 1
        dense -= kinds.count("moe") or layers // step
        found |= {"dense_layers": dense} if dense else {}
        wider = number(text, ("intermediate_size_mlp",))  # of Llama 4, whose experts have the other size
        found |= {"ffn": wider, "expert_ffn": ffn, "shared_ffn": ffn} if wider else {}
    if dense and any(kind in kinds for kind in ("mlp", "moe", "hybrid")):
        found["ffn"] = max(ffn * (kinds.count("mlp") + kinds.count("hybrid")) // dense, 1)
    return found


def windows(text: Mapping[str, Any], numbers: Mapping[str, int], kinds: list[object] | None) -> dict[str, int]:
    """Return the window if some layers see all tokens (otherwise engines may not use it), or what the state of layers
    without attention takes, as a window.
    """
    layers = numbers.get("layers", 0)
    window, pattern = number(text, ("sliding_window",)), number(text, ("sliding_window_pattern",))
    narrow = number(text, ("attention_window_size",))  # of all layers with attention in RecurrentGemma
    if narrow:
        return {"window": narrow}
    if kinds is None:
        return {"window": window, "wide_layers": layers // pattern} if window and pattern and pattern > 1 else {}
    if window and "sliding_attention" in kinds:
        return {"window": window, "wide_layers": sum(kind != "sliding_attention" for kind in kinds)}
    attending = sum(map(attends, kinds))
    heads = numbers.get("kv") or numbers.get("heads")
    if attending == len(kinds) or not heads or not numbers.get("hidden"):
        return {}
    head = numbers.get("head") or numbers["hidden"] // max(numbers.get("heads", 1), 1)
    window = state_window(numbers["hidden"], max(2 * heads * head, 1))
    stateless = kinds.count("mlp") + kinds.count("moe")
    return {"window": math.ceil(window * (1 - stateless / (len(kinds) - attending))), "wide_layers": attending}


def layers_listed(text: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of layers of a configuration that only lists their kinds (Nemotron-H as transformers 5 writes
    it).
    """
    for key in ("layers_block_type", "layer_types", "hybrid_override_pattern"):
        kinds = text.get(key)
        if isinstance(kinds, (list, str)) and kinds:
            return {"layers": len(kinds)}
    return {}


def in_layers(text: Mapping[str, Any], architecture: Architecture, kinds: list[object] | None) -> int:
    """Return the parameters of layers without attention beyond those of attention, as which they are counted, and of
    what is beside attention.
    """

    def given(key: str) -> int:
        return min(number(text, (key,)) or 0, LIMITS["hidden"])

    width, model_type = architecture.width, str(text.get("model_type", ""))
    keys = given("linear_num_key_heads") * given("linear_key_head_dim")
    values = given("linear_num_value_heads") * given("linear_value_head_dim")
    mamba = mamba_layer(text, width)
    sizes = {
        "linear_attention": width * (2 * keys + 3 * values) or mamba,
        "recurrent": architecture.attention + width * given("lru_width"),
        "conv": 4 * width**2,  # LFM2
        "mlp": 0,
        "moe": 0,
    }
    if kinds is None:  # in each layer of Falcon-H1 and Hymba beside attention
        beside = 0 if model_type in ("falcon_h1", "hymba") else architecture.attention
        states = any(key.startswith(("mamba_", "ssm_")) for key in text)
        return architecture.layers * max(mamba - beside, 0) if states else 0
    # the output of Qwen's attention has a gate
    gate = architecture.heads * architecture.head * width if model_type.startswith(("qwen3_next", "qwen3_5")) else 0
    attending = [kind for kind in kinds if attends(kind)]
    others = [sizes.get(kind, mamba) if isinstance(kind, str) else mamba for kind in kinds if not attends(kind)]
    own = sum(others) + len(attending) * (architecture.attention + gate)
    return max(own - architecture.layers * architecture.attention, 0)


def attends(kind: object) -> bool:
    """Return whether a layer of this kind has keys and values."""
    return isinstance(kind, str) and ATTENTION.fullmatch(kind) is not None


def stateful(text: Mapping[str, Any], model_type: str) -> dict[str, int]:
    """Return the numbers of a model without attention: a few heads with a window that takes as much as its state, and a
    gated feed-forward with the other parameters of a layer, which has thirteen squares of the width in RWKV.
    """
    width = min(number(text, KEYS["hidden"]) or 0, LIMITS["hidden"])
    matrices = 13 * width**2 if model_type.startswith("rwkv") else mamba_layer(text, width)
    inner = STATEFUL_HEADS * 64
    ffn = math.ceil((matrices - 4 * inner * width) / (3 * max(width, 1)))
    return {
        "heads": STATEFUL_HEADS, "kv": STATEFUL_HEADS, "head": 64, "ffn": min(max(ffn, 1), LIMITS["ffn"]),
        "window": state_window(width, 2 * inner),
    }  # fmt: skip


def mamba_layer(text: Mapping[str, Any], width: int) -> int:
    """Return the parameters of a layer of Mamba (arXiv 2312.00752) or, with groups of heads, of Mamba-2."""

    def given(*keys: str) -> int:
        return min(number(text, keys) or 0, LIMITS["ffn"])

    heads, head = given("mamba_n_heads", "mamba_num_heads"), given("mamba_d_head", "mamba_head_dim")
    inner = given("mamba_d_ssm") or heads * head or given("mamba_expand", "expand") * width or 2 * width
    groups, state = given("mamba_n_groups", "n_groups"), given("mamba_d_state", "ssm_state_size", "state_size")
    return 3 * width * inner + (2 * width * groups * state if groups else inner * (width // 8 + 2 * state))

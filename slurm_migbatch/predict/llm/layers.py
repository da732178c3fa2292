"""Read which kinds of layers a model has from its `config.json`: attention, windows, states, experts."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Mapping
from typing import Any, Final

from slurm_migbatch.predict.llm.architecture import STATE_WIDTHS, Architecture
from slurm_migbatch.predict.llm.blocks import kinds_of_blocks
from slurm_migbatch.predict.llm.configuration import KEYS, LIMITS, number

STATEFUL: Final = re.compile(r"(?:falcon_)?mamba2?|rwkv[0-9]*|xlstm")
"""Model types without any attention."""
STATEFUL_HEADS: Final = 8
"""Heads that stand for the state of such a layer: so few that a usual sequence fills the window."""
ATTENTION: Final = re.compile(r"(?!linear_)(?:[a-z_]+_)?attention|hybrid")
"""Kinds of layers that keep keys and values; some keep fewer (`compressed_sparse_attention` of DeepSeek V4). `hybrid`
ones of Zamba2 have attention, a feed-forward and a state.
"""
_LETTERS: Final = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""Kinds of layers in Nemotron-H's pattern; each layer has one of these parts only."""


STATELESS: Final = frozenset({"mlp", "moe", "no_op", "linear", "crossing"})
"""Kinds of layers without attention that keep nothing for a token of the text."""
PATCHES: Final = 4 * 1601
"""Patches of an image, whose keys the layers keep that attend to images instead of the text (Llama 3.2 Vision)."""
_BESIDE: Final = frozenset({"falcon_h1", "hymba"})
"""Model types that have Mamba beside attention in each layer."""
_STEPS: Final = (
    "expert_layer_period", "interleave_moe_layer_step", "decoder_sparse_step", "moe_every_n_layers", "moe_layer_freq",
    "moe_layer_interval",
)  # fmt: skip
"""Keys of the distance between two layers with experts."""
_SPARSE: Final = frozenset({1, "sparse", "moe"})
"""How lists of layers mark one with experts."""


def kinds_of(text: Mapping[str, Any], layers: int) -> list[object] | None:
    """Return the kind of each layer; None if the configuration does not state kinds."""
    for listed in (text.get("layer_types"), text.get("layers_block_type"), kinds_of_blocks(text)):
        if isinstance(listed, list):
            return list(listed[:layers])
    crossing = text.get("cross_attention_layers")
    if isinstance(crossing, list):
        return ["crossing" if layer in crossing else "attention" for layer in range(layers)]
    flags = text.get("attn_type_list")  # of MiniMax
    if isinstance(flags, list):
        return ["linear_attention" if flag == 0 else "attention" for flag in flags[:layers]]
    letters, interval = text.get("sliding_window_pattern"), _interval(text)
    if isinstance(letters, str) and letters:  # LLLG of EXAONE 4, repeated
        usual = {"L": "sliding_attention", "G": "full_attention"}
        return [usual.get(letters[layer % len(letters)]) for layer in range(layers)]
    if interval > 1:
        return ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(layers)]
    types = text.get("block_types") or text.get("_block_types")  # of RecurrentGemma, repeated
    if isinstance(types, list) and types:
        return [types[layer % len(types)] for layer in range(layers)]
    pattern = text.get("hybrid_override_pattern")  # of Nemotron-H
    if isinstance(pattern, str):
        return [_LETTERS.get(letter) for letter in pattern[:layers]]
    attending = _attending(text, layers)
    return None if attending is None else ["attention" if i in attending else "mamba" for i in range(layers)]


def _interval(text: Mapping[str, Any]) -> int:
    """Return the distance of layers with attention among those of linear attention: of Qwen3-Next, Ling and Ring."""
    linear = str(text.get("model_type", "")).endswith(("_linear", "_hybrid"))
    return number(text, ("full_attention_interval", *(["layer_group_size"] if linear else []))) or 1


def _attending(text: Mapping[str, Any], layers: int) -> Container[object] | None:
    """Return the places of the layers with attention; None if the configuration does not state them."""
    period, offset = number(text, ("attn_layer_period",)) or 1, number(text, ("attn_layer_offset",))  # of Jamba
    if period > 1:
        return range(offset or 0, layers, period)
    linear, listed = text.get("linear_attn_config"), text.get("attn_layer_indices")  # of Kimi, of Bamba
    if isinstance(linear, dict) and isinstance(linear.get("full_attn_layers"), list):
        return [layer - 1 for layer in linear["full_attn_layers"][:layers] if type(layer) is int]
    return listed[:layers] if isinstance(listed, list) else None


def feed_forwards(text: Mapping[str, Any], numbers: Mapping[str, int], kinds: list[object]) -> dict[str, int]:
    """Return the layers without experts and their mean feed-forward, where not all layers have the same."""
    layers, ffn, dense = numbers.get("layers", 0), numbers.get("ffn", 0), numbers.get("layers", 0)
    found: dict[str, int] = {}
    if numbers.get("experts"):
        dense -= min(kinds.count("moe") or _sparse(text, numbers), layers)
        found |= {"dense_layers": dense} if dense else {}
        wider = number(text, ("intermediate_size_mlp",))  # of Llama 4, whose experts have the other size
        found |= {"ffn": wider, "expert_ffn": ffn, "shared_ffn": ffn} if wider else {}
    if dense and any(kind in kinds for kind in ("mlp", "moe", "hybrid")):
        found["ffn"] = max(ffn * (kinds.count("mlp") + kinds.count("hybrid")) // dense, 1)
    return found


def _sparse(text: Mapping[str, Any], numbers: Mapping[str, int]) -> int:
    """Return the number of layers with experts, those of an encoder included."""
    layers = min(numbers.get("layers", 0), LIMITS["layers"])
    for key in ("mlp_layer_types", "moe_layer_freq"):
        listed = text.get(key)
        if isinstance(listed, list):
            return sum(isinstance(kind, (int, str)) and kind in _SPARSE for kind in listed[:layers])
    step = number(text, _STEPS) or 1
    sparse = (layers - min(numbers.get("dense_layers", 0), layers)) // step
    plain = text.get("mlp_only_layers")
    if isinstance(plain, list):
        sparse -= len([layer for layer in plain if type(layer) is int and layer < layers and (layer + 1) % step == 0])
    other = number(text, ("encoder_sparse_step",))  # of NLLB and Switch Transformers
    return max(sparse, 0) + (numbers.get("encoder_layers", 0) // other if other else 0)


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
    own = kinds[: len(kinds) - min(number(text, ("num_kv_shared_layers",)) or 0, len(kinds))]  # of Gemma 3n and 4
    wide = sum(_is_wide(kind, window) for kind in own)
    heads = numbers.get("kv") or numbers.get("heads")
    if wide == len(kinds) or not heads or not numbers.get("hidden"):
        return {}
    head = numbers.get("head") or numbers["hidden"] // max(numbers.get("heads", 1), 1)
    values = numbers["kv_rank"] + numbers.get("rope", 64) if numbers.get("kv_rank") else 2 * heads * head
    kept = dict.fromkeys(STATELESS, 0) | {
        "sliding_attention": window or 0,
        "conv": math.ceil((number(text, ("conv_L_cache",)) or 3) * numbers["hidden"] / max(values, 1)),
    }
    state = math.ceil(_state(text, numbers["hidden"]) / max(values, 1))
    tokens = [kept.get(kind, state) if isinstance(kind, str) else state for kind in own if not _is_wide(kind, window)]
    # their mean: layers that read the keys of others keep none
    return {"window": max(math.ceil(sum(tokens) / (len(kinds) - wide)), 1), "wide_layers": wide}


def _is_wide(kind: object, window: int | None) -> bool:
    """Return whether a layer keeps the keys of all tokens."""
    return attends(kind) and not (window and kind == "sliding_attention")


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
    mamba = _delta(text, width) or mamba_layer(text, width)
    sizes = {
        "linear_attention": width * (2 * keys + 3 * values) or mamba,
        "recurrent": architecture.attention + width * given("lru_width"),
        "conv": 4 * width**2,  # LFM2
        "linear": width**2,
        "crossing": architecture.attention,
        **dict.fromkeys(("mlp", "moe", "no_op"), 0),
    }
    if STATEFUL.fullmatch(model_type):
        return 0
    if kinds is None:  # in each layer of Falcon-H1 and Hymba beside attention
        beside = 0 if model_type in _BESIDE else architecture.attention
        states = any(key.startswith(("mamba_", "ssm_")) for key in text)
        return architecture.layers * max(mamba - beside, 0) if states else 0
    # the output of Qwen's attention has a gate
    gate = architecture.heads * architecture.head * width if model_type.startswith(("qwen3_next", "qwen3_5")) else 0
    attending = [kind for kind in kinds if attends(kind)]
    others = [sizes.get(kind, mamba) if isinstance(kind, str) else mamba for kind in kinds if not attends(kind)]
    if "hybrid" in attending:
        return sum(others) + _shared_blocks(text, architecture, len(attending), mamba)
    own = sum(others) + len(attending) * (architecture.attention + gate)
    return own - architecture.layers * architecture.attention


def _delta(text: Mapping[str, Any], width: int) -> int:
    """Return the parameters of a layer of Kimi's linear attention (arXiv 2510.26692): four matrices, and two gates of
    the rank of a head; 0 if there is none.
    """
    linear = text.get("linear_attn_config")
    stated = linear if isinstance(linear, dict) else text
    heads, head = (
        min(number(stated, (key, f"linear_{key}")) or 0, LIMITS["head"]) for key in ("num_heads", "head_dim")
    )
    if stated is text and "linear_num_heads" not in text:
        return 0
    return 4 * width * heads * head + 2 * head * (width + heads * head)


def _shared_blocks(text: Mapping[str, Any], architecture: Architecture, hybrid: int, mamba: int) -> int:
    """Return the parameters of Zamba's hybrid layers beyond those that all layers are counted with: each has a layer of
    Mamba, a matrix and adapters of its own; attention and feed-forward are those of one or two blocks, which read the
    embedding beside the layer before (arXiv 2411.15242).
    """

    def given(key: str) -> int:
        return min(number(text, (key,)) or 0, LIMITS["ffn"])

    width, ffn = architecture.width, given("intermediate_size")
    blocks = min(given("num_mem_blocks") or 1, hybrid)
    read = max(given("attention_hidden_size") - width, 0)
    inner = (architecture.heads + 2 * architecture.kv_heads) * architecture.head
    rank = given("adapter_rank")
    adapters = rank * (width + 2 * ffn) + (6 * rank * given("attention_hidden_size")) * (
        text.get("use_shared_attention_adapter") is True
    )
    own = hybrid * (mamba + width**2 + adapters) + blocks * (architecture.attention + read * inner)
    return own - (hybrid - blocks) * architecture.feed_forward(ffn) - architecture.layers * architecture.attention


def attends(kind: object) -> bool:
    """Return whether a layer of this kind has keys and values."""
    return isinstance(kind, str) and ATTENTION.fullmatch(kind) is not None


def stateful(text: Mapping[str, Any], model_type: str) -> dict[str, int]:
    """Return the numbers of a model without attention: a few heads with a window that takes as much as its state, and a
    gated feed-forward with the other parameters of a layer, which has thirteen squares of the width in RWKV, twelve
    in xLSTM.
    """
    width = min(number(text, KEYS["hidden"]) or 0, LIMITS["hidden"])
    squares = 12 if model_type == "xlstm" else 13 if model_type.startswith("rwkv") else 0
    matrices = squares * width**2 or mamba_layer(text, width)
    inner = STATEFUL_HEADS * 64
    ffn = math.ceil((matrices - 4 * inner * width) / (3 * max(width, 1)))
    return {
        "heads": STATEFUL_HEADS, "kv": STATEFUL_HEADS, "head": 64, "ffn": min(max(ffn, 1), LIMITS["ffn"]),
        "window": math.ceil(_state(text, width) / (2 * inner)),
    }  # fmt: skip


def states_beside(text: Mapping[str, Any], layers: int, kinds: list[object] | None) -> int:
    """Return the values of 16 bits of the states that a sequence keeps in layers that have keys and values, too."""
    both = str(text.get("model_type", "")) in _BESIDE
    count = layers if both else sum(kind == "hybrid" for kind in kinds or ())
    width, heads, keys = (min(number(text, KEYS[key]) or 0, LIMITS[key]) for key in ("hidden", "heads", "kv"))
    inner, _, state = _mamba_sizes(text, width)
    crossing = sum(kind == "crossing" for kind in kinds or ()) * 2 * (keys or heads) * (width // max(heads, 1))
    return 2 * count * inner * state + crossing * PATCHES


def _state(text: Mapping[str, Any], width: int) -> int:
    """Return the values of 16 bits that a layer without attention keeps for a sequence: twice its numbers of 32 bits,
    with those of a convolution over four tokens; as many as of Mamba-2 if the configuration does not state them.
    """

    def given(key: str) -> int:
        return min(number(text, (key,)) or 0, LIMITS["head"])

    if str(text.get("model_type", "")).startswith("rwkv"):
        return 2 * width * ((given("head_size") or 64) + 2)
    inner, groups, state = _mamba_sizes(text, width)
    keys, values, head = given("linear_key_head_dim"), given("linear_value_head_dim"), given("linear_num_value_heads")
    if keys * values * head:
        return 2 * head * values * (keys + 4) + 8 * given("linear_num_key_heads") * 2 * keys
    return 2 * (inner * (state + 4) + 8 * groups * state) if state else STATE_WIDTHS * width


def mamba_layer(text: Mapping[str, Any], width: int) -> int:
    """Return the parameters of a layer of Mamba (arXiv 2312.00752) or, with groups of heads, of Mamba-2."""
    inner, groups, state = _mamba_sizes(text, width)
    return 3 * width * inner + (2 * width * groups * state if groups else inner * (width // 8 + 2 * state))


def _mamba_sizes(text: Mapping[str, Any], width: int) -> tuple[int, int, int]:
    """Return the inner width of such a layer, its groups, and the numbers that it keeps for each inner value."""

    def given(*keys: str) -> int:
        return min(number(text, keys) or 0, LIMITS["ffn"])

    heads, head = given("mamba_n_heads", "mamba_num_heads"), given("mamba_d_head", "mamba_head_dim")
    inner = given("mamba_d_ssm") or heads * head or given("mamba_expand", "expand") * width or 2 * width
    groups = given("mamba_n_groups", "mamba_ngroups", "n_groups")
    return inner, groups, given("mamba_d_state", "ssm_state_size", "state_size")

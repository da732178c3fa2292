"""Find the configuration of the language model in a model's `config.json`, and the numbers in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

LIMITS: Final[Mapping[str, int]] = {
    "layers": 1024, "hidden": 1 << 18, "heads": 4096, "kv": 4096, "head": 4096, "ffn": 1 << 21, "vocab": 1 << 24,
    "context": 1 << 24, "experts": 4096, "active": 4096, "expert_ffn": 1 << 21, "shared_ffn": 1 << 21,
    "dense_layers": 1024, "window": 10_000_000, "wide_layers": 1024, "kv_rank": 1 << 16, "q_rank": 1 << 16,
    "nope": 4096, "rope": 4096, "value": 4096, "index": 4096, "tied": 1, "plain_ffn": 1, "bias": 1, "encoder": 1,
    "encoder_layers": 1024, "source": 1 << 20, "params": 10**14, "groups": 1024,
    "state": 1 << 40, "aside": 10**14, "seen": 1 << 17,
}  # fmt: skip
"""Keys of `arch=` and the largest number that each accepts."""
KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "layers": (
        "num_decoder_layers", "decoder_layers", "decoder_num_hidden_layers", "num_hidden_layers", "n_layer",
        "num_layers", "n_layers", "num_transformer_layers", "n_blocks", "layers", "num_blocks",
    ),
    "hidden": (
        "hidden_size", "n_embd", "d_model", "dim", "emb_dim", "model_dim", "embed_dim", "embedding_dim", "n_embed",
    ),
    "heads": (
        "num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads", "attention_heads",
        "num_decoder_attention_heads", "decoder_num_attention_heads", "num_query_heads",
    ),
    "kv": (
        "num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num", "kv_n_heads", "n_kv_heads",
        "decoder_num_key_value_heads", "num_query_groups", "num_multi_query_heads", "num_attention_groups",
    ),
    "head": ("head_dim", "d_kv", "attention_head_dim", "kv_channels", "dim_head"),
    "ffn": (
        "intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size", "hidden_dim", "decoder_ffn_dim",
        "d_inner", "dim_ff", "mlp_dim", "mlp_hidden_size", "ff_intermediate_size",
    ),
    "vocab": ("vocab_size", "padded_vocab_size", "n_words", "n_vocab"),
    "context": (
        "max_position_embeddings", "n_positions", "seq_length", "max_seq_len", "n_ctx", "max_target_positions",
        "model_max_length", "max_sequence_length", "max_seq_length", "max_context_length",
    ),
    "source": ("max_source_positions",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "active": ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "moe_k"),
    "expert_ffn": ("moe_intermediate_size", "expert_ffn_hidden_size"),
    "shared_ffn": tuple(f"{name}_intermediate_size" for name in ("shared_expert", "shared", "moe_shared_expert")),
    "dense_layers": ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"),
    "kv_rank": ("kv_lora_rank",),
    "q_rank": ("q_lora_rank",),
    "nope": ("qk_nope_head_dim",),
    "rope": ("qk_rope_head_dim",),
    "value": ("v_head_dim",),
    "groups": ("num_hidden_groups",),
}  # fmt: skip
"""Keys of each number in configurations in Hugging Face's form."""
_SIZES: Final = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip
DEFAULTS: Final[Mapping[str, Mapping[str, int]]] = {
    "llama": dict(zip(_SIZES, (4096, 11008, 32, 32, 32000, 2048), strict=True)),
    "mistral": dict(zip((*_SIZES, "num_key_value_heads"), (4096, 14336, 32, 32, 32000, 131072, 8), strict=True)),
    "qwen2": dict(zip(_SIZES, (4096, 22016, 32, 32, 151936, 32768), strict=True)),
    "gemma3_text": {
        **dict(zip(_SIZES, (2304, 9216, 26, 8, 262208, 131072), strict=True)),
        "num_key_value_heads": 4, "head_dim": 256, "sliding_window_pattern": 6,
    },
}  # fmt: skip
"""What the configuration of a language model within a larger one leaves out (LLaVA, Gemma 3 4B, Qwen2-Audio): the
defaults of transformers' classes, by model type.
"""
LANGUAGE: Final = (
    "vlm_config", "thinker_config", "text_config", "language_config", "llm_config", "decoder_config", "decoder",
)  # fmt: skip
"""Keys of the language model within a model of several parts, an outer one before an inner one."""
_SOUND: Final = ("num_mel_bins", "sampling_rate")
"""Keys of a model that takes sound."""
IMAGES: Final = ("image_size", "patch_size", "num_channels")
"""Keys of a model that takes images; a language model beside it has a configuration of its own."""
NESTED: Final = 4
"""Depth to which parts of parts are read."""
_WHOLE: Final = frozenset({"vocab", "context", "source"})
"""Numbers that a configuration may state for the language model within it."""
_OF_PART: Final = frozenset(name for key, names in KEYS.items() if key not in _WHOLE for name in names)


def language(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of the language model, with what it leaves out if it is a part of another one."""
    text = config
    for inner in inner_ones(config):
        text = {**_around(text, inner), **inner}
    if text is not config:
        text = {**DEFAULTS.get(str(text.get("model_type")), {}), **text}
    if isinstance(config.get("ssm_cfg"), dict):  # the form of Mamba's authors, which names no type
        second = config["ssm_cfg"].get("layer") == "Mamba2"
        text = {"model_type": "mamba2" if second else "mamba", "state_size": 128 if second else 16, **text}
    for part in ("attn_config", "ffn_config", "moe"):  # of DBRX, of Mistral's own form
        if isinstance(config.get(part), dict):
            text = {**config[part], **text}
    return text


def _around(text: Mapping[str, Any], inner: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what the configuration around a language model says about it: no sizes if that states its own."""
    if number(inner, KEYS["layers"]) is None or number(inner, KEYS["hidden"]) is None:
        return text
    return {key: value for key, value in text.items() if key not in _OF_PART}


def inner_ones(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the configurations of the language model within this one, an outer one before an inner one."""
    found: list[Mapping[str, Any]] = []
    text = config
    for part in LANGUAGE:
        inner = text.get(part)
        if isinstance(inner, dict):
            found.append(inner)
            text = {**text, **inner}
    if found or number(config, KEYS["layers"]) is not None:
        return found
    largest = max(_parts(config), key=_size, default=None)
    return found if largest is None or not _size(largest) else [largest]


def _parts(config: Mapping[str, Any], depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of a model that may be its language model, under any key."""
    for part in config.values():
        if isinstance(part, dict) and depth < NESTED:
            yield part
            yield from _parts(part, depth + 1)


def _size(part: Mapping[str, Any]) -> int:
    """Return a measure of the size of a part that is described as a language model or one of sound; else 0."""
    if any(key in part for key in IMAGES) or not any(key in part for key in (*KEYS["vocab"], *_SOUND)):
        return 0
    layers, width, heads = (number(part, KEYS[key]) or 0 for key in ("layers", "hidden", "heads"))
    return layers * width**2 if heads else 0


def number(text: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    """Return the first of these numbers that the configuration has; None if it has none."""
    for key in keys:
        value = text.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    return None

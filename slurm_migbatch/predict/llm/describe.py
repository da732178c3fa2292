"""Read a model's `config.json`: its architecture, and the hints that describe it. Every number in it is checked."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from slurm_migbatch.predict.llm.architecture import VOCAB, Architecture, Experts, Latent, state_window
from slurm_migbatch.predict.llm.precision import NAMES

LIMITS: Final[Mapping[str, int]] = {
    "layers": 1024, "hidden": 1 << 18, "heads": 4096, "kv": 4096, "head": 4096, "ffn": 1 << 21, "vocab": 1 << 24,
    "context": 1 << 24, "experts": 4096, "active": 4096, "expert_ffn": 1 << 21, "shared_ffn": 1 << 21,
    "dense_layers": 1024, "window": 10_000_000, "wide_layers": 1024, "kv_rank": 1 << 16, "q_rank": 1 << 16,
    "nope": 4096, "rope": 4096, "value": 4096, "tied": 1, "plain_ffn": 1, "bias": 1, "encoder": 1,
    "encoder_layers": 1024, "source": 1 << 20, "params": 10**14, "groups": 1024,
}  # fmt: skip
"""Keys of `arch=` and the largest number that each accepts."""
NEEDED: Final = ("layers", "hidden", "heads")
KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "layers": ("num_decoder_layers", "decoder_layers", "num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads", "attention_heads"),
    "kv": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num", "kv_n_heads", "n_kv_heads"),
    "head": ("head_dim", "d_kv", "attention_head_dim"),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size", "hidden_dim", "decoder_ffn_dim"),
    "vocab": ("vocab_size", "padded_vocab_size"),
    "context": ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len", "n_ctx", "max_target_positions"),
    "source": ("max_source_positions",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "active": ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "moe_k"),
    "expert_ffn": ("moe_intermediate_size",),
    "shared_ffn": tuple(f"{name}_intermediate_size" for name in ("shared_expert", "shared", "moe_shared_expert")),
    "dense_layers": ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"),
    "kv_rank": ("kv_lora_rank",),
    "q_rank": ("q_lora_rank",),
    "nope": ("qk_nope_head_dim",),
    "rope": ("qk_rope_head_dim",),
    "value": ("v_head_dim",),
    "groups": ("num_hidden_groups",),
}
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
GATED_ENCODERS: Final = frozenset(
    ["modernbert", "nomic_bert", "eurobert", "gte", "new", "neobert", "esmc", "longformer"]
)
ENCODERS: Final = GATED_ENCODERS | frozenset([
    "bert", "roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "distilbert", "mpnet", "deberta", "deberta-v2",
    "electra", "albert", "esm", "big_bird", "megatron-bert", "data2vec-text", "ernie", "layoutlm",
    "roberta-prelayernorm", "rembert", "roformer", "nystromformer", "convbert", "jina_embeddings_v3", "xmod",
])  # fmt: skip
TWO_STACKS: Final = frozenset(["bart", "mbart", "marian", "m2m_100", "pegasus", "whisper"])
UNGATED: Final = (
    (ENCODERS - GATED_ENCODERS)
    | TWO_STACKS
    | frozenset(
        ["gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "falcon", "mpt", "gpt_bigcode", "starcoder2", "phi"]
    )
    | {"apertus", "arcee", "nemotron", "nemotron_h", "trocr", "codegen", "biogpt", "xglm", "musicgen_decoder"}
)
BIASED: Final = UNGATED - {"apertus", "mpt", "falcon", "arcee", "nemotron", "nemotron_h"}
TIED: Final = frozenset([
    "gemma", "gemma2", "gemma3", "gemma3_text", "gpt2", "gpt_neo", "opt", "bloom", "falcon", "mpt", "gpt_bigcode",
    "cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "lfm2", "lfm2_moe", "smollm3", "recurrent_gemma",
    "mamba", "t5_gemma_module", "t5gemma2_decoder",
])  # fmt: skip
"""Model types by the properties that their configuration does not state. Longformer is not gated, but has as many
parameters in its global attention.
"""
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
_TOWER: Final = (
    (("depth", "encoder_layers", "layers", "num_blocks"), "layers"), (("embed_dim", "width"), "hidden"),
)  # fmt: skip
"""Keys of a tower: Qwen-VL's, where hidden_size may be the language model's, Whisper's, and the usual ones."""
_CONFORMER: Final = ("conv_kernel_size", "conv_depthwise_kernel_size", "conv_expansion_factor")
"""Keys of an encoder of sound with two feed-forwards and a convolution in each layer (arXiv 2005.08100)."""
_TYPED: Final = frozenset({"vision_config", "audio_config", "encoder", "text_encoder", "audio_encoder"})
"""Keys of parts that are counted by what they are."""
NESTED: Final = 4
"""Depth to which parts of parts are read."""
IMAGES: Final = ("image_size", "patch_size", "num_channels")
"""Keys of a model that takes images; a language model beside it has a configuration of its own."""


LANGUAGE: Final = ("thinker_config", "text_config", "language_config", "llm_config", "decoder_config", "decoder")
"""Keys of the language model within a model of several parts, an outer one before an inner one."""
SHARED: Final = ("n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts")
"""Keys of the number of experts that all tokens pass."""


class ArchError(ValueError):
    """An invalid description; the message says what is wrong."""


class DescribeError(Exception):
    """A model on disk that cannot be described; the message says why and what to do."""


@dataclass(frozen=True)
class Described:
    """Contents of a configuration: a name, the numbers of `arch=`, data type and quantisation if given. `counted`: what
    the number of parameters is from.
    """

    name: str
    numbers: Mapping[str, int]
    dtype: str
    quantization: str
    counted: str = "config.json, which may have parts that are not understood"

    @property
    def architecture(self) -> Architecture:
        """The architecture. Raises ArchError."""
        return build(self.numbers)

    @property
    def hints(self) -> str:
        """Hints to put into a comment."""
        pairs = [f"model={self.name}", "arch=" + "+".join(f"{key}:{value}" for key, value in self.numbers.items())]
        pairs += [f"dtype={self.dtype}"] if self.dtype else []
        return " ".join(pairs + ([f"quantization={self.quantization}"] if self.quantization else []))


def read_arch(text: str) -> Architecture:
    """Return the architecture that `arch=` describes; raises ArchError."""
    numbers: dict[str, int] = {}
    for pair in text.split("+"):
        name, _, value = pair.partition(":")
        if name not in LIMITS:
            raise ArchError(f"{name} is an unknown part")
        if name in numbers:
            raise ArchError(f"{name} appears twice")
        numbers[name] = int(value) if len(value) <= 15 else LIMITS[name] + 1
    return build(numbers)


def build(numbers: Mapping[str, int]) -> Architecture:
    """Return the architecture of these numbers; raises ArchError."""
    for name in NEEDED:
        if not numbers.get(name):
            raise ArchError(f"{name} is missing")
    for name, value in numbers.items():
        if not 0 <= value <= LIMITS[name]:
            raise ArchError(f"{name} is out of range")
    given = numbers.get
    heads, hidden, layers = numbers["heads"], numbers["hidden"], numbers["layers"]
    experts = None
    if given("experts"):
        dense = min(given("dense_layers", 0), layers)
        active = min(max(given("active", 1), 1), numbers["experts"])
        experts = Experts(
            numbers["experts"], active, given("expert_ffn", given("ffn", 0)), given("shared_ffn", 0), dense
        )
    latent = None
    if given("kv_rank"):
        latent = Latent(
            numbers["kv_rank"], given("q_rank", 0), given("nope", 128), given("rope", 64), given("value", 128)
        )
    encoder, encoder_layers = bool(given("encoder", 0)), given("encoder_layers", 0)
    # `params` counts all parts: then only the logits of an unknown vocabulary are missing
    unknown = not encoder and not given("vocab")
    architecture = Architecture(
        layers,
        hidden,
        heads,
        given("kv", heads),
        given("head", max(hidden // heads, 1)),
        given("ffn", 4 * hidden),
        VOCAB if unknown and not given("params") else given("vocab", 0),
        max(given("context", 2048), 1),
        gated=not given("plain_ffn", 0),
        tied=bool(given("tied", 0)),
        headless=encoder,
        bias="all" if given("bias") else "",
        window=given("window", 0),
        wide_layers=min(given("wide_layers", 0), layers),
        experts=experts,
        latent=latent,
        encoder_layers=encoder_layers,
        source=given("source", 0),
        kind="both" if encoder_layers else "encoder" if encoder else "decoder",
        outputs=VOCAB if unknown else 0,
        groups=min(given("groups", 0), layers),
    )
    return replace(architecture, extra=max(given("params", 0) - architecture.parameters, 0))


def of_config(config: Mapping[str, Any], name: str) -> Described:
    """Return the contents of a configuration in Hugging Face's form; raises DescribeError."""
    text = _language(config)
    if text is config and "vocab_size" not in config and any(key in config for key in IMAGES):
        raise DescribeError(f"the configuration of {name} is of a model of images: use its public name, or add mem=")
    numbers = {key: value for key, keys in KEYS.items() if (value := _number(text, keys)) is not None}
    numbers = _layers_listed(text) | numbers
    numbers |= _listed(text) | _stretched(text, numbers)
    kinds = _kinds(text, min(numbers.get("layers", 0), LIMITS["layers"]))
    numbers |= _moe(text, numbers) | _windows(text, numbers, kinds)
    numbers |= _feed_forwards(text, numbers, kinds or [])
    model_type = str(text.get("model_type", ""))
    numbers |= _of_type(text, model_type, numbers.get("ffn", 0))
    numbers["tied"] = int(text.get("tie_word_embeddings", model_type in TIED | TWO_STACKS) is True)
    if text.get("is_encoder_decoder") is True:
        numbers["encoder_layers"] = _number(text, ("encoder_layers", "num_layers")) or numbers.get("layers", 0)
    # T5 states whether its feed-forward is gated
    numbers["plain_ffn"] = int(
        model_type in UNGATED or str(text.get("feed_forward_proj") or "gated").partition("-")[0] != "gated"
    )
    numbers["bias"] = int(model_type in BIASED)
    numbers["encoder"] = int(model_type in ENCODERS or "EncoderModel'" in str(config.get("architectures")))
    # Falcon states as many heads of keys as of queries beside it
    if text.get("multi_query") is True and ("kv" not in numbers or text.get("new_decoder_architecture") is False):
        numbers["kv"] = 1
    described = Described(
        name,
        {key: value for key, value in numbers.items() if value or key in NEEDED},
        _dtype(config, text),
        _quantization(config.get("quantization_config")),
    )
    try:
        architecture = build(described.numbers)
    except ArchError as error:
        raise DescribeError(
            f"the configuration of {name} does not describe a language model ({error}): add mem="
        ) from None
    towers = sum(_tower(text.get(f"{sense}_config")) for sense in ("vision", "audio"))
    beside = towers + _embedded_by_layer(text, architecture.layers) + _in_layers(text, architecture, kinds)
    counted = architecture.encoder_layers * (architecture.attention + architecture.feed_forward(architecture.ffn))
    beside += max(sum(_part(config.get(f"{sense}encoder")) for sense in ("", "text_", "audio_")) - counted, 0)
    beside += _apart(config, _inner(config))
    if not beside:
        return described
    return replace(
        described, numbers={**described.numbers, "params": min(architecture.parameters + beside, LIMITS["params"])}
    )


def _language(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of the language model, with what it leaves out if it is a part of another one."""
    text = config
    for inner in _inner(config):
        text = {**text, **inner}
    if text is not config:
        text = {**DEFAULTS.get(str(text.get("model_type")), {}), **text}
    for part in ("attn_config", "ffn_config"):  # of DBRX
        if isinstance(config.get(part), dict):
            text = {**config[part], **text}
    return text


def _inner(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the configurations of the language model within this one, an outer one before an inner one."""
    found: list[Mapping[str, Any]] = []
    text = config
    for part in LANGUAGE:
        inner = text.get(part)
        if isinstance(inner, dict):
            found.append(inner)
            text = {**text, **inner}
    return found


def _apart(config: Mapping[str, Any], inner: list[Mapping[str, Any]], depth: int = 0) -> int:
    """Return the parameters of parts beside the language model that are known only by their layers and width: an
    encoder of speech, a voice, a network between images and text.
    """
    total = 0
    for key, part in config.items():
        if not isinstance(part, dict) or depth == NESTED:
            continue
        if key not in _TYPED and not any(part is one for one in inner):
            total += _tower(part)
        if not key.endswith("encoder"):
            total += _apart(part, inner, depth + 1)
    return total


def _embedded_by_layer(text: Mapping[str, Any], layers: int) -> int:
    """Return the parameters of embeddings that each layer adds of its own (Gemma 3n and 4); 0 if there are none."""
    vocab, width = (_number(text, (f"{key}_per_layer_input",)) or 0 for key in ("vocab_size", "hidden_size"))
    return vocab * width * layers if vocab <= LIMITS["vocab"] and width <= LIMITS["hidden"] else 0


def _tower(config: Any) -> int:
    """Return the parameters of a transformer that encodes images or sound beside a language model; 0 if there is
    none.
    """
    if not isinstance(config, dict):
        return 0
    layers, width = (_number(config, (*first, *KEYS[key])) or 0 for first, key in _TOWER)
    ffn = _number(config, KEYS["ffn"]) or 4 * width
    if layers > LIMITS["layers"] or width > LIMITS["hidden"] or ffn > LIMITS["ffn"]:
        return 0
    if any(key in config for key in _CONFORMER):
        return layers * (7 * width**2 + 4 * width * ffn)
    matrices = 3 if "silu" in (config.get("hidden_act"), config.get("activation")) else 2
    return layers * (4 * width**2 + matrices * width * ffn)


def _of_type(text: Mapping[str, Any], model_type: str, ffn: int) -> dict[str, int]:
    """Return the numbers that mean something else in this type of model; `ffn` is the one stated."""
    if model_type == "recurrent_gemma":  # its two matrices of a feed-forward have this width together
        return {"ffn": ffn // 2}
    if text.get("block_auto_adjust_ff_dim") is True:  # LFM2
        multiple = _number(text, ("block_multiple_of",)) or 1
        return {"ffn": -(-2 * ffn // 3 // multiple) * multiple}
    return _stateful(text, model_type) if STATEFUL.fullmatch(model_type) else {}


def _stateful(text: Mapping[str, Any], model_type: str) -> dict[str, int]:
    """Return the numbers of a model without attention: a few heads with a window that takes as much as its state, and a
    gated feed-forward with the other parameters of a layer, which has thirteen squares of the width in RWKV.
    """
    width = min(_number(text, KEYS["hidden"]) or 0, LIMITS["hidden"])
    matrices = 13 * width**2 if model_type.startswith("rwkv") else _mamba(text, width)
    inner = STATEFUL_HEADS * 64
    ffn = math.ceil((matrices - 4 * inner * width) / (3 * max(width, 1)))
    return {
        "heads": STATEFUL_HEADS, "kv": STATEFUL_HEADS, "head": 64, "ffn": min(max(ffn, 1), LIMITS["ffn"]),
        "window": state_window(width, 2 * inner),
    }  # fmt: skip


def _mamba(text: Mapping[str, Any], width: int) -> int:
    """Return the parameters of a layer of Mamba (arXiv 2312.00752) or, with groups of heads, of Mamba-2."""

    def given(*keys: str) -> int:
        return min(_number(text, keys) or 0, LIMITS["ffn"])

    heads, head = given("mamba_n_heads", "mamba_num_heads"), given("mamba_d_head", "mamba_head_dim")
    inner = given("mamba_d_ssm") or heads * head or given("mamba_expand", "expand") * width or 2 * width
    groups, state = given("mamba_n_groups", "n_groups"), given("mamba_d_state", "ssm_state_size", "state_size")
    return 3 * width * inner + (2 * width * groups * state if groups else inner * (width // 8 + 2 * state))


def _in_layers(text: Mapping[str, Any], architecture: Architecture, kinds: list[object] | None) -> int:
    """Return the parameters of layers without attention beyond those of attention, as which they are counted, and of
    what is beside attention.
    """

    def given(key: str) -> int:
        return min(_number(text, (key,)) or 0, LIMITS["hidden"])

    width, model_type = architecture.width, str(text.get("model_type", ""))
    keys = given("linear_num_key_heads") * given("linear_key_head_dim")
    values = given("linear_num_value_heads") * given("linear_value_head_dim")
    mamba = _mamba(text, width)
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
    attending = [kind for kind in kinds if _attends(kind)]
    others = [sizes.get(kind, mamba) if isinstance(kind, str) else mamba for kind in kinds if not _attends(kind)]
    own = sum(others) + len(attending) * (architecture.attention + gate)
    return max(own - architecture.layers * architecture.attention, 0)


def _attends(kind: object) -> bool:
    """Return whether a layer of this kind has keys and values."""
    return isinstance(kind, str) and ATTENTION.fullmatch(kind) is not None


def _part(config: Any) -> int:
    """Return the parameters of an encoder that is described apart from its decoder (T5Gemma, TrOCR, MusicGen); 0 if
    there is none.
    """
    if not isinstance(config, dict):
        return 0
    alone = {key: value for key, value in config.items() if not key.endswith("encoder")}
    try:
        return of_config(alone, "").architecture.parameters
    except DescribeError:
        return _tower(config)


def _number(text: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    for key in keys:
        value = text.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    return None


def _listed(text: Mapping[str, Any]) -> dict[str, int]:
    """Return the numbers that a configuration lists: a feed-forward or experts for each layer (Gemma 3n, Hunyuan A13B),
    experts for each of text and images (ERNIE 4.5 VL), which are as many. Of heads, which are wider in layers that see
    all tokens (Gemma 4), the widest.
    """
    found: dict[str, int] = {}
    keys = {
        "ffn": "intermediate_size", "experts": "moe_num_experts", "expert_ffn": "moe_intermediate_size",
        "active": "moe_topk",
    }  # fmt: skip
    for key, name in keys.items():
        values = text.get(name)
        if isinstance(values, list) and values and all(type(value) is int for value in values):
            found[key] = sum(values) if key == "expert_ffn" and len(values) == 2 else max(values)
    layers = text.get("per_layer_config")
    own = [layer for layer in layers.values() if isinstance(layer, dict)] if isinstance(layers, dict) else []
    heads = [_number(text, ("global_head_dim",)), *(_number(layer, ("head_dim",)) for layer in own)]
    if any(heads):
        found["head"] = max(filter(None, (*heads, _number(text, KEYS["head"]))))
    return found


def _layers_listed(text: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of layers of a configuration that only lists their kinds (Nemotron-H as transformers 5 writes
    it).
    """
    for key in ("layers_block_type", "layer_types", "hybrid_override_pattern"):
        kinds = text.get(key)
        if isinstance(kinds, (list, str)) and kinds:
            return {"layers": len(kinds)}
    return {}


def _stretched(text: Mapping[str, Any], numbers: Mapping[str, int]) -> dict[str, int]:
    """Return the context to which scaled positions (YaRN) stretch that of the configuration, as vLLM takes it."""
    scaling = text.get("rope_scaling") or text.get("rope_parameters")
    context = numbers.get("context")
    if not isinstance(scaling, dict) or not context or str(text.get("model_type", "")).startswith("gemma3"):
        return {}
    kind, factor = scaling.get("rope_type") or scaling.get("type"), scaling.get("factor")
    if kind not in ("yarn", "linear", "dynamic") or not isinstance(factor, (int, float)) or not 1 <= factor <= 1024:
        return {}
    first = _number(scaling, ("original_max_position_embeddings",)) if kind == "yarn" else None
    return {"context": min(max(context, round((first or context) * factor)), LIMITS["context"])}


def _moe(text: Mapping[str, Any], numbers: Mapping[str, int]) -> dict[str, int]:
    listed = text.get("num_shared_expert")  # of Hunyuan A13B, for each layer
    shared = max(listed) if isinstance(listed, list) and all(type(one) is int for one in listed) and listed else 0
    shared = _number(text, SHARED) or shared
    if not numbers.get("experts") or not shared or numbers.get("shared_ffn"):
        return {}
    return {"shared_ffn": shared * numbers.get("expert_ffn", numbers.get("ffn", 0))}


def _kinds(text: Mapping[str, Any], layers: int) -> list[object] | None:
    """Return the kind of each layer; None if the configuration does not state kinds."""
    for key in ("layer_types", "layers_block_type"):
        if isinstance(text.get(key), list):
            return list(text[key][:layers])
    flags = text.get("attn_type_list")  # of MiniMax
    if isinstance(flags, list):
        return ["linear_attention" if flag == 0 else "attention" for flag in flags[:layers]]
    letters, interval = text.get("sliding_window_pattern"), _number(text, ("full_attention_interval",)) or 1
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
    period, offset = _number(text, ("attn_layer_period",)) or 1, _number(text, ("attn_layer_offset",))  # of Jamba
    if period > 1:
        attending = range(offset or 0, layers, period)
    if not isinstance(attending, (list, range)):
        return None
    return ["attention" if layer in attending[:layers] else "mamba" for layer in range(layers)]


def _feed_forwards(text: Mapping[str, Any], numbers: Mapping[str, int], kinds: list[object]) -> dict[str, int]:
    """Return the layers without experts and their mean feed-forward, where not all layers have the same."""
    layers, ffn, dense = numbers.get("layers", 0), numbers.get("ffn", 0), numbers.get("layers", 0)
    found: dict[str, int] = {}
    if numbers.get("experts"):
        step = _number(text, ("expert_layer_period", "interleave_moe_layer_step")) or 1
        dense -= kinds.count("moe") or layers // step
        found |= {"dense_layers": dense} if dense else {}
        wider = _number(text, ("intermediate_size_mlp",))  # of Llama 4, whose experts have the other size
        found |= {"ffn": wider, "expert_ffn": ffn, "shared_ffn": ffn} if wider else {}
    if dense and any(kind in kinds for kind in ("mlp", "moe", "hybrid")):
        found["ffn"] = max(ffn * (kinds.count("mlp") + kinds.count("hybrid")) // dense, 1)
    return found


def _windows(text: Mapping[str, Any], numbers: Mapping[str, int], kinds: list[object] | None) -> dict[str, int]:
    """Return the window if some layers see all tokens (otherwise engines may not use it), or what the state of layers
    without attention takes, as a window.
    """
    layers = numbers.get("layers", 0)
    window, pattern = _number(text, ("sliding_window",)), _number(text, ("sliding_window_pattern",))
    narrow = _number(text, ("attention_window_size",))  # of all layers with attention in RecurrentGemma
    if narrow:
        return {"window": narrow}
    if kinds is None:
        return {"window": window, "wide_layers": layers // pattern} if window and pattern and pattern > 1 else {}
    if window and "sliding_attention" in kinds:
        return {"window": window, "wide_layers": sum(kind != "sliding_attention" for kind in kinds)}
    attending = sum(map(_attends, kinds))
    heads = numbers.get("kv") or numbers.get("heads")
    if attending == len(kinds) or not heads or not numbers.get("hidden"):
        return {}
    head = numbers.get("head") or numbers["hidden"] // max(numbers.get("heads", 1), 1)
    window = state_window(numbers["hidden"], max(2 * heads * head, 1))
    stateless = kinds.count("mlp") + kinds.count("moe")
    return {"window": math.ceil(window * (1 - stateless / (len(kinds) - attending))), "wide_layers": attending}


def _dtype(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    dtype_name = str(text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype") or "")
    return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(dtype_name, "")


def _quantization(config: Any) -> str:
    if not isinstance(config, dict):
        return ""
    method = str(config.get("quant_method", "")).replace("_", "-")
    bits = config.get("bits")
    if method == "bitsandbytes":
        return "bnb-4bit" if config.get("load_in_4bit") is True else "bnb-8bit"
    if method == "compressed-tensors":
        groups = json.dumps(config.get("config_groups", {}))
        return "w8a8" if '"num_bits": 4' not in groups else "nvfp4" if "nvfp4" in str(config.get("format")) else "w4a16"
    if method == "modelopt" and "fp4" in str(config.get("quant_algo")).lower():
        return "modelopt-fp4"
    if method == "torchao":  # an older release names the kind, a newer one describes it
        kind = json.dumps(config.get("quant_type")).lower()
        return "int4" if "int4" in kind else "int8" if "int8" in kind or "float8" in kind else ""
    if method == "gptq" and bits == 8:
        return "gptq-int8"
    # the names of methods mean 4 bits
    if isinstance(bits, (int, float)) and 1 <= bits <= 8 and (bits != 4 or method not in NAMES):
        return f"{bits:.3g}bit"
    return method if method in NAMES else ""

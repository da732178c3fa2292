"""Read a model's `config.json`: its architecture, and the hints that describe it. Every number in it is checked."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from slurm_migbatch.predict.llm.architecture import SEEN_MIB, VOCAB, Architecture, Experts, Latent
from slurm_migbatch.predict.llm.blocks import numbers_of_blocks
from slurm_migbatch.predict.llm.configuration import IMAGES, KEYS, LIMITS, NESTED, inner_ones, language, number
from slurm_migbatch.predict.llm.layers import (
    STATEFUL,
    feed_forwards,
    in_layers,
    kinds_of,
    layers_listed,
    stateful,
    states_beside,
    windows,
)
from slurm_migbatch.predict.llm.quantization import quantization_of

NEEDED: Final = ("layers", "hidden", "heads")
GATED_ENCODERS: Final = frozenset(
    ["modernbert", "nomic_bert", "eurobert", "gte", "new", "neobert", "esmc", "longformer"]
)
_ACTIVATION: Final = (
    "hidden_act", "hidden_activation", "activation_function", "activation", "mlp_hidden_act", "dense_act_fn",
    "decoder_hidden_act",
)  # fmt: skip
ENCODERS: Final = GATED_ENCODERS | frozenset([
    "bert", "roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "distilbert", "mpnet", "deberta", "deberta-v2",
    "electra", "albert", "esm", "big_bird", "megatron-bert", "data2vec-text", "ernie", "layoutlm",
    "roberta-prelayernorm", "rembert", "roformer", "nystromformer", "convbert", "jina_embeddings_v3", "xmod",
])  # fmt: skip
TWO_STACKS: Final = frozenset([
    "bart", "mbart", "marian", "m2m_100", "pegasus", "whisper", "blenderbot", "blenderbot-small", "bigbird_pegasus",
    "pegasus_x", "mvp", "plbart", "led", "nllb-moe", "prophetnet", "fsmt", "speech_to_text",
])  # fmt: skip
UNGATED: Final = (
    (ENCODERS - GATED_ENCODERS)
    | TWO_STACKS
    | frozenset(
        ["gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "falcon", "mpt", "gpt_bigcode", "starcoder2", "phi"]
    )
    | {"apertus", "arcee", "nemotron", "nemotron_h", "trocr", "codegen", "biogpt", "xglm", "musicgen_decoder"}
)
BIASED: Final = UNGATED - {"apertus", "mpt", "falcon", "arcee", "nemotron", "nemotron_h"}
PLAIN: Final = frozenset(
    ["relu", "relu2", "gelu", "gelu_new", "gelu_fast", "gelu_python", "quick_gelu", "xielu", "gelu_10"]
)
"""Activations of feed-forwards of two matrices, in any model type but these, which have a gate beside them."""
GATED: Final = re.compile(
    r".*gemma.*|modernbert.*|eurobert|gte|new|neobert|esmc|longformer|bitnet|zamba2?|llama|mistral|mixtral|qwen[23]|phi3|"
    r"deepseek_v[23]|olmo2?|granite|cohere2?|glm4?|internlm2|minicpm"
)
_ENCODING: Final = re.compile(r".*(?:ForMaskedLM|ForCTC|ForRNNT|ForTDT|ForAudioClassification|Encoder(?:Model)?)")
_GENERATING: Final = re.compile(
    r".*(?:CausalLM|LMHeadModel|Generation|Generator|Decoder|ForRetrieval|Text2Text|Seq2Seq.*)"
)
"""Classes of models that generate nothing, and of those that do."""
TIED: Final = frozenset([
    "gemma", "gemma2", "gemma3", "gemma3_text", "gpt2", "gpt_neo", "opt", "bloom", "falcon", "mpt", "gpt_bigcode",
    "cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "lfm2", "lfm2_moe", "smollm3", "recurrent_gemma",
    "mamba", "t5_gemma_module", "t5gemma2_decoder", "gemma3n", "gemma3n_text", "gemma4", "gemma4_text", "vaultgemma",
    "starcoder2", "xglm", "biogpt", "ctrl", "gpt-sw3", "openai-gpt", "xlnet", "trocr", "minicpm3", "zamba", "zamba2",
])  # fmt: skip
"""Model types by the properties that their configuration does not state. Longformer is not gated, but has as many
parameters in its global attention.
"""
SEEING: Final = 430_000_000
"""Parameters of an encoder of images of which no size is stated: those of the larger of SigLIP's common ones."""
TILES: Final = 13
MOST_PATCHES: Final = 65536
SEEN_BYTES: Final = 63
"""Images of the stated size that encoders take of a larger one (InternVL: twelve and the whole), patches of an image of
any size (Qwen's), and working memory in bytes for each patch and its width (models.toml).
"""
DEPTHS: Final[Mapping[int, int]] = {384: 12, 768: 12, 1024: 24, 1152: 27, 1280: 32, 1408: 40}
"""Layers of the usual vision transformers by width, which a configuration may leave out."""
_SEEN_BY: Final = ("mm_vision_tower", "vision_tower", "vision_backbone_id")
"""Keys that name an encoder of images."""
_NAMED: Final = ("cls", "architecture", "model_name")
"""The same within its own configuration."""
_HALVED: Final = frozenset({"recurrent_gemma", "moshi", "kyutai_speech_to_text", "qwen", "molmo"})
"""Model types whose two matrices of a gated feed-forward have the stated width together."""
_NARROWER: Final = ("moe_latent_size", "moe_hidden_size")
"""Keys of the width that experts read and write, where it is not the model's (Nemotron 3 Super)."""
_TOWER: Final = (
    (("depth", "encoder_layers", "layers", "num_blocks", "conf_num_hidden_layers"), "layers"),
    (("embed_dim", "width", "attention_dim"), "hidden"),
)
"""Keys of a tower: Qwen-VL's, where hidden_size may be the language model's, Whisper's, and the usual ones."""
_CONFORMER: Final = (
    "conv_kernel_size", "conv_depthwise_kernel_size", "conv_expansion_factor", "conf_conv_kernel_size",
)  # fmt: skip
"""Keys of an encoder of sound with two feed-forwards and a convolution in each layer (arXiv 2005.08100)."""
_TYPED: Final = frozenset({"vision_config", "audio_config", "encoder", "text_encoder", "audio_encoder"})
"""Keys of parts that are counted by what they are."""
SHARED: Final = ("n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts")
"""Keys of the number of experts that all tokens pass."""


class ArchError(ValueError):
    """An invalid description; the message says what is wrong."""


class DescribeError(Exception):
    """A model on disk that cannot be described; the message says why and what to do."""


@dataclass(frozen=True)
class Described:
    """Contents of a configuration: a name, the numbers of `arch=`, data type and quantization if given. `counted`: what
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
            numbers["kv_rank"], given("q_rank", 0), given("nope", 128), given("rope", 64), given("value", 128),
            given("index", 0),
        )  # fmt: skip
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
        state=given("state", 0),
    )
    extra = max(given("params", 0) - architecture.parameters, 0)
    return replace(architecture, extra=extra, aside=min(given("aside", 0), extra), seen_mib=given("seen", 0))


def of_config(config: Mapping[str, Any], name: str) -> Described:
    """Return the contents of a configuration in Hugging Face's form; raises DescribeError."""
    text = language(config)
    if text is config and "vocab_size" not in config and any(key in config for key in IMAGES):
        raise DescribeError(f"the configuration of {name} is of a model of images: use its public name, or add mem=")
    numbers, kinds = _numbers(config, text)
    described = Described(
        name,
        {key: value for key, value in numbers.items() if value or key in NEEDED},
        _dtype(config, text),
        quantization_of(config.get("quantization_config") or text.get("quantization_config")),
    )
    try:
        architecture = build(described.numbers)
    except ArchError as error:
        raise DescribeError(
            f"the configuration of {name} does not describe a language model ({error}): add mem="
        ) from None
    aside = _aside(config, text, architecture)
    beside = aside + _beside(config, text, architecture, kinds)
    if not beside:
        return described
    parameters = min(max(architecture.parameters + beside, 1), LIMITS["params"])
    sized = of_size(described.numbers, parameters)
    if aside and architecture.generates:
        sized["aside"] = min(aside, LIMITS["aside"])
        sized |= _seen(config, text)
    return replace(described, numbers=sized)


def _numbers(config: Mapping[str, Any], text: Mapping[str, Any]) -> tuple[dict[str, int], list[object] | None]:
    """Return the numbers that the language model's configuration `text` states, and the kind of each layer, if any."""
    numbers = {key: value for key, keys in KEYS.items() if (value := number(text, keys)) is not None}
    numbers = layers_listed(text) | numbers
    numbers |= _listed(text) | _stretched(text, numbers)
    numbers |= numbers_of_blocks(text, numbers) | _index(text)
    if "context" in numbers:  # some state one without a limit
        numbers["context"] = min(numbers["context"], LIMITS["context"])
    if text.get("is_moe") is False:
        numbers.pop("experts", None)
    layers = min(numbers.get("layers", 0), LIMITS["layers"])
    kinds = kinds_of(text, layers)
    numbers |= _moe(text, numbers) | windows(text, numbers, kinds)
    if True in (config.get("is_encoder_decoder"), text.get("is_encoder_decoder")):
        numbers["encoder_layers"] = number(text, ("encoder_layers", "num_layers")) or numbers.get("layers", 0)
    numbers |= feed_forwards(text, numbers, kinds or [])
    model_type = str(text.get("model_type", ""))
    numbers |= _of_type(text, model_type, numbers.get("ffn", 0))
    numbers["state"] = min(states_beside(text, layers, kinds), LIMITS["state"])
    numbers["tied"] = int(text.get("tie_word_embeddings", model_type in TIED | TWO_STACKS) is True)
    numbers["plain_ffn"] = int(_plain_ffn(text, model_type))
    numbers["bias"] = int(model_type in BIASED)
    # BERT may be either half of an encoder and a decoder
    halves = "encoder_layers" in numbers
    numbers["encoder"] = int(not halves and (model_type in ENCODERS or _encodes(config, text, numbers)))
    numbers |= _narrow_embedding(text, numbers)
    # Falcon states as many heads of keys as of queries beside it
    if text.get("multi_query") is True and ("kv" not in numbers or text.get("new_decoder_architecture") is False):
        numbers["kv"] = 1
    return numbers, kinds


def _beside(
    config: Mapping[str, Any], text: Mapping[str, Any], architecture: Architecture, kinds: list[object] | None
) -> int:
    """Return the parameters that generated tokens pass beside those of the architecture."""
    beside = in_layers(text, architecture, kinds)
    beside += _adapters(config, architecture) + _across(text, architecture) + _indexers(text, architecture)
    encodes = str(text.get("model_type", "")) not in ENCODERS and architecture.kind == "encoder"
    if encodes and any(key in text for key in _CONFORMER):
        layer = architecture.attention + architecture.feed_forward(architecture.ffn)
        beside += max(_tower(text) - architecture.layers * layer, 0)
    return beside


def _index(text: Mapping[str, Any]) -> dict[str, int]:
    """Return what sparse attention caches of a token for its index, in values of 16 bits: an 8-bit key, a scale."""
    head = number(text, ("index_head_dim",))
    return {"index": math.ceil((head + 4) / 2)} if head else {}


def _indexers(text: Mapping[str, Any], architecture: Architecture) -> int:
    """Return the parameters of such indices: their queries, the key that all heads share, and weights of the heads."""
    heads, head = (min(number(text, (f"index_{key}",)) or 0, LIMITS["head"]) for key in ("n_heads", "head_dim"))
    rank = architecture.latent.query_rank if architecture.latent and architecture.latent.query_rank else 0
    return architecture.layers * ((rank or architecture.width) * heads * head + architecture.width * (head + heads))


def _narrow_embedding(text: Mapping[str, Any], numbers: Mapping[str, int]) -> dict[str, int]:
    """Return the vocabulary of as many words as take, with the whole width, what narrower embeddings, the matrix after
    them and that after the layers take (ALBERT, ELECTRA, RemBERT).
    """
    width, vocab = (min(numbers.get(key, 0), LIMITS[key]) for key in ("hidden", "vocab"))
    narrow = number(text, ("embedding_size", "input_embedding_size")) if numbers["encoder"] else None
    return {"vocab": math.ceil(narrow * (vocab + 2 * width) / width) + width} if narrow and narrow < width else {}


def _aside(config: Mapping[str, Any], text: Mapping[str, Any], architecture: Architecture) -> int:
    """Return the parameters that no generated token passes: of encoders, voices, and embeddings that are looked up."""
    seeing = _vision(text.get("vision_config")) or (SEEING if _sees(config) else 0)
    towers = seeing + _tower(text.get("audio_config"))
    counted = architecture.encoder_layers * (architecture.attention + architecture.feed_forward(architecture.ffn))
    parts = max(sum(_part(config.get(f"{sense}encoder")) for sense in ("", "text_", "audio_")) - counted, 0)
    embedded = _embedded_by_layer(text, architecture.layers)
    return towers + parts + embedded + _apart(config, inner_ones(config))


def of_size(numbers: Mapping[str, int], parameters: int) -> dict[str, int]:
    """Return the numbers of an architecture with exactly this many parameters. If it would have more, its
    feed-forwards are narrower than stated: not all layers have one, or it has two matrices instead of three.
    """
    described = {key: value for key, value in numbers.items() if key != "params"}
    computed = build(described)
    excess = computed.parameters - parameters
    key = "expert_ffn" if computed.routed else "ffn"
    width = described.get(key) or described.get("ffn") or 4 * described["hidden"]
    narrowest = build({**described, key: 1}).parameters
    if excess > 0 and narrowest < computed.parameters:
        of_column = (computed.parameters - narrowest) / (width - 1)
        described[key] = max(width - math.ceil(excess / of_column), 1)
    found = build(described)
    beyond = parameters - found.parameters
    if beyond < 0 and not found.groups:  # layers share their attention, too
        layer = found.shared_of(1)
        described["groups"] = max(found.layers + beyond // layer, 1)
        beyond = parameters - build(described).parameters
    return {**described, "params": parameters} if beyond > 0 else described


def _apart(config: Mapping[str, Any], inner: list[Mapping[str, Any]], depth: int = 0) -> int:
    """Return the parameters of parts beside the language model that are known only by their layers and width: an
    encoder of speech, a voice, a network between images and text.
    """
    total = 0
    for key, part in config.items():
        if not isinstance(part, dict) or depth == NESTED:
            continue
        if key not in _TYPED and not any(part is known for known in inner):
            total += _part(part) if number(part, KEYS["experts"]) else _tower(part)
        if not key.endswith("encoder"):
            total += _apart(part, inner, depth + 1)
    return total


def _adapters(config: Mapping[str, Any], architecture: Architecture) -> int:
    """Return the parameters of adapters that a model is published with (Phi-4 multimodal has one for each sense)."""
    ranks = [number(part, ("r",)) or 0 for part in config.values() if isinstance(part, dict) and "lora_alpha" in part]
    return sum(architecture.adapters(rank) for rank in ranks if rank <= architecture.width)


def _across(text: Mapping[str, Any], architecture: Architecture) -> int:
    """Return the parameters of what is between text and other senses: layers of cross attention beside the others
    (IDEFICS), a second vocabulary (CSM, with one of each code of its sound).
    """
    interval, vocab = number(text, ("cross_layer_interval",)), number(text, ("text_vocab_size",)) or 0
    crossing = architecture.layers // interval if interval else 0
    codes = (number(text, ("num_codebooks",)) or 0) * architecture.vocab if vocab else 0
    embedded = min(vocab, LIMITS["vocab"]) + min(codes, LIMITS["vocab"])
    layer = architecture.attention + architecture.feed_forward(architecture.ffn)
    # CogVLM has a second set of weights in each layer, for images
    crossing += architecture.layers if "'CogVLM" in str(text.get("architectures")) else 0
    return crossing * layer + embedded * architecture.width


def _sees(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration only says that there is an encoder of images, as those of Phi-3 and Phi-4."""
    embedding = config.get("embd_layer")
    within = isinstance(embedding, dict) and "image_embd_layer" in embedding
    named = any(isinstance(config.get(key), str) and config[key] for key in _SEEN_BY)
    return within or named or isinstance(config.get("img_processor"), dict)


def _seen(config: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, int]:
    """Return the MiB that an encoder of images takes for the largest one."""
    vision = text.get("vision_config") or config.get("vision_encoder")  # Mistral's own form has the latter
    if not isinstance(vision, dict) or not _vision(vision):
        return {"seen": SEEN_MIB} if _sees(config) else {}
    width = number(vision, (*_TOWER[1][0], *KEYS["hidden"]))
    side, patch = number(vision, ("image_size",)), number(vision, ("patch_size", "spatial_patch_size"))
    if not width:
        return {"seen": SEEN_MIB}
    patches = min(TILES * (side // patch) ** 2, MOST_PATCHES) if side and patch else MOST_PATCHES
    return {"seen": min(math.ceil(SEEN_BYTES * patches * width / 2**20), LIMITS["seen"])}


def _vision(config: Any) -> int:
    """Return the parameters of an encoder of images, also of one that leaves out its depth or is only named."""
    sized = _tower(config)
    if sized or not isinstance(config, dict):
        return sized
    if any(isinstance(config.get(key), str) for key in _NAMED):
        return SEEING
    width = number(config, KEYS["hidden"]) or 0
    return DEPTHS.get(width, 0) * 12 * width**2 if number(config, KEYS["layers"]) is None else 0


def _embedded_by_layer(text: Mapping[str, Any], layers: int) -> int:
    """Return the parameters of embeddings that each layer adds of its own (Gemma 3n and 4); 0 if there are none."""
    vocab, width = (number(text, (f"{key}_per_layer_input",)) or 0 for key in ("vocab_size", "hidden_size"))
    return vocab * width * layers if vocab <= LIMITS["vocab"] and width <= LIMITS["hidden"] else 0


def _tower(config: Any) -> int:
    """Return the parameters of a transformer that encodes images or sound beside a language model; 0 if there is
    none.
    """
    if not isinstance(config, dict):
        return 0
    layers, width = (number(config, (*first, *KEYS[key])) or 0 for first, key in _TOWER)
    if not width and not any(key in config for key in IMAGES):
        width = number(config, ("hidden_dim",)) or 0
    ffn = number(config, (*KEYS["ffn"], "linear_units")) or 4 * width
    if layers > LIMITS["layers"] or width > LIMITS["hidden"] or ffn > LIMITS["ffn"]:
        return 0
    if any(key in config for key in _CONFORMER):
        return layers * (7 * width**2 + 4 * width * ffn)
    matrices = 3 if "silu" in (config.get("hidden_act"), config.get("activation")) else 2
    return layers * (4 * width**2 + matrices * width * ffn)


def _of_type(text: Mapping[str, Any], model_type: str, ffn: int) -> dict[str, int]:
    """Return the numbers that mean something else in this type of model; `ffn` is the one stated."""
    if model_type in _HALVED or text.get("activation_type") == "swiglu":  # of OLMo in its authors' form
        return {"ffn": ffn // 2}
    if model_type.startswith("longcat_flash"):  # each layer is two with attention, one of them without experts
        layers = number(text, KEYS["layers"]) or 0
        return {"layers": 2 * layers, "dense_layers": layers, "shared_ffn": ffn}
    if text.get("block_auto_adjust_ff_dim") is True:  # LFM2
        multiple = number(text, ("block_multiple_of",)) or 1
        return {"ffn": -(-2 * ffn // 3 // multiple) * multiple}
    return stateful(text, model_type) if STATEFUL.fullmatch(model_type) else {}


def _encodes(config: Mapping[str, Any], text: Mapping[str, Any], numbers: Mapping[str, int]) -> bool:
    """Return whether a model of a type that is not known generates nothing, by the name of its class."""
    classes = config.get("architectures")
    if not isinstance(classes, list) or numbers.get("encoder_layers"):
        return False
    named = [name for name in classes if isinstance(name, str)]
    generating = not named or any(map(_GENERATING.fullmatch, named))
    if any(map(_ENCODING.fullmatch, named)) or not (generating or numbers.get("vocab")):
        return True
    # a decoder without its output has such a name, too
    older = {"kv", "experts"}.isdisjoint(numbers) and "n_embd" not in text and text.get("is_decoder") is not True
    plain = _activation(text) in PLAIN and str(text.get("model_type", "")) not in UNGATED | TIED
    return older and plain and not generating


def _activation(text: Mapping[str, Any]) -> str:
    return next((text[key] for key in _ACTIVATION if isinstance(text.get(key), str)), "")


def _plain_ffn(text: Mapping[str, Any], model_type: str) -> bool:
    """Return whether feed-forwards have two matrices, without a gate."""
    stated = text.get("feed_forward_proj")  # of T5
    if model_type in UNGATED or (isinstance(stated, str) and stated):
        return model_type in UNGATED or str(stated).partition("-")[0] != "gated"
    return not GATED.fullmatch(model_type) and (_activation(text) in PLAIN or model_type.startswith("siglip"))


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
    heads = [number(text, ("global_head_dim",)), *(number(layer, ("head_dim",)) for layer in own)]
    if any(heads):
        found["head"] = max(filter(None, (*heads, number(text, KEYS["head"]))))
    return found


def _stretched(text: Mapping[str, Any], numbers: Mapping[str, int]) -> dict[str, int]:
    """Return the context to which scaled positions (YaRN) stretch that of the configuration, as vLLM takes it."""
    scaling = text.get("rope_scaling") or text.get("rope_parameters")
    context = numbers.get("context")
    if not isinstance(scaling, dict) or not context or str(text.get("model_type", "")).startswith("gemma3"):
        return {}
    kind, factor = scaling.get("rope_type") or scaling.get("type"), scaling.get("factor")
    if kind not in ("yarn", "linear", "dynamic") or not isinstance(factor, (int, float)) or not 1 <= factor <= 1024:
        return {}
    first = number(scaling, ("original_max_position_embeddings",)) if kind == "yarn" else None
    return {"context": min(max(context, round((first or context) * factor)), LIMITS["context"])}


def _moe(text: Mapping[str, Any], numbers: Mapping[str, int]) -> dict[str, int]:
    listed = text.get("num_shared_expert")  # of Hunyuan A13B, for each layer
    shared = max(listed) if isinstance(listed, list) and all(type(count) is int for count in listed) and listed else 0
    shared = number(text, SHARED) or shared
    if not numbers.get("experts"):
        return {}
    if text.get("residual_moe") is True:  # of Grok-2, beside its experts
        return {"shared_ffn": numbers.get("ffn", 0)}
    width, latent = numbers.get("hidden", 0), number(text, _NARROWER) or 0
    expert = numbers.get("expert_ffn", numbers.get("ffn", 0))
    # as many parameters as one of the model's width
    narrowed = {"expert_ffn": math.ceil(expert * latent / width)} if 0 < latent < width <= LIMITS["hidden"] else {}
    return narrowed if not shared or numbers.get("shared_ffn") else {**narrowed, "shared_ffn": shared * expert}


def _dtype(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    dtype_name = str(text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype") or "")
    return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(dtype_name, "")

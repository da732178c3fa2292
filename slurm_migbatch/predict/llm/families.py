"""List public models: their architecture as published in their configuration files, and all their names.

Layer sizes come from each model's public `config.json`; parameters are computed from them (`architecture`), and a
test compares them with the published numbers. Plain models (image, video, speech synthesis) have their published
parameters, all parts of the pipeline together, and our estimate of the working memory of one item at its usual size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from slurm_migbatch.predict.llm.architecture import Architecture, Experts, Latent

_K: Final = 1024


@dataclass(frozen=True)
class Model:
    """One public model. `native`: how its weights are published, a data type or a quantisation."""

    name: str
    architecture: Architecture
    native: str = "bf16"
    aliases: tuple[str, ...] = ()


def _a(
    layers: int, width: int, heads: int, kv_heads: int, ffn: int, vocab: int, context: int, **more: Any
) -> Architecture:
    """Return a Llama-like decoder: RMS norms, gated feed-forward, no biases."""
    more.setdefault("head", width // heads)
    return Architecture(layers, width, heads, kv_heads, ffn=ffn, vocab=vocab, context=context, **more)


def _gpt(layers: int, width: int, heads: int, vocab: int, context: int, **more: Any) -> Architecture:
    """Return a GPT-2-like decoder: layer norms and biases everywhere, two matrices of four times the width, learned
    positions.
    """
    given = {"gated": False, "tied": True, "bias": "all", "norm_bias": True, "positions": context, **more}
    ffn = given.pop("ffn", 4 * width)
    return _a(layers, width, heads, given.pop("kv_heads", heads), ffn, vocab, context, **given)


def _neox(layers: int, width: int, heads: int, vocab: int = 50304) -> Architecture:
    return _gpt(layers, width, heads, vocab, 2 * _K, tied=False, positions=0)


def _opt(layers: int, width: int, heads: int) -> Architecture:
    return _gpt(layers, width, heads, 50272, 2 * _K, positions=2 * _K + 2)


def _bloom(layers: int, width: int, heads: int) -> Architecture:
    return _gpt(layers, width, heads, 250880, 2 * _K, positions=0, extra=2 * width)


def _t5(layers: int, width: int, heads: int, ffn: int, head: int = 64, *, first: bool = False) -> Architecture:
    """Return a T5; `first`: version 1.0, whose feed-forward is not gated and whose output shares the embedding."""
    return Architecture(
        layers,
        width,
        heads,
        heads,
        head,
        ffn,
        32128,
        512,
        gated=not first,
        tied=first,
        encoder_layers=layers,
        extra=2 * 32 * heads,
        kind="both",
    )


def _whisper(layers: int, width: int, heads: int, mels: int = 80, encoder: int = 0) -> Architecture:
    vocab = 51866 if mels == 128 else 51865
    stem = 3 * mels * width + width + 3 * width * width + width
    # keys have no bias: one vector less in each of the attentions
    fewer = width * (2 * layers + (encoder or layers))
    return Architecture(
        layers,
        width,
        heads,
        heads,
        64,
        4 * width,
        vocab,
        448,
        gated=False,
        tied=True,
        bias="all",
        norm_bias=True,
        positions=448,
        encoder_layers=encoder or layers,
        source=1500,
        extra=stem + 1500 * width - fewer,
        kind="both",
    )


def _bert(layers: int, width: int, heads: int, ffn: int, vocab: int, **more: Any) -> Architecture:
    """Return a BERT-like encoder: token types, a norm after the embedding and a pooler are `extra`."""
    context = more.pop("context", 512)
    types = more.pop("types", 2)
    extra = types * width + 2 * width + (width * width + width) - 2 * width + more.pop("extra", 0)
    return Architecture(
        layers,
        width,
        heads,
        heads,
        width // heads,
        ffn,
        vocab,
        context,
        gated=False,
        headless=True,
        bias="all",
        norm_bias=True,
        positions=more.pop("positions", context),
        extra=extra,
        kind="encoder",
        **more,
    )


def _plain(params: float, item_mib: int) -> Architecture:
    return Architecture(0, 0, extra=round(params * 1e6), kind="plain", item_mib=item_mib)


def _seen(base: Architecture, params: int) -> Architecture:
    """Return a decoder with other parts (a vision tower) up to its published number of parameters."""
    return replace(base, extra=max(params - base.parameters, 0) + base.extra)


def _moe(count: int, active: int, ffn: int, shared: int = 0, dense_layers: int = 0) -> Experts:
    return Experts(count, active, ffn, shared, dense_layers)


_L31_8B = _a(32, 4096, 32, 8, 14336, 128256, 128 * _K)
_L31_70B = _a(80, 8192, 64, 8, 28672, 128256, 128 * _K)
_L2_7B = _a(32, 4096, 32, 32, 11008, 32000, 4 * _K)
_L2_13B = _a(40, 5120, 40, 40, 13824, 32000, 4 * _K)
_MISTRAL = _a(32, 4096, 32, 8, 14336, 32768, 32 * _K)
_NEMO = _a(40, 5120, 32, 8, 14336, 131072, 128 * _K, head=128)
_SMALL24 = _a(40, 5120, 32, 8, 32768, 131072, 32 * _K, head=128)
_QWEN: Final[Mapping[str, Any]] = {"bias": "qkv"}
_Q25_1B = _a(28, 1536, 12, 2, 8960, 151936, 32 * _K, tied=True, **_QWEN)
_Q25_3B = _a(36, 2048, 16, 2, 11008, 151936, 32 * _K, tied=True, **_QWEN)
_Q25_7B = _a(28, 3584, 28, 4, 18944, 152064, 32 * _K, **_QWEN)
_Q25_14B = _a(48, 5120, 40, 8, 13824, 152064, 32 * _K, **_QWEN)
_Q25_32B = _a(64, 5120, 40, 8, 27648, 152064, 32 * _K, **_QWEN)
_Q25_72B = _a(80, 8192, 64, 8, 29568, 152064, 32 * _K, **_QWEN)
_Q3: Final[Mapping[str, Any]] = {"head": 128, "head_norms": True}
_Q3_8B = _a(36, 4096, 32, 8, 12288, 151936, 40 * _K, **_Q3)
_Q3_30B = _a(48, 2048, 32, 4, 6144, 151936, 40 * _K, experts=_moe(128, 8, 768), **_Q3)
_G2: Final[Mapping[str, Any]] = {"tied": True, "norms": 4, "window": 4096}
_G3: Final[Mapping[str, Any]] = {"tied": True, "norms": 4, "head_norms": True}
_G3_4B = _a(34, 2560, 8, 4, 10240, 262208, 128 * _K, head=256, window=1024, wide_layers=5, **_G3)
_G3_12B = _a(48, 3840, 16, 8, 15360, 262208, 128 * _K, head=256, window=1024, wide_layers=8, **_G3)
_G3_27B = _a(62, 5376, 32, 16, 21504, 262208, 128 * _K, head=128, window=1024, wide_layers=10, **_G3)
_PHI: Final[Mapping[str, Any]] = {"gated": False, "bias": "all", "norms": 1, "norm_bias": True}
_DS_V3 = _a(
    61,
    7168,
    128,
    128,
    18432,
    129280,
    128 * _K,
    head=128,
    latent=Latent(512, 1536),
    experts=_moe(256, 8, 2048, 2048, 3),
    extra=58 * 256,
)
_GLM_AIR = _a(
    46, 4096, 96, 8, 10944, 151552, 128 * _K, head=128, bias="qkv", experts=_moe(128, 8, 1408, 1408, dense_layers=1)
)
_GLM = _a(
    92, 5120, 96, 8, 12288, 151552, 128 * _K, head=128, bias="qkv", experts=_moe(160, 8, 1536, 1536, dense_layers=3)
)
_MINIMAX = _a(62, 3072, 48, 8, 1536, 200064, 192 * _K, head=128, experts=_moe(256, 8, 1536))
_SC2: Final[Mapping[str, Any]] = {"gated": False, "bias": "all", "norm_bias": True}
_BERT_BASE, _BERT_LARGE = (12, 768, 12, 3072), (24, 1024, 16, 4096)
_XLMR: Final[Mapping[str, Any]] = {"types": 1, "positions": 514}


def _m(name: str, architecture: Architecture, also: str = "", native: str = "bf16") -> Model:
    return Model(name, architecture, native, tuple(also.split()))


_LLAMA = (
    _m("llama-7b", _a(32, 4096, 32, 32, 11008, 32000, 2 * _K), "llama-1-7b alpaca-7b"),
    _m("llama-13b", _a(40, 5120, 40, 40, 13824, 32000, 2 * _K), "llama-1-13b"),
    _m("llama-30b", _a(60, 6656, 52, 52, 17920, 32000, 2 * _K), "llama-33b llama-1-30b"),
    _m("llama-65b", _a(80, 8192, 64, 64, 22016, 32000, 2 * _K), "llama-1-65b"),
    _m("llama-2-7b", _L2_7B, "llama2 vicuna-7b vicuna-7b-v1.5 orca-2-7b wizardlm-7b"),
    _m("llama-2-13b", _L2_13B, "vicuna-13b vicuna-13b-v1.5 orca-2-13b wizardlm-13b mythomax-l2-13b"),
    _m("llama-2-70b", _a(80, 8192, 64, 8, 28672, 32000, 4 * _K)),
    _m("codellama-7b", _a(32, 4096, 32, 32, 11008, 32016, 16 * _K)),
    _m("codellama-13b", _a(40, 5120, 40, 40, 13824, 32016, 16 * _K)),
    _m("codellama-34b", _a(48, 8192, 64, 8, 22016, 32000, 16 * _K), "phind-codellama-34b"),
    _m("codellama-70b", _a(80, 8192, 64, 8, 28672, 32016, 4 * _K)),
    _m("llama-3-8b", replace(_L31_8B, context=8 * _K), "llama3"),
    _m("llama-3-70b", replace(_L31_70B, context=8 * _K)),
    _m(
        "llama-3.1-8b",
        _L31_8B,
        "llama3.1 deepseek-r1-8b deepseek-r1-distill-llama-8b tulu-3-8b llama-3.1-nemotron-nano-8b llama-guard-3-8b",
    ),
    _m("llama-3.1-70b", _L31_70B, "llama-3.1-nemotron-70b tulu-3-70b"),
    _m("llama-3.1-405b", _a(126, 16384, 128, 8, 53248, 128256, 128 * _K)),
    _m("llama-3.2-1b", _a(16, 2048, 32, 8, 8192, 128256, 128 * _K, tied=True), "llama-guard-3-1b"),
    _m("llama-3.2-3b", _a(28, 3072, 24, 8, 8192, 128256, 128 * _K, tied=True), "llama3.2"),
    _m("llama-3.2-11b", _seen(replace(_L31_8B, layers=40), 10_670_220_835), "llama-3.2-11b-vision llama3.2-vision"),
    _m("llama-3.2-90b", _seen(replace(_L31_70B, layers=100), 88_592_000_000), "llama-3.2-90b-vision"),
    _m("llama-3.3-70b", _L31_70B, "llama3.3 deepseek-r1-70b deepseek-r1-distill-llama-70b"),
    _m(
        "llama-4-scout",
        _seen(_a(48, 5120, 40, 8, 16384, 202048, 256 * _K, head=128, experts=_moe(16, 1, 8192, 8192)), 108_641_793_536),
        "llama-4-scout-17b-16e llama4",
    ),
    _m(
        "llama-4-maverick",
        _seen(
            _a(48, 5120, 40, 8, 16384, 202048, 256 * _K, head=128, experts=_moe(128, 1, 8192, 8192, 24)),
            401_583_781_376,
        ),
        "llama-4-maverick-17b-128e",
    ),
    _m("tinyllama-1.1b", _a(22, 2048, 32, 4, 5632, 32000, 2 * _K), "tinyllama"),
    # some of its 80 layers have no attention: a bound of its cache
    _m("llama-3.3-nemotron-super-49b", _seen(_a(80, 8192, 64, 8, 18000, 128256, 128 * _K), 49_900_000_000)),
)
_MISTRALS = (
    _m(
        "mistral-7b",
        _MISTRAL,
        "mistral mathstral-7b openhermes-2.5-mistral-7b zephyr-7b openchat-3.5 "
        "neural-chat-7b  starling-lm-7b e5-mistral-7b sfr-embedding-mistral bge-en-icl",
    ),
    _m("mistral-nemo", _NEMO, "mistral-nemo-12b mistral-nemo-2407"),
    _m("ministral-8b", _a(36, 4096, 32, 8, 12288, 131072, 32 * _K, head=128)),
    # with the vision encoder of 0.4 billion that the model cards name
    _m("ministral-3-3b", _seen(_a(26, 3072, 32, 8, 9216, 131072, 256 * _K, head=128, tied=True), 3_850_000_000)),
    _m("ministral-3-8b", _seen(_a(34, 4096, 32, 8, 14336, 131072, 256 * _K, head=128), 8_920_000_000)),
    _m("ministral-3-14b", _seen(_a(40, 5120, 32, 8, 16384, 131072, 256 * _K, head=128), 13_950_000_000)),
    # with Whisper's encoder
    _m("voxtral-mini-3b", _seen(_a(30, 3072, 32, 8, 8192, 131072, 128 * _K, head=128), 4_680_000_000), "voxtral-mini"),
    _m("mistral-small-22b", _a(56, 6144, 48, 8, 16384, 32768, 32 * _K), "mistral-small-2409 codestral-22b codestral"),
    _m("mistral-small-24b", _SMALL24, "mistral-small-2501 mistral-small"),
    _m(
        "mistral-small-3.2-24b",
        replace(_seen(_SMALL24, 24_011_361_280), context=128 * _K),
        "mistral-small-3.1-24b mistral-small-2503 mistral-small-2506 mistral-small3.1 mistral-small3.2 "
        "devstral-small devstral-small-2505 magistral-small",
    ),
    _m(
        "mistral-large",
        _a(88, 12288, 96, 8, 28672, 32768, 128 * _K),
        "mistral-large-2407 mistral-large-2411  mistral-large-123b",
    ),
    _m("mistral-large-3-675b", _plain(675_000, 4 * _K), "mistral-large-3 mistral-large-2512", "fp8"),
    _m("pixtral-12b", _seen(_NEMO, 12_682_736_640)),
    _m(
        "mixtral-8x7b",
        _a(32, 4096, 32, 8, 14336, 32000, 32 * _K, experts=_moe(8, 2, 14336)),
        "nous-hermes-2-mixtral-8x7b mixtral",
    ),
    _m("mixtral-8x22b", _a(56, 6144, 48, 8, 16384, 32768, 64 * _K, experts=_moe(8, 2, 16384))),
)
_QWENS = (
    _m("qwen1.5-0.5b", _a(24, 1024, 16, 16, 2816, 151936, 32 * _K, tied=True, **_QWEN)),
    _m("qwen1.5-1.8b", _a(24, 2048, 16, 16, 5504, 151936, 32 * _K, **_QWEN), "qwen-1.8b"),
    _m("qwen1.5-4b", _a(40, 2560, 20, 20, 6912, 151936, 32 * _K, **_QWEN)),
    _m("qwen1.5-7b", _a(32, 4096, 32, 32, 11008, 151936, 32 * _K, **_QWEN), "qwen-7b"),
    _m("qwen1.5-14b", _a(40, 5120, 40, 40, 13696, 152064, 32 * _K, **_QWEN), "qwen-14b"),
    _m("qwen1.5-32b", _a(64, 5120, 40, 8, 27392, 152064, 32 * _K, **_QWEN)),
    _m("qwen1.5-72b", _a(80, 8192, 64, 64, 24576, 152064, 32 * _K, **_QWEN), "qwen-72b"),
    _m("qwen1.5-110b", _a(80, 8192, 64, 8, 49152, 152064, 32 * _K, **_QWEN)),
    _m("qwen2-0.5b", _a(24, 896, 14, 2, 4864, 151936, 32 * _K, tied=True, **_QWEN)),
    _m("qwen2-1.5b", _Q25_1B, "gte-qwen2-1.5b"),
    _m("qwen2-7b", _Q25_7B, "gte-qwen2-7b"),
    _m("qwen2-72b", _Q25_72B),
    _m("qwen2-57b-a14b", _a(28, 3584, 28, 4, 18944, 151936, 32 * _K, experts=_moe(64, 8, 2560, 20480), **_QWEN)),
    _m(
        "qwen1.5-moe-a2.7b",
        _a(24, 2048, 16, 16, 5632, 151936, 8 * _K, experts=_moe(60, 4, 1408, 5632), **_QWEN),
        "qwen1.5-moe",
    ),
    _m("qwen2-audio-7b", _seen(_Q25_7B, 8_397_000_000)),
    _m("qwen2-vl-2b", _seen(_Q25_1B, 2_208_985_600)),
    _m("qwen2-vl-7b", _seen(_Q25_7B, 8_291_375_616)),
    _m("qwen2-vl-72b", _seen(_Q25_72B, 73_405_560_320)),
    _m("qwen2.5-0.5b", _a(24, 896, 14, 2, 4864, 151936, 32 * _K, tied=True, **_QWEN), "mxbai-rerank-base-v2"),
    _m("qwen2.5-1.5b", _Q25_1B, "mxbai-rerank-large-v2"),
    _m("deepseek-r1-distill-qwen-1.5b", replace(_Q25_1B, tied=False, context=128 * _K), "deepseek-r1-1.5b"),
    _m("qwen2.5-3b", _Q25_3B),
    _m("qwen2.5-7b", _Q25_7B, "qwen2.5"),
    _m("deepseek-r1-distill-qwen-7b", replace(_Q25_7B, context=128 * _K), "deepseek-r1-7b"),
    _m("qwen2.5-14b", _Q25_14B),
    _m("deepseek-r1-distill-qwen-14b", replace(_Q25_14B, context=128 * _K), "deepseek-r1-14b"),
    _m("qwen2.5-32b", _Q25_32B),
    _m("qwq-32b", replace(_Q25_32B, context=40 * _K), "qwq"),
    _m("deepseek-r1-distill-qwen-32b", replace(_Q25_32B, context=128 * _K), "deepseek-r1-32b"),
    _m("qwen2.5-72b", _Q25_72B),
    _m("qwen2.5-omni-3b", _seen(_Q25_3B, 5_540_000_000)),
    _m("qwen2.5-omni-7b", _seen(_Q25_7B, 10_730_000_000)),
    _m("qwen2.5-vl-3b", replace(_seen(_Q25_3B, 3_754_622_976), context=125 * _K)),
    _m("qwen2.5-vl-7b", replace(_seen(_Q25_7B, 8_292_166_656), context=125 * _K)),
    _m("qwen2.5-vl-32b", replace(_seen(_Q25_32B, 33_452_718_336), context=125 * _K)),
    _m("qwen2.5-vl-72b", replace(_seen(_Q25_72B, 73_410_777_344), context=125 * _K)),
    _m(
        "qwen3-0.6b",
        _a(28, 1024, 16, 8, 3072, 151936, 40 * _K, tied=True, **_Q3),
        "qwen3-embedding-0.6b  qwen3-reranker-0.6b",
    ),
    _m("qwen3-1.7b", _a(28, 2048, 16, 8, 6144, 151936, 40 * _K, tied=True, **_Q3)),
    _m("qwen3-4b", _a(36, 2560, 32, 8, 9728, 151936, 40 * _K, tied=True, **_Q3), "qwen3-embedding-4b"),
    _m("qwen3-8b", _Q3_8B, "qwen3 deepseek-r1-0528-qwen3-8b"),
    _m("qwen3-embedding-8b", replace(_Q3_8B, headless=True)),
    _m("qwen3-14b", _a(40, 5120, 40, 8, 17408, 151936, 40 * _K, **_Q3)),
    _m("qwen3-32b", _a(64, 5120, 64, 8, 25600, 151936, 40 * _K, **_Q3)),
    _m("qwen3-30b-a3b", _Q3_30B, "qwen3-30b"),
    _m(
        "qwen3-coder-30b-a3b",
        replace(_Q3_30B, context=256 * _K),
        "qwen3-30b-a3b-instruct-2507  qwen3-30b-a3b-thinking-2507 qwen3-coder",
    ),
    _m("qwen3-235b-a22b", _a(94, 4096, 64, 4, 12288, 151936, 40 * _K, experts=_moe(128, 8, 1536), **_Q3), "qwen3-235b"),
    _m("qwen3-coder-480b-a35b", _a(62, 6144, 96, 8, 8192, 151936, 256 * _K, experts=_moe(160, 8, 2560), **_Q3)),
    _m("qwen3-vl-30b-a3b", _seen(replace(_Q3_30B, context=256 * _K), 31_070_754_032)),
    _m("qwen3-vl-8b", _seen(replace(_Q3_8B, context=256 * _K), 8_767_123_696)),
    _m(
        "qwen3-next-80b-a3b",
        _seen(_a(48, 2048, 16, 2, 5120, 151936, 256 * _K, head=256, experts=_moe(512, 10, 512, 512)), 81_324_862_720),
        "qwen3-next qwen3-coder-next",
    ),
)
_GEMMAS = (
    _m(
        "gemma-2b",
        _a(18, 2048, 8, 1, 16384, 256000, 8 * _K, head=256, tied=True),
        "codegemma-2b bge-reranker-v2-gemma",
    ),
    _m("gemma-7b", _a(28, 3072, 16, 16, 24576, 256000, 8 * _K, head=256, tied=True), "gemma codegemma-7b"),
    _m("gemma-2-2b", _a(26, 2304, 8, 4, 9216, 256000, 8 * _K, head=256, wide_layers=13, **_G2)),
    _m("gemma-2-9b", _a(42, 3584, 16, 8, 14336, 256000, 8 * _K, head=256, wide_layers=21, **_G2), "gemma2"),
    _m("gemma-2-27b", _a(46, 4608, 32, 16, 36864, 256000, 8 * _K, head=128, wide_layers=23, **_G2)),
    _m("gemma-3-270m", _a(18, 640, 4, 1, 2048, 262144, 32 * _K, head=256, window=512, wide_layers=3, **_G3)),
    _m("gemma-3-1b", _a(26, 1152, 4, 1, 6912, 262144, 32 * _K, head=256, window=512, wide_layers=4, **_G3)),
    _m("gemma-3-4b", _seen(_G3_4B, 4_300_079_472), "gemma3 medgemma-4b"),
    _m("gemma-3-12b", _seen(_G3_12B, 12_187_325_040)),
    _m("gemma-3-27b", _seen(_G3_27B, 27_432_406_640), "medgemma-27b"),
    _m("gemma-3n-e2b", _seen(_a(30, 2048, 8, 2, 8192, 262400, 32 * _K, head=256, tied=True), 5_439_438_272)),
    _m("gemma-3n-e4b", _seen(_a(35, 2048, 8, 2, 16384, 262400, 32 * _K, head=256, tied=True), 7_849_978_192)),
)
_PHIS = (
    _m("phi-1.5", _a(24, 2048, 32, 32, 8192, 51200, 2 * _K, extra=51200, **_PHI), "phi-1"),
    _m("phi-2", _a(32, 2560, 32, 32, 10240, 51200, 2 * _K, extra=51200, **_PHI)),
    _m("phi-3-mini", _a(32, 3072, 32, 32, 8192, 32064, 4 * _K), "phi3"),
    _m("phi-3-small", _a(32, 4096, 32, 8, 14336, 100352, 8 * _K, tied=True), "phi-3-small-8k"),
    _m("phi-3-medium", _a(40, 5120, 40, 10, 17920, 32064, 4 * _K)),
    _m("phi-3.5-mini", _a(32, 3072, 32, 32, 8192, 32064, 128 * _K), "phi3.5"),
    _m(
        "phi-3.5-moe", _a(32, 4096, 32, 8, 6400, 32064, 128 * _K, experts=_moe(16, 2, 6400), bias="qkv", norm_bias=True)
    ),
    _m("phi-3.5-vision", _seen(_a(32, 3072, 32, 32, 8192, 32064, 128 * _K), 4_146_621_440), "phi-3-vision"),
    _m("phi-4", _a(40, 5120, 40, 10, 17920, 100352, 16 * _K), "phi-4-14b phi-4-reasoning phi-4-reasoning-plus"),
    _m("phi-4-mini", _a(32, 3072, 24, 8, 8192, 200064, 128 * _K, tied=True)),
    _m("phi-4-multimodal", _seen(_a(32, 3072, 24, 8, 8192, 200064, 128 * _K, tied=True), 5_574_460_384)),
)
_DEEPSEEKS = (
    _m("deepseek-llm-7b", _a(30, 4096, 32, 32, 11008, 102400, 4 * _K), "deepseek-7b"),
    _m("deepseek-llm-67b", _a(95, 8192, 64, 8, 22016, 102400, 4 * _K), "deepseek-67b"),
    _m("deepseek-coder-1.3b", _a(24, 2048, 16, 16, 5504, 32256, 16 * _K)),
    _m("deepseek-coder-6.7b", _a(32, 4096, 32, 32, 11008, 32256, 16 * _K)),
    _m("deepseek-coder-33b", _a(62, 7168, 56, 8, 19200, 32256, 16 * _K)),
    _m(
        "deepseek-v2-lite",
        _a(27, 2048, 16, 16, 10944, 102400, 32 * _K, latent=Latent(512), experts=_moe(64, 6, 1408, 2816, 1)),
        "deepseek-coder-v2-lite deepseek-v2-lite-16b",
    ),
    _m(
        "deepseek-v2",
        _a(
            60,
            5120,
            128,
            128,
            12288,
            102400,
            128 * _K,
            head=128,
            latent=Latent(512, 1536),
            experts=_moe(160, 6, 1536, 3072, 1),
        ),
        "deepseek-v2.5 deepseek-coder-v2 deepseek-v2-236b",
    ),
    _m("deepseek-v3", _DS_V3, "deepseek-v3-0324 deepseek-v3.1 deepseek-v3.2 deepseek-v3-671b", "fp8"),
    _m("deepseek-r1", _DS_V3, "deepseek-r1-0528 deepseek-r1-671b deepseek-r1-zero", "fp8"),
)
_OLDER = (
    _m("gpt2", _gpt(12, 768, 12, 50257, _K), "gpt-2 dialogpt-small", "fp32"),
    _m("gpt2-medium", _gpt(24, 1024, 16, 50257, _K), "gpt-2-medium dialogpt-medium", "fp32"),
    _m("gpt2-large", _gpt(36, 1280, 20, 50257, _K), "gpt-2-large dialogpt-large", "fp32"),
    _m("gpt2-xl", _gpt(48, 1600, 25, 50257, _K), "gpt-2-xl", "fp32"),
    _m("distilgpt2", _gpt(6, 768, 12, 50257, _K), "distil-gpt2", "fp32"),
    _m("gpt-neo-125m", _gpt(12, 768, 12, 50257, 2 * _K), "", "fp32"),
    _m("gpt-neo-1.3b", _gpt(24, 2048, 16, 50257, 2 * _K), "", "fp32"),
    _m("gpt-neo-2.7b", _gpt(32, 2560, 20, 50257, 2 * _K), "", "fp32"),
    _m(
        "gpt-j-6b",
        _a(28, 4096, 16, 16, 16384, 50400, 2 * _K, gated=False, bias="mlp", norms=1, norm_bias=True, extra=50400),
        "gptj-6b gpt-j",
        "fp32",
    ),
    _m("gpt-neox-20b", _neox(44, 6144, 64, 50432), "gpt-neox", "fp16"),
    *(
        _m(f"pythia-{size}", _neox(*shape), "", "fp16")
        for size, shape in {
            "70m": (6, 512, 8),
            "160m": (12, 768, 12),
            "410m": (24, 1024, 16),
            "1b": (16, 2048, 8),
            "1.4b": (24, 2048, 16),
            "2.8b": (32, 2560, 32, 50304),
            "6.9b": (32, 4096, 32, 50432),
            "12b": (36, 5120, 40, 50688),
        }.items()
    ),
    *(
        _m(f"opt-{size}", _opt(*shape), "", "fp16")
        for size, shape in {
            "125m": (12, 768, 12),
            "350m": (24, 1024, 16),
            "1.3b": (24, 2048, 32),
            "2.7b": (32, 2560, 32),
            "6.7b": (32, 4096, 32),
            "13b": (40, 5120, 40),
            "30b": (48, 7168, 56),
            "66b": (64, 9216, 72),
            "175b": (96, 12288, 96),
        }.items()
    ),
    _m("dolly-v2-12b", _neox(36, 5120, 40, 50688), "", "fp16"),
    _m("blip2-opt-2.7b", _seen(_opt(32, 2560, 32), 3_744_761_856), "", "fp16"),
    _m("blip2-opt-6.7b", _seen(_opt(32, 4096, 32), 7_752_000_000), "", "fp16"),
    _m("bloom-560m", _bloom(24, 1024, 16), "bloomz-560m", "fp16"),
    _m("bloom-1b1", _bloom(24, 1536, 16), "bloomz-1b1", "fp16"),
    _m("bloom-1b7", _bloom(24, 2048, 16), "bloomz-1b7", "fp16"),
    _m("bloom-3b", _bloom(30, 2560, 32), "bloomz-3b", "fp16"),
    _m("bloom-7b1", _bloom(30, 4096, 32), "bloomz-7b1", "fp16"),
    _m("bloom", _bloom(70, 14336, 112), "bloomz bloom-176b"),
    _m("falcon-7b", _gpt(32, 4544, 71, 65024, 2 * _K, kv_heads=1, bias="", norms=1, positions=0)),
    _m("falcon-40b", _gpt(60, 8192, 128, 65024, 2 * _K, kv_heads=8, bias="", positions=0)),
    _m("falcon-180b", _gpt(80, 14848, 232, 65024, 2 * _K, kv_heads=8, bias="", positions=0)),
    _m("falcon3-1b", _a(18, 2048, 8, 4, 8192, 131072, 8 * _K, head=256)),
    _m("falcon3-3b", _a(22, 3072, 12, 4, 9216, 131072, 32 * _K, head=256)),
    _m("falcon3-7b", _a(28, 3072, 12, 4, 23040, 131072, 32 * _K, head=256)),
    _m("falcon3-10b", _a(40, 3072, 12, 4, 23040, 131072, 32 * _K, head=256)),
    _m("mpt-7b", _a(32, 4096, 32, 32, 16384, 50432, 2 * _K, gated=False, tied=True)),
    _m("mpt-30b", _a(48, 7168, 64, 64, 28672, 50432, 8 * _K, gated=False, tied=True)),
    _m("santacoder", _gpt(24, 2048, 16, 49280, 2 * _K, kv_heads=1), "", "fp16"),
    _m("starcoderbase-1b", _gpt(24, 2048, 16, 49152, 8 * _K, kv_heads=1), "starcoder-1b"),
    _m("starcoderbase-3b", _gpt(36, 2816, 22, 49152, 8 * _K, kv_heads=1), "starcoder-3b"),
    _m("starcoderbase-7b", _gpt(42, 4096, 32, 49152, 8 * _K, kv_heads=1), "starcoder-7b"),
    _m("starcoder", _gpt(40, 6144, 48, 49152, 8 * _K, kv_heads=1), "starcoderbase starcoder-15b starchat-beta"),
    _m("starcoder2-3b", _a(30, 3072, 24, 2, 12288, 49152, 16 * _K, tied=True, **_SC2)),
    _m("starcoder2-7b", _a(32, 4608, 36, 4, 18432, 49152, 16 * _K, tied=True, **_SC2)),
    _m("starcoder2-15b", _a(40, 6144, 48, 4, 24576, 49152, 16 * _K, **_SC2)),
)
_OTHERS = (
    _m(
        "gpt-oss-20b",
        _a(
            24,
            2880,
            64,
            8,
            2880,
            201088,
            128 * _K,
            head=64,
            window=128,
            wide_layers=12,
            bias="all",
            experts=_moe(32, 4, 2880),
            extra=24 * (64 + 32),
        ),
        "gpt-oss",
        "mxfp4",
    ),
    _m(
        "gpt-oss-120b",
        _a(
            36,
            2880,
            64,
            8,
            2880,
            201088,
            128 * _K,
            head=64,
            window=128,
            wide_layers=18,
            bias="all",
            experts=_moe(128, 4, 2880),
            extra=36 * (64 + 128),
        ),
        "",
        "mxfp4",
    ),
    _m("yi-6b", _a(32, 4096, 32, 4, 11008, 64000, 4 * _K), "yi-1.5-6b"),
    _m("yi-9b", _a(48, 4096, 32, 4, 11008, 64000, 4 * _K), "yi-1.5-9b"),
    _m("yi-34b", _a(60, 7168, 56, 8, 20480, 64000, 4 * _K), "yi-1.5-34b nous-hermes-2-yi-34b"),
    _m("smollm2-135m", _a(30, 576, 9, 3, 1536, 49152, 8 * _K, tied=True), "smollm-135m"),
    _m("smollm2-360m", _a(32, 960, 15, 5, 2560, 49152, 8 * _K, tied=True), "smollm-360m"),
    _m("smollm2-1.7b", _a(24, 2048, 32, 32, 8192, 49152, 8 * _K, tied=True), "smollm-1.7b"),
    _m("smollm3-3b", _a(36, 2048, 16, 4, 11008, 128256, 64 * _K, tied=True)),
    _m("solar-10.7b", _a(48, 4096, 32, 8, 14336, 32000, 4 * _K)),
    _m(
        "command-r",
        _a(40, 8192, 64, 64, 22528, 256000, 128 * _K, tied=True, norms=1),
        "c4ai-command-r-v01  command-r-35b aya-23-35b",
    ),
    _m("command-r-plus", _a(64, 12288, 96, 8, 33792, 256000, 128 * _K, tied=True, norms=1), "c4ai-command-r-plus"),
    _m(
        "command-r7b",
        _a(32, 4096, 32, 8, 14336, 256000, 128 * _K, tied=True, norms=1),
        "aya-expanse-8b c4ai-command-r7b",
    ),
    _m("aya-expanse-32b", _a(40, 8192, 64, 8, 24576, 256000, 128 * _K, tied=True, norms=1), "command-r-08-2024"),
    _m("internlm2-7b", _a(32, 4096, 32, 8, 14336, 92544, 32 * _K), "internlm2.5-7b"),
    _m("internlm3-8b", _a(48, 4096, 32, 2, 10240, 128512, 32 * _K)),
    _m("internlm2-20b", _a(48, 6144, 48, 8, 16384, 92544, 32 * _K), "internlm2.5-20b"),
    _m("baichuan2-7b", _a(32, 4096, 32, 32, 11008, 125696, 4 * _K)),
    _m("baichuan2-13b", _a(40, 5120, 40, 40, 13696, 125696, 4 * _K)),
    _m("chatglm3-6b", _a(28, 4096, 32, 2, 13696, 65024, 8 * _K, bias="qkv"), "chatglm2-6b", "fp16"),
    _m("glm-4-9b", _a(40, 4096, 32, 2, 13696, 151552, 128 * _K, bias="qkv"), "glm-4-9b-0414"),
    _m("glm-4v-9b", _seen(_a(40, 4096, 32, 2, 13696, 151552, 8 * _K, bias="qkv"), 13_900_000_000)),
    _m("glm-4-32b", _a(61, 6144, 48, 2, 23040, 151552, 32 * _K, norms=4), "glm-4-32b-0414 glm-z1-32b"),
    _m("glm-4.5-air", _seen(_GLM_AIR, 110_468_000_000), "glm-4.5-air-106b"),
    _m("glm-4.5", _seen(_GLM, 358_338_000_000), "glm-4.6"),
    _m("kimi-k2", _plain(1_026_000, 4 * _K), "", "fp8"),
    _m("minimax-m2", _MINIMAX, "", "fp8"),
    _m("granite-3.3-2b", _a(40, 2048, 32, 8, 8192, 49159, 128 * _K, tied=True), "granite-3.1-2b granite-3.2-2b"),
    _m("granite-3.3-8b", _a(40, 4096, 32, 8, 12800, 49159, 128 * _K, tied=True), "granite-3.1-8b granite-3.2-8b"),
    _m("olmo-2-7b", _a(32, 4096, 32, 32, 11008, 100352, 4 * _K, extra=32 * 2 * 4096), "olmo-2-1124-7b olmo-7b"),
    _m("olmo-2-13b", _a(40, 5120, 40, 40, 13824, 100352, 4 * _K, extra=40 * 2 * 5120), "olmo-2-1124-13b"),
    _m("olmo-2-32b", _a(64, 5120, 40, 8, 27648, 100352, 4 * _K), "olmo-2-0325-32b"),
    _m("stablelm-2-1.6b", _a(24, 2048, 32, 32, 5632, 100352, 4 * _K, norm_bias=True, bias="qkv")),
    _m("stablelm-zephyr-3b", _a(32, 2560, 32, 32, 6912, 50304, 4 * _K, norm_bias=True), "stablelm-3b-4e1t"),
    _m("exaone-3.5-7.8b", _a(32, 4096, 32, 8, 14336, 102400, 32 * _K)),
    _m("exaone-3.5-32b", _a(64, 5120, 40, 8, 27392, 102400, 32 * _K)),
    _m("dbrx", _a(40, 6144, 48, 8, 10752, 100352, 32 * _K, experts=_moe(16, 4, 10752)), "dbrx-132b"),
    _m("llava-1.5-7b", _seen(_L2_7B, 7_063_427_072), "llava-v1.5-7b llava-7b", "fp16"),
    _m("llava-1.5-13b", _seen(_L2_13B, 13_350_839_296), "llava-v1.5-13b llava-13b", "fp16"),
    _m("llava-v1.6-mistral-7b", _seen(_MISTRAL, 7_566_747_648), "llava-v1.6-7b llava-next-7b", "fp16"),
    _m("internvl2-8b", _seen(_a(32, 4096, 32, 8, 14336, 92553, 32 * _K), 8_075_365_376), "internvl2.5-8b internvl3-8b"),
)
_BOTH = (
    _m("t5-small", _t5(6, 512, 8, 2048, first=True), "", "fp32"),
    _m("t5-base", _t5(12, 768, 12, 3072, first=True), "", "fp32"),
    _m("t5-large", _t5(24, 1024, 16, 4096, first=True), "", "fp32"),
    _m("t5-3b", _t5(24, 1024, 32, 16384, 128, first=True), "", "fp32"),
    _m("t5-11b", _t5(24, 1024, 128, 65536, 128, first=True), "", "fp32"),
    _m("flan-t5-small", _t5(8, 512, 6, 1024), "t5-v1.1-small", "fp32"),
    _m("flan-t5-base", _t5(12, 768, 12, 2048), "t5-v1.1-base", "fp32"),
    _m("flan-t5-large", _t5(24, 1024, 16, 2816), "t5-v1.1-large", "fp32"),
    _m("flan-t5-xl", _t5(24, 2048, 32, 5120), "t5-v1.1-xl", "fp32"),
    _m("flan-t5-xxl", _t5(24, 4096, 64, 10240), "t5-v1.1-xxl", "fp32"),
    _m("flan-ul2", _t5(32, 4096, 16, 16384, 256), "ul2 flan-ul2-20b"),
    _m("whisper-tiny", _whisper(4, 384, 6), "", "fp32"),
    _m("whisper-base", _whisper(6, 512, 8), "", "fp32"),
    _m("whisper-small", _whisper(12, 768, 12), "", "fp32"),
    _m("whisper-medium", _whisper(24, 1024, 16), "", "fp32"),
    _m("whisper-large-v2", _whisper(32, 1280, 20), "whisper-large whisper-large-v1", "fp32"),
    _m("whisper-large-v3", _whisper(32, 1280, 20, 128), "whisper", "fp16"),
    _m("whisper-large-v3-turbo", _whisper(4, 1280, 20, 128, 32), "whisper-turbo", "fp16"),
    _m("distil-large-v3", _whisper(2, 1280, 20, 128, 32), "distil-whisper distil-whisper-large-v3", "fp16"),
)
_ENCODERS = (
    _m(
        "distilbert", _bert(6, 768, 12, 3072, 30522, types=0, extra=-768 * 768 - 768), "distilbert-base-uncased", "fp32"
    ),
    _m("bert-base", _bert(*_BERT_BASE, 30522), "bert bert-base-uncased bert-base-cased", "fp32"),
    _m(
        "bert-base-multilingual",
        _bert(*_BERT_BASE, 119547),
        "bert-base-multilingual-cased  bert-base-multilingual-uncased",
        "fp32",
    ),
    _m("bert-large", _bert(*_BERT_LARGE, 30522), "bert-large-uncased bert-large-cased", "fp32"),
    _m("roberta-base", _bert(*_BERT_BASE, 50265, **_XLMR), "codebert-base", "fp32"),
    _m("roberta-large", _bert(*_BERT_LARGE, 50265, **_XLMR), "", "fp32"),
    _m(
        "distilbert-base-multilingual",
        _bert(6, 768, 12, 3072, 119547, types=0, extra=-768 * 768 - 768),
        "distilbert-base-multilingual-cased",
        "fp32",
    ),
    _m(
        "xlm-roberta-base",
        _bert(*_BERT_BASE, 250002, **_XLMR),
        "multilingual-e5-base bge-reranker-base paraphrase-multilingual-mpnet-base-v2",
        "fp32",
    ),
    _m(
        "xlm-roberta-large",
        _bert(*_BERT_LARGE, 250002, **_XLMR),
        "multilingual-e5-large bge-reranker-large",
        "fp32",
    ),
    _m(
        "bge-m3",
        _bert(*_BERT_LARGE, 250002, types=1, positions=8194, context=8 * _K),
        "bge-reranker-v2-m3 snowflake-arctic-embed-l-v2.0 jina-embeddings-v3",
        "fp32",
    ),
    _m("deberta-v3-base", _bert(*_BERT_BASE, 128100, types=0, positions=0), "", "fp32"),
    _m("deberta-v3-large", _bert(*_BERT_LARGE, 128100, types=0, positions=0), "", "fp32"),
    _m("all-minilm-l6-v2", _bert(6, 384, 12, 1536, 30522), "all-minilm-l6 minilm-l6", "fp32"),
    _m("all-minilm-l12-v2", _bert(12, 384, 12, 1536, 30522), "minilm-l12", "fp32"),
    _m(
        "multilingual-minilm-l12",
        _bert(12, 384, 12, 1536, 250037),
        "paraphrase-multilingual-minilm-l12-v2 multilingual-e5-small",
        "fp32",
    ),
    _m(
        "gte-multilingual-base",
        _bert(*_BERT_BASE, 250048, types=1, positions=0, context=8 * _K, extra=12 * 768 * 3072),
        "",
        "fp32",
    ),
    _m("all-mpnet-base-v2", _bert(*_BERT_BASE, 30527, types=0, positions=514), "mpnet-base", "fp32"),
    _m("bge-small", _bert(12, 384, 12, 1536, 30522), "bge-small-en-v1.5 bge-small-en e5-small-v2 gte-small", "fp32"),
    _m("bge-base", _bert(*_BERT_BASE, 30522), "bge-base-en-v1.5 bge-base-en e5-base-v2 gte-base", "fp32"),
    _m(
        "bge-large",
        _bert(*_BERT_LARGE, 30522),
        "bge-large-en-v1.5 bge-large-en e5-large-v2 gte-large  mxbai-embed-large-v1 "
        "mxbai-embed-large snowflake-arctic-embed-l",
        "fp32",
    ),
    _m(
        "nomic-embed-text-v1.5",
        _bert(*_BERT_BASE, 30528, positions=0, context=8 * _K, extra=12 * 768 * 3072),
        "nomic-embed-text-v1 nomic-embed-text",
        "fp32",
    ),
    _m("modernbert-base", _bert(22, 768, 12, 1728, 50368, types=0, positions=0, context=8 * _K), "", "fp32"),
    _m("modernbert-large", _bert(28, 1024, 16, 3936, 50368, types=0, positions=0, context=8 * _K), "", "fp32"),
)
_PLAIN = (
    _m(
        "stable-diffusion-v1-5",
        _plain(1_066, 3 * _K),
        "stable-diffusion-1.5 stable-diffusion-v1-4 stable-diffusion sd-1.5 sd15",
        "fp16",
    ),
    _m("stable-diffusion-2.1", _plain(1_290, 4 * _K), "stable-diffusion-2-1 stable-diffusion-2 sd-2.1", "fp16"),
    _m(
        "stable-diffusion-xl",
        _plain(3_468, 6 * _K),
        "stable-diffusion-xl-base-1.0 sdxl sdxl-turbo stable-diffusion-xl-base",
        "fp16",
    ),
    _m(
        "stable-diffusion-3-medium",
        _plain(7_690, 4 * _K),
        "stable-diffusion-3 sd3 sd3-medium stable-diffusion-3.5-medium",
        "fp16",
    ),
    _m("stable-diffusion-3.5-large", _plain(13_800, 5 * _K), "sd3.5-large stable-diffusion-3.5-large-turbo"),
    _m("flux.1-dev", _plain(16_870, 5 * _K), "flux.1-schnell flux-dev flux-schnell flux.1 flux flux.1-kontext-dev"),
    _m("flux.2-dev", _plain(56_200, 8 * _K), "flux.2"),
    _m("stable-video-diffusion", _plain(2_254, 12 * _K), "stable-video-diffusion-img2vid-xt", "fp16"),
    _m("pixart-sigma", _plain(5_450, 4 * _K), "pixart-alpha pixart", "fp16"),
    _m("cogvideox-2b", _plain(6_700, 12 * _K), "", "fp16"),
    _m("cogvideox-5b", _plain(10_500, 12 * _K), "cogvideox"),
    _m("wan2.1-t2v-14b", _plain(20_200, 16 * _K), "wan2.2-t2v-14b wan2.1-14b"),
    _m("wan2.1-t2v-1.3b", _plain(7_300, 8 * _K), "wan2.1-1.3b"),
    _m("qwen-image", _plain(28_900, 8 * _K), "qwen-image-edit"),
    _m("clip-vit-large-patch14", _plain(428, 100), "clip-vit-large clip", "fp32"),
    _m("clip-vit-base-patch32", _plain(151, 50), "clip-vit-base", "fp32"),
    _m("siglip-so400m", _plain(878, 150), "siglip-so400m-patch14-384", "fp32"),
    _m("dinov2-large", _plain(304, 150), "dinov2", "fp32"),
    _m("dinov2-giant", _plain(1_136, 300), "", "fp32"),
    _m("sam-vit-huge", _plain(641, 4 * _K), "sam-vit-h segment-anything", "fp32"),
    _m("wav2vec2-base", _plain(95, 300), "wav2vec2-base-960h", "fp32"),
    _m("wav2vec2-large", _plain(317, 500), "wav2vec2-large-960h", "fp32"),
    _m("musicgen-large", _plain(3_300, 2 * _K), "", "fp32"),
    _m("bark", _plain(1_200, 3 * _K), "", "fp32"),
    _m("xtts-v2", _plain(467, 2 * _K), "xtts", "fp32"),
    _m("esm2-t33-650m", _bert(33, 1280, 20, 5120, 33, types=0, positions=1026, context=_K), "esm2-650m", "fp32"),
    _m("esm2-t36-3b", _bert(36, 2560, 40, 10240, 33, types=0, positions=1026, context=_K), "esm2-3b", "fp32"),
    _m("esm2-t48-15b", _bert(48, 5120, 40, 20480, 33, types=0, positions=1026, context=_K), "esm2-15b", "fp32"),
)
ALL: Final[tuple[Model, ...]] = (
    *_LLAMA,
    *_MISTRALS,
    *_QWENS,
    *_GEMMAS,
    *_PHIS,
    *_DEEPSEEKS,
    *_OLDER,
    *_OTHERS,
    *_BOTH,
    *_ENCODERS,
    *_PLAIN,
)
"""All public models of the table."""

"""Test that the configurations of unusual architectures are described with their published size and cache."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.predict.llm import names, precision
from slurm_migbatch.predict.llm.architecture import Architecture
from slurm_migbatch.predict.llm.describe import DescribeError, of_config, read_arch
from slurm_migbatch.predict.llm.memory import weights_mib
from slurm_migbatch.predict.llm.modeldir import describe
from slurm_migbatch.workload.hints import parse
from tests.support import weight_files

Config = dict[str, object]

GROUPED: Config = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip
"""Llama 3.1 8B."""
SIZE = 8_030_000_000


def described(config: Config) -> Architecture:
    """Return the architecture of a configuration, which its hints describe too."""
    found = of_config(config, "ours")
    parsed = parse("migbatch: " + found.hints)
    assert parsed.llm.arch is not None and read_arch(parsed.llm.arch) == found.architecture
    return found.architecture


def grows(architecture: Architecture) -> float:
    """Return the values that a far token adds to the cache."""
    return (architecture.cache_values(300_000) - architecture.cache_values(200_000)) / 100_000


ZAMBA = (6, 12, 18, 24, 30, 36, 42, 47, 51)
MAMBA = {"vocab_size": 50277, "n_layer": 64, "d_model": 2560, "rms_norm": True, "pad_vocab_size_multiple": 8}
QWEN: Config = {
    "model_type": "qwen", "hidden_size": 4096, "intermediate_size": 22016, "num_attention_heads": 32,
    "num_hidden_layers": 32, "kv_channels": 128, "vocab_size": 151936, "seq_length": 8192,
    "tie_word_embeddings": False,
}  # fmt: skip
BERT: Config = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "hidden_act": "gelu", "max_position_embeddings": 512, "vocab_size": 30522,
}  # fmt: skip
CONFIGS: dict[str, tuple[Config, float]] = {
    # billions of parameters, as model cards state them, or as transformers' class counts them (5.24)
    "NLLB-MoE 54B": ({
        "model_type": "nllb-moe", "is_encoder_decoder": True, "d_model": 2048, "encoder_layers": 24,
        "decoder_layers": 24, "encoder_ffn_dim": 8192, "decoder_ffn_dim": 8192, "encoder_attention_heads": 16,
        "decoder_attention_heads": 16, "num_hidden_layers": 24, "num_experts": 128, "encoder_sparse_step": 4,
        "decoder_sparse_step": 4, "vocab_size": 256206, "activation_function": "relu",
    }, 54.5),
    "Switch Base 8": ({
        "model_type": "switch_transformers", "is_encoder_decoder": True, "d_model": 768, "d_ff": 3072, "d_kv": 64,
        "num_heads": 12, "num_layers": 12, "num_decoder_layers": 12, "num_experts": 8, "encoder_sparse_step": 2,
        "decoder_sparse_step": 2, "vocab_size": 32128, "feed_forward_proj": "relu",
    }, 0.619),
    "nomic-embed-text-v2-moe": ({
        "model_type": "nomic_bert", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_inner": 3072, "n_positions": 2048,
        "vocab_size": 250048, "num_experts": 8, "moe_top_k": 2, "moe_every_n_layers": 2, "activation_function": "gelu",
    }, 0.475),
    "nomic-embed-text-v1.5": ({
        "model_type": "nomic_bert", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_inner": 3072, "n_positions": 8192,
        "vocab_size": 30528, "activation_function": "swiglu",
    }, 0.137),
    "Zamba2 2.7B": ({
        "model_type": "zamba2", "adapter_rank": 128, "attention_head_dim": 160, "attention_hidden_size": 5120,
        "hidden_act": "gelu", "hidden_size": 2560, "intermediate_size": 10240, "mamba_d_state": 64, "mamba_expand": 2,
        "layers_block_type": ["hybrid" if layer in ZAMBA else "mamba" for layer in range(54)], "mamba_ngroups": 1,
        "num_attention_heads": 32, "num_hidden_layers": 54, "num_key_value_heads": 32, "num_mem_blocks": 2,
        "vocab_size": 32000, "tie_word_embeddings": True,
    }, 2.69),
    "Phi-4 multimodal": ({
        "model_type": "phi4mm", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
        "num_attention_heads": 24, "num_key_value_heads": 8, "vocab_size": 200064, "tie_word_embeddings": True,
        "hidden_act": "silu", "vision_lora": {"r": 256, "lora_alpha": 512}, "speech_lora": {"r": 320, "lora_alpha": 1},
        "audio_processor": {"config": {"attention_dim": 1024, "linear_units": 1536, "num_blocks": 24}},
        "embd_layer": {"image_embd_layer": {"crop_size": 448}, "audio_embd_layer": {"n_mels": 80}},
    }, 5.57),
    "LongCat Flash": ({
        "model_type": "longcat_flash", "hidden_size": 6144, "ffn_hidden_size": 12288, "expert_ffn_hidden_size": 2048,
        "n_routed_experts": 512, "moe_topk": 12, "num_layers": 28, "num_attention_heads": 64, "kv_lora_rank": 512,
        "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 131072,
    }, 562),
    "Kimi Linear 48B": ({
        "model_type": "kimi_linear", "hidden_size": 2304, "intermediate_size": 9216, "moe_intermediate_size": 1024,
        "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1, "first_k_dense_replace": 1,
        "moe_layer_freq": 1, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 32, "num_hidden_layers": 27,
        "vocab_size": 163840, "model_max_length": 1048576, "tie_word_embeddings": False,
        "linear_attn_config": {"full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32},
    }, 49.1),
    "Qwen 7B, the first": (QWEN, 7.72),
    "Qwen-VL, the first": ({**QWEN, "visual": {"layers": 48, "width": 1664, "heads": 16, "image_size": 448}}, 9.6),
    "LLaDA 8B": ({
        "model_type": "llada", "d_model": 4096, "mlp_hidden_size": 12288, "n_heads": 32, "n_kv_heads": 32,
        "n_layers": 32, "vocab_size": 126464, "activation_type": "silu", "max_sequence_length": 4096,
    }, 8.02),
    "BLOOM": ({"model_type": "bloom", "n_embed": 14336, "num_attention_heads": 112, "n_layer": 70,
               "vocab_size": 250880}, 176.2),
    "CogVLM2 19B": ({
        **GROUPED, "architectures": ["CogVLMForCausalLM"], "num_key_value_heads": None, "num_multi_query_heads": 8,
        "vision_config": {"hidden_size": 1792, "intermediate_size": 15360, "num_hidden_layers": 63},
    }, 19.5),
    "Phi-3 small": ({
        "model_type": "phi3small", "hidden_size": 4096, "ff_intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 100352, "tie_word_embeddings": True,
    }, 7.39),
    "OLMo 7B of its authors": ({
        "model_type": "hf_olmo", "d_model": 4096, "mlp_hidden_size": 22016, "n_heads": 32, "n_layers": 32,
        "vocab_size": 50280, "activation_type": "swiglu", "max_sequence_length": 2048, "weight_tying": False,
    }, 6.89),
    "LLaVA 1.5 7B of its authors": ({
        "model_type": "llava_llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "vocab_size": 32000, "mm_vision_tower": "openai/clip-vit-large-patch14-336",
    }, 7.06),
    "Janus Pro 7B": ({
        "language_config": {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
                            "num_hidden_layers": 30, "num_attention_heads": 32, "vocab_size": 102400},
        "vision_config": {"cls": "CLIPVisionTower", "params": {"model_name": "siglip_large_patch16_384"}},
    }, 7.42),
    "SmolVLM 256M": ({
        "text_config": {"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
                        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49280,
                        "tie_word_embeddings": False},
        "vision_config": {"hidden_size": 768, "image_size": 512, "patch_size": 16, "model_type": "smolvlm_vision"},
    }, 0.256),
    "xLSTM 7B": ({"model_type": "xlstm", "embedding_dim": 4096, "num_blocks": 32, "num_heads": 8,
                  "vocab_size": 50304}, 6.87),
    "Mamba 2.8B of its authors": ({**MAMBA, "ssm_cfg": {}}, 2.77),
    "Jais 2 8B": ({
        "model_type": "jais2", "hidden_size": 3328, "intermediate_size": 26624, "num_hidden_layers": 32,
        "num_attention_heads": 26, "num_key_value_heads": 26, "head_dim": 128, "hidden_act": "relu2",
        "vocab_size": 150272, "tie_word_embeddings": False,
    }, 8.09),
    "Persimmon 8B": ({
        "model_type": "persimmon", "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 36,
        "num_attention_heads": 64, "hidden_act": "relu2", "vocab_size": 262144,
    }, 9.4),
    "Moshi": ({
        "model_type": "moshi", "hidden_size": 4096, "ffn_dim": 22528, "num_hidden_layers": 32, "head_dim": 128,
        "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_act": "silu", "vocab_size": 32000,
    }, 6.84),
    "Blenderbot 3B": ({
        "model_type": "blenderbot", "is_encoder_decoder": True, "d_model": 2560, "encoder_layers": 2,
        "decoder_layers": 24, "encoder_ffn_dim": 10240, "decoder_ffn_dim": 10240, "decoder_attention_heads": 32,
        "activation_function": "gelu", "vocab_size": 8008,
    }, 2.70),
    "IDEFICS 9B": ({
        "model_type": "idefics", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "hidden_act": "silu", "vocab_size": 32000, "cross_layer_interval": 4,
        "vision_config": {"embed_dim": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "image_size": 224},
    }, 8.93),
    "experts of half the width": ({
        "model_type": "muse_spark_text", "hidden_size": 8192, "intermediate_size": 16384, "num_hidden_layers": 62,
        "num_attention_heads": 128, "num_key_value_heads": 16, "head_dim": 64, "hidden_act": "silu",
        "moe_hidden_size": 4096, "moe_intermediate_size": 4096, "num_local_experts": 256, "num_experts_per_tok": 8,
        "vocab_size": 202048, "mlp_layer_types": ["sparse"] * 62,
    }, 820),
    "TAPAS base": ({**BERT, "model_type": "tapas", "architectures": ["TapasModel"]}, 0.110),
    "a BERT of a new type": ({**BERT, "model_type": "ours", "architectures": ["OursForMaskedLM"]}, 0.109),
    "Parakeet CTC 0.6B": ({
        "model_type": "parakeet_ctc", "architectures": ["ParakeetForCTC"], "vocab_size": 1025,
        "encoder_config": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
                           "num_attention_heads": 8, "hidden_act": "silu", "conv_kernel_size": 9, "num_mel_bins": 80},
    }, 0.609),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_configuration_gives_the_published_parameters(name: str) -> None:
    config, billions = CONFIGS[name]
    assert described(config).parameters == pytest.approx(1e9 * billions, rel=0.05)


KEYS = sorted({key for config, _ in CONFIGS.values() for key in config})
ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 300), st.sampled_from([1 << 21, 1 << 70, -(1 << 70)]), st.floats(),
    st.sampled_from(["", "gelu", "sparse", "mamba"]), st.lists(st.sampled_from([0, 1, "attention", None, {}])),
    st.dictionaries(st.sampled_from(KEYS), st.integers(0, 300) | st.none(), max_size=4),
)  # fmt: skip


@given(st.sampled_from(sorted(CONFIGS)), st.dictionaries(st.sampled_from(KEYS), ODD, max_size=5))
def test_any_value_is_described_or_refused(name: str, changed: Config) -> None:
    try:
        found = described({**CONFIGS[name][0], **changed})
    except DescribeError:
        return
    assert found.parameters > 0 and found.cache_values(2000) >= found.cache_values(1000) >= 0


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("google/byt5-xl", 3.74),
        ("google/umt5-xxl", 13.0),
        ("Salesforce/codet5-base", 0.223),
        ("google/pegasus-xsum", 0.569),
        ("Helsinki-NLP/opus-mt-en-de", 0.0775),
        ("microsoft/BioGPT-Large", 1.57),
        ("microsoft/kosmos-2-patch14-224", 1.66),
        ("inclusionAI/Ling-lite-1.5", 16.8),
        ("Qwen/Qwen-VL-Chat", 9.66),
        ("stepfun-ai/GOT-OCR2_0", 0.716),
        ("kyutai/moshiko-pytorch-bf16", 7.69),
        ("yikuan8/Clinical-Longformer", 0.149),
        ("magistral", 24.0),
        ("zephyr", 7.25),
        ("stablelm-zephyr", 2.8),
        ("phind-codellama:34b-v2-q4_K_M", 33.7),
    ],
)
def test_public_model_is_known_by_its_name(name: str, billions: float) -> None:
    found = names.resolve(name)
    assert found is not None and found.how == "public"
    assert found.architecture.parameters == pytest.approx(1e9 * billions, rel=0.01)


def test_experts_of_encoder_and_decoder_are_used_by_few_tokens() -> None:
    """2 of 128 in every fourth layer."""
    assert 3e9 < described(CONFIGS["NLLB-MoE 54B"][0]).active < 4e9


def test_model_without_attention_keeps_a_state_only() -> None:
    for name in ("xLSTM 7B", "Mamba 2.8B of its authors"):
        assert grows(described(CONFIGS[name][0])) == 0


@pytest.mark.parametrize("wrapped", ["vlm_config", "backbone_of_tomorrow"])
def test_language_model_is_found_under_any_key(wrapped: str) -> None:
    """ColPali and ColQwen2 wrap theirs once more."""
    found = described({"model_type": "colpali", wrapped: {"text_config": GROUPED, "vision_config": {}}})
    assert found.parameters == pytest.approx(SIZE, rel=0.001)


def test_what_no_generated_token_passes_is_described_as_aside() -> None:
    tower = {"depth": 32, "hidden_size": 1280}
    found = described({"text_config": GROUPED, "vision_config": tower})
    assert found.aside == found.extra == 32 * 12 * 1280**2


def test_sizes_around_a_language_model_are_not_its_own() -> None:
    """Music Flamingo states the size of a head of its sound beside a text_config that leaves out its own."""
    found = described({"head_dim": 1280, "intermediate_size": 99, "text_config": GROUPED})
    assert found == described({"text_config": GROUPED})


def test_layers_of_a_searched_architecture_are_counted_one_by_one() -> None:
    """Nemotron Super: layers without attention, feed-forwards of several widths, or one matrix instead."""
    attention, none = {"attention": {"n_heads_in_group": 4, "no_op": False}}, {"attention": {"no_op": True}}
    blocks = [
        {**attention, "ffn": {"ffn_mult": 5.25, "no_op": False}},
        {**none, "ffn": {"ffn_mult": 2.625}},
        {**none, "ffn": {"no_op": True}},
        {"attention": {"replace_with_linear": True}, "ffn": {"intermediate_size": 7168}},
    ]
    config = {**GROUPED, "model_type": "nemotron-nas", "intermediate_size": None, "num_key_value_heads": None,
              "block_configs": blocks * 8}  # fmt: skip
    found = described(config)
    width, heads = 4096, 4096 * (4096 + 2 * 1024) + 4096 * 4096
    embedding, norms = 2 * 128256 * width, 2 * 32 * width
    expected = 8 * (heads + width**2 + 3 * width * (14336 + 7168 + 0 + 7168)) + embedding + norms
    assert found.parameters == pytest.approx(expected, rel=0.001)
    assert grows(found) == 8 * 2 * 8 * 128
    assert described({**config, "block_configs": []}).layers == 32


def test_blocks_that_state_other_things_leave_the_layers_alone() -> None:
    """Those of Nemotron 3 by Puzzle state the width of experts, later ones of a layer the heads of keys."""
    moe: Config = {**GROUPED, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 4096}
    blocks = [{"block_type": "moe", "moe_intermediate_size": width} for width in (1024, 3072)] * 16
    assert described({**moe, "block_configs": blocks}) == described({**moe, "moe_intermediate_size": 2048})
    stated = [{"attention": {"num_key_value_heads": 4}, "ffn": {"intermediate_size": 14336}}] * 32
    assert described({**GROUPED, "block_configs": stated}) == described({**GROUPED, "num_key_value_heads": 4})


def test_layers_that_read_the_keys_of_others_keep_none() -> None:
    """Gemma 3n E4B: the last 15 of 35 layers; every fifth of the others sees all tokens."""
    config: Config = {
        "model_type": "gemma3n_text", "hidden_size": 2048, "num_hidden_layers": 35, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 256, "intermediate_size": [16384] * 35, "vocab_size": 262400,
        "sliding_window": 512, "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
        "num_kv_shared_layers": 15,
    }  # fmt: skip
    found, alone = described(config), described({**config, "num_kv_shared_layers": 0})
    assert grows(found) == 4 * 2 * 2 * 256 and grows(alone) == 7 * 2 * 2 * 256
    assert found.cache_values(100_000) == pytest.approx(4 * 1024 * 100_000 + 16 * 1024 * 512, rel=0.01)


def test_latent_attention_in_few_layers_is_cached_in_few() -> None:
    """Kimi Linear and Ling: the other layers keep a state."""
    kimi = described(CONFIGS["Kimi Linear 48B"][0])
    assert grows(kimi) == 7 * (512 + 64)
    expanded = kimi.cache_values(300_000, "expanded") - kimi.cache_values(200_000, "expanded")
    assert expanded == 7 * 32 * (192 + 128) * 100_000
    assert kimi.cache_values(1, "expanded") < 1e6, "a state is as large in every engine"
    ring: Config = {**GROUPED, "model_type": "bailing_moe_linear", "num_hidden_layers": 20, "layer_group_size": 5}
    assert grows(described(ring)) == 4 * 2 * 8 * 128
    assert grows(described({**ring, "model_type": "bailing_moe"})) == 20 * 2 * 8 * 128


def test_layers_with_a_state_beside_attention_keep_both() -> None:
    """Falcon-H1 7B: 44 layers of 3072 x 256 numbers of 32 bits; Zamba2's nine hybrid ones."""
    falcon: Config = {
        "model_type": "falcon_h1", "hidden_size": 3072, "intermediate_size": 12288, "num_attention_heads": 12,
        "num_key_value_heads": 2, "head_dim": 128, "num_hidden_layers": 44, "vocab_size": 130048,
        "mamba_d_ssm": 3072, "mamba_d_state": 256, "mamba_n_groups": 1, "tie_word_embeddings": False,
    }  # fmt: skip
    found = described(falcon)
    assert found.cache_values(1) == 2 * 44 * 3072 * 256 + grows(found) and grows(found) == 44 * 2 * 2 * 128
    zamba = described(CONFIGS["Zamba2 2.7B"][0])
    assert zamba.state == 9 * 2 * 5120 * 64


def test_short_convolutions_keep_less_than_a_state() -> None:
    """LFM2 1.2B: ten of sixteen layers keep three tokens each."""
    config = {**GROUPED, "model_type": "lfm2", "hidden_size": 2048, "num_hidden_layers": 16, "conv_L_cache": 3,
              "layer_types": [*["conv"] * 10, *["full_attention"] * 6]}  # fmt: skip
    assert described(config).cache_values(1) < 6 * 2 * 8 * 64 + 10 * 4 * 2048


@pytest.mark.parametrize(
    ("sparse", "count"),
    [
        ({"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 29}, 29),
        ({"moe_layer_freq": [0] + [1] * 31}, 31),
        ({"moe_layer_freq": 2}, 16),
        ({"decoder_sparse_step": 2}, 16),
        ({"decoder_sparse_step": 1, "mlp_only_layers": [0, 5]}, 30),
        ({"first_k_dense_replace": 2, "moe_layer_freq": 1}, 30),
        ({"mlp_only_layers": [], "decoder_sparse_step": 1}, 32),
        ({"mlp_layer_types": [None, {}, []]}, 0),
    ],
)
def test_layers_with_experts_are_counted_as_stated(sparse: Config, count: int) -> None:
    config: Config = {**GROUPED, "num_experts": 16, "moe_intermediate_size": 2048, "num_experts_per_tok": 2, **sparse}
    found = described(config)
    assert found.routed == count * 16 * 3 * 4096 * 2048


def test_feed_forwards_are_narrowed_where_no_layer_has_experts() -> None:
    config: Config = {**GROUPED, "num_experts": 16, "moe_intermediate_size": 2048, "mlp_layer_types": ["dense"] * 32,
                      "layers_block_type": ["mlp"] * 16 + ["attention"] * 16}  # fmt: skip
    assert described(config).parameters < SIZE


def test_experts_that_a_model_does_not_use_are_not_counted() -> None:
    """Doge states 16,384 of them in its dense models, too."""
    assert described({**GROUPED, "num_experts": 16384, "is_moe": False}).parameters == pytest.approx(SIZE, rel=0.001)


@pytest.mark.parametrize(
    ("activation", "matrices"),
    [("silu", 3), ("gelu_pytorch_tanh", 3), ("relu2", 2), ("gelu", 2), ("gelu_new", 2), ("xielu", 2), (None, 3)],
)
def test_feed_forward_of_an_unknown_model_follows_from_its_activation(activation: object, matrices: int) -> None:
    found = described({**GROUPED, "model_type": "ours", "hidden_act": activation})
    assert found.feed_forward(14336) == matrices * 4096 * 14336


@pytest.mark.parametrize("model_type", ["gemma", "gemma2", "modernbert", "bitnet", "zamba2", "llama", "qwen2"])
def test_feed_forward_of_a_known_model_has_a_gate_whatever_its_activation(model_type: str) -> None:
    """Llamas with ReLU, whose zeros are skipped, have one, too."""
    assert described({**GROUPED, "model_type": model_type, "hidden_act": "gelu"}).gated


@pytest.mark.parametrize(
    ("classes", "more", "kind"),
    [
        (["OursForMaskedLM"], {}, "encoder"),
        (["OursForSequenceClassification"], {}, "encoder"),
        (["OursModel"], {}, "encoder"),
        (["OursForCausalLM"], {}, "decoder"),
        (["OursLMHeadModel"], {"is_decoder": True}, "decoder"),
        (["OursModel"], {"num_key_value_heads": 4}, "decoder"),
        (["OursModel"], {"hidden_act": "silu"}, "decoder"),
        ([None, {}], {}, "decoder"),
        ("OursForMaskedLM", {}, "decoder"),
        (["OursModel"], {"is_encoder_decoder": True}, "both"),
    ],
)
def test_model_of_an_unknown_type_is_an_encoder_by_its_class(classes: object, more: Config, kind: str) -> None:
    assert described({**BERT, "model_type": "ours", "architectures": classes, **more}).kind == kind


def test_decoder_within_a_pair_attends_to_the_encoder() -> None:
    """Its own configuration says that it is no pair."""
    half = {**BERT, "model_type": "bert", "is_encoder_decoder": False}
    config: Config = {"model_type": "encoder-decoder", "is_encoder_decoder": True, "encoder": half, "decoder": half}
    found = described(config)
    assert found.kind == "both" and found.cache_values(100) == 2 * found.layers * 2 * 768 * 100


@pytest.mark.parametrize(
    ("stated", "files", "dtype"),
    [
        ({}, "", "fp32"),
        ({"torch_dtype": "float16"}, "", "fp16"),
        ({"dtype": "bfloat16"}, "", "bf16"),
        ({}, "F16", "fp16"),
    ],
)
def test_encoder_that_states_no_data_type_has_32_bits(tmp_path: Path, stated: Config, files: str, dtype: str) -> None:
    """As those of the table of public models."""
    (tmp_path / "config.json").write_text(json.dumps({**BERT, "model_type": "bert", **stated}))
    if files:
        weight_files.write(tmp_path / "model.safetensors", {"a": (files, 10**8)})
    assert describe(tmp_path).dtype == dtype


def test_context_without_a_limit_is_the_largest() -> None:
    config = {**GROUPED, "max_position_embeddings": None, "model_max_length": 10**30}
    assert described(config).context == 1 << 24


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, 4.16),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, 8.1),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
          "quantized_layers": {"a": {"quant_algo": "NVFP4"}, "b": {"quant_algo": "NVFP4"}, "c": {"quant_algo": "FP8"}}},
         4.5),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": [1]}, 8.1),
        ({"quant_method": "bitnet"}, 2.5),
        ({"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 2, "group_size": 64}}}, 2.5),
        ({"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4}}}, 4.5),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4"}}}, 4.5),
        ({"quant_method": "quark",
          "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}, "input_tensors": {"dtype": "int4"}}}, 8.1),
        ({"quant_method": "quanto", "weights": "int8"}, 8.1),
        ({"quant_method": "awq", "w_bit": 4}, 4.16),
        ({"quant_method": "fp_quant", "forward_dtype": "mxfp4"}, 4.5),
        ({"quant_method": "compressed-tensors", "config_groups": {}, "format": "dense"}, 16.0),
        ({"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized",
          "config_groups": {"group_0": {"weights": {"num_bits": 4}}}}, 4.5),
        ({"quant_method": "compressed-tensors", "format": "mixed-precision",
          "config_groups": {"a": {"weights": {"num_bits": 4}}, "b": {"weights": {"num_bits": 8}}}}, 8.1),
        ({"quant_method": "compressed-tensors", "format": "float-quantized",
          "config_groups": {"a": {"weights": {"num_bits": 8}, "input_activations": {"num_bits": 4}}}}, 8.1),
        ({"quant_method": "compressed-tensors", "config_groups": [1]}, 16.0),
        ({"quant_method": None}, 16.0),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, 4.5),
        ({"load_in_4bit": False, "load_in_8bit": True}, 8.1),
        ({"load_in_4bit": False, "load_in_8bit": False}, 16.0),
    ],
)  # fmt: skip
def test_bits_of_further_quantizations_are_read(quantization: Config, bits: float) -> None:
    found = of_config({"text_config": {**GROUPED, "quantization_config": quantization}}, "ours")
    kept = precision.quantized(found.quantization) if found.quantization else precision.plain("bf16")
    assert kept is not None and kept.bits == bits


@pytest.mark.parametrize(
    ("dtype", "values", "quantization"),
    [("F8_E4M3", 8 * 10**9, "int8"), ("I32", 1_200_000_000, "4bit"), ("BF16", 8_000_000_000, ""),
     ("I32", 300_000_000, "2bit")],
)  # fmt: skip
def test_size_of_complete_files_says_the_quantization_that_a_configuration_leaves_out(
    tmp_path: Path, dtype: str, values: int, quantization: str
) -> None:
    """NVIDIA's checkpoints by ModelOpt state theirs in another file."""
    (tmp_path / "config.json").write_text(json.dumps(GROUPED))
    weight_files.write(tmp_path / "model.safetensors", {"a": (dtype, values), "head": ("BF16", 128256 * 4096)})
    found = describe(tmp_path)
    assert found.quantization == quantization
    if quantization == "int8":
        kept = precision.known(quantization)
        size = (tmp_path / "model.safetensors").stat().st_size
        assert weights_mib(found.architecture, kept) * 2**20 == pytest.approx(size, rel=0.1)


def test_directory_in_the_form_of_mistral_is_described(tmp_path: Path) -> None:
    params = {"dim": 6144, "n_layers": 56, "head_dim": 128, "hidden_dim": 16384, "n_heads": 48, "n_kv_heads": 8,
              "vocab_size": 32768, "moe": {"num_experts_per_tok": 2, "num_experts": 8}}  # fmt: skip
    (tmp_path / "params.json").write_text(json.dumps(params))
    assert describe(tmp_path).architecture.parameters == pytest.approx(140.6e9, rel=0.001)
    (tmp_path / "config.json").write_text(json.dumps(GROUPED))
    assert describe(tmp_path).architecture.parameters == pytest.approx(SIZE, rel=0.001)


def test_pipeline_of_diffusers_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableDiffusionXLPipeline"}')
    with pytest.raises(DescribeError, match="pipeline of several models: use its public name"):
        describe(tmp_path)


def test_quantization_that_modelopt_states_beside_the_configuration_is_read(tmp_path: Path) -> None:
    """As in nvidia/Qwen3-32B-NVFP4."""
    (tmp_path / "config.json").write_text(json.dumps(GROUPED))
    beside = tmp_path / "hf_quant_config.json"
    beside.write_text('{"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}')
    assert describe(tmp_path).quantization == "modelopt-fp4"
    (tmp_path / "config.json").write_text(json.dumps({**GROUPED, "quantization_config": {"quant_method": "awq"}}))
    assert describe(tmp_path).quantization == "awq"
    (tmp_path / "config.json").write_text(json.dumps(GROUPED))
    for unusable in ('{"quantization": 4}', "[]", " " * (2 << 20)):
        beside.write_text(unusable)
        assert describe(tmp_path).quantization == ""


def test_pipe_in_the_place_of_a_configuration_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(DescribeError, match=r"config\.json is not a plain file"):
        describe(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(GROUPED))
    os.mkfifo(tmp_path / "hf_quant_config.json")
    assert describe(tmp_path).quantization == ""


def test_incomplete_files_say_nothing_about_a_quantization(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GROUPED))
    weight_files.write(tmp_path / "model-00001-of-00002.safetensors", {"a": ("F8_E4M3", 10**9)})
    assert describe(tmp_path).quantization == ""


LLAMA_GGUF: dict[str, object] = {
    "general.architecture": "llama", "general.name": "Ours", "llama.block_count": 32, "llama.embedding_length": 4096,
    "llama.context_length": 131072, "llama.feed_forward_length": 14336, "llama.attention.head_count": 32,
    "llama.attention.head_count_kv": 8, "llama.attention.key_length": 128, "llama.rope.dimension_count": 128,
    "tokenizer.ggml.tokens": [f"t{i}" for i in range(128256)], "tokenizer.ggml.token_type": [1] * 128256,
    "tokenizer.ggml.add_bos_token": True,
}  # fmt: skip
BLOCKS_OF_LLAMA = {"token_embd.weight": (4096, 128256), "output.weight": (4096, 128256), "rest": (6979588096,)}


@pytest.mark.parametrize(("bits", "level"), [(4.89, "q4-k-m"), (8.5, "q8-0"), (16.0, "f16"), (2.0, "iq1-s")])
def test_model_in_gguf_is_described_by_the_header_of_its_file(tmp_path: Path, bits: float, level: str) -> None:
    """Llama 3.1 8B, as llama.cpp converts it."""
    file = tmp_path / "ggml-model.gguf"
    weight_files.write_gguf(file, LLAMA_GGUF, BLOCKS_OF_LLAMA, int(8_030_261_248 * bits / 8))
    for path in (file, tmp_path):
        found = describe(path)
        architecture = found.architecture
        assert architecture.parameters == 8_030_261_248 and found.quantization == level
        assert architecture.cache_values(1) == 65536 and architecture.context == 131072
        parsed = parse("migbatch: " + found.hints)
        assert parsed.llm.arch is not None and read_arch(parsed.llm.arch) == architecture
        assert weights_mib(architecture, precision.known(level)) * 2**20 >= 8_030_261_248 * bits / 8
    alone = weights_mib(architecture, precision.known(level))
    (tmp_path / "mmproj-F16.gguf").write_bytes(bytes(8 << 20))
    assert weights_mib(describe(tmp_path).architecture, precision.known(level)) == pytest.approx(alone + 8, abs=0.1)


def test_gguf_of_several_files_is_described_if_all_are_there(tmp_path: Path) -> None:
    parts = [tmp_path / f"ours-{number:05d}-of-00002.gguf" for number in (1, 2)]
    weight_files.write_gguf(parts[0], LLAMA_GGUF, {"token_embd.weight": (4096, 128256)}, 2**30)
    with pytest.raises(DescribeError, match="1 of the 2 files"):
        describe(tmp_path)
    rest = {key: BLOCKS_OF_LLAMA[key] for key in ("output.weight", "rest")}
    weight_files.write_gguf(parts[1], {"general.architecture": "llama"}, rest, 7 * 2**30)
    assert describe(parts[0]).architecture.parameters == 8_030_261_248
    weight_files.write_gguf(tmp_path / "small-Q2_K.gguf", LLAMA_GGUF, BLOCKS_OF_LLAMA, 3 * 2**30)
    assert describe(tmp_path).name == "ours-00001-of-00002", "the largest of several"
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert describe(tmp_path).name == "ours-00001-of-00002", "repositories have a configuration that says no more"
    (tmp_path / "config.json").write_text(json.dumps(GROUPED))
    weight_files.write(tmp_path / "model.safetensors", {"a": ("BF16", SIZE)})
    assert describe(tmp_path).quantization == ""


@pytest.mark.parametrize("name", ["ours-00002-of-00002.gguf", "ours-00001-of-00002.gguf"])
def test_pipe_in_the_place_of_a_gguf_is_not_read(tmp_path: Path, name: str) -> None:
    """In a directory of another user, whose model is shared."""
    parts = [tmp_path / f"ours-{number:05d}-of-00002.gguf" for number in (1, 2)]
    for part in parts:
        weight_files.write_gguf(part, LLAMA_GGUF, BLOCKS_OF_LLAMA, 2**30)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    for path in (tmp_path, *parts):
        with pytest.raises(DescribeError, match=f"{name} is not a plain file"):
            describe(path)


def test_link_to_a_missing_encoder_of_images_is_not_counted(tmp_path: Path) -> None:
    """The cache of Hugging Face's hub has links, of which the files may have been deleted."""
    weight_files.write_gguf(tmp_path / "a.gguf", LLAMA_GGUF, BLOCKS_OF_LLAMA, 8_030_261_248)
    without = describe(tmp_path)
    (tmp_path / "mmproj-F16.gguf").symlink_to(tmp_path / "deleted")
    assert describe(tmp_path) == without


def test_gguf_that_was_not_downloaded_completely_is_refused(tmp_path: Path) -> None:
    weight_files.write_gguf(tmp_path / "a.gguf", LLAMA_GGUF, BLOCKS_OF_LLAMA, 2**30, place=2**31)
    with pytest.raises(DescribeError, match=r"a\.gguf is incomplete"):
        describe(tmp_path)


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_described_as_gguf_or_refused(content: bytes, begins: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "a.gguf"
        file.write_bytes(b"GGUF\x03\0\0\0" * begins + content)
        with pytest.raises(DescribeError):
            describe(file)


def test_layers_without_attention_in_gguf_have_no_heads_of_keys(tmp_path: Path) -> None:
    """Granite 4.0 H Tiny: attention in four of forty layers."""
    heads = [4 if layer in (5, 15, 25, 35) else 0 for layer in range(40)]
    keys = {f"granitehybrid.{key}": value for key, value in {
        "block_count": 40, "embedding_length": 1536, "context_length": 131072, "feed_forward_length": 512,
        "attention.head_count": 12, "attention.head_count_kv": heads, "expert_count": 64, "expert_used_count": 6,
        "vocab_size": 100352, "ssm.state_size": 128, "ssm.inner_size": 3072,
    }.items()}  # fmt: skip
    weight_files.write_gguf(
        tmp_path / "tiny.gguf", {"general.architecture": "granitehybrid", **keys}, {"all": (6_940_000_000,)}, 4 * 10**9
    )
    found = describe(tmp_path / "tiny.gguf").architecture
    assert found.parameters == 6_940_000_000 and grows(found) == 4 * 2 * 4 * 128


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"GGUF",
        b"GGUF\x03\0\0\0" + b"\xff" * 16,
        b"PK" + bytes(100),
        b"GGUF\x03\0\0\0" + bytes(8) + b"\1" + bytes(7) + b"\xff" * 8,
        b"GGUF\x03" + bytes(60),
    ],
)
def test_file_that_is_no_gguf_is_refused_with_a_message(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "a.gguf").write_bytes(text)
    for path in (tmp_path, tmp_path / "a.gguf"):
        with pytest.raises(DescribeError, match=r"a\.gguf|language model"):
            describe(path)


@pytest.mark.parametrize(
    ("name", "widths"),
    [("acme/mamba-6b", 80), ("acme/rwkv-5-2.9b", 132), ("acme/mamba2-6b", 528), ("NX-AI/xLSTM-7b", 528)],
)
def test_state_of_a_model_known_by_its_size_is_that_of_its_kind(name: str, widths: int) -> None:
    found = names.resolve(name)
    assert found is not None and found.how == "size" and grows(found.architecture) == 0
    architecture = found.architecture
    state = architecture.layers * widths * architecture.width
    assert state <= architecture.cache_values(200_000) <= 1.05 * state


def test_layers_that_attend_to_images_keep_their_patches() -> None:
    """Llama 3.2 11B Vision: as the model of that name."""
    text = GROUPED | {"num_hidden_layers": 40, "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38]}
    found, public = described({"model_type": "mllama", "text_config": text}), names.resolve("llama-3.2-11b-vision")
    assert public is not None and grows(found) == 32 * 2 * 8 * 128
    assert found.cache_values(5000) == public.architecture.cache_values(5000)
    assert found.parameters == described({**GROUPED, "num_hidden_layers": 40}).parameters


def test_states_of_hybrid_models_are_as_large_as_their_configurations_state() -> None:
    jamba = GROUPED | {
        "model_type": "jamba", "attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16, "mamba_expand": 2,
    }  # fmt: skip
    qwen = GROUPED | {
        "model_type": "qwen3_next", "full_attention_interval": 4, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    }  # fmt: skip
    for config, kept, attending in ((jamba, 28 * 2 * 8192 * 20, 4), (qwen, 24 * 2 * 32 * 128 * 128, 8)):
        found = described(config)
        state = found.cache_values(200_000) - 200_000 * attending * 2 * 8 * 128
        assert kept <= state <= 1.1 * kept


@pytest.mark.parametrize(
    ("config", "millions"),
    [
        ({"model_type": "electra", "hidden_size": 256, "embedding_size": 128, "intermediate_size": 1024,
          "num_attention_heads": 4}, 13.5),
        ({"model_type": "rembert", "hidden_size": 1152, "input_embedding_size": 256, "intermediate_size": 4608,
          "num_hidden_layers": 32, "num_attention_heads": 18, "vocab_size": 250300}, 576),
    ],
)  # fmt: skip
def test_embedding_narrower_than_the_layers_is_counted_so(config: Config, millions: float) -> None:
    """ELECTRA small and RemBERT, their checkpoints without the output over the vocabulary."""
    assert described(BERT | config).parameters == pytest.approx(1e6 * millions, rel=0.02)


def test_feed_forward_beside_the_experts_is_counted() -> None:
    """Grok-2."""
    grok = GROUPED | {
        "hidden_size": 8192, "intermediate_size": 32768, "moe_intermediate_size": 16384, "num_hidden_layers": 64,
        "num_attention_heads": 64, "head_dim": 128, "num_local_experts": 8, "num_experts_per_tok": 2,
        "residual_moe": True, "vocab_size": 131072,
    }  # fmt: skip
    assert described(grok).parameters == pytest.approx(269.5e9, rel=0.001)


def test_index_of_sparse_attention_is_cached_and_counted() -> None:
    """DeepSeek-V3.2: vLLM caches 132 bytes a token and layer beside the latent vector."""
    config = {
        "model_type": "deepseek_v32", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256,
        "n_shared_experts": 1, "first_k_dense_replace": 3, "num_experts_per_tok": 8, "kv_lora_rank": 512,
        "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280,
        "max_position_embeddings": 163840, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048,
    }  # fmt: skip
    found, public = described(config), names.resolve("deepseek-ai/DeepSeek-V3.2-Exp")
    assert public is not None and public.how == "public"
    assert grows(found) == grows(public.architecture) == 61 * (512 + 64 + 66)
    assert found.parameters == pytest.approx(671.9e9, rel=0.0002)
    assert found.parameters == pytest.approx(public.architecture.parameters, rel=0.0002)
    assert found.cache_values(1, "expanded") == 61 * (128 * (192 + 128) + 66)

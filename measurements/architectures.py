"""Targets of `migbatch profile run`: public architectures with random weights, which need no download.

    migbatch profile run measurements/architectures.py:infer.bert_base --model bert-base --inputs 128,512
    migbatch profile run measurements/architectures.py:lora.llama_3_1_8b --model llama-3.1-8b --kind train --inputs 1024

`infer` passes a batch through the model in its published precision, `infer_tf32` with the products of 32-bit weights in
TF32, `infer_fp16` in 16 bits; `train` makes a step of all parameters (weights in 32 bits, bf16 by torch.autocast, fused
AdamW), `train_fp32` all of it in 32 bits, `checkpointed` like `train` with activation checkpointing, `lora` and
`lora_checkpointed` a step of adapters of rank 16 on all matrices of the layers over weights in bf16. Names are those of
jobs' `model=`, with `_` for `-` and `.`. Needs torch, transformers, torchvision, and peft for `lora`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from slurm_migbatch.predict.llm.architecture import Architecture
from slurm_migbatch.predict.llm.families import ALL, Model

Step = Callable[[], object]

VISION: Final = (
    "resnet50", "resnet152", "vgg16", "mobilenet_v2", "densenet121", "inception_v3", "efficientnet_b0",
    "efficientnet_b4", "convnext_tiny", "vit_b_16", "vit_l_16", "swin_t",
)  # fmt: skip
"""Models of torchvision."""
PREFIXES: Final[Mapping[str, str]] = {
    "llama": "Llama", "mistral": "Mistral", "qwen2.5": "Qwen2", "qwen3": "Qwen3", "smollm2": "Llama",
    "tinyllama": "Llama", "opt": "OPT", "gpt2": "GPT2", "pythia": "GPTNeoX", "gemma-2-": "Gemma2", "phi-3": "Phi3",
    "bert": "Bert", "all-minilm": "Bert", "roberta": "Roberta", "xlm-roberta": "XLMRoberta", "distilbert": "DistilBert",
    "all-mpnet": "MPNet", "deberta-v3": "DebertaV2", "esm2": "Esm",
    "t5": "T5", "flan-t5": "T5", "whisper": "Whisper",
}  # fmt: skip
"""Classes of transformers, by the beginning of the model's name; the longest counts."""
BF16: Final = torch.bfloat16
FP16: Final = torch.float16


def _squeezed(name: str) -> str:
    return name.replace("-", "_").replace(".", "_")


_MODELS: Final = {_squeezed(model.name): model for model in ALL}


def _config(family: str, a: Architecture) -> Any:
    """Return transformers' configuration of an architecture."""
    import transformers

    common = {"vocab_size": a.vocab, "hidden_size": a.width, "num_hidden_layers": a.layers, "intermediate_size": a.ffn}
    common |= {"num_attention_heads": a.heads, "max_position_embeddings": max(a.positions, a.context)}
    decoder = {**common, "num_key_value_heads": a.kv_heads, "head_dim": a.head, "tie_word_embeddings": a.tied}
    sizes: Mapping[str, Any] = {
        "OPT": {**common, "ffn_dim": a.ffn, "max_position_embeddings": a.positions - 2, "word_embed_proj_dim": a.width},
        "GPT2": {"vocab_size": a.vocab, "n_embd": a.width, "n_layer": a.layers, "n_head": a.heads,
                 "n_positions": a.positions},
        "GPTNeoX": common, "Bert": common, "MPNet": common, "Roberta": {**common, "type_vocab_size": 1},
        "XLMRoberta": {**common, "type_vocab_size": 1},
        "DistilBert": {"vocab_size": a.vocab, "dim": a.width, "n_layers": a.layers, "n_heads": a.heads,
                       "hidden_dim": a.ffn, "max_position_embeddings": a.context},
        "DebertaV2": {**common, "max_position_embeddings": a.context, "type_vocab_size": 0, "relative_attention": True,
                      "position_buckets": 256, "norm_rel_ebd": "layer_norm", "share_att_key": True,
                      "pos_att_type": ["p2c", "c2p"], "position_biased_input": False},
        "Esm": {**common, "position_embedding_type": "rotary", "token_dropout": False, "mask_token_id": 32,
                "pad_token_id": 1},
        "T5": {"vocab_size": a.vocab, "d_model": a.width, "d_kv": a.head, "d_ff": a.ffn, "num_layers": a.layers,
               "num_heads": a.heads, "feed_forward_proj": "gated-gelu" if a.gated else "relu",
               "tie_word_embeddings": a.tied},
        "Whisper": {"d_model": a.width, "encoder_layers": a.encoder_layers, "decoder_layers": a.layers,
                    "encoder_attention_heads": a.heads, "decoder_attention_heads": a.heads, "encoder_ffn_dim": a.ffn,
                    "decoder_ffn_dim": a.ffn, "vocab_size": a.vocab, "num_mel_bins": 128 if a.vocab == 51866 else 80},
    }  # fmt: skip
    return getattr(transformers, f"{family}Config")(**sizes.get(family, decoder))


def _class(family: str, a: Architecture) -> Any:
    import transformers

    ends = {"T5": "ForConditionalGeneration", "Whisper": "ForConditionalGeneration", "GPT2": "LMHeadModel"}
    end = ends.get(family, "ForCausalLM" if a.kind == "decoder" else "Model")
    return getattr(transformers, f"{family}{end}")


def _network(model: Model, dtype: torch.dtype) -> Any:
    """Return the model on the GPU, with random weights."""
    family = PREFIXES[max((prefix for prefix in PREFIXES if model.name.startswith(prefix)), key=len)]
    config = _config(family, model.architecture)
    made = _class(family, model.architecture)
    if getattr(made, "_supports_sdpa", False):
        config._attn_implementation = "sdpa"
    with torch.device("meta"):
        network = made(config)
    network = network.to(dtype).to_empty(device="cuda")
    with torch.no_grad():
        for weight in network.parameters():
            weight.normal_(0.0, 0.02)
        for name, buffer in network.named_buffers():
            _refill(name, buffer)
    if hasattr(network, "tie_weights"):
        network.tie_weights()
    return network


def _refill(name: str, buffer: Any) -> None:
    """Give a buffer plausible values: positions count, rotary frequencies fall, everything else is 0."""
    if "position_ids" in name:
        buffer.copy_(torch.arange(buffer.numel(), device=buffer.device).view_as(buffer))
    elif "inv_freq" in name:
        exponents = torch.arange(buffer.numel(), device=buffer.device) / buffer.numel()
        buffer.copy_((10000.0**-exponents).view_as(buffer))
    else:
        buffer.zero_()


def _inputs(a: Architecture, batch: int, tokens: int) -> dict[str, Any]:
    ids = torch.randint(5, min(a.vocab, 30000), (batch, tokens), device="cuda")
    return {"input_ids": ids}


def _vision_network(name: str) -> Any:
    import torchvision

    options = {"init_weights": False, "aux_logits": False} if name == "inception_v3" else {}
    return getattr(torchvision.models, name)(weights=None, **options).cuda()


def _vision(name: str, batch: int, pixels: int) -> Step:
    network = _vision_network(name).eval()
    images = torch.rand(batch, 3, pixels, pixels, device="cuda")
    return torch.inference_mode()(lambda: network(images))  # type: ignore[no-any-return]


def _infer(name: str, batch: int, size: int, *, dtype: Any = None, tf32: bool = False) -> Step:
    if name in VISION:
        return _vision(name, batch, size)
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    model = _MODELS[name]
    network = _network(model, dtype or (torch.float32 if model.native == "fp32" else BF16)).eval()
    a = model.architecture
    if model.name.startswith("whisper"):
        sound = torch.rand(batch, network.config.num_mel_bins, 2 * a.source, device="cuda", dtype=network.dtype)
        ids = torch.randint(5, 1000, (batch, size), device="cuda")
        return torch.inference_mode()(lambda: network(input_features=sound, decoder_input_ids=ids))  # type: ignore[no-any-return]
    inputs = _inputs(a, batch, size)
    if a.kind == "both":
        inputs["decoder_input_ids"] = inputs["input_ids"][:, :1]
    elif a.kind == "decoder":
        inputs |= {"use_cache": True, "logits_to_keep": 1}
    return torch.inference_mode()(lambda: network(**inputs))  # type: ignore[no-any-return]


def _train(name: str, batch: int, size: int, *, checkpointed: bool = False, mixed: bool = True) -> Step:
    if name in VISION:
        network = _vision_network(name).train()
        images = torch.rand(batch, 3, size, size, device="cuda")
        classes = torch.randint(0, 1000, (batch,), device="cuda")
        return _stepped(network, lambda: torch.nn.functional.cross_entropy(network(images), classes), mixed)
    model = _MODELS[name]
    network = _network(model, torch.float32).train()
    return _stepped(network, _loss(model, network, batch, size, checkpointed), mixed)


def _lora(name: str, batch: int, size: int, *, checkpointed: bool = False) -> Step:
    import peft

    model = _MODELS[name]
    adapters = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    network = peft.get_peft_model(_network(model, BF16), adapters).train()
    if checkpointed:
        network.enable_input_require_grads()
    return _stepped(network, _loss(model, network, batch, size, checkpointed), mixed=True)


def _loss(model: Model, network: Any, batch: int, size: int, checkpointed: bool) -> Callable[[], Any]:
    """Return a forward pass of a language model, up to its loss."""
    if checkpointed:
        network.gradient_checkpointing_enable({"use_reentrant": False})
    network.config.use_cache = False
    inputs = _inputs(model.architecture, batch, size)
    if model.architecture.kind == "encoder":
        return lambda: network(**inputs).last_hidden_state.float().square().mean()
    return lambda: network(**inputs, labels=inputs["input_ids"]).loss


def _stepped(network: Any, loss: Callable[[], Any], mixed: bool) -> Step:
    """Return a step of training: forward and backward pass, and the optimizer."""
    optimizer = torch.optim.AdamW([w for w in network.parameters() if w.requires_grad], lr=1e-5, fused=True)

    def step() -> None:
        with torch.autocast("cuda", BF16, enabled=mixed):
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step.model = network  # type: ignore[attr-defined]
    return step


class Targets:
    """Factories `make(batch, input_size)` by the model's name."""

    def __init__(self, make: Callable[..., Step], **options: Any) -> None:
        self._make = partial(make, **options)

    def __getattr__(self, name: str) -> Callable[[int, int], Step]:
        if name not in _MODELS and name not in VISION:
            raise AttributeError(name)

        def make(batch: int, input_size: int) -> Step:
            return self._make(name, batch, input_size)

        return make


infer = Targets(_infer)
infer_tf32 = Targets(_infer, tf32=True)
infer_fp16 = Targets(_infer, dtype=FP16)
train = Targets(_train)
train_fp32 = Targets(_train, mixed=False)
checkpointed = Targets(_train, checkpointed=True)
lora = Targets(_lora)
lora_checkpointed = Targets(_lora, checkpointed=True)

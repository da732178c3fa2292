"""Parse the hints of language models, which have the names that serving engines and trainers use.

| key | meaning | forms |
|---|---|---|
| engine | what serves the model | vllm, sglang, trtllm, tgi, llamacpp, ollama, transformers |
| dtype | type of the weights | auto, bf16, fp16, fp32 |
| quantization | of the weights, if not in the model's name | awq, gptq, fp8, int8, bitsandbytes, mxfp4, q4_k_m |
| max_model_len | longest sequence, input and output together | 8192, 8k |
| max_num_seqs | sequences at once (`batch` means the same) | 16 |
| output | tokens that a request generates (`input`: tokens of its prompt) | 256, 1k |
| kv_cache_dtype | type of the key-value cache | auto, fp8, bf16 |
| gpu_memory_utilization | share of the slice that the engine may take | 0.9 |
| ttft, tpot | longest time to the first token, and for each further one | 500ms, 40ms |
| rate | requests a second | 2, 0.5 |
| method | how it is tuned; also says that the role is train | full, lora, qlora |
| lora_rank | rank of the adapters of LoRA; without role and engine it also says that the method is lora | 64 |
| optimizer | of the training | adamw, adamw_8bit, adafactor, lion, sgd |
| checkpointing | whether activations are recomputed in the backward pass | on, off |
| seq, micro_batch | tokens of a sequence, and sequences in one pass of a training | 2k, 4 |
| params | size of a model that is not public | 8b, 350m |
| arch | its architecture, as `migbatch model describe` prints it | layers:32+hidden:4096+heads:32+kv:8 |
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from slurm_migbatch.workload import units

Read = dict[str, "str | int"]
Reader = Callable[[str], "Read | None"]
CHOICES: Final = {
    "engine": ("vllm", "sglang", "trtllm", "tgi", "llamacpp", "ollama", "transformers"),
    "dtype": ("auto", "bf16", "bfloat16", "fp16", "float16", "half", "fp32", "float32", "float", "tf32"),
    "method": ("full", "lora", "qlora"),
    "optimizer": ("adamw", "adam", "adamw_8bit", "adafactor", "lion", "sgd", "sgd_momentum"),
    "checkpointing": ("on", "off"),
}
SPELLINGS: Final = {
    "tensorrt-llm": "trtllm", "tensorrt_llm": "trtllm", "llama.cpp": "llamacpp", "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw", "adamw_hf": "adamw", "paged_adamw": "adamw", "paged_adamw_32bit": "adamw",
    "adamw_bnb_8bit": "adamw_8bit", "adamw8bit": "adamw_8bit", "paged_adamw_8bit": "adamw_8bit",
}  # fmt: skip
"""Other words for some of these: engines' own names, and Hugging Face's of optimizers; paged ones count fully."""
OF_TRAINING: Final = ("method", "optimizer", "checkpointing", "seq", "micro_batch")
"""Hints that count in training only; of adapters a server may state the rank too."""
OF_SERVING: Final = ("max_num_seqs", "output", "kv_cache_dtype")
"""Hints that count in serving only."""
TOKENS: Final = "a number of tokens, for example 8192 or 8k"
COUNT: Final = "a number from 1 to 65536"
TIME: Final = "a time with its unit from 100us to 1d, for example 500ms"
NAME: Final = "a name of up to 24 letters, digits and . _ -, for example %s"
ARCH: Final = "name:number pairs joined by +, for example layers:32+hidden:4096+heads:32+kv:8 (migbatch model describe)"
MOST_TOKENS: Final = 10000000
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,23}")
_ARCH = re.compile(r"[a-z_]+:[0-9]+(?:\+[a-z_]+:[0-9]+)*")


@dataclass(frozen=True)
class LlmHints:
    """The hints about a language model. None: not given.

    `gpu_memory_utilization` and `rate` are in thousandths, `ttft_us` and `tpot_us` in microseconds; `params` a number.
    """

    engine: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    output: int | None = None
    kv_cache_dtype: str | None = None
    gpu_memory_utilization: int | None = None
    ttft_us: int | None = None
    tpot_us: int | None = None
    rate: int | None = None
    method: str | None = None
    lora_rank: int | None = None
    optimizer: str | None = None
    checkpointing: str | None = None
    seq: int | None = None
    micro_batch: int | None = None
    params: int | None = None
    arch: str | None = None

    @property
    def tunes(self) -> bool:
        """Whether they say how a model is trained; of adapters a server may state the rank too."""
        ranked = self.lora_rank is not None and self.engine is None
        return ranked or (self.method, self.optimizer, self.checkpointing, self.micro_batch) != (None,) * 4


def within(name: str, number: int | None, low: int, high: int) -> Read | None:
    """Return the field if the number is in range."""
    return {name: number} if number is not None and low <= number <= high else None


def one_of(name: str, *words: str) -> Reader:
    """Return a reader that accepts only these words, and others for them."""

    def read(text: str) -> Read | None:
        word = SPELLINGS.get(text, text)
        return {name: word} if word in words else None

    return read


def matching(name: str, pattern: re.Pattern[str]) -> Reader:
    """Return a reader of texts that match the pattern."""
    return lambda text: {name: text} if pattern.fullmatch(text) else None


def _tokens(name: str) -> Reader:
    def read(text: str) -> Read | None:
        size = units.input_size(text)
        return None if size is None or size[1] == "px" else within(name, size[0], 1, MOST_TOKENS)

    return read


def count(name: str) -> Reader:
    """Return a reader of numbers from 1 to 65536."""
    return lambda text: within(name, units.small_integer(text), 1, 65536)


def duration(name: str) -> Reader:
    """Return a reader of times from 100us to 1d."""
    return lambda text: within(name, units.duration_us(text), 100, 86400000000)


def _thousandths(name: str, low: int, high: int) -> Reader:
    def read(text: str) -> Read | None:
        number = units.plain_number(text)
        return None if number is None else within(name, math.floor(number * 1000.0 + 0.5), low, high)

    return read


def _params(text: str) -> Read | None:
    return within("params", units.items(text), 1000000, 100000000000000)


def _arch(text: str) -> Read | None:
    return {"arch": text} if len(text) <= 400 and _ARCH.fullmatch(text) else None


KEYS: Final[dict[str, tuple[str, Reader]]] = {
    "engine": ("one of " + ", ".join(CHOICES["engine"]), one_of("engine", *CHOICES["engine"])),
    "dtype": (
        "auto, bf16, fp16, fp32 or tf32, for 8 and 4 bits quantization=fp8 or awq",
        one_of("dtype", *CHOICES["dtype"]),
    ),
    "quantization": (NAME % "awq", matching("quantization", _NAME)),
    "max_model_len": (TOKENS, _tokens("max_model_len")),
    "max_num_seqs": (COUNT, count("max_num_seqs")),
    "output": (TOKENS, _tokens("output")),
    "kv_cache_dtype": (NAME % "fp8", matching("kv_cache_dtype", _NAME)),
    "gpu_memory_utilization": (
        "a share from 0.05 to 1, for example 0.9",
        _thousandths("gpu_memory_utilization", 50, 1000),
    ),
    "ttft": (TIME, duration("ttft_us")),
    "tpot": (TIME, duration("tpot_us")),
    "rate": ("requests a second from 0.001 to 100000, for example 2", _thousandths("rate", 1, 100000000)),
    "method": ("full, lora or qlora", one_of("method", *CHOICES["method"])),
    "lora_rank": (COUNT, count("lora_rank")),
    "optimizer": ("one of " + ", ".join(CHOICES["optimizer"]), one_of("optimizer", *CHOICES["optimizer"])),
    "checkpointing": ("on or off", one_of("checkpointing", *CHOICES["checkpointing"])),
    "seq": (TOKENS, _tokens("seq")),
    "micro_batch": (COUNT, count("micro_batch")),
    "params": ("a number of parameters, for example 8b or 350m", _params),
    "arch": (ARCH, _arch),
}
"""What to write for each key, also rendered into the Lua shims, and its reader."""

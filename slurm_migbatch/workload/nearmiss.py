"""Mistyped hints: misspelt keys, and comments with hints in the wrong place.

`gres_templates/migbatch_core.lua.j2` has the same steps.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Final

from slurm_migbatch.workload.refusal import lower

LONGEST_KEY: Final = 24
"""Maximum bytes of a key that is compared with others."""
_OTHER_WORDS: Final = {
    "mem": "memory vram gpu_mem gpu_memory",
    "batch": "batch_size bs",
    "role": "mode task kind phase",
    "input": "image_size img_size imgsz resolution input_size",
    "model": "network",
    "slo": "latency",
    "quantization": "quant",
    "dtype": "precision torch_dtype",
    "max_model_len": "context context_length ctx_size num_ctx max_seq_len",
    "max_num_seqs": "max_batch_size max_running_requests",
    "gpu_memory_utilization": "mem_fraction_static",
    "seq": "max_length max_seq_length seq_len",
    "micro_batch": "micro_batch_size",
    "lora_rank": "lora_r rank",
    "optimizer": "optim",
    "checkpointing": "gradient_checkpointing activation_checkpointing",
}
OTHER_WORDS: Final = {word: key for key, words in _OTHER_WORDS.items() for word in words.split()}
"""Common alternatives to a key, among them options of SGLang, TensorRT-LLM, llama.cpp, Ollama and Hugging Face."""
_DEVICES: Final = (
    "gpus num_gpus devices nproc_per_node world_size tp tp_size tensor_parallel tensor_parallel_size pp pp_size "
    "pipeline_parallel pipeline_parallel_size dp dp_size data_parallel_size"
)
SEVERAL_DEVICES: Final = frozenset(_DEVICES.split())
"""Keys that ask for several devices for one program."""
_SEPARATORS = re.compile(r"[ ;,\"']")


def nearest(key: str, known: Iterable[str]) -> str:
    """Return the key that is probably meant; empty if none is within two typing errors, or one for a short key."""
    lowered = lower(key)
    if len(lowered) > LONGEST_KEY:
        return ""
    if lowered in OTHER_WORDS:
        return OTHER_WORDS[lowered]
    nearest_word, least = "", 3
    for candidate in known:
        most = 1 if len(candidate) <= 4 else 2
        if abs(len(candidate) - len(lowered)) <= most:
            distance = _distance(lowered, candidate)
            if distance <= most and distance < least:
                nearest_word, least = candidate, distance
    return nearest_word


def _distance(first: str, second: str) -> int:
    """Count the insertions, deletions, replacements and swaps of neighbours between two words (Damerau, 1964)."""
    before: list[int] = []
    previous = list(range(len(second) + 1))
    for i, a in enumerate(first, 1):
        row = [i]
        for j, b in enumerate(second, 1):
            cost = min(previous[j] + 1, row[j - 1] + 1, previous[j - 1] + (a != b))
            if i > 1 and j > 1 and a == second[j - 2] and first[i - 2] == b:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        before, previous = previous, row
    return previous[-1]


def unread_pair(text: str, known: Collection[str]) -> str:
    """Return the first `key=value` with a known key in a comment that is not read for hints; empty for none."""
    if "=" not in text:
        return ""
    for token in _SEPARATORS.split(text):
        head, equals, value = token.partition("=")
        key = lower(head.rpartition(":")[2])
        if value and key in known:
            return key + equals + value
    return ""

"""Read how a model in GGUF is described in its files, and how many parameters they hold; no weight is loaded.

A file begins with a magic number, its version, the number of tensors and of keys, then the keys with their values, and
the name, shape and type of each tensor (github.com/ggml-org/ggml, docs/gguf.md). Numbers are little endian.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

MAGIC: Final = b"GGUF"
MOST_KEYS: Final = 4096
MOST_TENSORS: Final = 1 << 17
MOST_VALUES: Final = 1 << 22
"""Limits of what is read; the vocabulary and its merges have a few hundred thousand values."""
LONGEST: Final = 1 << 16
LISTED: Final = 1024
"""Longest text, and longest list of numbers, that are kept."""
_SCALARS: Final[Mapping[int, str]] = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_TEXT, _LIST = 8, 9
_SHARD: Final = re.compile(r"(.*)-[0-9]{5}-of-([0-9]{5})\.gguf")
_KEYS: Final[Mapping[str, str]] = {
    "block_count": "num_hidden_layers", "embedding_length": "hidden_size", "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "feed_forward_length": "intermediate_size", "vocab_size": "vocab_size",
    "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "leading_dense_block_count": "first_k_dense_replace", "attention.sliding_window": "sliding_window",
    "attention.kv_lora_rank": "kv_lora_rank", "attention.q_lora_rank": "q_lora_rank",
    "attention.value_length_mla": "v_head_dim", "rope.dimension_count": "qk_rope_head_dim",
    "ssm.state_size": "state_size", "ssm.inner_size": "mamba_d_ssm", "decoder_block_count": "num_decoder_layers",
}  # fmt: skip
"""Keys of a model's configuration in Hugging Face's form, by those of GGUF after the architecture's name."""
PATTERNS: Final[Mapping[str, int]] = {"gemma2": 2, "gemma3": 6, "gpt-oss": 2, "cohere2": 4, "exaone4": 4}
"""Layers of which one sees all tokens, by architecture; llama.cpp knows it, and the file does not state it."""


class GgufError(Exception):
    """A file that is no model in GGUF; the message says why."""


def shards_of(path: Path) -> list[Path]:
    """Return the files of a model in GGUF, the first one first; `path` is one of them, or their directory, in which the
    largest of several models counts. Empty if there is none.
    """
    if path.is_dir():
        found = [file for file in path.glob("*.gguf") if file.is_file() and not file.name.startswith("mmproj")]
        models = {tuple(shards_of(file)) for file in found}
        return list(max(models, key=lambda files: (sum(file.stat().st_size for file in files), files), default=()))
    match = _SHARD.fullmatch(path.name)
    if match is None:
        return [path] if path.suffix == ".gguf" else []
    return sorted(path.parent.glob(f"{_escaped(match[1])}-?????-of-{match[2]}.gguf"))


def read(files: list[Path]) -> tuple[dict[str, Any], int, int]:
    """Return a model's configuration in Hugging Face's form, its parameters, and the bytes that these take.

    Raises:
        GgufError: a file cannot be read, or is missing.
    """
    match = _SHARD.fullmatch(files[0].name)
    if match is not None and len(files) != int(match[2]):
        raise GgufError(f"{files[0].parent} has {len(files)} of the {int(match[2])} files of {match[1]}")
    config: dict[str, Any] = {}
    parameters = size = 0
    for file in files:
        if file.exists() and not file.is_file():  # reading a pipe may never end
            raise GgufError(f"{file} is not a plain file")
        try:
            with file.open("rb") as stream:
                keys, tensors, last = _header(stream)
                held = file.stat().st_size - stream.tell()
            config = config or _configuration(keys)
        except OSError as error:
            raise GgufError(f"{file} cannot be read ({error.strerror})") from None
        except (struct.error, ValueError, KeyError, TypeError, OverflowError):
            raise GgufError(f"{file} is not a model in GGUF") from None
        if held < last:
            raise GgufError(f"{file} is incomplete")
        config["tie_word_embeddings"] = config.get("tie_word_embeddings", True) and "output.weight" not in tensors
        parameters, size = parameters + sum(tensors.values()), size + held
    return config, parameters, size


def _header(stream: BinaryIO) -> tuple[dict[str, Any], dict[str, int], int]:
    """Return the keys of a file, the number of values of each tensor, and the place of the last one; raises
    struct.error, ValueError, KeyError, TypeError or OverflowError.
    """
    if stream.read(4) != MAGIC or _number(stream, "<I") not in (2, 3):
        raise ValueError("no GGUF")
    count, keys = _number(stream, "<Q"), _number(stream, "<Q")
    if keys > MOST_KEYS or count > MOST_TENSORS:
        raise ValueError("too many")
    found = {_text(stream): _value(stream, _number(stream, "<I")) for _ in range(keys)}
    tensors: dict[str, int] = {}
    last = 0
    for _ in range(count):
        name, sides = _text(stream), _number(stream, "<I")
        if sides > 8:
            raise ValueError("a shape is a few numbers")
        tensors[name] = math.prod(_number(stream, "<Q") for _ in range(sides))
        _number(stream, "<I")  # its type
        last = max(last, _number(stream, "<Q"))
    return found, tensors, last


def _number(stream: BinaryIO, form: str) -> Any:
    return struct.unpack(form, stream.read(struct.calcsize(form)))[0]


def _text(stream: BinaryIO) -> str:
    length = _number(stream, "<Q")
    if length > LONGEST:
        stream.seek(length, 1)
        return ""
    return stream.read(length).decode(errors="replace")


def _value(stream: BinaryIO, kind: int) -> Any:
    """Return a value; of a list of texts or a long one only the length."""
    if kind == _TEXT:
        return _text(stream)
    if kind != _LIST:
        return _number(stream, _SCALARS[kind])
    inner, length = _number(stream, "<I"), _number(stream, "<Q")
    if length > MOST_VALUES:
        raise ValueError("too many")
    if inner == _TEXT:
        for _ in range(length):
            stream.seek(_number(stream, "<Q"), 1)
        return length
    if length > LISTED:
        stream.seek(length * struct.calcsize(_SCALARS[inner]), 1)
        return length
    return [_number(stream, _SCALARS[inner]) for _ in range(length)]


def _configuration(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration in Hugging Face's form; of numbers for each layer the largest, and which layers have
    no heads of keys.
    """
    kind = str(keys.get("general.architecture", ""))
    given = {name: keys[f"{kind}.{key}"] for key, name in _KEYS.items() if f"{kind}.{key}" in keys}
    heads = given.get("num_key_value_heads")
    config: dict[str, Any] = {name: max(value, default=0) if isinstance(value, list) else value
                              for name, value in given.items()}  # fmt: skip
    if isinstance(heads, list) and 0 in heads:
        config["layer_types"] = ["attention" if count else "mamba" for count in heads]
    if "kv_lora_rank" in config:
        whole = keys.get(f"{kind}.attention.key_length_mla", config.get("head_dim", 0))
        config["qk_nope_head_dim"] = whole - config.get("qk_rope_head_dim", 0)
        config.setdefault("v_head_dim", keys.get(f"{kind}.attention.value_length", 128))
    config.setdefault("vocab_size", keys.get("tokenizer.ggml.tokens", 0))
    config["model_type"] = "bert" if "bert" in kind else kind.replace("-", "_")
    if kind in PATTERNS:
        config["sliding_window_pattern"] = PATTERNS[kind]
    return config


def _escaped(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)

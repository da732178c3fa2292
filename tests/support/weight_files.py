"""Write the headers of weight files in the form of safetensors, without the weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

BYTES = {"F32": 4, "BF16": 2, "F16": 2, "I32": 4, "I64": 8, "F8_E4M3": 1}


def write(file: Path, tensors: Mapping[str, tuple[str, int]], *, missing: int = 0) -> None:
    """Write a sparse file of tensors, by name their type and number of values; `missing`: bytes cut off its end."""
    end, header = 0, {"__metadata__": {"format": "pt"}}
    for name, (dtype, count) in tensors.items():
        start, end = end, end + count * BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": [count], "data_offsets": [start, end]}  # type: ignore[dict-item]
    text = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end - missing)


def write_gguf(
    file: Path, keys: Mapping[str, object], tensors: Mapping[str, tuple[int, ...]], size: int, place: int = 0
) -> None:
    """Write a sparse file in GGUF: its keys (a list of texts is a vocabulary), the shapes of its tensors and the place
    where they begin, and as many bytes of weights.
    """

    def text(value: str) -> bytes:
        return len(value.encode()).to_bytes(8, "little") + value.encode()

    def value(given: object) -> bytes:
        if isinstance(given, str):
            return (8).to_bytes(4, "little") + text(given)
        if isinstance(given, bool):
            return (7).to_bytes(4, "little") + bytes([given])
        if isinstance(given, int):
            return (4).to_bytes(4, "little") + given.to_bytes(4, "little")
        assert isinstance(given, list)
        inner, parts = (
            (8, map(text, given)) if isinstance(given[0], str) else (5, (i.to_bytes(4, "little") for i in given))
        )
        return (
            (9).to_bytes(4, "little") + inner.to_bytes(4, "little") + len(given).to_bytes(8, "little") + b"".join(parts)
        )

    header = b"GGUF" + (3).to_bytes(4, "little")
    header += len(tensors).to_bytes(8, "little") + len(keys).to_bytes(8, "little")
    header += b"".join(text(key) + value(given) for key, given in keys.items())
    for name, shape in tensors.items():
        header += text(name) + len(shape).to_bytes(4, "little")
        header += b"".join(side.to_bytes(8, "little") for side in shape) + bytes(4) + place.to_bytes(8, "little")
    with file.open("wb") as stream:
        stream.write(header)
        stream.truncate(len(header) + size)

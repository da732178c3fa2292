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

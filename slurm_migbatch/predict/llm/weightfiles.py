"""Read how many parameters the weight files of a model on disk hold, from their headers; no weight is loaded.

A file in the form of safetensors begins with the length of its header (8 bytes) and the header, which is JSON: the
type, shape and place of each tensor (github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MOST_HEADER: Final = 16 << 20
"""Size limit of a header in bytes; a model of a thousand matrices has 0.1 MB."""
MOST_FILES: Final = 512
"""Most files whose headers are read."""
PLAIN: Final[Mapping[str, str]] = {"F64": "fp32", "F32": "fp32", "F16": "fp16", "BF16": "bf16"}
"""Data types of unquantized weights."""
BESIDE: Final = frozenset({"I64", "BOOL"})
"""Data types of what is no weight: positions, masks."""
_OTHER: Final = "other"
MOST_SIDES: Final = 8
LONGEST_SIDE: Final = 1 << 40
"""Limits of a tensor's shape."""
_SHARD: Final = re.compile(r".*-[0-9]+-of-([0-9]+)\.safetensors")


@dataclass(frozen=True)
class Held:
    """What weight files hold: their size in bytes, and the numbers of their parameters by data type; none if they are
    quantized, incomplete or in another form. `complete`: all are there, by their headers.
    """

    size: int
    counts: Mapping[str, int]
    complete: bool = False

    @property
    def parameters(self) -> int:
        """Number of parameters; 0: unknown."""
        return sum(self.counts.values())

    @property
    def dtype(self) -> str:
        """Data type of most parameters; "": unknown."""
        return max(self.counts, key=lambda name: self.counts[name], default="")


def held(folder: Path) -> Held | None:
    """Return what the weight files of a directory hold; None if it has none."""
    files = _files(folder)
    if not files:
        return None
    size = sum(file.stat().st_size for file in files)
    shards = {int(match[1]) for file in files if (match := _SHARD.fullmatch(file.name))}
    complete = shards == {len(files)} or (not shards and len(files) == 1)
    if not complete or len(files) > MOST_FILES:
        return Held(size, {})
    counts: Counter[str] = Counter()
    for file in files:
        found = _counted(file)
        if found is None:
            return Held(size, {})
        counts.update(found)
    return Held(size, {} if counts[_OTHER] else dict(counts), complete=True)


def _files(folder: Path) -> list[Path]:
    """Return the files with the weights, once: repositories may have all of them in PyTorch's form too, Mistral's in
    its own, and diffusers' in other data types (`model.fp16.safetensors`).
    """
    files = [file for file in folder.glob("*.safetensors") if file.is_file() and not file.name.startswith("adapter_")]
    files = files or [file for file in folder.glob("pytorch_model*.bin") if file.is_file()]
    files = [file for file in files if "." not in file.stem] or files
    return [file for file in files if not file.name.startswith("consolidated")] or files


def _counted(file: Path) -> dict[str, int] | None:
    """Return the numbers of values in a complete file by data type, _OTHER for quantized ones; None if the file is not
    complete or has no header.
    """
    counts: Counter[str] = Counter()
    end = 0
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length)) if 2 <= length <= MOST_HEADER else None
        for dtype, shape, last in _tensors(header):
            if dtype not in BESIDE:
                counts[PLAIN.get(str(dtype), _OTHER)] += math.prod(shape)
            end = max(end, last)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return dict(counts) if counts and file.stat().st_size == 8 + length + end else None


def _tensors(header: object) -> Iterator[tuple[str, list[int], int]]:
    """Yield the type, shape and end of each tensor of a header; raises ValueError, KeyError or TypeError."""
    if not isinstance(header, dict):
        raise TypeError("a header is a table")
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        shape, end = tensor["shape"], tensor["data_offsets"][1]
        if len(shape) > MOST_SIDES or not all(
            type(number) is int and 0 <= number <= LONGEST_SIDE for number in (*shape, end)
        ):
            raise ValueError("a shape is a few whole numbers")
        yield tensor["dtype"], shape, end

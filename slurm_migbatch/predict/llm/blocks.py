"""Read layers that a configuration describes one by one, where a search has chosen the architecture of each (Nemotron's
Puzzle, arXiv 2411.19146).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from slurm_migbatch.predict.llm.configuration import LIMITS, number

MULTIPLE: Final = 256
"""Widths of feed-forwards, which are stated relative to the model's, are rounded up to a multiple of this."""
WIDEST: Final = 64
"""Largest such factor that is believed."""


def numbers_of_blocks(text: Mapping[str, Any], numbers: Mapping[str, int]) -> dict[str, int]:
    """Return the numbers of layers that are described one by one: the most heads of keys, the mean feed-forward."""
    blocks, width = _blocks(text), min(numbers.get("hidden", 0), LIMITS["hidden"])
    if not blocks:
        return {}
    groups = [number(_part(block, "attention"), ("n_heads_in_group",)) or 0 for block in blocks]
    heads = max((numbers.get("heads", 0) // group for group in groups if group), default=0)
    ffn = sum(min(_ffn(_part(block, "ffn"), width), LIMITS["ffn"]) for block in blocks)
    found = {"layers": len(blocks), "ffn": max(math.ceil(ffn / len(blocks)), 1)}
    return {**found, "kv": heads} if heads else found


def kinds_of_blocks(text: Mapping[str, Any]) -> list[str] | None:
    """Return the kind of each layer's attention, `linear` for one matrix; None if none is described."""
    return [_kind(_part(block, "attention")) for block in _blocks(text)] or None


def _blocks(text: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    listed = text.get("block_configs")
    if not isinstance(listed, list) or not all(isinstance(block, dict) for block in listed):
        return []
    return listed[: LIMITS["layers"]]


def _part(block: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = block.get(name)
    return part if isinstance(part, dict) else {}


def _kind(attention: Mapping[str, Any]) -> str:
    if attention.get("no_op") is True:
        return "no_op"
    return "linear" if attention.get("replace_with_linear") is True else "attention"


def _ffn(ffn: Mapping[str, Any], width: int) -> int:
    """Return the width of a gated feed-forward; one matrix instead of it counts as a narrow one."""
    if ffn.get("no_op") is True:
        return 0
    if ffn.get("replace_with_linear") is True:
        return math.ceil(width / 3)
    factor = ffn.get("ffn_mult")
    if isinstance(factor, (int, float)) and 0 < factor <= WIDEST:
        return math.ceil(int(2 * factor * width / 3) / MULTIPLE) * MULTIPLE
    return number(ffn, ("intermediate_size",)) or 0

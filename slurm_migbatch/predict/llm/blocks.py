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
        return _mean_expert(text)
    heads = max(_heads(_part(block, "attention"), numbers.get("heads", 0)) for block in blocks)
    ffn = sum(min(_ffn(_part(block, "ffn"), width), LIMITS["ffn"]) for block in blocks)
    found = {"layers": len(blocks), "ffn": max(math.ceil(ffn / len(blocks)), 1)}
    return {**found, "kv": heads} if heads else found


def _heads(attention: Mapping[str, Any], queries: int) -> int:
    """Return the heads of keys of a block, stated as such or by how many queries share one; 0: as usual."""
    group = number(attention, ("n_heads_in_group",))
    return queries // group if group else number(attention, ("num_key_value_heads",)) or 0


def _mean_expert(text: Mapping[str, Any]) -> dict[str, int]:
    """Return the mean width of experts where blocks state only that (Nemotron 3 by Puzzle)."""
    listed = text.get("block_configs")
    blocks = [block for block in listed if isinstance(block, dict)] if isinstance(listed, list) else []
    widths = [width for block in blocks if (width := number(block, ("moe_intermediate_size",)))]
    return {"expert_ffn": math.ceil(sum(min(width, LIMITS["ffn"]) for width in widths) / len(widths))} if widths else {}


def kinds_of_blocks(text: Mapping[str, Any]) -> list[str] | None:
    """Return the kind of each layer's attention, `linear` for one matrix; None if none is described."""
    return [_kind(_part(block, "attention")) for block in _blocks(text)] or None


def _blocks(text: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    listed = text.get("block_configs")
    if not isinstance(listed, list) or not all(isinstance(block, dict) and _part(block, "ffn") for block in listed):
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

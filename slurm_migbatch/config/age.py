"""Parse ages: `400d`, `60w`, `3y`, `forever`."""

from __future__ import annotations

import math
import re

_AGE_UNITS_S = {"d": 86400.0, "w": 7 * 86400.0, "y": 366 * 86400.0}
_AGE = re.compile(r"([0-9]{1,5})\s*([dwy])")


def parse_age(text: str) -> float:
    """Return the seconds of `400d`, `60w` or `3y`; infinite for `forever` and `0`. Raises ValueError."""
    word = text.strip().lower()
    if word in ("forever", "0"):
        return math.inf
    found = _AGE.fullmatch(word)
    if found is None:
        raise ValueError("a number and d, w or y")
    return int(found[1]) * _AGE_UNITS_S[found[2]]

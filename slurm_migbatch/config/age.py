"""Parse the age limit of records: `400d`, `60w`, `3y`, `forever`."""

from __future__ import annotations

import math
import re
from typing import Final

#: dispatch looks back two weeks; users look back further
LEAST_AGE_S: Final = 30 * 86400
_UNITS: Final = {"d": 86400.0, "w": 7 * 86400.0, "y": 366 * 86400.0}
_AGE = re.compile(r"([0-9]{1,5})\s*([dwy])")


class AgeError(ValueError):
    """A text that is not a length of time; the message says so."""


def parse_age(text: str) -> float:
    """Return the seconds; infinite for `forever` and `0`. Raises AgeError."""
    if text.strip().lower() in ("forever", "0"):
        return math.inf
    found = _AGE.fullmatch(text.strip().lower())
    if found is None:
        raise AgeError("a number and d, w or y")
    return int(found[1]) * _UNITS[found[2]]

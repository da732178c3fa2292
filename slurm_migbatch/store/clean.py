"""Sanitize external values for every database: bounded, finite, text without NUL and lone surrogates."""

from __future__ import annotations

import json
import math
from typing import Any

#: an event with longer JSON is kept as a stub
MAX_PAYLOAD_BYTES = 1 << 20
MAX_INTEGER = 2**63 - 1
_MAX_DEPTH = 16


def text(value: Any, length: int) -> str | None:
    """Return `value` as text of at most `length` characters; None for None, empty and non-scalar values."""
    if value is None or isinstance(value, (dict, list, tuple, set)):
        return None
    return _storable(str(value)[: length + 64])[:length] or None


def whole(value: Any, low: int = 0, high: int = MAX_INTEGER) -> int | None:
    """Return `value` if it is a whole number (or digits) from low to high, else None."""
    if isinstance(value, bool):
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, str) and value.lstrip("-").isascii() and value.lstrip("-").isdigit() and len(value) < 20:
        value = int(value)
    return value if isinstance(value, int) and low <= value <= high else None


def small(value: Any) -> int | None:
    """Return a whole number that fits 32 bits, or None."""
    return whole(value, 0, 2**31 - 1)


def real(value: Any) -> float | None:
    """Return `value` if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def moment(value: Any) -> float | None:
    """Return the unix seconds if `value` is a time after 1970 and before the year 9999, else None."""
    number = real(value)
    return number if number is not None and 0 < number < 253402300800 else None


def truth(value: Any) -> bool | None:
    """Return the boolean if `value` is one, else None."""
    return value if isinstance(value, bool) else None


def document(value: Any) -> Any:
    """Return `value` as JSON that every database accepts; too large a one becomes {"oversize_bytes": n}."""
    plain = _plain(value, 0)
    size = len(json.dumps(plain))
    return plain if size <= MAX_PAYLOAD_BYTES else {"oversize_bytes": size}


def _storable(value: str) -> str:
    """Return a text without NUL and lone surrogates."""
    if value.isascii():
        return value.replace("\0", "")
    return value.replace("\0", "").encode("utf-8", "replace").decode("utf-8")


def _plain(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return _storable(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if abs(value) <= MAX_INTEGER else str(value)[:64] if value.bit_length() < 4096 else "huge"
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if depth >= _MAX_DEPTH:
        return "..."
    if isinstance(value, dict) or hasattr(value, "items"):
        return {_storable(str(key)): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item, depth + 1) for item in value]
    return _storable(str(value))

"""YAML output for JSON-like documents, line by line; login nodes need no package for it.

Parsed as YAML 1.1 or 1.2, it is the same document.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_KEY = re.compile(r"[a-z][a-z0-9_]*")
#: names that YAML 1.1 reads as booleans or null
_TAKEN = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
_ESCAPED = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def mapping_lines(values: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Yield the lines of an object in block style, without line ends."""
    for name, value in values.items():
        key = name if _KEY.fullmatch(name) and name not in _TAKEN else _text(name)
        if isinstance(value, Mapping) and value:
            yield f"{indent}{key}:"
            yield from mapping_lines(value, f"{indent}  ")
        elif isinstance(value, (list, tuple)) and value:
            yield f"{indent}{key}:"
            yield from item_lines(value, indent)
        else:
            yield f"{indent}{key}: {_scalar(value)}"


def item_lines(values: Sequence[Any], indent: str = "") -> Iterator[str]:
    """Yield the lines of a list in block style, without line ends."""
    for value in values:
        if isinstance(value, Mapping) and value:
            first, *rest = mapping_lines(value)
            yield f"{indent}- {first}"
            for line in rest:
                yield f"{indent}  {line}"
        elif isinstance(value, (list, tuple)) and value:
            yield f"{indent}-"
            yield from item_lines(value, f"{indent}  ")
        else:
            yield f"{indent}- {_scalar(value)}"


def _scalar(value: Any) -> str:
    if isinstance(value, float):
        # YAML 1.1 requires a point in a number with an exponent
        mantissa, e, exponent = repr(value).partition("e")
        return f"{mantissa}.0e{exponent}" if e and "." not in mantissa else repr(value)
    return json.dumps(value) if value is None or isinstance(value, int | dict | list | tuple) else _text(str(value))


def _text(text: str) -> str:
    return '"' + "".join(map(_char, text)) + '"'


def _char(char: str) -> str:
    code = ord(char)
    if char in _ESCAPED:
        return _ESCAPED[char]
    if 0x20 <= code < 0x7F:
        return char
    return f"\\x{code:02X}" if code < 0x100 else f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}"

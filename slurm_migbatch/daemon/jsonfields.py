"""Parse JSON from the network strictly, and check the types and sizes of its fields.

An error is a `MessageError`, with a text for the sender.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

#: integers that all JSON readers represent exactly
MAX_NUMBER = 2**53 - 1
#: maximum of numbers with a fraction; jobs may report up to 1e21 items a second
MAX_REAL = 1e30
MAX_DEPTH = 12
MAX_ITEMS = 200_000
MAX_TEXT = 4096


class MessageError(ValueError):
    """An invalid message or event; the text says why."""


def parse(body: bytes) -> Any:
    """Parse `body` as JSON in UTF-8, strictly: no NaN, no duplicate key, bounded numbers. Raises MessageError."""
    try:
        value = json.loads(
            body.decode("utf-8"),
            parse_constant=_no_constant,
            parse_int=_integer,
            parse_float=_float,
            object_pairs_hook=_object,
        )
    except MessageError:
        raise
    except (ValueError, RecursionError):
        raise MessageError("the body is not JSON") from None
    return value


def _no_constant(text: str) -> NoReturn:
    raise MessageError(f"{text} is not a JSON number")


def _integer(text: str) -> int:
    if len(text) > 20:
        raise MessageError(f"a number of {len(text)} digits")
    return int(text)


def _float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise MessageError(f"{text[:40]} is too large a number")
    return number


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1) if len(names) < 1000 else "a key"
        raise MessageError(f"{twice[:40]!r} appears twice in one object")
    return fields


def matched(message: Mapping[str, Any], key: str, pattern: re.Pattern[str]) -> str:
    """Return a field that the whole pattern matches. Raises MessageError."""
    value = message.get(key)
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise MessageError(f"{key} is missing or malformed")
    return value


def whole(row: Mapping[str, Any], key: str, low: int, high: int) -> int:
    """Return a field that is a whole number from `low` to `high`. Raises MessageError."""
    value = row.get(key)
    if type(value) is not int or not low <= value <= high:
        raise MessageError(f"{key} must be a whole number from {low} to {high}, not {shown(value)}")
    return value


def real(row: Mapping[str, Any], key: str, low: float, high: float) -> float:
    """Return a field that is a number from `low` to `high`. Raises MessageError."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise MessageError(f"{key} must be a number from {low:g} to {high:g}, not {shown(value)}")
    return float(value)


def string(row: Mapping[str, Any], key: str, length: int) -> str:
    """Return a field that is a string of at most `length` characters. Raises MessageError."""
    value = row.get(key)
    if not isinstance(value, str) or len(value) > length:
        raise MessageError(f"{key} must be a string of at most {length} characters, not {shown(value)}")
    return value


def truth(row: Mapping[str, Any], key: str) -> bool:
    """Return a field that is true or false. Raises MessageError."""
    value = row.get(key)
    if type(value) is not bool:
        raise MessageError(f"{key} must be true or false, not {shown(value)}")
    return value


def rows(row: Mapping[str, Any], key: str, most: int) -> Sequence[Mapping[str, Any]]:
    """Return a field that is a list of at most `most` objects. Raises MessageError."""
    value = row.get(key)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise MessageError(f"{key} must be a list of objects, not {shown(value)}")
    if len(value) > most:
        raise MessageError(f"{key} has {len(value)} entries, at most {most} are accepted")
    return value


def shown(value: object) -> str:
    """Return a value of the network as a short text for an error."""
    return ascii(value)[:60] if isinstance(value, (str, int, float, bool, type(None))) else f"a {type(value).__name__}"


#: error of `key` of a row, if any; raised as MessageError
Field = Callable[[Mapping[str, Any], str], object]


def optional(check: Field) -> Field:
    """Return the check of a field that may be missing or null."""
    return lambda row, key: None if row.get(key) is None else check(row, key)


def whole_to(high: int, low: int = 0) -> Field:
    """Return the check of a whole number from `low` to `high`."""
    return lambda row, key: whole(row, key, low, high)


def string_to(length: int) -> Field:
    """Return the check of a string of at most `length` characters."""
    return lambda row, key: string(row, key, length)


def list_of(check: Callable[[Mapping[str, Any]], object], most: int) -> Field:
    """Return the check of a list of at most `most` objects, each with `check`."""

    def checked(row: Mapping[str, Any], key: str) -> None:
        for number, item in enumerate(rows(row, key, most)):
            try:
                check(item)
            except MessageError as error:
                raise MessageError(f"{key}[{number}]: {error}") from None

    return checked


def check_fields(row: Mapping[str, Any], fields: Mapping[str, Field]) -> None:
    """Check fields of a row. Raises MessageError."""
    for key, check in fields.items():
        check(row, key)


def check_bounds(value: Any) -> None:
    """Check the bounds of any event: depth, number of items, sizes of texts and numbers."""
    remaining, level = MAX_ITEMS, [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below += [*item, *item.values()]
            elif isinstance(item, list):
                below += item
            elif isinstance(item, str):
                if len(item) > MAX_TEXT:
                    raise MessageError(f"a text of {len(item)} characters, at most {MAX_TEXT} are accepted")
            elif (type(item) is int and abs(item) > MAX_NUMBER) or (type(item) is float and abs(item) > MAX_REAL):
                raise MessageError(f"{shown(item)} is too large a number")
        remaining -= len(below)
        if remaining < 0:
            raise MessageError(f"more than {MAX_ITEMS} values")
        level = below
        if not level:
            return
    raise MessageError(f"nested deeper than {MAX_DEPTH}")

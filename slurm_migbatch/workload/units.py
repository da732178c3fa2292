"""Quantities as written in hints: 200ms, 18gb, 2h, 4k, 512tok.

Strict allow-lists: each parser takes one text and returns a number, or None if the text has none of its forms. The Lua
shim has the same parsers, so they use the same steps in double precision.
"""

from __future__ import annotations

import math
import re

_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_DURATION = re.compile(r"(?:[0-9.]+[a-z]+)+")
_PAIR = re.compile(r"([0-9.]+)([a-z]+)")
_CLOCK = re.compile(r"([0-9]{1,2}):([0-9]{2}):([0-9]{2})")
_DAYS = re.compile(r"([0-9]{1,3})-([0-9]{1,2})(?::([0-9]{2}))?(?::([0-9]{2}))?")
_INTEGER = re.compile(r"[0-9]{1,6}")
_POWER_OF_TEN = re.compile(r"([0-9]+)e([0-9]{1,2})")
_GROUPED = re.compile(r".*\.[0-9]{3}")
"""Whole things are written so where the dot separates thousands; read as a decimal number, 50.000 would be 50."""
_SIDES = re.compile(r"([0-9]{1,6})x([0-9]{1,6})")
_MICROSECONDS = {
    "us": 1.0,
    "ms": 1e3,
    "s": 1e6,
    "sec": 1e6,
    "m": 60e6,
    "min": 60e6,
    "h": 3600e6,
    "d": 86400e6,
}
_BYTES = {
    "mb": 1e6,
    "m": 1048576.0,
    "mib": 1048576.0,
    "gb": 1e9,
    "g": 1073741824.0,
    "gib": 1073741824.0,
    "tb": 1e12,
    "t": 1099511627776.0,
    "tib": 1099511627776.0,
}
_THOUSANDS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9}
_INPUTS = {
    "": (1.0, ""),
    "k": (1024.0, ""),
    "tok": (1.0, "tok"),
    "tokens": (1.0, "tok"),
    "ktok": (1024.0, "tok"),
    "px": (1.0, "px"),
}


def plain_number(text: str) -> float | None:
    """Return a plain number of at most 16 characters, `20` or `0.5`."""
    if len(text) > 16 or _NUMBER.fullmatch(text) is None:
        return None
    return float(text)


def duration_us(text: str) -> int | None:
    """Return the microseconds of `200ms`, `0.2s`, `1h30m`, `2d`, `02:30:00` or Slurm's `1-02:00:00`.

    A bare number is not accepted.
    """
    clock = _CLOCK.fullmatch(text)
    if clock:
        hours, minutes, seconds = (int(part) for part in clock.groups())
        return ((hours * 60 + minutes) * 60 + seconds) * 1000000
    days = _DAYS.fullmatch(text)
    if days:
        day_count, hours, minutes, seconds = (int(part or 0) for part in days.groups())
        return (((day_count * 24 + hours) * 60 + minutes) * 60 + seconds) * 1000000
    if len(text) > 40 or _DURATION.fullmatch(text) is None:
        return None
    total = 0.0
    for digits, unit in _PAIR.findall(text):
        number, factor = plain_number(digits), _MICROSECONDS.get(unit)
        if number is None or factor is None:
            return None
        total = total + number * factor
    return math.floor(total + 0.5)


def memory_mib(text: str) -> int | None:
    """Return the MiB, rounded up, of `18gb` (10^9), `18gib` or `18g` (2^30), `900mb`, `900m`; a bare number is not
    accepted.
    """
    pair = _PAIR.fullmatch(text)
    if pair is None:
        return None
    number, factor = plain_number(pair[1]), _BYTES.get(pair[2])
    if number is None or factor is None:
        return None
    return math.ceil(number * factor / 1048576.0)


def small_integer(text: str) -> int | None:
    """Return a plain integer of at most six digits."""
    return int(text) if _INTEGER.fullmatch(text) else None


def items(text: str) -> int | None:
    """Return a number of things: `50000`, `50k`, `1.5m`, `2g`, `1e6`; not `50.000`, which has two meanings."""
    power = _POWER_OF_TEN.fullmatch(text)
    if power:
        number = plain_number(power[1])
        return None if number is None or int(power[2]) > 15 else math.floor(number * 10.0 ** int(power[2]) + 0.5)
    digits = text.rstrip("kmgb")
    number, factor = plain_number(digits), _THOUSANDS.get(text[len(digits) :])
    if number is None or factor is None or (factor == 1.0 and _GROUPED.fullmatch(digits)):
        return None
    return math.floor(number * factor + 0.5)


def input_size(text: str) -> tuple[int, str] | None:
    """Return `(size, unit)` of `512`, `512tok`, `4k` (4096), `224px`, `224x320` (the longer side).

    The unit may be empty.
    """
    sides = _SIDES.fullmatch(text)
    if sides:
        return max(int(sides[1]), int(sides[2])), "px"
    digits = text.rstrip("abcdefghijklmnopqrstuvwxyz")
    number, unit = plain_number(digits), _INPUTS.get(text[len(digits) :])
    if number is None or unit is None or (unit[0] == 1.0 and _GROUPED.fullmatch(digits)):
        return None
    return math.floor(number * unit[0] + 0.5), unit[1]

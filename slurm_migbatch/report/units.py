"""Sizes as sacct writes them."""

from __future__ import annotations

from slurm_migbatch.values import TYPE_CHECKING
from slurm_migbatch.values.figures import digits

if TYPE_CHECKING:
    from collections.abc import Callable

UNITS = "KMGTP"


def size_formatter(*, unit: str | None, convert: bool) -> Callable[[float | None], str]:
    """Format MiB in `unit` (one of KMGTP), else in the largest that leaves at least 1, or in MiB (M)."""

    def show(mib: float | None) -> str:
        if mib is None:
            return ""
        power = UNITS.index("M")
        value = float(mib)
        if unit is not None:
            value /= 1024.0 ** (UNITS.index(unit) - power)
            power = UNITS.index(unit)
        elif convert:
            while value >= 1024 and power < len(UNITS) - 1:
                value, power = value / 1024, power + 1
        return f"{value:.0f}{UNITS[power]}" if value == int(value) else f"{value:.2f}{UNITS[power]}"

    return show


def joules(value: float | None) -> str:
    """Return an energy as sacct writes ConsumedEnergy: whole joules, or two digits and a letter, by thousands."""
    if value is None:
        return ""
    power, shown = 0, float(round(value))
    while shown >= 1000 and power < len(UNITS):
        shown, power = shown / 1000, power + 1
    letter = UNITS[power - 1] if power else ""
    return f"{shown:.0f}{letter}" if shown == int(shown) else f"{shown:.2f}{letter}"


def figure(value: float | None, unit: str) -> str:
    """Return a measured or predicted figure to three significant digits with its unit; "" for None."""
    if value is None:
        return ""
    return f"{digits(value)}{unit}"

"""Write figures for messages and tables, of which three digits are meaningful, and counts."""

from __future__ import annotations


def digits(value: float) -> str:
    """Write three digits, and all that are before the point: 0.25, 12.3, 12345."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def gib(mib: float) -> str:
    """Write MiB in GiB."""
    return digits(mib / 1024)


def plural(count: int, noun: str) -> str:
    """Write a count with its noun: 1 run, 1,200 runs."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"

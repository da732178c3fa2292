"""Compute quantiles by the nearest rank."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_ROUNDING = 1e-9
"""Error of a product of a share and a number of values."""


def quantile(values: Iterable[float], share: float) -> float:
    """Return the smallest value that at least `share` of all values, one or more, do not exceed."""
    ordered = sorted(values)
    rank = -int((_ROUNDING - share * len(ordered)) // 1)  # rounded up
    return ordered[max(0, rank - 1)]

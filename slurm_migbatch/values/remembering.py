"""Remember results in a bounded dictionary."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    K = TypeVar("K")
    V = TypeVar("V")


def remembered(results: dict[K, V], most: int, key: K, make: Callable[[], V]) -> V:
    """Return the result of a key, made if it is missing; all are forgotten before there are more than `most`."""
    try:
        return results[key]
    except KeyError:
        if len(results) >= most:
            results.clear()
    results[key] = result = make()
    return result

"""Evaluate --constraint on the features of nodes, as far as it is simple."""

from __future__ import annotations

import re
from collections.abc import Callable

_WORD = re.compile(r"[A-Za-z0-9_.=:-]+")
_SIMPLE = re.compile(rf"{_WORD.pattern}(?:(?:[&,]{_WORD.pattern})*|(?:\|{_WORD.pattern})*)")


def satisfier(constraint: str) -> Callable[[frozenset[str]], bool] | None:
    """Return a check whether a node with these features satisfies a constraint like `a&b`, `a,b` or `a|b`.

    None for all others, which only Slurm evaluates. The check's cost does not grow with the constraint.
    """
    if _SIMPLE.fullmatch(constraint) is None:
        return None
    words = frozenset(_WORD.findall(constraint))
    if "|" in constraint:
        return lambda features: not features.isdisjoint(words)
    return words.issubset

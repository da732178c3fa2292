"""Evaluate --constraint on the features of nodes, as far as it is simple."""

from __future__ import annotations

import re
from collections.abc import Callable

_WORD = re.compile(r"[A-Za-z0-9_.=:-]+")
_SIMPLE = re.compile(rf"{_WORD.pattern}(?:(?:[&,]{_WORD.pattern})*|(?:\|{_WORD.pattern})*)")


def words_of(constraint: str) -> tuple[frozenset[str], bool] | None:
    """Return the features of a constraint like `a&b`, `a,b` or `a|b`, and whether one of them is enough.

    None for all others, which only Slurm evaluates.
    """
    if _SIMPLE.fullmatch(constraint) is None:
        return None
    return frozenset(_WORD.findall(constraint)), "|" in constraint


def satisfier(constraint: str) -> Callable[[frozenset[str]], bool] | None:
    """Return a check whether a node with these features satisfies a constraint; None if only Slurm can tell.

    The check's cost does not grow with the constraint.
    """
    found = words_of(constraint)
    if found is None:
        return None
    words, any_of_them = found
    if any_of_them:
        return lambda features: not features.isdisjoint(words)
    return words.issubset

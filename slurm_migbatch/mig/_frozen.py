"""Provide the base of the hand-written value classes.

Small values here are named tuples and the larger ones derive from `Frozen`; neither is a dataclass, because
importing `dataclasses` costs more than starting the interpreter and root's hooks import this package.
"""

from __future__ import annotations


class Frozen:
    """A value whose attributes are set once, by `_init`, and never again."""

    __slots__ = ()

    def _init(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is a value: {name} cannot be set")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is a value: {name} cannot be deleted")

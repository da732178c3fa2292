"""Provide attributes that are computed on first access.

Before Python 3.12 `functools.cached_property` takes a lock on each computation. That costs more than most of the
values computed here, which a round computes hundreds of thousands of times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class lazy(Generic[T]):  # noqa: N801 a decorator
    """Decorator for a computed attribute. The class needs a `__dict__`; two threads may compute the value twice."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, _owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> lazy[T]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> T: ...

    def __get__(self, instance: object, owner: type) -> T | lazy[T]:
        if instance is None:
            return self
        found = instance.__dict__[self._name] = self._compute(instance)
        return found

"""Provide values and patterns that are cheap to declare, for the modules that `migacct` imports at startup.

`dataclasses` imports `inspect` and compiles the methods of each class: for the classes of a query about
runs this takes longer than the interpreter's start. Other modules use dataclasses. Nothing is imported here,
neither `typing` nor `re`.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import re
    from collections.abc import Iterator, Mapping
    from typing import Any, ClassVar, TypeVar

    from typing_extensions import dataclass_transform

    _T = TypeVar("_T")
else:

    def dataclass_transform(**_options):
        """Do nothing: it exists for mypy."""
        return lambda cls: cls


_REQUIRED = object()


class Field:
    """The declaration of a field with metadata, such as bounds, for users of `fields`."""

    def __init__(self, default: Any, **facts: Any) -> None:
        self.default, self.facts = default, facts


@dataclass_transform(frozen_default=True, eq_default=True)
class Value:
    """Base of values: frozen, built from the annotated fields of their class, compared and hashed by them."""

    #: name -> declaration
    _fields: ClassVar[Mapping[str, Field]] = {}
    #: fields that are not keyword-only
    _places: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, *, kw_only: bool = False) -> None:
        """Use the annotated names as fields; with `kw_only` they are keyword-only."""
        declared = dict(cls._fields)
        places = [*cls._places]
        for name, kind in cls.__annotations__.items():
            if not kind.startswith("ClassVar"):
                default = cls.__dict__.get(name, _REQUIRED)
                declared[name] = default if isinstance(default, Field) else Field(default)
                declared[name].facts["kind"] = kind
                if not kw_only:
                    places.append(name)
        cls._fields, cls._places = declared, tuple(places)

    def __init__(self, *given: Any, **named: Any) -> None:
        declared = self._fields
        values = dict(zip(self._places, given, strict=False))
        if len(given) > len(self._places) or values.keys() & named.keys() or named.keys() - declared.keys():
            raise TypeError(f"{type(self).__name__} takes each of {', '.join(declared)} once")
        values.update(named)
        for name in declared:
            if name not in values:
                values[name] = default = declared[name].default
                if default is _REQUIRED:
                    raise TypeError(f"{type(self).__name__} lacks {name}")
        self.__dict__.update(values)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"cannot change {name} of a {type(self).__name__}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"cannot remove {name} of a {type(self).__name__}")

    def __eq__(self, other: object) -> bool:
        return self.__dict__ == other.__dict__ if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(map(self.__dict__.__getitem__, self._fields)))

    def __repr__(self) -> str:
        shown = (f"{name}={self.__dict__[name]!r}" for name in self._fields)
        return f"{type(self).__name__}({', '.join(shown)})"


def fields(of: Value | type[Value]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield names and metadata of the fields of a value or its class; `kind` is the type as written."""
    for name, field in of._fields.items():
        yield name, field.facts


def replace(changed: _T, **changes: Any) -> _T:
    """Return a copy of this value with some fields changed."""
    return type(changed)(**{**changed.__dict__, **changes})


class Pattern:
    """A regular expression that is compiled on first use."""

    def __init__(self, text: str, *flags: str) -> None:
        """Keep the text; `flags` are names of re's, such as "ASCII"."""
        self._text, self._flags = text, flags
        self._made: re.Pattern[str] | None = None

    @property
    def made(self) -> re.Pattern[str]:
        """The compiled expression."""
        if self._made is None:
            import re

            self._made = re.compile(self._text, sum(getattr(re, flag) for flag in self._flags))
        return self._made

    def match(self, text: str, at: int = 0) -> re.Match[str] | None:
        """See re.Pattern.match."""
        return self.made.match(text, at)

    def fullmatch(self, text: str) -> re.Match[str] | None:
        """See re.Pattern.fullmatch."""
        return self.made.fullmatch(text)

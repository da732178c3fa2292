"""Encode values of decisions as JSON and decode them, by their type hints.

A recording may come from an untrusted source, so the type hints, not the data, name the classes that are built. Fields
of a dataclass that have their default are omitted, and missing fields get the default, so a file written before a field
was added stays readable; other changes need another `segments.FORMAT`. Mappings keep their order; one with keys that
are not strings becomes a list of pairs. Sets are sorted.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, Final, NamedTuple, Union, get_args, get_origin, get_type_hints

from slurm_migbatch.mig.geometry import Geometry, GeometryError
from slurm_migbatch.mig.grant import Grant
from slurm_migbatch.mig.layout import Layout, Slot
from slurm_migbatch.mig.profile import Profile, ProfileError

Json = Any
Convert = Callable[[Any], Any]


class CodecError(ValueError):
    """Data that the type hint does not allow; the message says what was expected."""


@contextmanager
def reading_entry(number: int) -> Iterator[None]:
    """Raise CodecError for an entry, counted from 1, that damage or an edit has made contradict itself or others."""
    try:
        yield
    except CodecError as error:
        raise CodecError(f"entry {number} of the recording: {error}") from error
    except Exception as error:
        kind = type(error).__name__
        raise CodecError(f"entry {number} of the recording is damaged or was edited ({kind}: {error})") from error


class Codes(NamedTuple):
    """How values of one type are written and read."""

    encode: Convert
    decode: Convert


_KIND: Final = "is"
_ODD: Final = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


class Codec:
    """Encode and decode by type hints.

    Args:
        special: codes of types that the caller encodes in its own way.
        omit: fields of dataclasses that are neither written nor read.
    """

    def __init__(self, special: Mapping[Any, Codes] | None = None, omit: Collection[tuple[type, str]] = ()) -> None:
        self._known: dict[Any, Codes] = {**_LEAVES, **(special or {})}
        self._omit = frozenset(omit)

    def encode(self, value: Any, hint: Any) -> Json:
        """Return `value` in a form for `json.dumps`."""
        return self.codes(hint).encode(value)

    def decode(self, data: Json, hint: Any) -> Any:
        """Return the value that was encoded.

        Raises:
            CodecError: `data` does not match the hint.
        """
        try:
            return self.codes(hint).decode(data)
        except (TypeError, KeyError, AttributeError, ValueError, RecursionError) as error:
            if isinstance(error, CodecError):
                raise
            raise CodecError(f"{_shown(hint)}: {error}") from error

    def fields(self, kind: type) -> Mapping[str, Codes]:
        """Return how each field of a dataclass is written."""
        hints = get_type_hints(kind)
        return {
            field.name: self.codes(hints[field.name])
            for field in dataclasses.fields(kind)
            if (kind, field.name) not in self._omit
        }

    def codes(self, hint: Any) -> Codes:
        """Return how values of a type are written and read."""
        known = self._known.get(hint)
        if known is None:
            known = self._known[hint] = self._made(hint)
        return known

    def _made(self, hint: Any) -> Codes:
        origin, args = get_origin(hint), get_args(hint)
        if hint in (Layout, Grant):
            return self._value(hint)
        if isinstance(hint, type) and origin is None:
            return self._class(hint)
        if origin in (Union, types.UnionType):
            return self._union(args)
        if origin is tuple:
            return self._tuple(args)
        if origin in (list, Sequence, Collection):
            return self._sequence(args[0], list if origin is list else tuple)
        if origin in (set, frozenset):
            return self._set(args[0], origin)
        if origin in (dict, Mapping, OrderedDict):
            return self._mapping(args[0], args[1], OrderedDict if origin is OrderedDict else dict)
        if origin is Counter:
            return self._mapping(args[0], int, Counter)
        raise TypeError(f"cannot encode {_shown(hint)}")

    def _class(self, kind: type) -> Codes:
        if issubclass(kind, Enum):
            return Codes(lambda value: value.value, kind)
        if issubclass(kind, tuple):
            return self._named_tuple(kind)
        if dataclasses.is_dataclass(kind):
            return self._dataclass(kind)
        raise TypeError(f"cannot encode {_shown(kind)}")

    def _value(self, kind: type) -> Codes:
        """Return the codecs of layouts and grants, which validate their parts."""
        if kind is Layout:
            slots = self.codes(tuple[Slot, ...])
            return Codes(lambda value: slots.encode(value.slots), lambda data: Layout(slots.decode(data)))
        parts = self.codes(tuple[tuple[Profile, int], ...])
        return Codes(
            lambda value: [parts.encode(value.parts), value.decision, value.guest],
            lambda data: Grant(parts.decode(data[0]), _exactly(str)(data[1]), _exactly(bool)(data[2])),
        )

    def _union(self, args: tuple[Any, ...]) -> Codes:
        kinds = [kind for kind in args if kind is not type(None)]
        if len(kinds) == 1:
            inner = self.codes(kinds[0])
            return Codes(
                lambda value: None if value is None else inner.encode(value),
                lambda data: None if data is None else inner.decode(data),
            )
        by_name = {kind.__name__: self.codes(kind) for kind in kinds}

        def encode(value: Any) -> Json:
            name = type(value).__name__
            return {_KIND: name, **by_name[name].encode(value)}

        def decode(data: Json) -> Any:
            return by_name[data[_KIND]].decode({key: value for key, value in data.items() if key != _KIND})

        return Codes(encode, decode)

    def _tuple(self, args: tuple[Any, ...]) -> Codes:
        if len(args) == 2 and args[1] is Ellipsis:
            return self._sequence(args[0], tuple)
        parts = [self.codes(part) for part in args]
        return Codes(
            lambda value: [part.encode(item) for part, item in zip(parts, value, strict=True)],
            lambda data: tuple(part.decode(item) for part, item in zip(parts, _list(data), strict=True)),
        )

    def _named_tuple(self, kind: type) -> Codes:
        hints = get_type_hints(kind)
        parts = [self.codes(hints[name]) for name in kind._fields]  # type: ignore[attr-defined]
        return Codes(
            lambda value: [part.encode(item) for part, item in zip(parts, value, strict=True)],
            lambda data: kind(*(part.decode(item) for part, item in zip(parts, _list(data), strict=True))),
        )

    def _sequence(self, part: Any, kind: Convert) -> Codes:
        inner = self.codes(part)
        return Codes(
            list if inner.encode is _same else lambda value: [inner.encode(item) for item in value],
            lambda data: kind(inner.decode(e) for e in _list(data)),
        )

    def _set(self, part: Any, kind: Convert) -> Codes:
        inner = self.codes(part)
        return Codes(
            lambda value: sorted((inner.encode(item) for item in value), key=canonical),
            lambda data: kind(inner.decode(item) for item in _list(data)),
        )

    def _mapping(self, key: Any, value: Any, kind: Convert) -> Codes:
        keys, values = self.codes(key), self.codes(value)
        if key is str:
            return Codes(
                lambda mapping: {name: values.encode(item) for name, item in mapping.items()},
                lambda data: kind({name: values.decode(item) for name, item in _object(data).items()}),
            )
        return Codes(
            lambda mapping: [[keys.encode(name), values.encode(item)] for name, item in mapping.items()],
            lambda data: kind({keys.decode(name): values.decode(item) for name, item in _list(data)}),
        )

    def _dataclass(self, kind: type) -> Codes:
        fields = self.fields(kind)
        defaults = {field.name: _default(field) for field in dataclasses.fields(kind) if field.name in fields}
        parts = [(name, field.encode, defaults[name]) for name, field in fields.items()]

        def encode(value: Any) -> Json:
            row = {}
            for name, encode_part, default in parts:
                content = getattr(value, name)
                if content is not default and (type(content) is not type(default) or content != default):
                    row[name] = content if encode_part is _same else encode_part(content)
            return row

        def decode(data: Json) -> Any:
            return kind(**{name: fields[name].decode(item) for name, item in _object(data).items() if name in fields})

        return Codes(encode, decode)


_NO_DEFAULT: Final = object()


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return _NO_DEFAULT if field.default is dataclasses.MISSING else field.default


def canonical(data: Json) -> str:
    """Return canonical JSON: equal data give equal texts."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


# -- leaves ------------------------------------------------------------------------------------------------------------


def _shown(hint: Any) -> str:
    return getattr(hint, "__name__", None) or str(hint)


def _exactly(*kinds: type) -> Convert:
    def check(data: Json) -> Any:
        if type(data) not in kinds:
            raise CodecError(f"{str(data)[:60]!r} is no {kinds[0].__name__}")
        return data

    return check


_object, _list = _exactly(dict), _exactly(list)


def _same(value: Any) -> Any:
    return value


def _number(value: float) -> Json:
    return value if math.isfinite(value) else str(float(value))


def _as_number(data: Json) -> float:
    if isinstance(data, str) and data in _ODD:
        return _ODD[data]
    return float(data) if type(data) is float else int(_exactly(float, int)(data))


def _plain(value: Any) -> Json:
    """Return a value of the record converted to the types of JSON."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _profile(data: Json) -> Profile:
    try:
        return Profile.parse(_exactly(str)(data))
    except ProfileError as error:
        raise CodecError(str(error)) from error


def _geometry(data: Json) -> Geometry:
    try:
        return Geometry.from_dict(data)
    except GeometryError as error:
        raise CodecError(str(error)) from error


AS_IT_IS: Final = Codes(_same, _same)
"""Codes of values that are JSON already."""
_LEAVES: Final[Mapping[Any, Codes]] = {
    Any: Codes(_plain, _same),
    type(None): Codes(lambda value: None, lambda data: None),
    bool: Codes(_same, _exactly(bool)),
    int: Codes(_same, _exactly(int)),
    float: Codes(_number, _as_number),
    str: Codes(_same, _exactly(str)),
    Profile: Codes(lambda value: value.name, _profile),
    Geometry: Codes(lambda value: value.to_dict(), _geometry),
}

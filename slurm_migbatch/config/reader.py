"""Read migbatch.toml into `Config`, or report each error with its line and the correction."""

from __future__ import annotations

import dataclasses
import difflib
import re
import sys
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slurm_migbatch.config.keys import model_names
from slurm_migbatch.config.schema import (
    ClusterConfig,
    Config,
    GpuConfig,
    LendingConfig,
    ModelConfig,
    StoreConfig,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

DEFAULT_PATH = "/etc/migbatch/migbatch.toml"

_HEADER = re.compile(r"\s*\[([^\[\]]+)\]\s*(#.*)?$")
_KEY = re.compile(r"""\s*((?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*'))*)\s*=""")
_PART = re.compile(r"""[A-Za-z0-9_-]+|"[^"]*"|'[^']*'""")
_TYPES = {
    "str": "a quoted string",
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "tuple[str, ...]": 'a list of strings, ["a", "b"]',
}
_TABLE = "Mapping[str, int]"


@dataclasses.dataclass(frozen=True)
class Problem:
    """One error in the file. `line` counts from 1; 0 means the file as a whole."""

    line: int
    text: str


class ConfigError(ValueError):
    """The file is invalid; `problems` lists all errors, str() has `path:line: text` of each."""

    def __init__(self, path: str, problems: typing.Sequence[Problem]) -> None:
        self.problems = tuple(sorted(problems, key=lambda p: p.line))
        where = [f"{path}:{p.line}" if p.line else path for p in self.problems]
        super().__init__("; ".join(f"{w}: {p.text}" for w, p in zip(where, self.problems, strict=True)))


def load(path: str | Path = DEFAULT_PATH) -> Config:
    """Read and check the file at `path`.

    Raises:
        ConfigError: it cannot be read, is not TOML, or has an unknown key or invalid value.
    """
    return loads(text_in(path, "; write one with 'migbatch config render migbatch'"), str(path))


def loads(text: str, path: str = "migbatch.toml") -> Config:
    """Check `text`; `path` names it in messages.

    Raises:
        ConfigError: see `load`.
    """
    data = parse(text, path)
    lines = dict(lines_of(text))
    problems: list[Problem] = []
    parts: dict[str, Any] = {"path": path}
    sections = {f.name: f for f in dataclasses.fields(Config) if f.name != "path"}
    tables: dict[str, type] = {"gpus": GpuConfig, "models": ModelConfig}
    for name, value in data.items():
        line = lines.get((name,), 0)
        if name not in sections:
            problems.append(
                Problem(line, unknown_name("section" if isinstance(value, dict) else "key", name, sections))
            )
        elif not isinstance(value, dict):
            problems.append(Problem(line, f"{name} must be a section, [{name}]"))
        elif name in tables:
            parts[name] = _read_named(name, value, tables[name], lines, problems)
        else:
            parts[name] = read_section((name,), type(getattr(Config(), name)), value, lines, problems)
    config = Config(**parts)
    problems.extend(_together(config.lending, config.cluster, config.store, lines))
    if problems:
        raise ConfigError(path, problems)
    return config


def _read_named(
    name: str, sections: Mapping[str, Any], kind: type, lines: Mapping[tuple[str, ...], int], problems: list[Problem]
) -> dict[str, Any]:
    """Read the sections [NAME.KEY], each of which describes one GPU or model; wrong ones are added to `problems`."""
    read: dict[str, Any] = {}
    for key, facts in sections.items():
        line = lines.get((name, key), lines.get((name,), 0))
        if wrong := model_names((key,)):
            problems.append(Problem(line, f"[{name}] {wrong}"))
        elif not isinstance(facts, dict):
            problems.append(Problem(line, f"{name}.{key} must be a section"))
        else:
            read[key] = read_section((name, key), kind, facts, lines, problems)
    return read


def text_in(path: str | Path, advice: str = "") -> str:
    """Return the text of a TOML file, which may begin with a byte order mark.

    Raises:
        ConfigError: it cannot be read (then with the advice) or is not UTF-8 text.
    """
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(str(path), [Problem(0, f"cannot be read ({error.strerror}){advice}")]) from None
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), [Problem(0, f"is not UTF-8 text (byte {error.start})")]) from None


def parse(text: str, path: str) -> dict[str, Any]:
    """Return the tables of a TOML text; `path` names it in messages. Raises ConfigError."""
    try:
        data: dict[str, Any] = tomllib.loads(text)
    except RecursionError:
        reason = "its lists or tables are nested too deeply"
        raise ConfigError(path, [Problem(0, f"is not valid TOML: {reason}")]) from None
    except tomllib.TOMLDecodeError as error:
        where = re.search(r"\(at line (\d+), column \d+\)", str(error))
        line = int(where[1]) if where else len(text.splitlines())
        reason = str(error).split(" (at ")[0]
        raise ConfigError(path, [Problem(line, f"is not valid TOML: {reason[:1].lower()}{reason[1:]}")]) from None
    return data


def _together(
    lending: LendingConfig, cluster: ClusterConfig, store: StoreConfig, lines: Mapping[tuple[str, ...], int]
) -> Iterator[Problem]:
    """Yield errors in combinations of keys."""

    def line(key: str) -> int:
        return lines.get(("lending", key), 0)

    if others := [name for name in lending.training_only if name not in lending.partitions]:
        text = f"lending.training_only names {', '.join(others)}, which are not in lending.partitions"
        yield Problem(line("training_only"), text)
    if not lending.enabled:
        return
    if not lending.partitions:
        text = "lending.enabled requires lending.partitions: list the partitions whose training jobs can be lent slices"
        yield Problem(line("enabled"), text)
    if others := [name for name in lending.partitions if cluster.partitions and name not in cluster.partitions]:
        text = f"lending.partitions names {', '.join(others)}, which are not in cluster.partitions"
        yield Problem(line("partitions"), text)
    if store.keep_s < lending.forecast_days * lending.day_s:
        text = f"is shorter than the {lending.forecast_days} days of lending.forecast_days"
        yield Problem(lines.get(("store", "keep"), line("forecast_days")), f"store.keep = {store.keep!r} {text}")


def read_section(
    where: tuple[str, ...],
    cls: type,
    values: Mapping[str, Any],
    lines: Mapping[tuple[str, ...], int],
    problems: list[Problem],
) -> Any:
    """Read one section as an instance of `cls`; errors are added to `problems`, with defaults in their place."""
    name, header = ".".join(where), next((lines[where[:n]] for n in (2, 1) if where[:n] in lines), 0)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    found: dict[str, Any] = {}
    for key, value in values.items():
        line = lines.get((*where, key), header)
        if key not in fields:
            problems.append(Problem(line, unknown_name("key", key, fields) + f" in [{name}]"))
            continue
        kind = str(fields[key].type)
        if kind == _TABLE:
            found[key] = _table(where, fields[key], value, lines, line, problems)
            continue
        ok, value = _convert(kind, value)
        if not ok:
            problems.append(Problem(line, f"{name}.{key} must be {_TYPES[kind]}"))
            continue
        wrong = fields[key].metadata["check"](value) if fields[key].metadata["check"] else None
        if wrong:
            # errors are logged: not with the password of a URL
            shown = re.sub(":.*@", ":***@", value, flags=re.DOTALL) if isinstance(value, str) else value
            problems.append(Problem(line, f"{name}.{key} {wrong}, not {shown!r}"))
        elif isinstance(value, str) and not value.isprintable():
            problems.append(Problem(line, f"{name}.{key} contains an unprintable character"))
        else:
            found[key] = value
    needed = [f.name for f in fields.values() if f.default is f.default_factory is dataclasses.MISSING]
    missing = [key for key in needed if key not in values]
    if missing:
        problems.append(Problem(header, f"[{name}] needs {' and '.join(missing)}"))
    return cls(**found) if all(key in found for key in needed) else None


def _table(
    where: tuple[str, ...],
    field: dataclasses.Field[Any],
    values: Any,
    lines: Mapping[tuple[str, ...], int],
    line: int,
    problems: list[Problem],
) -> dict[str, int]:
    """Return a table of integers, with each entry checked."""
    name, found = ".".join((*where, field.name)), {}
    if not isinstance(values, dict):
        problems.append(Problem(line, f"{name} must be a table, [{name}] with one line per entry"))
        return {}
    for key, value in values.items():
        at = lines.get((*where, field.name, key), line)
        if not isinstance(value, int) or isinstance(value, bool):
            problems.append(Problem(at, f"{name}.{key} must be a whole number"))
        elif wrong := field.metadata["check"]({key: value}):
            problems.append(Problem(at, f"{name}.{key} {wrong}, not {value!r}"))
        else:
            found[key] = value
    return found


def _convert(kind: str, value: Any) -> tuple[bool, Any]:
    """Return whether a value has the type of its key, and the value as it is kept."""
    if kind == "tuple[str, ...]":
        valid = isinstance(value, list) and all(isinstance(v, str) for v in value)
        return valid, tuple(value) if valid else value
    if isinstance(value, bool):
        return kind == "bool", value
    types: dict[str, type | tuple[type, ...]] = {"bool": bool, "str": str, "int": int, "float": (int, float)}
    return isinstance(value, types[kind]), value


def unknown_name(kind: str, name: str, known: typing.Iterable[str]) -> str:
    """Report an unknown word, with the most similar known one."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1)
    return f"unknown {kind} {name!r}" + (f", did you mean {near[0]!r}?" if near else f" (known: {', '.join(known)})")


def lines_of(text: str) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield the line of every section header and key. tomllib does not report lines; the text is valid TOML."""
    section: tuple[str, ...] = ()
    quote = ""
    for number, line in enumerate(text.splitlines(), 1):
        if quote:
            if line.count(quote) % 2:
                quote = ""
            continue
        if header := _HEADER.match(line):
            section = _split(header[1])
            yield section, number
        elif key := _KEY.match(line):
            yield section + _split(key[1]), number
        for mark in ('"""', "'''"):
            if line.count(mark) % 2:
                quote = mark


def _split(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip("\"'") for part in _PART.findall(dotted))

"""Write migbatch.toml: every key with its meaning; defaults commented out, chosen values active."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from slurm_migbatch.config.schema import Config, GpuConfig, ModelConfig

_HEAD = """\
# migbatch: dynamic NVIDIA MIG for Slurm. Configuration of the controller (migbatchd and the migbatch commands).
# Check with `migbatch config check`; apply changes to a running service with SIGHUP (systemctl reload migbatchd).
"""
_TABLES: dict[str, tuple[type, str]] = {"gpus": (GpuConfig, "h100-80gb"), "models": (ModelConfig, "my-model")}


def render(values: Mapping[str, Mapping[str, Any]] | None = None) -> str:
    """Return the commented file, with `values` (section -> key -> value) set; round-trips through `loads`.

    Raises:
        KeyError: a section or key that does not exist.
    """
    values = values or {}
    sections = [f.name for f in dataclasses.fields(Config) if f.name not in ("path", *_TABLES)]
    if unknown := set(values) - set(sections) - set(_TABLES):
        raise KeyError(f"no section {unknown.pop()!r} in migbatch.toml")
    blocks = [_HEAD]
    for section in sections:
        blocks.append("\n".join(_section(section, values.get(section, {}))) + "\n")
    for table, (cls, example) in _TABLES.items():
        blocks.append("\n".join(_example(table, cls, example)) + "\n")
        for name, facts in values.get(table, {}).items():
            rows = "".join(f"{fact} = {_value(value)}\n" for fact, value in facts.items())
            blocks.append(f"[{table}.{json.dumps(name)}]\n{rows}")
    return "\n".join(blocks)


def text_of(config: Config) -> str:
    """Return the configuration as a file that reads as the same."""
    return render({section: values for section, values in dataclasses.asdict(config).items() if section != "path"})


def _section(name: str, values: Mapping[str, Any]) -> Iterator[str]:
    default = getattr(Config(), name)
    fields = {f.name: f for f in dataclasses.fields(default)}
    if unknown := set(values) - set(fields):
        raise KeyError(f"no key {unknown.pop()!r} in [{name}] of migbatch.toml")
    yield f"# {' '.join((default.__doc__ or '').split())}"
    yield f"[{name}]"
    for key, field in fields.items():
        yield from textwrap.wrap(field.metadata["doc"], 116, initial_indent="# ", subsequent_indent="# ")
        if key in values:
            yield f"{key} = {_value(values[key])}"
        else:
            yield f"#{key} = {_value(getattr(default, key))}"


def _example(table: str, cls: type, example: str) -> Iterator[str]:
    yield f"# {' '.join((cls.__doc__ or '').split())}"
    yield f"#[{table}.{example}]"
    for field in dataclasses.fields(cls):
        default_text = "(needed)" if field.default is dataclasses.MISSING else f"= {_value(field.default)}"
        yield f"#   {field.name} {default_text}: {field.metadata['doc']}"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(key)} = {_value(v)}" for key, v in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(v) for v in value) + "]"
    return json.dumps(str(value), ensure_ascii=False)

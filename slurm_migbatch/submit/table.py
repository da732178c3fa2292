"""The compiled table: the whole request grid as one Lua file, for the times when the service is away.

`return {...}` with partitions, GPU kinds, models with their bucket edges, and for each kind and model-and-role one
string of cells: batch after batch, within it input after input, cells separated by `;`, in a cell one
`latency_us:rate:need_mib` for each plain profile (in the kind's order), separated by `,`; `-` where nothing is known.
The shim finds a request's cell, compares its figures with the request and so gives the service's answers; objectives
need no cells of their own.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from slurm_migbatch.predict.selection import Chooser
from slurm_migbatch.workload.buckets import Bucket, Grid
from slurm_migbatch.workload.catalog import GpuKind, Partition, SiteCatalog

TABLE_VERSION: Final = 1
_INDENT: Final = " "


def quote(value: Any) -> str:
    """A value as Lua source: strings, numbers, booleans, lists and mappings of them."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return '"' + "".join(_escaped(byte) for byte in value.encode("utf-8")) + '"'
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"[{quote(key)}] = {quote(item)}" for key, item in value.items()) + " }"
    if isinstance(value, Sequence):
        return "{ " + ", ".join(quote(item) for item in value) + " }"
    raise TypeError(f"{type(value).__name__} has no Lua form")


def _escaped(byte: int) -> str:
    char = chr(byte)
    if char in '"\\':
        return "\\" + char
    return char if " " <= char <= "~" else f"\\{byte:03d}"


def compile_table(catalog: SiteCatalog, chooser: Chooser, *, models: Iterable[str] | None = None) -> str:
    """The table as Lua source. `models` limits it to those (canonical names); all known ones without it."""
    grids = chooser.grids
    wanted = sorted(grids if models is None else set(models) & set(grids))
    parts = [
        f"version = {TABLE_VERSION}",
        f"refuse_misses = {quote(chooser.refuse_misses)}",
        f"names = {quote(catalog.names)}",
        f"partitions = {quote({part.name: _partition(part) for part in catalog.partitions.values()})}",
        f"kinds = {quote({name: _kind(kind) for name, kind in catalog.kinds.items()})}",
        f"models = {quote({name: _grid(grids[name]) for name in wanted})}",
        f"aliases = {quote({old: new for old, new in sorted(chooser.aliases.items()) if new in wanted})}",
    ]
    cells = ",\n".join(
        f"{_INDENT}[{quote(name)}] = {{\n" + _rows(kind, wanted, chooser) + f"{_INDENT}}}"
        for name, kind in catalog.kinds.items()
    )
    return (
        "return {\n"
        + ",\n".join(_INDENT + part for part in parts)
        + f",\n{_INDENT}cells = {{\n{cells}\n{_INDENT}}}\n}}\n"
    )


def write_table(path: Path, source: str) -> None:
    """Put the table in place for slurmctld to find on its next look; a reader sees the old one or the new one.

    Raises OSError. The file is readable by all and writable by its owner: the shim refuses any other.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o644)
            file.write(source)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _partition(partition: Partition) -> dict[str, Any]:
    return {"kinds": [kind.name for kind in partition.kinds], "default": partition.default.profile.gres_type}


def _kind(kind: GpuKind) -> dict[str, Any]:
    return {
        "types": dict.fromkeys(kind.types, True),
        "full": kind.full.profile.gres_type,
        "profiles": [
            [
                info.profile.gres_type,
                info.compute_slices,
                info.memory_slices,
                info.memory_mib,
                not info.profile.suffix,
            ]
            for info in kind.geometry.profiles
        ],
    }


def _grid(grid: Grid) -> dict[str, Any]:
    return {
        "unit": grid.unit,
        "default_input": grid.default_input,
        "default_batch": grid.default_batch,
        "inputs": list(grid.inputs),
        "batches": list(grid.batches),
    }


def _rows(kind: GpuKind, models: Iterable[str], chooser: Chooser) -> str:
    lines = []
    for model in models:
        grid = chooser.grids[model]
        for role in ("infer", "train"):
            cells = ";".join(
                _cell(Bucket(model, role, batch, size, grid.unit), kind, chooser)
                for batch in grid.batches
                for size in grid.inputs
            )
            lines.append(f'{_INDENT * 2}["{model}/{role}"] = {quote(cells)},\n')
    return "".join(lines)


def _cell(bucket: Bucket, kind: GpuKind, chooser: Chooser) -> str:
    figures = chooser.predictor.figures(bucket, kind)
    plain = [info.profile for info in kind.geometry.profiles if not info.profile.suffix]
    known = [figures.get(profile) for profile in plain]
    return ",".join("-" if f is None else f"{f.latency_us}:{f.rate}:{f.need_mib}" for f in known)

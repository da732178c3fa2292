"""Write the compiled table: the whole request grid as one file, for use without the service.

The file has a first line `migbatch table <version> <bytes>`, then that many bytes of Lua (`return {...}`: partitions,
GPU kinds, where the records of each model begin), then records of printable characters that are read one by one when
needed: the memory of slurmctld does not grow with the grid. The shim finds a request's cell and compares its figures
with the request, and so gives the same answers as the service; objectives need no cells of their own.

A model's record is a line `unit;input;batch;inputs;batches` (`?` after a guessed unit; the defaults, then the edges),
and after it a cell for each GPU kind, role (infer, train), batch and input, in this order. A cell is two numbers: its
entry in the kind's pool of times and in its pool of memory needs. An entry of times has for each plain profile (in the
kind's order) the code of the latency, 0 if unknown, and how many codes the rate is above or below the batch divided by
that latency; an entry of needs has MiB. Numbers are digits to the base 94, from `!`.

Why pools: figures are preferred numbers (`predict.candidate`), and a model's figures on the other slices follow
few patterns, so many cells are equal. A cell takes five or six bytes for some twenty figures; written out it would
take more than a hundred.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from slurm_migbatch.predict.selection import Chooser
from slurm_migbatch.predict.sheet import SCALE, Block, latency_codes, needs_mib, rate_codes
from slurm_migbatch.values import atomicfile
from slurm_migbatch.workload.buckets import Grid
from slurm_migbatch.workload.catalog import GpuKind, MigNode, Partition, SiteCatalog

TABLE_VERSION: Final = 5
ROLES: Final = ("infer", "train")
BASE: Final = 94
ZERO: Final = ord("!")
TIME_DIGITS: Final = 2
NEED_DIGITS: Final = 5
MIDDLE: Final = BASE**TIME_DIGITS // 2
"""Added to the difference of a rate, which may be negative."""
_INDENT: Final = " "

Array = npt.NDArray[Any]


def quote(value: Any) -> str:
    """Return a value as Lua source: strings, numbers, booleans, lists and mappings of them."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return '"' + "".join(_escaped(byte) for byte in value.encode("utf-8", "surrogateescape")) + '"'
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


def site_source(catalog: SiteCatalog, *, records: Mapping[str, Any] | None = None) -> str:
    """Return the site as a Lua expression; `records`: the fields of it that locate the records."""
    parts = {
        "version": TABLE_VERSION,
        "names": catalog.suggested,
        "partitions": {part.name: _partition(part) for part in catalog.partitions.values()},
        "kinds": {name: _kind(kind) for name, kind in catalog.kinds.items()},
        "stem": catalog.stem,
        "catalog_nodes": catalog.catalog_nodes,
        **_nodes(catalog),
        **(records or {"models": {}, "aliases": {}}),
    }
    return "{\n" + "".join(f"{_INDENT}{name} = {quote(value)},\n" for name, value in parts.items()) + "}"


class TableCompiler:
    """Compile tables of one predictor, in one thread at a time.

    The records, which take long, are kept in memory while the GPU kinds stay the same.
    """

    def __init__(self, chooser: Chooser, models: Iterable[str] | None = None) -> None:
        """`models`: canonical names of the models in the table; None: all known ones."""
        self._chooser = chooser
        self._models = sorted(chooser.grids if models is None else set(models) & set(chooser.grids))
        self._compiled: tuple[list[GpuKind], dict[str, Any], bytes] | None = None

    def text(self, catalog: SiteCatalog) -> str:
        """Return the table of a catalog, all ASCII."""
        kinds = list(catalog.kinds.values())
        if self._compiled is None or self._compiled[0] != kinds:
            self._compiled = (kinds, *self._records(kinds))
        _, fields, records = self._compiled
        header = f"return {site_source(catalog, records=fields)}\n"
        return f"migbatch table {TABLE_VERSION} {len(header)}\n{header}{records.decode('ascii')}\n"

    def _records(self, kinds: Sequence[GpuKind]) -> tuple[dict[str, Any], bytes]:
        """Return the fields that locate the records, and the records."""
        chooser = self._chooser
        grids = chooser.grids
        times, needs = [_Pool() for _ in kinds], [_Pool() for _ in kinds]
        cells: dict[str, list[tuple[Array, Array]]] = {
            model: [
                _pooled(*_figures(chooser, model, role, kind), grids[model], times[number], needs[number])
                for number, kind in enumerate(kinds)
                for role in ROLES
            ]
            for model in self._models
        }
        digits = [max((pool.digits for pool in pools), default=1) for pools in (times, needs)]
        records = bytearray()

        def add(part: bytes) -> int:
            """Append to the records; return the position."""
            records.extend(part)
            return len(records) - len(part)

        fields: dict[str, Any] = {
            "digits": digits,
            "order": {kind.name: number for number, kind in enumerate(kinds)},
            "times": {kind.name: add(pool.text) for kind, pool in zip(kinds, times, strict=True)},
            "needs": {kind.name: add(pool.text) for kind, pool in zip(kinds, needs, strict=True)},
            "models": {},
            "aliases": {alias: new for alias, new in sorted(chooser.aliases.items()) if new in cells},
        }
        for model, sheets in cells.items():
            fields["models"][model] = add(_grid_line(grids[model]))
            for pair in sheets:
                add(np.hstack([_text(ids, width) for ids, width in zip(pair, digits, strict=True)]).tobytes())
        return fields, bytes(records)


def write_table(path: Path, source: str) -> None:
    """Write the table atomically for slurmctld to find when it next checks.

    Raises OSError. The file is readable by all and writable by its owner: the shim refuses any other.
    """
    atomicfile.write(path, source.encode("ascii"), 0o644)


def _partition(partition: Partition) -> dict[str, Any]:
    return {
        "kinds": [kind.name for kind in partition.kinds],
        "default": partition.default.profile.gres_type,
        "lends": partition.lends,
        "cpus_of_gpu": partition.gpu_defaults.cpus,
        "memory_of_gpu": partition.gpu_defaults.memory_mib,
        "others": dict.fromkeys(sorted(partition.others), True),
    }


def _nodes(catalog: SiteCatalog) -> dict[str, Any]:
    """Return the nodes by name, each as the number of its group: nodes that differ only by their names."""
    numbers: dict[MigNode, int] = {}
    names = {}
    for node in catalog.nodes.values():
        own = {node.feature} if node.named else set()
        group = replace(node, name="", features=node.features - own)
        names[node.name] = numbers.setdefault(group, len(numbers) + 1)
    groups = [
        {
            "gpus": list(group.gpus),
            "partitions": dict.fromkeys(sorted(group.partitions), True),
            "features": dict.fromkeys(sorted(group.features), True),
            "named": group.named,
        }
        for group in numbers
    ]
    return {"groups": groups, "nodes": names}


def _kind(kind: GpuKind) -> dict[str, Any]:
    return {
        "types": dict.fromkeys(kind.types, True),
        "slices": kind.slice_names,
        "full": kind.full.profile.gres_type,
        "layouts": [list(layout) for layout in kind.gpu_layouts.layouts],
        "compute": kind.gpu_layouts.compute,
        "memory": kind.gpu_layouts.memory,
        "profiles": [
            [
                info.profile.gres_type,
                info.compute_slices,
                info.memory_slices,
                info.memory_mib,
                not info.profile.suffix,
                kind.gpu_layouts.footprints[info.profile.gres_type].number + 1,
                info.max_instances,
            ]
            for info in kind.geometry.profiles
        ],
    }


def _grid_line(grid: Grid) -> bytes:
    edges = (",".join(map(str, edges)) for edges in (grid.inputs, grid.batches))
    return ";".join(
        [grid.unit + "?" * grid.guessed, str(grid.default_input), str(grid.default_batch), *edges, "\n"]
    ).encode("ascii")


class _Pool:
    """Distinct entries, all of one length, by number."""

    def __init__(self) -> None:
        self._entries: dict[bytes, int] = {}

    def numbers(self, rows: Array) -> Array:
        """Return the number of each row of characters, new ones added."""
        entries = self._entries
        # bytes strings of numpy end at the first NUL; characters of the table are printable
        texts: list[bytes] = np.ascontiguousarray(rows).view(f"S{rows.shape[1]}").ravel().tolist()
        for text in dict.fromkeys(texts):
            entries.setdefault(text, len(entries))
        return np.fromiter(map(entries.__getitem__, texts), dtype=np.int64, count=len(texts))

    @property
    def digits(self) -> int:
        """Number of digits of the largest number."""
        digits = 1
        while BASE**digits < len(self._entries):
            digits += 1
        return digits

    @property
    def text(self) -> bytes:
        """All entries in order."""
        return b"".join(self._entries)


def _text(codes: Array, digits: int) -> Array:
    """Encode each code as `digits` characters: return an array of bytes with one more dimension."""
    characters: Array = np.empty((*codes.shape, digits), dtype=np.uint8)
    higher = codes
    for place in range(digits - 1, 0, -1):
        higher, characters[..., place] = np.divmod(higher, BASE)
    characters[..., 0] = higher % BASE
    characters += ZERO
    return characters


def _figures(chooser: Chooser, model: str, role: str, kind: GpuKind) -> tuple[Array, Array, Array]:
    """Return the conservative seconds, items per second and MiB, cells x plain profiles."""
    grid = chooser.grids[model]
    sheet = chooser.predictor.sheet(Block(model, role, grid.batches, grid.inputs), kind)
    return sheet[0, 2], sheet[1, 0], sheet[2, 2]


def _pooled(
    seconds: Array, per_second: Array, mib: Array, grid: Grid, times: _Pool, needs: _Pool
) -> tuple[Array, Array]:
    """Return the numbers of each cell's entries in the pools; rounded as in `predict.candidate.Figures`."""
    known = ~np.isnan(seconds)
    latency = latency_codes(np.where(known, seconds, 0.0))
    rate = rate_codes(np.where(known, per_second, 0.0))
    batches = np.repeat(np.array(grid.batches, dtype=float), len(grid.inputs))[:, None]
    usual = np.searchsorted(SCALE, np.floor(batches * 1e9 / np.maximum(SCALE[latency], 1.0)), "right") - 1
    codes = np.stack([np.where(known, latency + 1, 0), np.where(known, rate - usual + MIDDLE, 0)], axis=2)
    need = needs_mib(np.where(known, mib, 0.0))
    rows = len(seconds)
    return (
        times.numbers(_text(codes, TIME_DIGITS).reshape(rows, -1)),
        needs.numbers(_text(need, NEED_DIGITS).reshape(rows, -1)),
    )

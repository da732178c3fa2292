"""Read measured points of servers of language models: common tables with rows of kind `serve`, and aiconfigurator's.

Common tables (the columns of `migbatch profile run --server`) name the GPU and the MIG profile; those with the columns
of aiconfigurator's silicon_sample.csv (`backend, model_path, system, precision, isl, osl, batch_size, silicon_ttft_ms,
silicon_tpot_ms`) are of one whole GPU. Rows that cannot be scored (a GPU or model that is unknown, a server on several
GPUs) are skipped and counted; malformed ones are errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from slurm_migbatch.lab.traces.csvlines import CsvLine, TraceError, lines
from slurm_migbatch.predict.llm import names, precision
from slurm_migbatch.predict.llm.names import Found
from slurm_migbatch.predict.llm.served import agrees, machine_of, workload_served
from slurm_migbatch.predict.llm.speed import Machine
from slurm_migbatch.predict.llm.workload import SHARES, Serving, Workload
from slurm_migbatch.profiling import aliases
from slurm_migbatch.profiling.csvfile import find, header
from slurm_migbatch.profiling.measurement import SERVE, Measurement
from slurm_migbatch.profiling.table import is_table, scan
from slurm_migbatch.values.figures import plural
from slurm_migbatch.workload.gpufacts import facts_of, model_of
from slurm_migbatch.workload.refusal import show

Row = TypeVar("Row")

COLUMNS: Final = (
    "backend", "model_path", "system", "precision", "isl", "osl", "batch_size", "silicon_ttft_ms", "silicon_tpot_ms",
)  # fmt: skip
MEASURED: Final = frozenset({"silicon_ttft_ms", "silicon_tpot_ms"})
COMMON: Final = ("input_size", "output", "ttft_s", "tpot_s")
"""Columns of a common table besides those of every one that a row of kind `serve` needs here."""
SPREAD_OVER: Final = ("tp_size", "pp_size", "attention_dp_size")
"""Columns of the GPUs of a server, if a table has them."""
CACHE_FP8: Final = "fp8"
"""Checkpoints in 8 bits keep their cache in 8 bits (kv_cache_quant_algo of ModelOpt's)."""


@dataclass(frozen=True)
class ServerPoint:
    """One measured point. Times in seconds; `share`: the slice's share of the GPU's SMs."""

    model: str
    workload: Workload
    machine: Machine
    ttft: float
    tpot: float
    gpu: str
    share: float = 1.0


@dataclass(frozen=True)
class ServerTables:
    """All points of some tables, and notices of what was skipped."""

    points: tuple[ServerPoint, ...]
    notices: tuple[str, ...] = ()


class UnusableError(ValueError):
    """A valid row that cannot be scored; the message says why and what would be."""


class _Skipped:
    """Rows that cannot be scored, by reason, with the first of each."""

    def __init__(self) -> None:
        self._found: dict[str, list[str]] = {}

    def add(self, where: str, why: str) -> None:
        self._found.setdefault(why, []).append(where)

    def first(self) -> tuple[str, str] | None:
        """Return where the first skipped row is, and why it was skipped."""
        return next(((where[0], why) for why, where in self._found.items()), None)

    def notices(self) -> list[str]:
        return [
            f"{plural(len(where), 'row')} {'are' if len(where) > 1 else 'is'} not scored (first {where[0]}): {why}"
            for why, where in self._found.items()
        ]


def scan_servers(folder: Path) -> ServerTables:
    """Return the points of all tables below a folder (or of one file), with notices of rows that cannot be scored.

    Other files of a folder are ignored. Raises TraceError and TableError, also if no row can be scored.
    """
    files = find(folder) if folder.is_dir() else [folder]
    skipped = _Skipped()
    points: list[ServerPoint] = []
    common: list[Path] = []
    for file in files:
        columns = aliases.renamed(header(file))
        if is_table(columns) and set(COMMON) <= set(columns):
            common.append(file)
        elif not folder.is_dir() or not MEASURED.isdisjoint(columns):
            points += _usable(((f"{file}:{line.number}", line) for line in lines(file, COLUMNS)), _of_line, skipped)
    if common:
        rows = [row for row in scan(common).rows if row.kind == SERVE and row.ran]
        points += _usable(((_named(row), row) for row in rows), _of_row, skipped)
    if not points:
        raise _no_points(folder, skipped)
    return ServerTables(tuple(points), tuple(skipped.notices()))


def _no_points(folder: Path, skipped: _Skipped) -> TraceError:
    if (first := skipped.first()) is not None:
        return TraceError(folder, 0, f"no row can be scored: {first[0]}: {first[1]}")
    return TraceError(
        folder,
        0,
        "holds no measured point of a serving engine: a common table has rows of kind serve with "
        f"{', '.join(COMMON)}; aiconfigurator's has the columns {', '.join(COLUMNS)}",
    )


def _usable(
    rows: Iterable[tuple[str, Row]], point: Callable[[Row], ServerPoint], skipped: _Skipped
) -> list[ServerPoint]:
    points = []
    for where, row in rows:
        try:
            points.append(point(row))
        except UnusableError as error:
            skipped.add(where, str(error))
    return points


def _of_line(line: CsvLine) -> ServerPoint:
    """Return the point of a line of aiconfigurator's. Raises UnusableError, and TraceError if it is malformed."""
    inputs, outputs = (line.count_of(name, 1, 10_000_000) for name in ("isl", "osl"))
    at_once = line.count_of("batch_size", 1, 65536)
    ttft, tpot = (line.number_of(f"silicon_{name}_ms", 1e-6, 1e9) / 1e3 for name in ("ttft", "tpot"))
    for column in SPREAD_OVER:
        if line.has(column) and line.count_of(column, 1) > 1:
            raise UnusableError(f"{column} must be 1, not {line.text(column)}: servers on several GPUs are left out")
    system, model = line.text("system"), _found(line.text("model_path"), "model_path")
    facts = facts_of(system)
    if facts is None or not facts.mib:
        raise UnusableError(
            f"system must name a GPU whose speed and memory are known, such as h100_sxm, not '{show(system)}'"
        )
    precision_name = line.text("precision") or "bf16"
    plain = precision_name in precision.DTYPES
    weight_precision = precision.plain(precision_name) if plain else precision.quantized(precision_name)
    if weight_precision is None:
        raise UnusableError(f"precision '{show(precision_name)}' is unknown: write bf16, fp8, nvfp4, awq or similar")
    engine = line.text("backend")
    bits = precision.CACHE["fp8" if weight_precision.name == CACHE_FP8 else "auto"]
    serving = Serving(inputs + outputs, at_once, inputs, outputs, bits, engine, SHARES.get(engine, 0.9))
    workload = Workload(Found(model.name, model.architecture, weight_precision), serving, None)
    machine = Machine(facts.tflops * 1e12, facts.bandwidth_gbs * 1e9, float(facts.mib), sliced=False)
    return ServerPoint(model.name, workload, machine, ttft, tpot, model_of(system))


def _of_row(row: Measurement) -> ServerPoint:
    """Return the point of a row of a common table. Raises UnusableError."""
    empty = [name for name in COMMON if not getattr(row, name)]
    if empty:
        raise UnusableError(f"{', '.join(empty)} must not be empty")
    if row.procs > 1:
        raise UnusableError(f"procs must be 1, not {row.procs}")
    if facts_of(row.gpu) is None:
        raise UnusableError(f"gpu must name one whose speed is known, such as h100-80gb, not '{show(row.gpu)}'")
    model = _found(row.model, "model")
    if not agrees(row):
        raise UnusableError(
            "its figures contradict each other: throughput_per_s is requests (not tokens) per second, latency_s the "
            "time of a request with all its tokens"
        )
    workload = workload_served(row)
    if workload is None:
        raise UnusableError("its engine or precision is unknown")
    machine, share = machine_of(row)
    assert row.ttft_s is not None and row.tpot_s is not None
    return ServerPoint(model.name, workload, machine, row.ttft_s, row.tpot_s, model_of(row.gpu), share)


def _found(name: str, column: str) -> Found:
    """Return the generative model of this name. Raises UnusableError."""
    model = names.resolve(name)
    if model is None:
        raise UnusableError(f"{column}: the model '{show(name)}' is unknown")
    if model.architecture.kind == "plain":
        raise UnusableError(f"{column}: the architecture of {model.name} is unknown: leave the model out")
    if model.architecture.kind == "encoder":
        raise UnusableError(f"{column}: {model.name} generates no tokens: leave the model out")
    return model


def _named(row: Measurement) -> str:
    return f"{row.model} on {row.gpu} {row.profile}".rstrip() + f" with batch {row.batch}"

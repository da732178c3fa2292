"""`migbatch profile`: measure models; import, list and export measured points."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slurm_migbatch.cli.common import HELP, LazyGroup, config_option, converted, open_record, print_table, steps
from slurm_migbatch.cli.ending import Failure
from slurm_migbatch.profiling.measurement import CPU, KINDS, SERVE, TEXT_LENGTHS, Measurement
from slurm_migbatch.report.lines import separated_lines
from slurm_migbatch.values.figures import plural
from slurm_migbatch.workload.gpufacts import facts_of

if TYPE_CHECKING:
    from slurm_migbatch.config import Config
    from slurm_migbatch.predict.facts import ModelFacts

_HERE = "slurm_migbatch.cli"
COMMANDS = {
    "export": (f"{_HERE}.profile:export", "Export the measured points of the record as a table."),
    "import": (f"{_HERE}.profile:import_", "Import measured points into the record."),
    "list": (f"{_HERE}.profile:list_", "List measured models and GPUs."),
    "run": (f"{_HERE}.profile_run:run", "Measure a model on this host."),
}
_UNUSUAL = "unusual points are used: if they are wrong, correct the table and import it again"
_IGNORED = (
    "contradicted by the other points of its model: the {figure} of {model} ({kind}) on {gpu}, {where}, batch {batch}; "
    "kept, but predictions do not use it"
)
_COLUMNS = ("Model", "Kind", "GPU", "Profiles", "Batches", "Inputs", "Points", "Ran", "Sources")

model_option = click.option("--model", metavar="NAME", help="Only this model.")
kind_option = click.option("--kind", type=click.Choice(KINDS), help="Only points of this kind.")
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object.")


@click.group(cls=LazyGroup, lazy=COMMANDS, context_settings=HELP)
def profile() -> None:
    """Measure models, and manage the measurements: throughput, latency and memory by slice and batch.

    The predictor learns from these points.
    """


def _source(value: str) -> str:
    most = TEXT_LENGTHS["source"]
    if not (0 < len(value) <= most and value.isprintable()):
        raise ValueError(f"write 1 to {most} printable characters")
    return value


@click.command("import")
@click.argument("paths", nargs=-1, required=True, metavar="FILE|DIR...", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--source", metavar="NAME", callback=converted(_source), help="Source of the points, instead of their column."
)
@click.option("-n", "--dry-run", is_flag=True, help="Only read and check.")
@json_option
@config_option
def import_(paths: tuple[Path, ...], source: str | None, dry_run: bool, as_json: bool, config: Config) -> None:
    """Import measured points into the record: tables as CSV, Markdown or JSON, or folders with CSV or published data.

    A table has the columns gpu, model, batch and throughput_per_s or latency_s, and may have profile (empty for a whole
    GPU), procs, memory_mib, input_size, params, flops_per_item and those that `profile run` writes. Usual other names
    and units (batch_size, latency_ms, memory_gb, 1g10gb, OOM) are read as these, with a notice.

    Everything is checked before anything is written, and either all is written or nothing. An existing point (the same
    GPU, model, kind, profile, batch, input size, processes and source, and the same serving or training method) gets
    the new values; importing the same file again changes nothing.

    A point that no GPU can reach (faster than its slice computes or reads, less memory than the weights) rejects the
    whole import, by file and line. A possible point far from all other data is imported and listed, and so is one that
    the other points of its model contradict; that one is not used.
    """
    from slurm_migbatch.daemon.facts import known_models, models_of
    from slurm_migbatch.predict.bounds import impossible
    from slurm_migbatch.predict.learned import LearnedPredictor
    from slurm_migbatch.predict.unusual import unusual
    from slurm_migbatch.profiling.table import merge, scan

    with steps() as progress:
        stages = 2 if dry_run else 3
        progress("reading and checking the tables", stages)
        facts = known_models(config)
        predictor = LearnedPredictor(models_of(config).current().saved.learned, facts)
        table = scan(paths, lambda row: impossible(row, predictor.knowledge), "nothing was imported")
        rows: Sequence[Measurement] = table.rows
        progress(f"comparing {plural(len(rows), 'point')} with known data", stages)
        far = [found.text for found in unusual(rows, predictor)]
        notices = [*table.notices, *far, *([_UNUSUAL] if far else []), *_contradicted(rows, facts), *_unused(rows)]
        if source is not None:
            rows = merge(replace(row, source=source) for row in rows)
        result: dict[str, Any] = {
            "points": len(rows),
            "did_not_run": sum(not row.ran for row in rows),
            "models": sorted({row.model for row in rows}),
            "notices": notices,
            "dry_run": dry_run,
        }
        if not dry_run:
            progress("writing them to the record", stages)
            result |= _keep(config, rows)
    if as_json:
        click.echo(json.dumps(result, indent=2))
        return
    for notice in notices:
        click.echo(f"migbatch: notice: {notice}", err=True)
    summary = f"{plural(len(rows), 'point')} of {plural(len(result['models']), 'model')}"
    if result["did_not_run"]:
        summary += f" ({result['did_not_run']} did not run)"
    if dry_run:
        click.echo(f"{summary}: nothing was written (--dry-run)")
    else:
        click.echo(f"{summary}: {result['added']} added, {result['replaced']} replaced, {result['same']} unchanged")


def _contradicted(rows: Sequence[Measurement], facts: Sequence[ModelFacts]) -> list[str]:
    """Return a notice on each point that the others of the table contradict."""
    from slurm_migbatch.predict.known import ModelKnowledge
    from slurm_migbatch.predict.training import ignored

    return [
        _IGNORED.format(
            figure=figure,
            model=row.model,
            kind=row.kind,
            gpu=row.gpu,
            where=row.profile or "the whole GPU",
            batch=row.batch,
        )
        for figure, row in ignored(rows, ModelKnowledge(facts))
    ]


def _unused(rows: Sequence[Measurement]) -> list[str]:
    """Return notices on language models whose figures correct no prediction."""
    from slurm_migbatch.predict.llm.names import generates
    from slurm_migbatch.predict.llm.served import point_of

    unlisted = [row for row in rows if facts_of(row.gpu) is None]
    servers = {row.gpu for row in unlisted if row.kind == SERVE}
    timed = [row for row in unlisted if row.kind == "train" and row.gpu != CPU and row.seconds is not None]
    trainings = {row.gpu for row in timed if generates(row.model)}
    unknown = "kept, but predictions do not use them: the speed of the GPU is unknown to migbatch"
    found = [("points of servers", servers), ("step times (not the memory) of language models in training", trainings)]
    notices = [f"{what} are {unknown} ({', '.join(sorted(gpus))})" for what, gpus in found if gpus]
    served = [row for row in rows if row.kind == SERVE and row.ran and facts_of(row.gpu) is not None]
    if unread := sorted({row.model for row in served if point_of(row) is None}):
        notices.append(
            f"points of servers of {', '.join(unread)} are kept, but predictions do not use them: that needs "
            "input_size, output, ttft_s and tpot_s that agree with latency_s, and params if the model is not public "
            "and its name states no size"
        )
    return notices


def _keep(config: Config, rows: Sequence[Measurement]) -> dict[str, int]:
    from sqlalchemy.exc import SQLAlchemyError

    from slurm_migbatch.store.db import open_store

    # only migbatchd creates and migrates it: a file created by root here would not belong to it
    open_record(config).close()
    with open_store(config.store.url) as store:
        try:
            return store.add_measurements(rows)._asdict()
        except SQLAlchemyError as error:
            raise Failure(f"nothing was imported: database error: {getattr(error, 'orig', error)}") from None


@click.command()
@click.argument("file", required=False, metavar="[FILE]", type=click.Path(dir_okay=False, path_type=Path))
@model_option
@kind_option
@config_option
def export(file: Path | None, model: str | None, kind: str | None, config: Config) -> None:
    """Export the measured points of the record as a table: to FILE (.csv or .csv.gz), or to standard output."""
    from slurm_migbatch.profiling.csvfile import SUFFIXES, is_csv
    from slurm_migbatch.profiling.table import save, write

    if file is not None and not is_csv(file):
        raise click.UsageError(f"the file name must end in {' or '.join(SUFFIXES)}")
    if file is not None and not file.parent.is_dir():
        raise Failure(f"no such directory: {file.parent}: create it, or choose another file")
    rows = _stored_rows(config, model, kind)
    if not rows:
        raise Failure("no such points: see `migbatch profile list`")
    if file is None:
        write(rows, sys.stdout)
        return
    try:
        save(file, rows)
    except OSError as error:
        raise Failure(f"cannot write {file}: {error.strerror}: choose another file") from None
    click.echo(f"{plural(len(rows), 'point')} written to {file}", err=True)


@click.command("list")
@model_option
@kind_option
@click.option("-n", "--noheader", is_flag=True, help="No header.")
@click.option("-P", "--parsable2", is_flag=True, help="Columns separated by '|'.")
@json_option
@config_option
def list_(model: str | None, kind: str | None, noheader: bool, parsable2: bool, as_json: bool, config: Config) -> None:
    """List measured models: kind, GPU, profiles, batches, input sizes, points and how many of them ran."""
    groups: dict[tuple[str, str, str], list[Measurement]] = {}
    for row in _stored_rows(config, model, kind):
        groups.setdefault((row.model, row.kind, row.gpu), []).append(row)
    found = [_summary(rows) for _, rows in sorted(groups.items())]
    if as_json:
        click.echo(json.dumps({"models": found}, indent=2))
        return
    lines = [
        (
            row["model"],
            row["kind"],
            row["gpu"],
            ",".join(name or "-" for name in row["profiles"]),
            _span(row["batches"]),
            _span(row["input_sizes"]),
            str(row["points"]),
            str(row["ran"]),
            ",".join(row["sources"]),
        )
        for row in found
    ]
    if parsable2:
        for line in separated_lines(_COLUMNS, lines, "|", show_header=not noheader):
            click.echo(line)
    else:
        print_table(_COLUMNS, lines, show_header=not noheader)


def _stored_rows(config: Config, model: str | None, kind: str | None) -> list[Measurement]:
    with open_record(config) as store:
        return store.measurements(model.lower() if model is not None else None, kind)


def _summary(rows: Sequence[Measurement]) -> dict[str, Any]:
    profiles = {row.profile: (row.compute_slices or 99, row.memory_slices or 99, row.profile) for row in rows}
    return {
        "model": rows[0].model,
        "kind": rows[0].kind,
        "gpu": rows[0].gpu,
        "family": next((row.family for row in rows if row.family), ""),
        "profiles": sorted(profiles, key=lambda name: profiles[name]),
        "batches": sorted({row.batch for row in rows}),
        "input_sizes": sorted({row.input_size for row in rows if row.input_size is not None}),
        "procs": sorted({row.procs for row in rows}),
        "points": len(rows),
        "ran": sum(row.ran for row in rows),
        "with_memory": sum(row.memory_mib is not None for row in rows),
        "sources": sorted({row.source for row in rows if row.source}),
    }


def _span(numbers: Sequence[int]) -> str:
    """Format numbers as `1-256` for many, all of them for up to three."""
    if len(numbers) > 3:
        return f"{numbers[0]}-{numbers[-1]}"
    return ",".join(map(str, numbers)) or "-"

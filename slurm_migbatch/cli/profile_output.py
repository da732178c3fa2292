"""Print what `migbatch profile run` measures: progress, the table, JSON."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slurm_migbatch.cli.common import print_table
from slurm_migbatch.profiling.cells import MeasurementCell
from slurm_migbatch.profiling.measurement import Measurement

if TYPE_CHECKING:
    from slurm_migbatch.profiling.device import Device
    from slurm_migbatch.profiling.measure import DidNotFit, Ran
    from slurm_migbatch.profiling.runner import Findings, ProfiledModel


def no_progress(*_: object) -> None:
    """Print nothing."""


@contextmanager
def progress(
    subject: ProfiledModel, points: int, quiet: bool
) -> Iterator[tuple[Callable[[MeasurementCell], None], Callable[[Measurement, Ran | DidNotFit, int], None]]]:
    """Yield what to call before and after each point (with the number of points left): on a terminal a bar with the
    remaining time, else lines for logs.
    """
    if quiet:
        yield no_progress, no_progress
        return
    click.echo(f"{subject.model} on {subject.device}: {points} points at most", err=True)
    if not sys.stderr.isatty():
        yield no_progress, lambda row, outcome, left: click.echo(f"{_words(row, outcome)}; {left} left", err=True)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    text = TextColumn("{task.description}", markup=False)
    with Progress(
        BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), text, console=Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task("starting", total=points)

        def after(row: Measurement, outcome: Ran | DidNotFit, left: int) -> None:
            bar.console.print(_words(row, outcome), markup=False, highlight=False)
            bar.advance(task)
            bar.update(task, total=bar.tasks[0].completed + left)

        yield lambda cell: bar.update(task, description=str(cell)), after


def _words(row: Measurement, outcome: Ran | DidNotFit) -> str:
    cell = MeasurementCell.of(row)
    if not row.ran:
        return f"{cell}: does not fit ({getattr(outcome, 'text', '')})"
    memory = f", {row.memory_mib:.0f} MiB" if row.memory_mib else ""
    return f"{cell}: {row.rate:.4g} items/s, {milliseconds(row.latency_s)} ms{memory}"


def milliseconds(seconds: float | None) -> str:
    """Return a time in ms; empty if unknown."""
    return "" if seconds is None else f"{1000 * seconds:.4g}"


def print_findings(found: Findings, path: Path, earlier: int) -> None:
    """Print the points as a table, with knees; `earlier` is the number of rows that the file had before."""
    from slurm_migbatch.profiling.curves import KNEE_SHARE, curves

    lines = [
        (
            str(row.batch),
            str(row.input_size or ""),
            str(row.procs),
            f"{row.rate:.4g}" if row.ran else "does not fit",
            milliseconds(row.latency_s),
            milliseconds(row.latency_p99_s),
            f"{row.memory_mib:.0f}" if row.memory_mib else "",
        )
        for row in sorted(found.rows, key=lambda row: (row.procs, row.input_size or 0, row.batch))
    ]
    print_table(("BATCH", "INPUT", "PROCS", "ITEMS/S", "MS", "P99_MS", "MIB"), lines)
    for curve in curves(found.rows):
        if curve.knee is not None and len(curve.points) > 1:
            at = f" at {curve.name}" if curve.name else ""
            click.echo(f"knee{at}: batch {curve.knee.batch}, the smallest with {KNEE_SHARE:.0%} of the best throughput")
    if found.unfit:
        click.echo(f"not tried, because smaller ones did not fit: {len(found.unfit)} points")
    click.echo(f"{path}: {len(found.outcomes)} new rows" + (f", {earlier} existing" if earlier else ""))


def findings_json(subject: ProfiledModel, device: Device, found: Findings, path: Path) -> dict[str, Any]:
    """Return the findings as an object for JSON."""
    from slurm_migbatch.profiling.curves import curves

    def point(row: Measurement) -> dict[str, Any]:
        outcome = found.outcomes.get(MeasurementCell.of(row))
        summary = getattr(outcome, "summary", None)
        return {
            **row.to_dict(),
            "ran": row.ran,
            "new": outcome is not None,
            "latency_p50_s": summary.p50 if summary else None,
            "samples": summary.count if summary else None,
            "why": getattr(outcome, "text", None),
        }

    return {
        "model": subject.model,
        "device": {
            "gpu": device.gpu,
            "uuid": device.visible or None,
            "profile": device.profile or None,
            "sm_count": device.sm_count,
            "memory_mib": device.memory_mib,
        },
        "table": str(path),
        "points": [point(row) for row in found.rows],
        "unfit": [cell._asdict() for cell in found.unfit],
        "knees": [
            {"input_size": curve.input_size, "procs": curve.procs, "batch": curve.knee.batch}
            for curve in curves(found.rows)
            if curve.knee is not None
        ],
    }

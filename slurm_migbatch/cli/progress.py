"""`migbatch progress`: a job says what it has achieved. Run by job scripts, as the ordinary user, on the compute node.

It appends one line to the file that MIGBATCH_PROGRESS names (`node/progress.py` has the form); programs may do the same
without it. A job must not fail because it could not report, so what is wrong with the file is a warning.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable

import click

Check = Callable[[click.Context, click.Parameter, "str | None"], "str | None"]
VARIABLE = "MIGBATCH_PROGRESS"
FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Slurm numbers the batch, extern and interactive steps from here up, or below zero."""


def _number(*, whole: bool = False, positive: bool = False) -> Check:
    """A callback that makes the user's number one that the progress file takes, as text."""

    def check(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or number < 0 or (positive and not number):
            raise click.BadParameter(f"{value!r} is no {'positive ' if positive else ''}number", ctx, param)
        if whole and not (number.is_integer() and number <= 1e15):
            raise click.BadParameter(f"{value!r} is no whole number up to 10^15", ctx, param)
        return str(int(number)) if whole else f"{number:.9g}"

    return check


@click.command()
@click.option(
    "--items", callback=_number(whole=True), metavar="N", help="Items done since the job's start, all in all."
)
@click.option(
    "--seconds", callback=_number(positive=True), metavar="S", help="Time that they took [from the first report on]."
)
@click.option("--batch", callback=_number(whole=True, positive=True), metavar="B", help="Items in one batch.")
@click.option(
    "--latency-ms", callback=_number(positive=True), metavar="L", help="Usual time for one batch, milliseconds."
)
@click.option(
    "--p99-ms", callback=_number(positive=True), metavar="L", help="Time that 99 of 100 batches keep, likewise."
)
@click.option(
    "--task", callback=_number(whole=True), metavar="I", help="Which task this is about [in steps: SLURM_PROCID]."
)
@click.option("--done", is_flag=True, help="Nothing more will be reported.")
def progress(
    items: str | None,
    seconds: str | None,
    batch: str | None,
    latency_ms: str | None,
    p99_ms: str | None,
    task: str | None,
    done: bool,
) -> None:
    """Tell migbatch what this job has achieved so far: migbatch progress --items 5000

    Predictions for the next jobs of the same model get better by it, and migacct shows it. Numbers count from the job's
    start; call it as often as you like (every few seconds is plenty), the last report of each task counts. Outside a
    job with a slice it does nothing. A program can append the line itself: items=5000 seconds=12.5
    """
    if items is None and latency_ms is None and p99_ms is None and not done:
        raise click.UsageError("nothing to report; say at least --items N, --latency-ms L or --done")
    words = {
        "items": items,
        "seconds": seconds,
        "batch": batch,
        "latency_ms": latency_ms,
        "p99_ms": p99_ms,
        "task": task if task is not None else own_task(),
        "at": f"{time.time():.3f}",
        "done": "1" if done else None,
    }
    line = " ".join(f"{key}={value}" for key, value in words.items() if value is not None)
    path = os.environ.get(VARIABLE)
    if not path:
        click.echo(f"migbatch: nothing reported: no {VARIABLE} here, which a job with a slice has", err=True)
        return
    try:
        append(path, line)
    except OSError as error:
        click.echo(f"migbatch: warning: nothing reported: {path}: {error.strerror}", err=True)


def own_task() -> str | None:
    """The task that this runs in; None in batch scripts and shells, which speak for the whole job."""
    step, rank = os.environ.get("SLURM_STEP_ID", ""), os.environ.get("SLURM_PROCID", "")
    in_step = step.isdigit() and int(step) < FIRST_SPECIAL_STEP
    return rank if in_step and rank.isdigit() else None


def append(path: str, line: str) -> None:
    """Add a line in one write, which others' lines do not mix with. Raises OSError."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.write(handle, f"{line}\n".encode())
    finally:
        os.close(handle)

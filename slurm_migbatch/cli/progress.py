"""`migbatch progress`: report the progress of a job. Run by job scripts, as the ordinary user, on the compute node.

It appends one line to the file in MIGBATCH_PROGRESS (`node/progressreport.py` has the format); programs may do the same
without it. A job must not fail because it could not report, so errors of the file are warnings.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import Any

import click

from slurm_migbatch.cli.common import converted
from slurm_migbatch.elastic import report

NOW = "now"

#: options that give a result; a report has one of them, --done or --oom
_ACHIEVED = ("items", "latency_ms", "p99_ms", "steps", "checkpoint", "restored")
#: fields of a report, in order
_FACTS = (
    "items", "seconds", "batch", "latency_ms", "p99_ms", "task", "steps", "checkpoint", "ckpt_s", "restored",
)  # fmt: skip


def _number(*, whole: bool = False, positive: bool = False) -> Callable[..., Any]:
    """Return a callback that converts the user's number to text for the progress file."""

    def convert(value: str) -> str:
        number = _float(value)
        if not math.isfinite(number) or number < 0 or (positive and not number):
            raise ValueError(f"{value!r} is not a {'positive ' if positive else ''}number")
        if whole and not (number.is_integer() and number <= 1e15):
            raise ValueError(f"{value!r} is not an integer up to 10^15")
        return str(int(number)) if whole else f"{number:.9g}"

    return converted(convert)


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _unix_time(value: str) -> str:
    """Return the unix seconds, as text.

    To the microsecond, because otherwise a checkpoint could seem older than the signal that requested it.
    """
    number = time.time() if value == NOW else _float(value)
    if not 0 < number <= 1e11:
        raise ValueError(f"{value!r} is not a time; write unix seconds, or omit it for now")
    return f"{number:.6f}"


@click.command()
@click.option(
    "--items", callback=_number(whole=True), metavar="N", help="Items done since the start of the job, in total."
)
@click.option(
    "--seconds",
    callback=_number(positive=True),
    metavar="S",
    help="Time spent on them [default: since the first report].",
)
@click.option("--batch", callback=_number(whole=True, positive=True), metavar="B", help="Items in one batch.")
@click.option(
    "--latency-ms", callback=_number(positive=True), metavar="L", help="Typical time for one batch, in milliseconds."
)
@click.option(
    "--p99-ms", callback=_number(positive=True), metavar="L", help="99th percentile of the batch time, in milliseconds."
)
@click.option("--task", callback=_number(whole=True), metavar="I", help="Task of the report [in steps: SLURM_PROCID].")
@click.option(
    "--steps", callback=_number(whole=True), metavar="N", help="Training steps done over all runs of the job."
)
@click.option(
    "--checkpoint",
    is_flag=False,
    flag_value=NOW,
    callback=converted(_unix_time),
    metavar="[TIME]",
    help="A checkpoint was completed at TIME (unix seconds) [now].",
)
@click.option("--ckpt-seconds", "ckpt_s", callback=_number(), metavar="S", help="Time spent writing it.")
@click.option(
    "--restored", callback=_number(whole=True), metavar="N", help="Step from which this run continued after a requeue."
)
@click.option("--done", is_flag=True, help="This is the last report.")
@click.option("--oom", is_flag=True, help="The job ran out of GPU memory.")
def progress(done: bool, oom: bool, **facts: str | None) -> None:
    """Report what this job has done so far: migbatch progress --items 5000

    Reports improve predictions for later jobs of the same model, and migacct shows them. Numbers count from the job's
    start; call it as often as you like (every few seconds is enough), the last report of each task counts. Outside a
    job with a slice it does nothing. A program can append the line itself: items=5000 seconds=12.5

    A training job that was signalled to save (USR1) answers with --checkpoint once the file is complete; then its slice
    can be reclaimed without loss.
    """
    if not (done or oom) and all(facts[name] is None for name in _ACHIEVED):
        raise click.UsageError("nothing to report; give at least --items N, --latency-ms L, --checkpoint or --done")
    reported = {"done": "1" if done else None, "oom": "1" if oom else None}
    line = report.line(os.environ, {**{name: facts[name] for name in _FACTS}, **reported})
    path = os.environ.get(report.VARIABLE)
    if not path:
        click.echo(
            f"migbatch: nothing reported: {report.VARIABLE} is not set, so this is not a job with a slice", err=True
        )
        return
    try:
        report.append(path, line)
    except OSError as error:
        click.echo(f"migbatch: warning: nothing reported: {path}: {error.strerror}", err=True)

"""`migbatch waste`: show what jobs held but did not use, in the style of seff and reportseff."""

from __future__ import annotations

from typing import Any

import click

from slurm_migbatch.cli.asking import ask_and_print
from slurm_migbatch.cli.common import source_option
from slurm_migbatch.cli.usage import filters, output, window_options
from slurm_migbatch.query.questions import WasteQuestion, is_job

_OF_TABLES = ("users", "accounts", "partitions", "nodes", "start", "end")


@click.command()
@click.argument("job", default="", metavar="[JOB]")
@source_option
@window_options
@click.option("--limit", type=click.IntRange(1, 100_000), metavar="N", help="Number of runs to list, worst first [20].")
@click.option("-n", "--noheader", is_flag=True, help="No header.")
@click.option("-P", "--parsable2", is_flag=True, help="Columns separated by '|'.")
@click.option("--csv", "as_csv", is_flag=True, help="CSV with plain numbers.")
@click.option("--json", "as_json", is_flag=True, help="Everything as one JSON object.")
def waste(job: str, config: str | None, db: str | None, **options: Any) -> int:
    """Show what JOB held but did not use, or the worst of the runs that ended in a time window.

    Held but idle: SMs were in use for less than a tenth of the time. Whole GPU, memory, SMs: a smaller slice would have
    been enough for the memory that the run used, with a margin, and for its SMs if they were sampled. Each finding has
    the option to submit with next time, and how long runs with that slice waited around that time (median and nine of
    ten). WASTED is in GPU-hours. Users see their own jobs, operators all.
    """
    chosen = filters(options)
    if job and not is_job(job):
        raise click.UsageError(f"{job!r} is not a job id; write 123, 123_4 or 123+1")
    if job and (any(chosen[name] for name in _OF_TABLES) or options["limit"]):
        raise click.UsageError("a job id cannot be combined with -u, -A, -r, -N, -S, -E or --limit")
    question = WasteQuestion(job=job, **chosen, limit=options["limit"], **output(options))
    return ask_and_print(question, config, db=db)

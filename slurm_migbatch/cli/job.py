"""`migbatch show` and `migbatch why`: one job in detail, as `key: value` lines, and why it waits."""

from __future__ import annotations

import click

from slurm_migbatch.cli.asking import ask_and_print
from slurm_migbatch.cli.common import job_argument, source_option
from slurm_migbatch.query.questions import ShowQuestion, WhyQuestion


@click.command()
@job_argument
@source_option
@click.option("-D", "--duplicates", is_flag=True, help="Include earlier runs of a requeued job.")
@click.option("--json", "as_json", is_flag=True, help="Everything as one JSON object.")
def show(job: str, config: str | None, duplicates: bool, as_json: bool) -> int:
    """Show one job: requested, bucket, allocated, predicted, measured, reasons.

    JOB is a job id as Slurm prints it: 123, 123_4 (array task) or 123+1 (part of a heterogeneous job).
    """
    return ask_and_print(ShowQuestion(job, duplicates, as_json), config)


@click.command()
@job_argument
@source_option
def why(job: str, config: str | None) -> int:
    """Show why a job waits and when it can start."""
    return ask_and_print(WhyQuestion(job), config)

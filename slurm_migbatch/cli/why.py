"""`migbatch why`: show why a job waits, from Slurm's queue, the record and the running supply loop."""

from __future__ import annotations

import click

from slurm_migbatch.cli.asking import ask_and_print
from slurm_migbatch.cli.common import job_argument, source_option
from slurm_migbatch.query.questions import WhyQuestion


@click.command()
@job_argument
@source_option
def why(job: str, config: str | None) -> int:
    """Show why a job waits and when it can start."""
    return ask_and_print(WhyQuestion(job), config)

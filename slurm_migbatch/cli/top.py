"""`migbatch top`: GPUs as their memory slices, holders, the queue, loans and events, live in the terminal."""

from __future__ import annotations

import click

from slurm_migbatch.cli.asking import asker
from slurm_migbatch.cli.common import F, NumberRange, source_option

SECONDS = NumberRange(1, 3600)


def delay_option(command: F) -> F:
    """Return the option -d/--delay; the function gets seconds."""
    option = click.option(
        "-d", "--delay", type=SECONDS, default=3.0, metavar="SECS", help="Seconds between refreshes [default 3]."
    )
    return option(command)


@click.command()
@source_option
@delay_option
@click.option(
    "-n", "--iterations", "count", type=click.IntRange(1), metavar="COUNT", help="Exit after COUNT refreshes."
)
@click.option("-b", "--batch", is_flag=True, help="Batch mode as in top -b: plain text, all rows.")
@click.option("-u", "--user", default="", metavar="USER", help="Only jobs of this user.")
def top(config: str | None, delay: float, count: int | None, batch: bool, user: str) -> None:
    """Watch GPUs, slices, the queue and loans in the terminal.

    Each GPU is one line of memory slices: = a job, ~ a training job on loan, : offered to Slurm, . free, ! faulty,
    x closed. Press h for the keys. Other users' jobs are shown as squeue shows them.
    """
    from slurm_migbatch.cli.live import run
    from slurm_migbatch.report.pagestate import PageState

    run(asker(config), PageState(interval=delay, user=user), None, count=count, plain=batch)

"""`migbatch loans`: show slices on loan to training jobs, and training jobs that wait for one."""

from __future__ import annotations

import os

import click

from slurm_migbatch.cli.asking import ask_and_print
from slurm_migbatch.cli.common import source_option
from slurm_migbatch.query.questions import LoansQuestion


@click.command()
@source_option
@click.option("-j", "--jobs", "ids", metavar="JOBS", help="Only these: 12, 12_3, 12_[1-5], 12+1.")
@click.option("-a", "--all", "everything", is_flag=True, help="Include ended loans.")
@click.option("--json", "as_json", is_flag=True, help="Everything as one JSON object.")
@click.option("-p", "--parsable", is_flag=True, help="Columns separated and lines ended by '|'.")
@click.option("-P", "--parsable2", is_flag=True, help="Columns separated by '|'.")
@click.option("-n", "--noheader", is_flag=True, help="No header line.")
def loans(
    config: str | None,
    ids: str | None,
    everything: bool,
    as_json: bool,
    parsable: bool,
    parsable2: bool,
    noheader: bool,
) -> int:
    """Show slices on loan to training jobs, and training jobs that wait for one.

    STATE is waiting, released (it may start), running, signalled (told to write a checkpoint), requeued, withdrawn, or
    ended. Other users' jobs are shown as far as squeue shows them.
    """
    question = LoansQuestion(
        ids,
        everything,
        as_json,
        "|" if parsable or parsable2 else None,
        parsable and not parsable2,
        not noheader,
        os.environ.get("SLURM_TIME_FORMAT", ""),
    )
    return ask_and_print(question, config)

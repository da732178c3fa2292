"""`migbatch explain`: show how a request would be rewritten and why, without submitting it."""

from __future__ import annotations

import os
from typing import Any

import click

from slurm_migbatch.cli.asking import ask_and_print
from slurm_migbatch.cli.common import source_option
from slurm_migbatch.query.questions import ExplainQuestion


@click.command()
@source_option
@click.option("--gres", metavar="LIST", help="As for sbatch, for example mig:auto, mig:2g.20gb:1 or gpu:1.")
@click.option("-G", "--gpus", metavar="N", help="As for sbatch.")
@click.option("--gpus-per-node", metavar="N", help="As for sbatch.")
@click.option("--gpus-per-task", metavar="N", help="As for sbatch.")
@click.option("--gpus-per-socket", metavar="N", help="As for sbatch.")
@click.option("--comment", metavar="TEXT", help="Hints, for example 'migbatch: model=bert-large batch=32 slo=200ms'.")
@click.option("--extra", metavar="TEXT", help="Hints, where the site allows them here.")
@click.option(
    "-p", "--partition", metavar="NAME", help="Partition [default: the only one with MIG, else Slurm's default]."
)
@click.option("-N", "--nodes", type=click.IntRange(1, 100000), help="Nodes of the job.")
@click.option("-n", "--ntasks", type=click.IntRange(1, 1000000), help="Tasks of the job.")
@click.option("--ntasks-per-node", type=click.IntRange(1, 100000), help="Tasks on each node.")
@click.option("--catalog", "catalog_file", metavar="FILE", help="Catalog to use [default: migbatchd's].")
@click.option(
    "--service", "service_socket", metavar="SOCKET", help="Query the service at this socket too, and compare."
)
@click.option("--json", "as_json", is_flag=True, help="Everything as one JSON object.")
def explain(
    config: str | None, catalog_file: str | None, service_socket: str | None, as_json: bool, **options: Any
) -> int:
    """Show what the submit filter would make of a request, with every candidate and its predicted figures.

    Nothing is submitted and nothing recorded. Exit code 0: it would be accepted; 3: refused.
    """
    given: dict[str, Any] = {  # as the filter sees them, one character per byte
        name: os.fsencode(value).decode("latin-1") if isinstance(value, str) else value
        for name, value in options.items()
    }
    return ask_and_print(
        ExplainQuestion(**given, as_json=as_json),
        config,
        catalog=catalog_file or "",
        submit_socket=service_socket or "",
    )

"""`migbatch bench live`: lending beside a real Slurm, and what the simulator had said."""

from __future__ import annotations

import json
from typing import Any

import click

from slurm_migbatch.cli.benchcommon import json_option, print_bars, progress
from slurm_migbatch.cli.common import Failure, print_table


@click.command()
@click.option("--seed", default=1, show_default=True, help="Of the wave.")
@click.option("--slurm-root", default="", metavar="DIR", help="Run the Slurm of this debootstrapped Debian.")
@json_option
def live(seed: int, slurm_root: str, as_json: bool) -> None:
    """Inference that follows a day, and training throughout, on a test bed: with lending and without (as root).

    The day is compressed to six minutes, so this takes about a quarter of an hour. Two nodes of four simulated H100s
    under a real Slurm; the simulator's figures for the same wave are printed beside.
    """
    from slurm_migbatch.bench.live import NotMeasurable, measure
    from slurm_migbatch.testbed.errors import TestbedError

    try:
        result = measure(seed, say=progress, slurm_root=slurm_root)
    except (NotMeasurable, TestbedError) as error:
        raise Failure(str(error)) from None
    if as_json:
        click.echo(json.dumps(result))
        return
    click.echo(
        f"{result['requests']} inference and {result['trainings']} training jobs, a day of {result['day_s']:g} s"
    )
    print_table(
        ("WAY", "JCT_S", "PREDICTED", "P95_S", "DELAY_S", "DELAY_P95_S", "PREDICTED", "RESTARTS", "MOST", "RPCS"),
        [_row(name, way) for name, way in result["ways"].items()],
    )
    print_bars(result)


def _row(name: str, way: dict[str, Any]) -> list[str]:
    said = way["predicted"]
    seconds = (
        way["jct_s"], said["jct_s"], way["jct_p95_s"], way["mean_delay_s"], way["p95_s"], said["delay_p95_s"]
    )  # fmt: skip
    return [
        name,
        *(f"{value:.1f}" for value in seconds),
        f"{way['restarts']:.2f}",
        str(way["restarts_max"]),
        str(way["rpcs"]),
    ]

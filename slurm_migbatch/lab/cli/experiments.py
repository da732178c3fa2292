"""The experiments of `migbatch bench`: what the policies do on public data, beside what others would."""

from __future__ import annotations

from pathlib import Path

import click

from slurm_migbatch.cli.common import Failure, print_table
from slurm_migbatch.lab.cli.common import (
    data_option,
    hand_over,
    json_option,
    plot_option,
    print_bars,
    print_notes,
    progress,
)


@click.command()
@data_option
@click.option("--seeds", type=click.IntRange(1, 1000), default=10, show_default=True, help="Workloads and requests.")
@plot_option
@json_option
def lending(data: Path, seeds: int, plot: Path | None, as_json: bool) -> None:
    """Training jobs on idle GPUs of inference, against training on its own half and other ways to lend (simulated)."""
    from slurm_migbatch.lab.bars import NotMeasurable
    from slurm_migbatch.lab.experiments.lending import measure
    from slurm_migbatch.workload.csvlines import TraceError

    try:
        result = measure(data, seeds, say=progress)
    except (NotMeasurable, TraceError) as error:
        raise Failure(str(error)) from None
    if hand_over("lending", result, as_json, plot):
        return
    print_notes(result)
    for found in result["results"]:
        what = "study" if found.get("study") else f"{found['decides']}, configuration {found['configuration']}"
        click.echo(
            f"\n{found['load']} ({what}): {found['requests']} requests of {found['apps']} applications, "
            "means over seeds"
        )
        print_table(
            ("way", "mean JCT", "over half", "restarts", "most", "delay mean", "p95", "max", "called back"),
            [
                (
                    name,
                    f"{way['jct_s']:.0f} s",
                    f"{way['jct_ratio'][0]:.3f}",
                    f"{way['restarts']:.2f}",
                    f"{way['restarts_max']:.0f}",
                    *(f"{way[key]:.2f} s" for key in ("delay_mean_s", "delay_p95_s", "delay_max_s")),
                    f"{way['reclaimed']:.0f}",
                )
                for name, way in found["ways"].items()
            ],
        )
    print_bars(result)


COMMANDS = (lending,)

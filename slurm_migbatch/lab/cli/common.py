"""Share options and the printing of results among the commands of `migbatch bench`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from slurm_migbatch.cli.common import print_table, steps
from slurm_migbatch.cli.ending import Failure
from slurm_migbatch.lab.bars import Bar, NotMeasurable
from slurm_migbatch.lab.say import Say
from slurm_migbatch.lab.traces.csvlines import TraceError

json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object; its targets are under 'bars'.")
data_option = click.option(
    "--data",
    required=True,
    metavar="DIR",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Directory of public data sets, or of the required one.",
)


def _plot_folder(_ctx: click.Context, _param: click.Parameter, value: Path | None) -> Path | None:
    if value is not None:
        from slurm_migbatch.profiling.plot import require

        require()
    return value


plot_option = click.option(
    "--plot",
    metavar="DIR",
    callback=_plot_folder,
    type=click.Path(file_okay=False, path_type=Path),
    help="Write plots (SVG) into this directory.",
)


@contextmanager
def measuring() -> Iterator[Say]:
    """Show on stderr what is being measured; if a measurement is not possible, end the command with the reason."""
    try:
        with steps() as say:
            yield say
    except (NotMeasurable, TraceError) as error:
        raise Failure(str(error)) from None


def print_notes(result: Mapping[str, Any]) -> None:
    """Print notes for the reader."""
    for note in result["notes"]:
        click.echo(f"note: {note}")


def print_bars(result: Mapping[str, Any]) -> None:
    """Print the bars as text."""
    for bar in result["bars"]:
        click.echo(Bar.from_dict(bar).line())


def print_lending(entry: Mapping[str, Any]) -> None:
    """Print the ways to lend at one load, as `experiments.lending.summary` returns them."""
    columns = ("mean JCT", "over half (95 %)", "restarts (95 %)", "most", "delay mean", "p95", "max", "reclaimed")
    lines = [
        (
            name,
            f"{way['jct_s']:.0f} s",
            with_interval(way["jct_ratio"], 3),
            with_interval(way["restarts_interval"], 2),
            f"{way['restarts_max']:.0f}",
            *(f"{way[key]:.2f} s" for key in ("delay_mean_s", "delay_p95_s", "delay_max_s")),
            f"{way['reclaimed']:.0f}",
        )
        for name, way in entry["ways"].items()
    ]
    print_table(("way", *columns), lines)


def with_interval(values: Sequence[float | None], digits: int) -> str:
    """Return a mean, with its interval if it is known."""
    mean, *interval = [f"{value:.{digits}f}" for value in values if value is not None]
    return f"{mean} ({interval[0]} to {interval[1]})" if len(interval) == 2 else mean


def hand_over(name: str, result: Mapping[str, Any], as_json: bool, plot: Path | None) -> bool:
    """Write plots if requested; as JSON print the result too. Return whether nothing is left to print."""
    if plot is not None:
        write_plots(name, result, plot)
    if as_json:
        click.echo(json.dumps(result))
    return as_json


def write_plots(name: str, result: Mapping[str, Any], folder: Path) -> None:
    """Write the plots of an experiment, if it has any."""
    from slurm_migbatch.lab.experiments.plots import PLOTS, write

    for path in write(name, result, folder) if name in PLOTS else ():
        click.echo(f"{path} written", err=True)

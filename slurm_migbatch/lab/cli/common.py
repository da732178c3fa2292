"""Share options and the printing of results among the commands of `migbatch bench`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import click

from slurm_migbatch.cli.common import print_table, steps
from slurm_migbatch.cli.ending import Failure
from slurm_migbatch.lab.bars import Bar, NotMeasurable
from slurm_migbatch.lab.progress import Progress
from slurm_migbatch.lab.traces.csvlines import TraceError
from slurm_migbatch.testbed.errors import TestbedError

Result = Mapping[str, Any]
Show = Callable[[Result], None]
"""Prints a result as text, without its bars."""
Option = Callable[[Any], Any]
"""Adds an option to a command."""

json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object; its targets are under 'bars'.")
data_option = click.option(
    "--data",
    required=True,
    metavar="DIR",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Directory of public data sets, or of the required one.",
)


def _plot_folder(_ctx: click.Context, _param: click.Parameter, value: Path | None) -> Path | None:
    """Create the directory before the work of minutes to hours whose result is plotted."""
    if value is not None:
        from slurm_migbatch.profiling.plot import require

        require()
        value.mkdir(parents=True, exist_ok=True)
        _require_writable(value)
    return value


def writable_file(_ctx: click.Context, _param: click.Parameter, value: Path | None) -> Path | None:
    """Return the option's file. Raises Failure if it could not be written after the work whose result it is to get."""
    if value is not None:
        if not value.parent.is_dir():
            raise Failure(f"no such directory: {value.parent}: create it, or choose another file")
        _require_writable(value if value.exists() else value.parent)
    return value


def _require_writable(path: Path) -> None:
    if not os.access(path, os.W_OK | os.X_OK if path.is_dir() else os.W_OK):
        raise Failure(f"{path} is not writable by this user")


plot_option = click.option(
    "--plot",
    metavar="DIR",
    callback=_plot_folder,
    type=click.Path(file_okay=False, path_type=Path),
    help="Write plots (SVG) into this directory.",
)


def number_option(name: str, low: int, high: int | None, default: int, help_text: str) -> Option:
    """Return an option for a whole number in a range."""
    return click.option(name, type=click.IntRange(low, high), default=default, show_default=True, help=help_text)


def draws_option(help_text: str, option: str = "--seeds", least: int = 2) -> Option:
    """Return the option for the number of random draws of an experiment."""
    return number_option(option, least, 1000, 10, help_text)


@contextmanager
def measuring() -> Iterator[Progress]:
    """Show on stderr what is being measured; if a measurement is not possible, end the command with the reason."""
    try:
        with steps() as progress:
            yield progress
    except (NotMeasurable, TestbedError, TraceError) as error:
        raise Failure(str(error)) from None


def cells(form: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cells of a row of a table: `form` has their formats, separated by `|`."""
    return tuple(cell.format_map(row) for cell in form.split("|"))


def print_notes(result: Result) -> None:
    """Print notes for the reader."""
    for note in result["notes"]:
        click.echo(f"note: {note}")


def print_bars(result: Result) -> None:
    """Print the bars as text."""
    for bar in result.get("bars", ()):
        click.echo(Bar.from_dict(bar).line())


def print_lending(entry: Mapping[str, Any]) -> None:
    """Print the ways to lend at one load, as `experiments.lending` returns them."""
    columns = ("mean JCT", "over half (95 %)", "restarts (95 %)", "most", "delay mean", "p95", "max", "reclaimed")
    lines = [
        (
            *(name, f"{way['jct_s']:.0f} s"),
            *(with_interval(way["jct_ratio"], 3), with_interval(way["restarts_interval"], 2)),
            *cells(
                "{restarts_max:.0f}|{delay_mean_s:.2f} s|{delay_p95_s:.2f} s|{delay_max_s:.2f} s|{reclaimed:.0f}", way
            ),
        )
        for name, way in entry["ways"].items()
    ]
    print_table(("way", *columns), lines)


def with_interval(values: Sequence[float | None], digits: int) -> str:
    """Return a mean, with its interval if it is known."""
    mean, *interval = [f"{value:.{digits}f}" for value in values if value is not None]
    return f"{mean} ({interval[0]} to {interval[1]})" if len(interval) == 2 else mean


def measurement(measure: str, *options: Option) -> Callable[[Show], click.Command]:
    """Return a decorator that makes a command from the function that prints its result.

    Args:
        measure: module:function, called with the values of `options` and with `progress`.
        options: of the command, beside the one for JSON.
    """

    def command_of(show: Show) -> click.Command:
        def run(as_json: bool, **values: Any) -> None:
            print_result(measured(measure, values), as_json, show)

        return _command(show, run, *options)

    return command_of


def measured(measure: str, values: Mapping[str, Any]) -> Result:
    """Call module:function with these arguments; if a measurement is not possible, end the command with the reason."""
    module, _, function = measure.partition(":")
    with measuring() as progress:
        result: Result = getattr(import_module(module), function)(**values, progress=progress)
    return result


def print_result(result: Result, as_json: bool, show: Show) -> None:
    """Print a result as JSON, or as text with its bars."""
    if as_json:
        click.echo(json.dumps(result))
        return
    show(result)
    print_bars(result)


def _command(show: Show, run: Callable[..., None], *options: Option) -> click.Command:
    for option in reversed((*options, json_option)):
        option(run)
    return click.command(show.__name__.strip("_").replace("_", "-"), help=show.__doc__)(run)


class WrongVariant(NamedTuple):
    """What `--wrong` runs instead: module:function; it has no plots."""

    measure: str
    show: Show
    help: str


def experiment(
    measure: str, *options: Option, wrong: WrongVariant | None = None, plots: bool = True
) -> Callable[[Show], click.Command]:
    """Return `measurement` with the directory of data, a folder for plots and, if it has one, the variant `wrong`."""
    further = [data_option, *options]
    if wrong is not None:
        further.append(click.option("--wrong", "as_wrong", is_flag=True, help=wrong.help))
    if plots:
        further.append(plot_option)

    def command_of(show: Show) -> click.Command:
        def run(as_json: bool, plot: Path | None = None, as_wrong: bool = False, **values: Any) -> None:
            way = WrongVariant(measure, show, "")
            if as_wrong and wrong is not None:
                if plot is not None:
                    raise click.UsageError("--wrong has no plots; leave --plot out")
                way = wrong
            result = measured(way.measure, values)
            if plot is not None:
                write_plots(show.__name__, result, plot)
            print_result(result, as_json, way.show)

        return _command(show, run, *further)

    return command_of


def write_plots(name: str, result: Result, folder: Path) -> None:
    """Write the plots of an experiment, if it has any."""
    from slurm_migbatch.lab.experiments.plots import PLOTS, write

    for path in write(name, result, folder) if name in PLOTS else ():
        click.echo(f"{path} written", err=True)

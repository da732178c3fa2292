"""`migbatch usage`: sums of held slices, in the style of sreport."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import click

from slurm_migbatch.cli.asking import ask_and_print
from slurm_migbatch.cli.common import F, source_option
from slurm_migbatch.query.questions import UsageQuestion


def window_options(command: F, start: str = "", end: str = "") -> F:
    """Return the options of migacct that select runs: -u -A -r -N -S -E, and --db; `start`, `end`: default window."""
    since, until = start or "midnight", end or "now"
    words = partial(click.option, multiple=True)
    options: tuple[Callable[[F], F], ...] = (
        words("-u", "--user", "users", metavar="USERS", help="Only these users (names or numbers)."),
        words("-A", "--account", "--accounts", "accounts", metavar="ACCOUNTS", help="Only these, without subaccounts."),
        words("-r", "--partition", "partitions", metavar="NAMES", help="Only these partitions."),
        words("-N", "--nodelist", metavar="NODES", help="Only these nodes: n[1-4],m7."),
        click.option(
            "-S", "--starttime", default=start, metavar="TIME", help=f"Start of the window [default: {since}]."
        ),
        click.option("-E", "--endtime", default=end, metavar="TIME", help=f"End of the window [default: {until}]."),
        click.option("--db", envvar="MIGBATCH_DB", metavar="URL", help="Database to read [env MIGBATCH_DB]."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def filters(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the options that select runs as fields of a query."""
    from slurm_migbatch.report.format import split

    return {
        **{name: split(options[name]) for name in ("users", "accounts", "partitions")},
        "nodes": ",".join(options["nodelist"]),
        "start": options["starttime"],
        "end": options["endtime"],
    }


def output(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the options -n, -P, --csv and --json as fields of a query."""
    return {
        "header": not options["noheader"],
        "delimiter": "|" if options["parsable2"] else None,
        "as_csv": options["as_csv"],
        "as_json": options["as_json"],
    }


@click.command()
@source_option
@click.option(
    "--by", default="", metavar="COLUMNS", help="Any of user,account,partition,profile,node,month [account,user]."
)
@window_options
@click.option("-n", "--noheader", is_flag=True, help="No header.")
@click.option("-P", "--parsable2", is_flag=True, help="Columns separated by '|', no total.")
@click.option("--csv", "as_csv", is_flag=True, help="CSV with plain numbers, no total.")
@click.option("--json", "as_json", is_flag=True, help="Everything as one JSON object.")
def usage(config: str | None, db: str | None, **options: Any) -> int:
    """Show the slice-hours and GPU-hours held in a time window, by whom, and their idle share.

    Each run counts from its start to its end within the window, as in sreport; a slice counts as its share of a GPU
    (3g.40gb is half of one). Percent refers to the time of all present MIG GPUs, or, if the record does not cover the
    whole window, to the used time. %IDLE is the share of SM time without work, of the sampled time (%SAMPLED). A slice
    shared by two training jobs counts for each.
    """
    style = os.environ.get("SLURM_TIME_FORMAT", "")
    question = UsageQuestion(by=options["by"], **filters(options), **output(options), time_style=style)
    return ask_and_print(question, config, db=db)

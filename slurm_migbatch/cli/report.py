"""`migbatch report`: draw charts of the record as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from slurm_migbatch.cli.common import HELP, show_stage, source_option
from slurm_migbatch.cli.ending import Failure
from slurm_migbatch.cli.usage import filters


@click.command(context_settings=HELP)
@click.option(
    "--html", metavar="FILE", required=True, type=click.Path(dir_okay=False, path_type=Path), help="Output file."
)
@click.option("-S", "--starttime", default="now-30days", show_default=True, metavar="TIME", help="Start of the window.")
@click.option("-E", "--endtime", default="now", show_default=True, metavar="TIME", help="End of the window.")
@click.option(
    "-A", "--account", "--accounts", "accounts", multiple=True, metavar="NAMES", help="Only runs of these accounts."
)
@click.option(
    "-u", "--user", "users", multiple=True, metavar="NAMES", help="Only runs of these users (names or numbers)."
)
@click.option("-r", "--partition", "partitions", multiple=True, metavar="NAMES", help="Only runs in these partitions.")
@click.option("-N", "--nodelist", multiple=True, metavar="NODES", help="Only slices on these nodes: n[1-4],m7.")
@click.option(
    "--db",
    envvar="MIGBATCH_DB",
    metavar="URL",
    help="Database to read [env MIGBATCH_DB; default: from the configuration].",
)
@source_option
def report(html: Path, db: str | None, config: str | None, **options: Any) -> None:
    """Draw the use of GPU slices as one self-contained HTML file.

    Use by account and over time, busy and idle; profiles; GPU layouts; waits; predicted against measured; loans. If
    PrivateData hides runs of others, users who are not operators get their own. Times are as in migacct.
    """
    if not html.parent.is_dir():
        raise Failure(f"no such directory: {html.parent}: create it, or choose another file")
    from slurm_migbatch.cli.asking import ask_for_text
    from slurm_migbatch.query.questions import PageQuestion

    show_stage("computing and drawing")
    document = ask_for_text(PageQuestion(**filters(options)), config, db=db)
    html.write_text(document, encoding="utf-8")

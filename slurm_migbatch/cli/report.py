"""`migbatch report`: draw charts of the record as one HTML file."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from slurm_migbatch.cli.common import HELP, show_stage, source_option
from slurm_migbatch.cli.ending import Failure
from slurm_migbatch.cli.usage import filters, window_options


@click.command(context_settings=HELP)
@click.option(
    "--html", metavar="FILE", required=True, type=click.Path(dir_okay=False, path_type=Path), help="Output file."
)
@partial(window_options, start="now-30days", end="now")
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

"""`migbatch report`: pictures of the record as one HTML file."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

import click

from slurm_migbatch.cli.common import HELP, Failure


@click.command(context_settings=HELP)
@click.option(
    "--html", metavar="FILE", required=True, type=click.Path(dir_okay=False, path_type=Path), help="Write this file."
)
@click.option(
    "-S", "--starttime", "start", default="now-30days", show_default=True, metavar="TIME", help="Begin of the window."
)
@click.option("-E", "--endtime", "end", default="now", show_default=True, metavar="TIME", help="End of the window.")
@click.option(
    "-A", "--account", "--accounts", "accounts", multiple=True, metavar="NAMES", help="Only runs of these accounts."
)
@click.option(
    "-u", "--user", "users", multiple=True, metavar="NAMES", help="Only runs of these users (names or numbers)."
)
@click.option("-r", "--partition", "partitions", multiple=True, metavar="NAMES", help="Only runs in these partitions.")
@click.option(
    "-N", "--nodelist", "nodes", multiple=True, metavar="NODES", help="Only slices on these nodes: n[1-4],m7."
)
@click.option("--db", metavar="URL", help="Database to read [env MIGBATCH_DB; default: of the configuration].")
@click.option(
    "-c",
    "--config",
    metavar="FILE",
    help="Configuration of the controller [env MIGBATCH_CONFIG; default /etc/migbatch/migbatch.toml].",
)
def report(html: Path, start: str, end: str, db: str | None, config: str | None, **names: tuple[str, ...]) -> None:
    """Draw what GPU slices were used for as one HTML file, which needs nothing beside it.

    Use by account and over time, busy and idle; profiles; what lay on the GPUs; waits; predicted against measured;
    loans. It reads the record itself, so it is for who may open that: on the database's host, or with --db. Who is no
    operator gets his own runs where PrivateData hides others. Times are migacct's.
    """
    from slurm_migbatch.report.pictures import require

    require()
    from slurm_migbatch.cli.asking import local_site, rights_here
    from slurm_migbatch.query import pictures
    from slurm_migbatch.query.reply import Unanswerable
    from slurm_migbatch.report.errors import ReportError
    from slurm_migbatch.report.format import split
    from slurm_migbatch.report.selection import ReportOptions, make_selection

    now = time.time()
    db = db or os.environ.get("MIGBATCH_DB")
    asked = ReportOptions(
        users=split(names["users"]),
        allusers=not names["users"],
        accounts=split(names["accounts"]),
        partitions=split(names["partitions"]),
        nodes=",".join(names["nodes"]),
        start=start,
        end=end,
        duplicates=True,
    )
    try:
        wanted = make_selection(asked, now, os.getuid()).wanted
        site = local_site(config, db)
        with _no_collection():
            document = pictures.page(wanted, rights_here(site, named=bool(db)), site, now)
    except ReportError as error:
        raise click.UsageError(str(error)) from None
    except Unanswerable as error:
        raise Failure(str(error)) from None
    html.write_text(document, encoding="utf-8")


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Look for no cycles meanwhile: rows of the record make none, and a fifth of the time would go into it."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()

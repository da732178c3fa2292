"""The command `migacct`: what jobs asked for, got and did with it, in the way of sacct."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from slurm_migbatch.cli.common import F, Failure, run

if TYPE_CHECKING:
    from slurm_migbatch.report.columns import Column, Context
    from slurm_migbatch.report.selection import Selection
    from slurm_migbatch.report.table import Style
    from slurm_migbatch.store.db import Store

_LINES_AT_ONCE = 2000


def database_url(option: str | None) -> str:
    """Return the database: --db, else MIGBATCH_DB, else [store] url of the configuration, else its default.

    Raises:
        ConfigError: the configuration exists and cannot be used.
    """
    if url := option or os.environ.get("MIGBATCH_DB"):
        return url
    from slurm_migbatch.config import DEFAULT_PATH, StoreConfig, load

    path = os.environ.get("MIGBATCH_CONFIG", DEFAULT_PATH)
    if path == DEFAULT_PATH and not os.path.exists(path):  # noqa: PTH110 keeps pathlib out of start-up
        return StoreConfig().url
    return load(path).store.url


class _Command(click.Command):
    """A command whose help ends with the columns and the forms of times."""

    def format_epilog(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from slurm_migbatch.report.columns import COLUMNS, DEFAULT
        from slurm_migbatch.report.states import CODES
        from slurm_migbatch.slurm.times import TIME_FORMS

        with formatter.section("Columns (-o)"):
            formatter.write_dl([(column.name, column.doc) for column in COLUMNS])
        with formatter.section("Default columns"):
            formatter.write_text(DEFAULT)
        with formatter.section("Times (-S, -E)"):
            formatter.write_text(TIME_FORMS)
            formatter.write_text(
                "Without -j and -s: from midnight to now. With -j: from the beginning to now. With -s: this moment, or "
                "the moment of -S; with -j and -s from the beginning."
            )
        with formatter.section("States (-s)"):
            formatter.write_text(", ".join(f"{code} {name}" for code, name in CODES.items()))
        with formatter.section("Environment"):
            formatter.write_dl(
                [
                    ("MIGACCT_FORMAT", "Columns where -o is not given."),
                    ("MIGBATCH_DB", "Database where --db is not given."),
                    ("MIGBATCH_CONFIG", "Configuration whose [store] url is used else."),
                    ("SLURM_TIME_FORMAT", "standard, relative or a strftime format."),
                ]
            )
        with formatter.section("Exit codes"):
            formatter.write_text("0 done, also where nothing matches; 1 a value or the database is bad; 2 wrong usage.")


def _now_print(text: str) -> Callable[[click.Context, click.Parameter, bool], None]:
    def callback(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
        if value and not ctx.resilient_parsing:
            click.echo(_TEXTS[text](ctx))
            ctx.exit()

    return callback


def _version(_ctx: click.Context) -> str:
    from importlib.metadata import version

    return f"migacct {version('slurm-migbatch')}"


def _names(_ctx: click.Context) -> str:
    from slurm_migbatch.report.format import name_list

    return name_list()


def _usage(ctx: click.Context) -> str:
    return ctx.command.get_usage(ctx)


_TEXTS = {"version": _version, "names": _names, "usage": _usage}


def _words(*names: str, help: str, metavar: str) -> Callable[[F], F]:
    """Return an option of comma-separated words that may come several times."""
    return click.option(*names, multiple=True, metavar=metavar, help=help)


@click.command(cls=_Command, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@_words("-j", "--jobs", metavar="JOBS", help="Only these: 12, 12_3, 12_[1-5], 12+1; 12.s0 stands for 12.")
@_words("-u", "--user", "--uid", "users", metavar="USERS", help="Only jobs of these users (names or numbers).")
@click.option(
    "-a", "--allusers", is_flag=True, help="Jobs of all users, as for root and with -j or -N; else only yours."
)
@_words("-A", "--accounts", metavar="ACCOUNTS", help="Only jobs of these accounts.")
@_words("-r", "--partition", "partitions", metavar="NAMES", help="Only jobs in these partitions.")
@_words("-N", "--nodelist", metavar="NODES", help="Only jobs that held slices on one of these nodes: n[1-4],m7.")
@_words("-s", "--state", "states", metavar="STATES", help="Only jobs in these states within the window: CD,F or names.")
@click.option("-S", "--starttime", default="", metavar="TIME", help="Begin of the window.")
@click.option("-E", "--endtime", default="", metavar="TIME", help="End of the window.")
@click.option("-D", "--duplicates", is_flag=True, help="Also earlier runs of the same job id (requeued ones).")
@click.option("-X", "--allocations", is_flag=True, help="One line for each job, none for its single slices.")
@_words("-o", "--format", metavar="COLUMNS", help="Columns: name, name%20, name%-20 (left), +name adds to the default.")
@click.option("-b", "--brief", is_flag=True, help="JobID, State and ExitCode.")
@click.option("-l", "--long", is_flag=True, help="Most columns.")
@click.option("-n", "--noheader", is_flag=True, help="No header.")
@click.option("-p", "--parsable", is_flag=True, help="Columns separated, and lines ended, by '|'.")
@click.option("-P", "--parsable2", is_flag=True, help="Columns separated by '|'.")
@click.option(
    "--delimiter", default="|", show_default=True, metavar="TEXT", help="What separates columns in -p and -P."
)
@click.option("--json", "as_json", is_flag=True, help="Everything as JSON: raw numbers, units in the names.")
@click.option("--noconvert", is_flag=True, help="Leave sizes in MiB (M).")
@click.option("--units", metavar="K|M|G|T|P", help="Write sizes in this unit.")
@click.option("--db", metavar="URL", help="Database to read.")
@click.option(
    "-e",
    "--helpformat",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_now_print("names"),
    help="List the names of the columns.",
)
@click.option(
    "-V",
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_now_print("version"),
    help="Show the version.",
)
@click.option(
    "--usage",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_now_print("usage"),
    help="Show how it is called.",
)
def command(**options: Any) -> None:
    """Show what jobs asked for, which MIG slices they got, and what became of them.

    Filters, times and output are sacct's. A job that holds several slices has a line for each, 12.s0, 12.s1 ..., below
    its own.
    """  # fmt: skip
    from slurm_migbatch.report.errors import ReportError

    try:
        _report(_Options(**options))
    except ReportError as error:
        raise Failure(str(error)) from None


class _Options(NamedTuple):
    """The options as click reads them."""

    jobs: tuple[str, ...]
    users: tuple[str, ...]
    allusers: bool
    accounts: tuple[str, ...]
    partitions: tuple[str, ...]
    nodelist: tuple[str, ...]
    states: tuple[str, ...]
    starttime: str
    endtime: str
    duplicates: bool
    allocations: bool
    format: tuple[str, ...]
    brief: bool
    long: bool
    noheader: bool
    parsable: bool
    parsable2: bool
    delimiter: str
    as_json: bool
    noconvert: bool
    units: str | None
    db: str | None


def _report(options: _Options) -> None:
    from slurm_migbatch.report.columns import BRIEF, DEFAULT, LONG, Context
    from slurm_migbatch.report.errors import ReportError
    from slurm_migbatch.report.format import parse_format
    from slurm_migbatch.report.units import UNITS, size_formatter
    from slurm_migbatch.slurm.times import time_formatter

    now = time.time()
    units = options.units and options.units.upper()
    if units is not None and units not in UNITS:
        raise ReportError(f"--units {options.units!r} is not one of {', '.join(UNITS)}")
    selection = _selection(options, now)
    default = LONG if options.long else BRIEF if options.brief else os.environ.get("MIGACCT_FORMAT") or DEFAULT
    columns = parse_format(",".join(options.format) or default, default)
    context = Context(
        now,
        time_formatter(os.environ.get("SLURM_TIME_FORMAT"), now),
        size_formatter(unit=units or None, convert=not options.noconvert),
    )
    if selection.remark:
        click.echo(f"migacct: warning: {selection.remark}", err=True)
    store = _open(database_url(options.db))
    try:
        _print(
            _document(store, selection.wanted, now)
            if options.as_json
            else _table(store, selection.wanted, columns, context, _style(options))
        )
    except Exception as error:
        if not type(error).__module__.startswith("sqlalchemy."):
            raise
        raise Failure(f"reading the database failed: {getattr(error, 'orig', error)}") from None
    finally:
        store.close()


def _selection(options: _Options, now: float) -> Selection:
    from slurm_migbatch.report.selection import ReportOptions, make_selection, split

    asked = ReportOptions(
        jobs=",".join(options.jobs),
        users=split(options.users),
        allusers=options.allusers,
        accounts=split(options.accounts),
        partitions=split(options.partitions),
        nodes=",".join(options.nodelist),
        states=",".join(options.states),
        start=options.starttime,
        end=options.endtime,
        duplicates=options.duplicates,
    )
    return make_selection(asked, now, os.getuid())


def _style(options: _Options) -> Style:
    from slurm_migbatch.report.table import Style

    return Style(
        header=not options.noheader,
        delimiter=options.delimiter if options.parsable or options.parsable2 else None,
        closed=options.parsable and not options.parsable2,
        slices=not options.allocations,
    )


def _open(url: str) -> Store:
    from slurm_migbatch.store.db import open_store

    return open_store(url, readonly=True)


def _table(store: Store, wanted: Any, columns: tuple[Column, ...], context: Context, style: Style) -> Iterator[str]:
    from slurm_migbatch.report import table
    from slurm_migbatch.store.queries import select_runs

    run_fields = {name for column in columns for name in column.run}
    slice_fields = {name for column in columns for name in column.slice}
    with store.reading() as connection:
        yield from table.render(columns, select_runs(connection, wanted, run_fields, slice_fields), context, style)


def _document(store: Store, wanted: Any, now: float) -> Iterator[str]:
    from slurm_migbatch.report import document
    from slurm_migbatch.store.queries import select_runs

    with store.reading() as connection:
        found = select_runs(connection, wanted, document.RUN_FIELDS, document.SLICE_FIELDS)
        yield from document.render(found, wanted, now)


def _print(lines: Iterator[str]) -> None:
    some: list[str] = []
    for line in lines:
        some.append(line)
        if len(some) == _LINES_AT_ONCE:
            _write(some)
            some.clear()
    _write(some)


def _write(lines: list[str]) -> None:
    if lines:
        sys.stdout.write("\n".join(lines) + "\n")


def main() -> None:
    """Run the command."""
    # it lives for a moment and makes no cycles worth mentioning; a tenth of its time would go into looking for them
    gc.disable()
    sys.exit(run(command, "migacct"))

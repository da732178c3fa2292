"""The command `migacct`: what jobs asked for, got and did with it, in the way of sacct."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from typing import Any

import click

from slurm_migbatch.cli.asking import ask_and_print
from slurm_migbatch.cli.common import EXIT_FAILED, F, Failure, run


class _Command(click.Command):
    """A command whose help ends with the columns and the forms of times."""

    #: wrong usage ends as of sacct
    usage_code = EXIT_FAILED

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
            formatter.write_text(
                "0 done, also where nothing matches; 1 wrong usage, a value that means nothing, or a bad database."
            )


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
@_words("-q", "--qos", metavar="NAMES", help="Only jobs with one of these QOS.")
@_words("-g", "--gid", "--group", "groups", metavar="GROUPS", help="Only jobs of these groups (names or numbers).")
@_words("-W", "--wckeys", metavar="NAMES", help="Only jobs with one of these wckeys.")
@_words("--name", "names", metavar="NAMES", help="Only jobs with one of these names.")
@click.option("-k", "--timelimit-min", "limit_min", default="", metavar="TIME", help="Only jobs with this time limit.")
@click.option("-K", "--timelimit-max", "limit_max", default="", metavar="TIME", help="With -k: up to this time limit.")
@_words("-M", "--clusters", metavar="NAMES", help="Only jobs of these clusters; `all` for every one of the record.")
@click.option("-L", "--allclusters", is_flag=True, help="Jobs of every cluster of the record.")
@_words("-N", "--nodelist", metavar="NODES", help="Only jobs that held slices on one of these nodes: n[1-4],m7.")
@_words("-s", "--state", "states", metavar="STATES", help="Only jobs in these states within the window: CD,F or names.")
@click.option("-S", "--starttime", default="", metavar="TIME", help="Begin of the window.")
@click.option("-E", "--endtime", default="", metavar="TIME", help="End of the window.")
@click.option("-T", "--truncate", is_flag=True, help="Times and durations within the window alone.")
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
@click.option("--yaml", "as_yaml", is_flag=True, help="The same as YAML.")
@click.option("--noconvert", is_flag=True, help="Leave sizes in MiB (M).")
@click.option("--units", metavar="K|M|G|T|P", help="Write sizes in this unit.")
@click.option("--db", metavar="URL", help="Database to read.")
@click.option("-c", "--completion", is_flag=True, help="Refused: there is no log of job completion.")
@_words("-x", "--associations", metavar="IDS", help="Refused: the record has no ids of associations.")
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
    from slurm_migbatch.query.questions import RunsQuestion

    _refuse(options)
    parted = options["parsable"] or options["parsable2"]
    question = RunsQuestion(
        jobs=",".join(options["jobs"]),
        users=_split(options["users"]),
        allusers=options["allusers"],
        accounts=_split(options["accounts"]),
        partitions=_split(options["partitions"]),
        nodes=",".join(options["nodelist"]),
        states=",".join(options["states"]),
        start=options["starttime"],
        end=options["endtime"],
        duplicates=options["duplicates"],
        groups=_split(options["groups"]),
        qos=_split(options["qos"]),
        wckeys=_split(options["wckeys"]),
        names=_split(options["names"]),
        clusters=("all",) if options["allclusters"] else _split(options["clusters"]),
        limit_min=options["limit_min"],
        limit_max=options["limit_max"],
        truncate=options["truncate"],
        slices=not options["allocations"],
        columns=",".join(options["format"]),
        default_columns=os.environ.get("MIGACCT_FORMAT", ""),
        brief=options["brief"],
        long=options["long"],
        header=not options["noheader"],
        delimiter=options["delimiter"] if parted else None,
        closed=options["parsable"] and not options["parsable2"],
        as_json=options["as_json"],
        as_yaml=options["as_yaml"],
        convert=not options["noconvert"],
        units=options["units"] or "",
        time_style=os.environ.get("SLURM_TIME_FORMAT", ""),
    )
    ask_and_print(question, db=options["db"] or os.environ.get("MIGBATCH_DB"))


def _refuse(options: dict[str, Any]) -> None:
    """Say what to use instead of what sacct has and the record cannot tell."""
    if options["completion"]:
        raise Failure("Slurm job completion is disabled: migacct reads the record of migbatchd alone; leave -c out")
    if options["associations"]:
        raise Failure(
            "the record has no ids of associations: name their users, accounts and partitions by -u, -A and -r"
        )


def _split(texts: tuple[str, ...]) -> tuple[str, ...]:
    from slurm_migbatch.report.format import split

    return split(texts)


def main() -> None:
    """Run the command."""
    # it lives for a moment and makes no cycles worth mentioning; a tenth of its time would go into looking for them
    gc.disable()
    sys.exit(run(command, "migacct"))

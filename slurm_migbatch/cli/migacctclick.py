"""`migacct` as a click command: help, completion, and usage errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from slurm_migbatch.cli.ending import EXIT_FAILED
from slurm_migbatch.cli.migacct import OPTIONS, show
from slurm_migbatch.cli.options import ReportOption


class _Command(click.Command):
    """A command whose help ends with the columns and the time formats."""

    #: exit code of wrong usage, as in sacct
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
                "Without -j and -s: from midnight to now. With -j: all until now. With -s: now, or the time of -S; "
                "with -j and -s all."
            )
        with formatter.section("States (-s)"):
            formatter.write_text(", ".join(f"{code} {name}" for code, name in CODES.items()))
        with formatter.section("Environment"):
            formatter.write_dl(
                [
                    ("MIGACCT_FORMAT", "Default of -o."),
                    ("MIGBATCH_DB", "Default of --db."),
                    ("MIGBATCH_CONFIG", "Configuration file; its [store] url is used if neither is set."),
                    ("SLURM_TIME_FORMAT", "standard, relative or a strftime format."),
                    ("TZ", "Time zone of -S, -E and shown times; by default the controller's."),
                ]
            )
        with formatter.section("Exit codes"):
            formatter.write_text(
                "0 done, also if nothing matches; 1 wrong usage, an unknown value, or a database error."
            )


def _version(_ctx: click.Context) -> str:
    from importlib.metadata import version

    return f"migacct {version('slurm-migbatch')}"


def _names(_ctx: click.Context) -> str:
    from slurm_migbatch.report.format import name_list

    return name_list()


_TEXTS: dict[str, Callable[[click.Context], str]] = {
    "version": _version,
    "helpformat": _names,
    "usage": lambda ctx: ctx.command.get_usage(ctx),
}


def _now_print(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        click.echo(_TEXTS[str(param.name)](ctx))
        ctx.exit()


def _of_click(option: ReportOption) -> click.Option:
    more: dict[str, Any] = {"help": option.help}
    if option.instead:
        more |= {"is_flag": True, "is_eager": True, "expose_value": False, "callback": _now_print}
    elif not option.metavar:
        more |= {"is_flag": True}
    elif option.many:
        more |= {"metavar": option.metavar, "multiple": True}
    else:
        more |= {"metavar": option.metavar, "default": option.default, "show_default": option.shown}
    return click.Option([*option.flags, option.key], **more)


def _show(**options: Any) -> None:
    """Show what jobs requested, which MIG slices they got, and how they ended.

    Filters, times and output are sacct's. A job that holds several slices has a line for each, 12.s0, 12.s1 ..., below
    its own.
    """
    show(options)


command = _Command(
    "migacct",
    callback=_show,
    params=list(map(_of_click, OPTIONS)),
    help=_show.__doc__,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

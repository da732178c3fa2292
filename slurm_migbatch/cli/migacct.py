"""The command `migacct`: requests, allocations and results of jobs, in the style of sacct."""

from __future__ import annotations

import gc
import os
import sys

from slurm_migbatch.cli.ending import Failure, ending, leave
from slurm_migbatch.cli.options import ReportOption, completed, parse
from slurm_migbatch.values import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any


def _words(*flags: str, name: str = "", metavar: str, help: str) -> ReportOption:
    """Return an option of comma-separated words that may be repeated."""
    return ReportOption(flags, help, metavar, name, many=True)


OPTIONS = (
    _words("-j", "--jobs", metavar="JOBS", help="Only these: 12, 12_3, 12_[1-5], 12+1; 12.s0 means 12."),
    _words("-u", "--user", "--uid", name="users", metavar="USERS", help="Only jobs of these users (names or numbers)."),
    ReportOption(("-a", "--allusers"), "Jobs of all users (default for root and with -j or -N); else only yours."),
    _words("-A", "--accounts", metavar="ACCOUNTS", help="Only jobs of these accounts."),
    _words("-r", "--partition", name="partitions", metavar="NAMES", help="Only jobs in these partitions."),
    _words("-q", "--qos", metavar="NAMES", help="Only jobs with one of these QOS."),
    _words(
        "-g", "--gid", "--group", name="groups", metavar="GROUPS", help="Only jobs of these groups (names or numbers)."
    ),
    _words("-W", "--wckeys", metavar="NAMES", help="Only jobs with one of these wckeys."),
    _words("--name", name="names", metavar="NAMES", help="Only jobs with one of these names."),
    ReportOption(("-k", "--timelimit-min"), "Only jobs with this time limit.", "TIME", "limit_min", default=""),
    ReportOption(("-K", "--timelimit-max"), "With -k: up to this time limit.", "TIME", "limit_max", default=""),
    _words("-M", "--clusters", metavar="NAMES", help="Only jobs of these clusters; `all` for all in the record."),
    ReportOption(("-L", "--allclusters"), "Jobs of every cluster in the record."),
    _words(
        "-N",
        "--nodelist",
        name="nodes",
        metavar="NODES",
        help="Only jobs that ran on one of these nodes: n[1-4],m7.",
    ),
    _words(
        "-s",
        "--state",
        name="states",
        metavar="STATES",
        help="Only jobs in these states within the window: CD,F or names.",
    ),
    ReportOption(("-S", "--starttime"), "Start of the window.", "TIME", "start", default=""),
    ReportOption(("-E", "--endtime"), "End of the window.", "TIME", "end", default=""),
    ReportOption(("-T", "--truncate"), "Limit times and durations to the window."),
    ReportOption(("-D", "--duplicates"), "Include earlier runs of requeued jobs."),
    ReportOption(("-X", "--allocations"), "One line per job, none for its slices."),
    _words(
        "-o",
        "--format",
        name="columns",
        metavar="COLUMNS",
        help="Columns: name, name%20, name%-20 (left), +name adds to the default.",
    ),
    ReportOption(("-b", "--brief"), "JobID, State and ExitCode."),
    ReportOption(("-l", "--long"), "Most columns."),
    ReportOption(("-n", "--noheader"), "No header."),
    ReportOption(("-p", "--parsable"), "Columns separated and lines ended by '|'."),
    ReportOption(("-P", "--parsable2"), "Columns separated by '|'."),
    ReportOption(("--delimiter",), "Separator of columns in -p and -P.", "TEXT", default="|", shown=True),
    ReportOption(("--json",), "Everything as JSON: raw numbers, units in the names.", name="as_json"),
    ReportOption(("--yaml",), "Everything as YAML.", name="as_yaml"),
    ReportOption(("--noconvert",), "Print sizes in MiB (M)."),
    ReportOption(("--units",), "Print sizes in this unit.", "K|M|G|T|P", default=""),
    ReportOption(("--db",), "Database to read.", "URL"),
    ReportOption(("-c", "--completion"), "Refused: there is no job completion log."),
    _words("-x", "--associations", metavar="IDS", help="Only jobs of these associations of slurmdbd."),
    ReportOption(("-e", "--helpformat"), "List the names of the columns.", instead=True),
    ReportOption(("-V", "--version"), "Show the version.", instead=True),
    ReportOption(("--usage",), "Show the usage.", instead=True),
)


#: fields of the query that are options of that name: values as given, lists of words, lists that the query reads
_AS_GIVEN = (
    *("allusers", "start", "end", "duplicates", "limit_min", "limit_max", "truncate", "brief", "long", "units"),
    *("as_json", "as_yaml"),
)
_LISTS = ("users", "accounts", "partitions", "groups", "qos", "wckeys", "names", "associations", "clusters")
_JOINED = ("jobs", "nodes", "states", "columns")


def show(options: Mapping[str, Any]) -> int:
    """Print what the options select; return the exit code."""
    from slurm_migbatch.cli.asking import ask_and_print
    from slurm_migbatch.query.questions import RunsQuestion
    from slurm_migbatch.report.format import split

    if options["completion"]:
        raise Failure("Slurm job completion is disabled: migacct only reads the record of migbatchd; omit -c")
    parted = options["parsable"] or options["parsable2"]
    fields: dict[str, Any] = {name: options[name] for name in _AS_GIVEN}
    fields |= {name: ",".join(options[name]) for name in _JOINED}
    fields |= {name: split(options[name]) for name in _LISTS}
    if options["allclusters"]:
        fields["clusters"] = ("all",)
    if options["users"]:  # as in sacct, the later of -a and -u counts
        given = list(options)
        fields["allusers"] = options["allusers"] and given.index("users") < given.index("allusers")
    question = RunsQuestion(
        **fields,
        slices=not options["allocations"],
        default_columns=os.environ.get("MIGACCT_FORMAT", ""),
        header=not options["noheader"],
        delimiter=options["delimiter"] if parted else None,
        closed=options["parsable"] and not options["parsable2"],
        convert=not options["noconvert"],
        time_style=os.environ.get("SLURM_TIME_FORMAT", ""),
    )
    return ask_and_print(question, db=options["db"] or os.environ.get("MIGBATCH_DB"))


def called(arguments: Sequence[str]) -> int:
    """Run the command with these arguments; return the exit code."""
    arguments = completed(OPTIONS, arguments)
    options = None if "_MIGACCT_COMPLETE" in os.environ else parse(OPTIONS, arguments)
    if options is not None:
        return ending("migacct", lambda: show(options))
    from slurm_migbatch.cli.common import run
    from slurm_migbatch.cli.migacctclick import command

    return run(command, "migacct", arguments)


def main() -> None:
    """Run the command."""
    # short-lived and nearly free of cycles; the collector would take a tenth of its time
    gc.disable()
    leave(called(sys.argv[1:]))

"""What every command shares: error texts and exit codes, lazy loading, the configuration option, key-value output."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from slurm_migbatch.config import Config
    from slurm_migbatch.daemon.history import HistoryStore
    from slurm_migbatch.slurm.cli import CliClient

F = TypeVar("F", bound=Callable[..., Any])

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

HELP = {"help_option_names": ["-h", "--help"]}

#: modules that another extra brings than `controller` does
_EXTRAS = {"pynvml": "node", "matplotlib": "plot", "rich": "login", "plotly": "report", "markupsafe": "report"}
_LAB = "slurm_migbatch.lab"
#: what a database says of itself, by SQLAlchemy, which commands without one do not import
_OF_DATABASES = ("OperationalError", "InternalError", "InterfaceError", "DatabaseError")
#: packages of ours that an installation may leave out
_PARTS = {
    _LAB: "the simulator and the experiments (slurm_migbatch.lab) are",
    "slurm_migbatch.testbed": "the test bed (slurm_migbatch.testbed) is",
}


class Failure(click.ClickException):
    """Something went wrong that the caller can act on; the text is one sentence that says how. Exit code 1."""


def load(where: str) -> click.Command:
    """Import the command that `module:attribute` names."""
    module, _, attribute = where.partition(":")
    command = getattr(importlib.import_module(module), attribute)
    assert isinstance(command, click.Command)
    return command


def run(command: click.Command | str, prog: str, args: Sequence[str] | None = None) -> int:
    """Run `command` and turn every expected failure, a package that is not installed too, into one line on stderr.

    Args:
        command: the command, or where `load` finds it if importing it may fail.
        prog: its name.
        args: its arguments; those of this process where not given.

    Returns:
        The exit code: 0 done, 1 failed, 2 (or the command's own `usage_code`) wrong usage, 130 interrupted.
    """
    try:
        command = load(command) if isinstance(command, str) else command
        code = command.main(list(args) if args is not None else None, prog_name=prog, standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return EXIT_USAGE
    except click.UsageError as error:
        hint = f" (try '{error.ctx.command_path} -h')" if error.ctx is not None else ""
        _print_error(prog, f"{_usage_text(error)}{hint}")
        return int(getattr(command, "usage_code", EXIT_USAGE))
    except click.ClickException as error:
        _print_error(prog, error.format_message())
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # the reader went away, as `| head` does; what Python still holds must go nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except ModuleNotFoundError as error:
        text = _missing(error)
        if not text or "MIGBATCH_DEBUG" in os.environ:
            raise
        _print_error(prog, text)
        return EXIT_FAILED
    except Exception as error:
        if not is_expected(error) or "MIGBATCH_DEBUG" in os.environ:
            raise
        _print_error(prog, describe(error))
        return EXIT_FAILED
    return code if isinstance(code, int) and not isinstance(code, bool) else 0


def _missing(error: ModuleNotFoundError) -> str:
    """Return what is not installed and how to get it, as a sentence; empty where it is a module that must be there."""
    name = error.name or ""
    if name in _PARTS:
        return f"{_PARTS[name]} not part of this installation; pip install 'slurm-migbatch[lab]' brings all"
    package = name.partition(".")[0]
    if package in ("", "slurm_migbatch"):
        return ""
    from traceback import walk_tb

    importers = (str(frame.f_globals.get("__name__", "")) for frame, _ in walk_tb(error.__traceback__))
    in_lab = any(f"{importer}.".startswith(f"{_LAB}.") for importer in importers)
    extra = "lab" if in_lab else _EXTRAS.get(package, "controller")
    return (
        f"this needs the Python package {package}, which is not installed here; pip install 'slurm-migbatch[{extra}]'"
    )


def is_expected(error: BaseException) -> bool:
    """Return whether an error speaks to the user and not about a bug: ours, the system's about a file or a peer, the
    database's about itself (full, locked, read-only, damaged, away)."""
    ours = type(error).__module__.partition(".")[0] == "slurm_migbatch"
    return isinstance(error, OSError) or ours or (type(error).__name__ in _OF_DATABASES and hasattr(error, "orig"))


def describe(error: BaseException) -> str:
    """Return an expected error as a sentence."""
    if (cause := getattr(error, "orig", None)) is not None:
        return f"the database fails: {cause}; see `migbatch db check`"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__


def _usage_text(error: click.UsageError) -> str:
    """Return what was wrong, with click's guess at what was meant as part of the sentence."""
    guesses = getattr(error, "possibilities", None)
    if not guesses:
        return " ".join(error.format_message().split()).rstrip(".")
    return f"{error.message.rstrip('.')}; did you mean {' or '.join(sorted(guesses))}?"


def _print_error(prog: str, text: str) -> None:
    click.echo(f"{prog}: error: {text}", err=True)


class LazyGroup(click.Group):
    """A group whose subcommands are imported when they run: start-up stays quick, and nodes need no database.

    Args:
        lazy: name -> (module:attribute, one line of help).
    """

    def __init__(self, *args: Any, lazy: Mapping[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return every subcommand, loaded or not."""
        return sorted({*super().list_commands(ctx), *self.lazy})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the subcommand."""
        return load(self.lazy[cmd_name][0]) if cmd_name in self.lazy else super().get_command(ctx, cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the subcommand; where there is none, name the one perhaps meant (click knows only loaded ones)."""
        names = self.list_commands(ctx)
        if args[0] not in names and not args[0].startswith("-") and not ctx.resilient_parsing:
            import difflib

            near = difflib.get_close_matches(args[0], names, 1)
            ctx.fail(f"No such command '{args[0]}'{f'; did you mean {near[0]}?' if near else '.'}")
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete the names of subcommands, without importing any."""
        from click.shell_completion import CompletionItem

        found = [CompletionItem(name, help=text) for name, (_, text) in sorted(self.lazy.items())]
        return [item for item in found if item.value.startswith(incomplete)] + click.Command.shell_complete(
            self, ctx, incomplete
        )

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of the help text, without importing anything."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.lazy[name][1]) for name in self.list_commands(ctx) if name in self.lazy])


def config_option(command: F) -> F:
    """Return the option -c/--config; the function gets a `Config`."""

    def read(_ctx: click.Context, _param: click.Parameter, value: str | None) -> Config:
        from slurm_migbatch.config import DEFAULT_PATH, Config, load

        if value is None:
            value = os.environ.get("MIGBATCH_CONFIG") or DEFAULT_PATH
            if not os.path.exists(value) and value == DEFAULT_PATH:  # noqa: PTH110 keeps pathlib out of start-up
                return Config()
        return load(value)

    option = click.option(
        "-c",
        "--config",
        metavar="FILE",
        callback=read,
        help="Configuration of the controller [env MIGBATCH_CONFIG; default /etc/migbatch/migbatch.toml].",
    )
    return option(command)


def job_argument(command: F) -> F:
    """The argument JOB, as Slurm prints it (12, 12_3, 12+1; a step 12.0 means its job); the function gets the text."""

    def read(ctx: click.Context, param: click.Parameter, value: str) -> str:
        from slurm_migbatch.query.questions import is_job

        if not is_job(value):
            raise click.BadParameter(f"{value!r} is no job id; write 123, 123_4 or 123+1", ctx, param)
        return value

    return click.argument("job", callback=read, metavar="JOB")(command)


def open_record(config: Config) -> HistoryStore:
    """Open the record for reading; works while migbatchd is down."""
    from slurm_migbatch.daemon.history import open_history

    return open_history(config.store.url, readonly=True)


def slurm_client(config: Config) -> CliClient:
    """Return the client of Slurm's commands, as the configuration finds them."""
    from slurm_migbatch.slurm.cli import CliClient

    cluster = config.cluster
    return CliClient(cluster.slurm_bin or None, cluster.slurm_conf or None, cluster.timeout_s)


def default_partition(config: Config) -> str:
    """Return the partition of jobs that name none; nothing, and a line on stderr, where Slurm does not answer."""
    from slurm_migbatch.slurm.client import SlurmError

    try:
        return slurm_client(config).default_partition()
    except SlurmError as error:
        click.echo(f"migbatch: the default partition is not known, Slurm does not answer: {error}", err=True)
        return ""


def tell_stage(text: str) -> None:
    """Tell on stderr what is being done now, where somebody looks at it; nothing where stderr is no terminal."""
    if sys.stderr.isatty():
        click.echo(f"{text} ...", err=True)


@contextmanager
def progress_bar(label: str) -> Iterator[Callable[[int, int], None] | None]:
    """Show on stderr how much of a work is done and how long the rest takes.

    Yields what is to be called with how many parts are done and how many there are; None where stderr is no terminal.
    """
    if not sys.stderr.isatty():
        yield None
        return
    with click.progressbar(length=1, label=label, file=sys.stderr) as bar:

        def show(done: int, total: int) -> None:
            bar.length = max(total, 1)
            bar.update(done - bar.pos)

        yield show


def print_pairs(pairs: Iterable[tuple[str, str]]) -> None:
    """Print `key: value` lines as seff does; an empty key continues the value above."""
    from slurm_migbatch.report.lines import pair_lines

    for line in pair_lines(pairs):
        click.echo(line)


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, show_header: bool = True) -> None:
    """Print columns as wide as their widest value, two blanks apart; only the header where there are no rows."""
    from slurm_migbatch.report.lines import table_lines

    for line in table_lines(header, rows, show_header=show_header):
        click.echo(line)

"""Shared code of all commands: running, lazy loading, the configuration option, key-value output."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from slurm_migbatch.cli.ending import EXIT_INTERRUPTED, EXIT_USAGE, Failure, ending

if TYPE_CHECKING:
    from click._termui_impl import ProgressBar
    from click.shell_completion import CompletionItem

    from slurm_migbatch.config import Config
    from slurm_migbatch.slurm.cli import CliClient
    from slurm_migbatch.store.db import Store

F = TypeVar("F", bound=Callable[..., Any])

HELP = {"help_option_names": ["-h", "--help"]}


def load(where: str) -> click.Command:
    """Import the command given as `module:attribute`."""
    module, _, attribute = where.partition(":")
    command = getattr(importlib.import_module(module), attribute)
    assert isinstance(command, click.Command)
    return command


def run(command: click.Command | str, prog: str, args: Sequence[str] | None = None) -> int:
    """Run a command (or `module:attribute`, if importing it may fail) and turn every expected failure, including a
    missing package, into one line on stderr. The exit code is 0 done, 1 failed, 2 (or the command's own `usage_code`)
    wrong usage, 130 interrupted.
    """

    def work() -> object:
        found = load(command) if isinstance(command, str) else command
        try:
            return found.main(list(args) if args is not None else None, prog_name=prog, standalone_mode=False)
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(error.format_message(), err=True)
            return EXIT_USAGE
        except click.UsageError as error:
            hint = f" (try '{error.ctx.command_path} -h')" if error.ctx is not None else ""
            raise Failure(f"{_usage_text(error)}{hint}", getattr(found, "usage_code", EXIT_USAGE)) from None
        except click.ClickException as error:
            raise Failure(error.format_message(), error.exit_code) from None
        except click.Abort:
            return EXIT_INTERRUPTED

    return ending(prog, work)


def _usage_text(error: click.UsageError) -> str:
    """Return the usage error; if an option does not exist, with the most similar one."""
    if not isinstance(error, click.NoSuchOption):
        return " ".join(error.format_message().split()).rstrip(".")
    import difflib

    flags = {flag.lstrip("-"): flag for flag in error.possibilities or ()}
    near = difflib.get_close_matches(error.option_name.lstrip("-"), flags, 1)
    return error.message.rstrip(".") + (f"; did you mean {flags[near[0]]}?" if near else "")


class Group(click.Group):
    """A group whose help has the first sentence of each subcommand's; click cuts it off at the end of the line."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of the help text."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, self._line(ctx, name)) for name in self.list_commands(ctx)])

    def _line(self, ctx: click.Context, name: str) -> str:
        command = self.get_command(ctx, name)
        return "" if command is None else command.get_short_help_str(limit=sys.maxsize)


class LazyGroup(Group):
    """A group whose subcommands are imported when they run: start-up stays fast, and nodes need no database.

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
        """Find the subcommand; if there is none, suggest a similar one (click knows only loaded ones)."""
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

    def _line(self, ctx: click.Context, name: str) -> str:
        return self.lazy[name][1] if name in self.lazy else super()._line(ctx, name)


class NumberRange(click.FloatRange):
    """A number within bounds; click's own type accepts nan."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number; a usage error otherwise."""
        found: float = super().convert(value, param, ctx)
        if found != found:
            self.fail(f"{value!r} is not a number", param, ctx)
        return found


def config_option(command: F) -> F:
    """Return the option -c/--config; the function gets a `Config`."""

    def read(_ctx: click.Context, _param: click.Parameter, value: str | None) -> Config:
        from slurm_migbatch.config import DEFAULT_PATH, Config, load

        if value is None:
            value = os.environ.get("MIGBATCH_CONFIG") or DEFAULT_PATH
            if not os.path.exists(value) and value == DEFAULT_PATH:  # noqa: PTH110 keeps pathlib out of start-up
                return Config()
        return load(value)

    return source_option(command, read)


def source_option(command: F, callback: Callable[..., Any] | None = None) -> F:
    """Return the option -c/--config; the function gets the path as given, or what `callback` makes of it."""
    option = click.option(
        "-c",
        "--config",
        metavar="FILE",
        callback=callback,
        help="Configuration of the controller [env MIGBATCH_CONFIG; default /etc/migbatch/migbatch.toml].",
    )
    return option(command)


def converted(convert: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """Return a callback that converts the value of an option if there is one; a ValueError of `convert` is wrong usage
    with its message.
    """

    def read(ctx: click.Context, param: click.Parameter, value: str | None) -> Any:
        try:
            return None if value is None else convert(value)
        except ValueError as error:
            raise click.BadParameter(str(error), ctx, param) from None

    return read


def job_argument(command: F) -> F:
    """Declare the argument JOB, as Slurm prints it (12, 12_3, 12+1; a step 12.0 means its job), passed on as text."""

    def read(value: str) -> str:
        from slurm_migbatch.query.questions import is_job

        if not is_job(value):
            raise ValueError(f"{value!r} is not a job id; write 123, 123_4 or 123+1")
        return value

    return click.argument("job", callback=converted(read), metavar="JOB")(command)


def open_record(config: Config) -> Store:
    """Open the record for reading; works while migbatchd is down."""
    from slurm_migbatch.store.db import open_store

    return open_store(config.store.url, readonly=True)


def slurm_client(config: Config) -> CliClient:
    """Return the client of Slurm's commands, as configured."""
    from slurm_migbatch.slurm.cli import CliClient

    return CliClient(*config.cluster.commands)


def default_partition(config: Config) -> str:
    """Return the partition of jobs that name none; nothing, and a line on stderr, if Slurm does not answer."""
    from slurm_migbatch.slurm.client import SlurmError

    try:
        return slurm_client(config).default_partition()
    except SlurmError as error:
        click.echo(f"migbatch: the default partition is not known, Slurm does not answer: {error}", err=True)
        return ""


def show_stage(text: str) -> None:
    """Show the current activity on stderr, if it is a terminal."""
    if sys.stderr.isatty():
        click.echo(f"{text} ...", err=True)


@contextmanager
def steps() -> Iterator[Callable[[str, int], None]]:
    """Yield a function to call at the start of each step, with its name and its number of parts.

    If the number is known a progress bar is shown on stderr, else (0) a line per step; nothing if stderr is not a
    terminal.
    """
    bars: list[ProgressBar[str | None]] = []

    def end(*, done: bool) -> None:
        for bar in bars:
            if done:
                bar.update((bar.length or 0) - bar.pos, "")
            bar.render_finish()
        bars.clear()

    def show_step(text: str, of: int) -> None:
        if not of or not sys.stderr.isatty():
            end(done=True)
            show_stage(text)
            return
        if bars and (bars[0].length != of or bars[0].pos + 1 >= of):
            end(done=True)
        if bars:
            bars[0].update(1, text)
            return
        shown = click.progressbar(length=of, show_pos=True, item_show_func=lambda item: item or "", file=sys.stderr)
        shown.current_item = text
        shown.render_progress()
        bars.append(shown)

    try:
        yield show_step
    except BaseException:
        end(done=False)
        raise
    end(done=True)


def print_pairs(pairs: Iterable[tuple[str, str]]) -> None:
    """Print `key: value` lines as seff does; an empty key continues the value above."""
    from slurm_migbatch.report.lines import pair_lines

    for line in pair_lines(pairs):
        click.echo(line)


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, show_header: bool = True) -> None:
    """Print columns as wide as their widest value, two blanks apart; only the header if there are no rows."""
    from slurm_migbatch.report.lines import table_lines

    for line in table_lines(header, rows, show_header=show_header):
        click.echo(line)

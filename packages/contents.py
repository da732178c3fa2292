"""Write what a package holds beside the virtual environment: units, man pages, completion of shells.

Run by packages/build.py with the Python of that environment: `python contents.py ROLE PREFIX ZSH DATE DIRECTORY`, ZSH
the place of its completion, DATE that of the pages (2026-01-31). Commands of which something to import is not part of
the role have no page.
"""

from __future__ import annotations

import gzip
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from slurm_migbatch.cli.common import load
from slurm_migbatch.node import install as node_install

MAIN = "slurm_migbatch.cli.main:cli"
MIGACCT = "slurm_migbatch.cli.migacctclick:command"
MIGBATCHD = "slurm_migbatch.cli.migbatchd:migbatchd"
#: role -> its programs: name -> where the command is, section of the manual
PROGRAMS = {
    "controller": {"migbatch": (MAIN, 1), "migacct": (MIGACCT, 1), "migbatchd": (MIGBATCHD, 8)},
    "node": {"migbatch": (MAIN, 1), "migacct": (MIGACCT, 1)},
    "login": {"migbatch": (MAIN, 1), "migacct": (MIGACCT, 1)},
}
SHELLS = {
    "bash": "usr/share/bash-completion/completions/{}",
    "fish": "usr/share/fish/vendor_completions.d/{}.fish",
}
UNITS = "usr/lib/systemd/system"
_LONG = 40
"""Characters of a word that no line of a terminal need hold."""


class RoffFormatter(click.HelpFormatter):
    """Writes what `--help` shows as a page of the manual."""

    #: whether nothing was written since the last heading: what comes next is a paragraph by itself
    _begins = True

    def write(self, string: str) -> None:
        """Write lines of roff, none that is empty."""
        if string.strip():
            super().write(string)
            self._begins = string.rpartition(".SH ")[2].count("\n") == 1

    def write_usage(self, prog: str, args: str = "", _prefix: str | None = None) -> None:
        """Write the synopsis."""
        self.write(f".SH SYNOPSIS\n.B {_roff(prog)}\n{_roff(args)}\n.SH DESCRIPTION\n")

    def write_heading(self, heading: str) -> None:
        """Write the heading of a section."""
        self.write(f".SH {_roff(heading.upper())}\n")

    def write_text(self, text: str) -> None:
        """Write paragraphs; one that begins with a backspace keeps its lines, as click has it."""
        for paragraph in text.strip("\n").split("\n\n"):
            lines = [_roff(line) for line in paragraph.splitlines() if line.strip() != "\b"]
            if paragraph.lstrip().startswith("\b"):
                lines = [".nf", *lines, ".fi"]
            self.write(("" if self._begins else ".PP\n") + "\n".join(lines) + "\n")

    def write_dl(self, rows: Iterable[tuple[str, str]], _col_max: int = 30, _col_spacing: int = 2) -> None:
        """Write a list of terms; the widths are those of a terminal."""
        for term, text in rows:
            self.write(f".TP\n.B {_roff(term)}\n{_roff(text.strip())}\n")

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Write a section; roff indents by itself."""
        self.write_heading(name)
        yield


def _roff(text: str) -> str:
    """Return text so that roff sets it as it stands; a long list of words and commas may be broken at a comma."""
    words = (word.replace(",", ",\0") if len(word) > _LONG else word for word in text.split())
    escaped = " ".join(words).replace("\\", "\\e").replace("-", "\\-").replace("\0", "\\:")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped


def page(ctx: click.Context, section: int, date: str) -> str:
    """Return the page of one command. `date`: of the page, as 2026-01-31."""
    name = ctx.command_path.replace(" ", "-")
    # as wide as the longest sentence about a command
    formatter = RoffFormatter(width=200)
    ctx.command.format_help(ctx, formatter)
    release = f"slurm-migbatch {version('slurm-migbatch')}"
    # long words, paths and options, leave wide gaps where lines are filled to the right
    head = f'.TH {name.upper()} {section} "{date}" "{release}"\n.nh\n.ad l\n.SH NAME\n'
    return f"{head}{name} \\- {_roff(ctx.command.get_short_help_str(limit=200))}\n{formatter.getvalue()}"


def pages(ctx: click.Context) -> Iterator[click.Context]:
    """Yield a command and those below it that can be imported here and are not hidden."""
    yield ctx
    command = ctx.command
    if not isinstance(command, click.Group):
        return
    for name in command.list_commands(ctx):
        try:
            below = command.get_command(ctx, name)
        except ModuleNotFoundError:
            continue
        if below is not None and not below.hidden:
            yield from pages(click.Context(below, info_name=name, parent=ctx))


def completion(command: click.Command, program: str, shell: str) -> str:
    """Return click's own script of completion for a shell."""
    kind = get_completion_class(shell)
    assert kind is not None
    return kind(command, {}, program, f"_{program.upper()}_COMPLETE").source()


def units(role: str, prefix: str) -> dict[str, str]:
    """Return the units of a role as `migbatch install` would write them: name -> text."""
    if role == "node":
        return {"migbatch-node.service": node_install.unit(f"{prefix}/bin/migbatch")}
    if role == "controller":
        from slurm_migbatch import site
        from slurm_migbatch.config import DEFAULT_PATH

        program = Path(prefix) / "bin/migbatchd"
        values = {"program": program, "config": DEFAULT_PATH, "user": "root"}
        return {"migbatchd.service": site.render("migbatchd.service.j2", **values)}
    return {}


def contents(role: str, prefix: str, zsh: str, date: str) -> Iterator[tuple[str, bytes]]:
    """Yield each file of the role's package, its path without the first slash."""
    for name, text in units(role, prefix).items():
        yield f"{UNITS}/{name}", text.encode()
    for program, (where, section) in PROGRAMS[role].items():
        command = load(where)
        for shell, place in {**SHELLS, "zsh": f"{zsh}/_{{}}"}.items():
            yield place.format(program), completion(command, program, shell).encode()
        for ctx in pages(click.Context(command, info_name=program)):
            name = ctx.command_path.replace(" ", "-")
            yield (
                f"usr/share/man/man{section}/{name}.{section}.gz",
                gzip.compress(page(ctx, section, date).encode(), mtime=0),
            )


def main() -> None:
    """Write them below a directory."""
    role, prefix, zsh, date, directory = sys.argv[1:]
    for path, data in contents(role, prefix, zsh, date):
        place = Path(directory) / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)


if __name__ == "__main__":
    main()

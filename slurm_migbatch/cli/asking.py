"""How the commands of users ask: at the record, where this user may open it, else the query service."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from slurm_migbatch.cli.common import EXIT_USAGE, F, Failure
from slurm_migbatch.query.reply import Reply, Unanswerable

if TYPE_CHECKING:
    from slurm_migbatch.config import Config
    from slurm_migbatch.query.questions import Question
    from slurm_migbatch.query.site import Site
    from slurm_migbatch.slurm.rights import Rights

_LINES_AT_ONCE = 2000


def source_option(command: F) -> F:
    """Return the option -c/--config; the function gets the path as it was given."""
    option = click.option(
        "-c",
        "--config",
        metavar="FILE",
        help="Configuration of the controller [env MIGBATCH_CONFIG; default /etc/migbatch/migbatch.toml].",
    )
    return option(command)


def tell(
    question: Question, config: str | None = None, *, db: str | None = None, catalog: str = "", submit_socket: str = ""
) -> int:
    """Have a question answered and print what is answered; return the exit code.

    Args:
        question: what is asked.
        config: file of the configuration, as -c gives it.
        db: URL of the database instead of the configured one.
        catalog: catalog file instead of the configured one.
        submit_socket: where to ask the submit service too.

    Raises:
        Failure, click.UsageError: there is no answer.
        ConfigError: the configuration exists and cannot be used.
    """
    from slurm_migbatch.query.answers import answer
    from slurm_migbatch.query.site import Site

    site = Site(_configuration(config, db), catalog, submit_socket)
    try:
        return _print(answer(question, _rights(site, named=bool(db)), site))
    except Unanswerable as error:
        raise (click.UsageError if error.code == EXIT_USAGE else Failure)(str(error)) from None


def _rights(site: Site, *, named: bool) -> Rights:
    """Return what this user may be told: all of a database that he named and could open, else as the service does."""
    from slurm_migbatch.slurm.rights import Rights

    uid = os.getuid()
    if named or uid == 0:
        return Rights(uid, everything=True)
    import asyncio
    import pwd

    from slurm_migbatch.daemon.privacy import Privacy

    trusted = set()
    with contextlib.suppress(KeyError):
        trusted.add(pwd.getpwnam(site.config.cluster.slurm_user).pw_uid)
    return asyncio.run(Privacy(site.slurm(), trusted).rights(uid))


def _configuration(path: str | None, db: str | None) -> Config:
    from dataclasses import replace

    from slurm_migbatch.config import DEFAULT_PATH, Config, StoreConfig, load

    if db:
        return replace(Config(), store=StoreConfig(db))
    path = path or os.environ.get("MIGBATCH_CONFIG", DEFAULT_PATH)
    if path == DEFAULT_PATH and not os.path.exists(path):  # noqa: PTH110 keeps pathlib out of start-up
        return Config()
    return load(path)


def _print(reply: Reply) -> int:
    for remark in reply.remarks:
        click.echo(remark, err=True)
    _write_all(reply.lines)
    return reply.code


def _write_all(lines: Iterable[str]) -> None:
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

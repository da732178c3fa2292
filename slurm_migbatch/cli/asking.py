"""How the commands of users ask: at the record, where this user may open it, else the query service."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import click

from slurm_migbatch.cli.common import EXIT_USAGE, F, Failure
from slurm_migbatch.query.login import CONFIG, LOGIN_CONF, RECORD, Servers, find_servers, uid_of
from slurm_migbatch.query.reply import Reply, Unanswerable

if TYPE_CHECKING:
    from slurm_migbatch.config import Config
    from slurm_migbatch.node.auth import MungeSigner
    from slurm_migbatch.query.protocol import Answer
    from slurm_migbatch.query.questions import Question
    from slurm_migbatch.query.site import QuerySite
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


def ask_and_print(
    question: Question, config: str | None = None, *, db: str | None = None, catalog: str = "", submit_socket: str = ""
) -> int:
    """Ask a question and print the answer; return the exit code.

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
    found = _configuration(config, db, named=bool(catalog or submit_socket))
    if isinstance(found, Servers):
        return _print_answer(_asked(question, found))
    from slurm_migbatch.query.answers import answer
    from slurm_migbatch.query.site import QuerySite

    site = QuerySite(found, catalog, submit_socket)
    try:
        return _print(answer(question, _rights(site, named=bool(db)), site))
    except Unanswerable as error:
        raise _failure(str(error), error.code) from None


def asker(config: str | None = None) -> Callable[[Question], Answer]:
    """Return what answers one question after the other, as `ask_and_print` would, for commands that go on.

    Raises:
        LoginError, ConfigError, Failure: it is not known whom to ask. What it returns raises errors of one question.
    """
    found = _configuration(config, None, named=False)
    if isinstance(found, Servers):
        servers, signer = found, _signer(found)

        def far(question: Question) -> Answer:
            from slurm_migbatch.query.client import ask

            return ask(question, servers, signer)

        return far
    from slurm_migbatch.query.answers import answer
    from slurm_migbatch.query.protocol import Answer
    from slurm_migbatch.query.site import QuerySite

    site = QuerySite(found)

    def here(question: Question) -> Answer:
        try:
            reply = answer(question, _rights(site, named=False), site)
        except Unanswerable as error:
            return Answer(error.code, error=str(error))
        return Answer(reply.code, "".join(f"{line}\n" for line in reply.lines), reply.remarks)

    return here


def ask_for_text(question: Question, config: str | None = None, *, db: str | None = None) -> str:
    """Ask a question whose answer is a file's text, and return that; remarks go to stderr.

    Args:
        question: what is asked.
        config: file of the configuration, as -c gives it.
        db: URL of the database instead of the configured one.

    Raises:
        Failure, click.UsageError: there is no answer.
        ConfigError: the configuration exists and cannot be used.
    """
    found = _configuration(config, db, named=False)
    if isinstance(found, Servers):
        told = _asked(question, found)
        if told.error:
            raise _failure(told.error, told.code)
        lines, remarks = [told.out.removesuffix("\n")], told.err
    else:
        from slurm_migbatch.query.answers import answer
        from slurm_migbatch.query.site import QuerySite

        site = QuerySite(found)
        try:
            reply = answer(question, _rights(site, named=bool(db)), site)
            lines, remarks = list(reply.lines), reply.remarks
        except Unanswerable as error:
            raise _failure(str(error), error.code) from None
    for remark in remarks:
        click.echo(remark, err=True)
    return "\n".join(lines) + "\n"


def _failure(sentence: str, code: int) -> click.ClickException:
    return click.UsageError(sentence) if code == EXIT_USAGE else Failure(sentence)


def _asked(question: Question, servers: Servers) -> Answer:
    from slurm_migbatch.query.client import ask

    return ask(question, servers, _signer(servers))


def _signer(servers: Servers) -> MungeSigner:
    from slurm_migbatch.node.auth import AuthError, MungeSigner

    try:
        return MungeSigner(servers.munge_socket, servers.uids)
    except AuthError as error:
        sentence = str(error).partition(":")[0]
        raise Failure(f"{sentence}: this command proves who asks by munge, which this host lacks") from None


def _print_answer(answer: Answer) -> int:
    if answer.error:
        raise _failure(answer.error, answer.code)
    for remark in answer.err:
        click.echo(remark, err=True)
    sys.stdout.write(answer.out)
    return answer.code


def _rights(site: QuerySite, *, named: bool) -> Rights:
    """Return what this user may see: all of a database that he named and could open, else as the service does."""
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


def _configuration(path: str | None, db: str | None, *, named: bool) -> Config | Servers:
    """Return the configuration whose record this user may open, else the services to ask.

    With `named`, files of this host are part of what is asked, so it is answered here in any case.
    """
    path = path or os.environ.get("MIGBATCH_CONFIG") or CONFIG
    here = os.path.exists(path) or path != CONFIG  # noqa: PTH110 keeps pathlib out of start-up
    if not (db or named or here or os.path.exists(RECORD)):  # noqa: PTH110
        return find_servers()
    from dataclasses import replace

    from slurm_migbatch.config import Config, ConfigError, StoreConfig, load

    if db:
        return replace(Config(), store=StoreConfig(db))
    try:
        config = load(path) if here else Config()
    except ConfigError:
        if os.access(path, os.F_OK) and not os.access(path, os.R_OK):
            return find_servers()
        raise
    return config if named or not config.query.enabled or _may_read(config) else _servers_of(config)


def _may_read(config: Config) -> bool:
    """Whether this user may open the record; of a database server, that one is configured."""
    scheme, _, rest = config.store.url.partition("://")
    if not scheme.startswith("sqlite"):
        return True
    try:
        os.close(os.open(rest.removeprefix("/").partition("?")[0], os.O_RDONLY | os.O_CLOEXEC))
    except PermissionError:
        return False
    except FileNotFoundError:
        # on the controller migbatchd has not run yet; elsewhere /etc may be the controller's
        return os.geteuid() == 0 and not os.path.exists(LOGIN_CONF)  # noqa: PTH110
    except OSError:
        return True
    return True


def _servers_of(config: Config) -> Servers:
    """Return this host's own service where migbatchd runs here, else the services that any host would ask."""
    directory = config.daemon.run_dir
    uids = frozenset({0, *uid_of(config.cluster.slurm_user)})
    try:
        here = os.stat(directory).st_uid in uids and os.path.exists(config.daemon.api_socket)  # noqa: PTH110, PTH116
    except OSError:
        here = False
    if not here:
        return find_servers()
    listen = config.query.listen
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(listen, listen)  # noqa: S104
    url = f"http://{f'[{host}]' if ':' in host else host}:{config.query.port}"
    return Servers((url,), uids, config.node_api.munge_socket, config.path or CONFIG)


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

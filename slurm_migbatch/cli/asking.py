"""Query path of the user commands: the record if this user may open it, else the query service."""

from __future__ import annotations

import os
import sys
from itertools import chain, islice

from slurm_migbatch.cli.ending import Failure
from slurm_migbatch.query.reply import Reply, Unanswerable
from slurm_migbatch.query.site import QuerySite
from slurm_migbatch.values import TYPE_CHECKING, replace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import TextIO

    from slurm_migbatch.config import Config
    from slurm_migbatch.node.auth import MungeSigner
    from slurm_migbatch.query.login import Servers
    from slurm_migbatch.query.questions import Question
    from slurm_migbatch.slurm.rights import Rights

_LINES_AT_ONCE = 2000
_IN_MEMORY = 8 << 20
"""Characters of an answer that are kept in memory; a longer one is in a temporary file."""
_TEMPORARY = "/var/tmp"  # noqa: S108 - nameless; /tmp is often in memory


def ask_and_print(
    question: Question, config: str | None = None, *, db: str | None = None, catalog: str = "", submit_socket: str = ""
) -> int:
    """Send a query and print the answer; return the exit code. Arguments and errors are those of `asker`."""
    reply = asker(config, db=db, catalog=catalog, submit_socket=submit_socket)(question)
    _print_remarks(reply)
    _write_all(reply.lines)
    return reply.code


def ask_for_text(question: Question, config: str | None, *, db: str | None) -> str:
    """Return the answer to a query whose answer is the text of a file; remarks go to stderr. See `asker`."""
    reply = asker(config, db=db)(question)
    lines = list(reply.lines)
    _print_remarks(reply)
    return "\n".join(lines) + "\n"


def asker(
    config: str | None, *, db: str | None = None, catalog: str = "", submit_socket: str = ""
) -> Callable[[Question], Reply]:
    """Return a function that answers one query after the other.

    Args:
        config: file of the configuration, as given by -c.
        db: URL of the database instead of the configured one.
        catalog: catalog file instead of the configured one.
        submit_socket: socket of the submit service to query too.

    Raises:
        LoginError, Failure: there is no source to query. The returned function raises Failure and `client.NoAnswer` if
            there is no answer to one query.
        ConfigError: the configuration exists and cannot be used.
    """
    found = _source(config, db, catalog, submit_socket)
    return _local(found, named=bool(db)) if isinstance(found, QuerySite) else _remote(found)


def _local(site: QuerySite, *, named: bool) -> Callable[[Question], Reply]:
    from slurm_migbatch.query.answers import answer
    from slurm_migbatch.store.errors import MissingDatabaseError

    def ask(question: Question) -> Reply:
        try:
            reply = answer(question, _rights(site, named=named), site)
            return replace(reply, lines=_all_read(reply.lines))
        except Unanswerable as error:
            raise Failure(str(error), error.code) from None
        except MissingDatabaseError as error:
            if not named:
                raise
            raise Failure(f"no database at {error.path}: correct --db or MIGBATCH_DB") from None

    return ask


def _all_read(lines: Iterable[str]) -> Iterable[str]:
    """Read the whole answer, which ends the snapshot of the record. Who reads the output may take days for it, such as
    `less`, and the record's log would grow meanwhile (`store.wal`).
    """
    kept: list[str] = []
    size, rest = 0, iter(lines)
    for line in rest:
        kept.append(line)
        size += len(line)
        if size > _IN_MEMORY:
            return _lines_of(_written(chain(kept, rest)))
    return kept


def _written(lines: Iterable[str]) -> TextIO:
    import tempfile

    directory = os.environ.get("TMPDIR", _TEMPORARY)
    try:
        file = tempfile.TemporaryFile("w+", encoding="utf-8", errors="surrogatepass", newline="\n", dir=directory)  # noqa: SIM115
        try:
            file.writelines(f"{line}\n" for line in lines)
            file.seek(0)
        except BaseException:
            file.close()
            raise
    except OSError as error:
        raise Failure(
            f"cannot keep the answer in {directory} (TMPDIR selects another directory): {error.strerror}"
        ) from None
    return file


def _lines_of(file: TextIO) -> Iterator[str]:
    with file:
        for line in file:
            yield line.removesuffix("\n")


def _remote(servers: Servers) -> Callable[[Question], Reply]:
    from slurm_migbatch.query import client

    signer = _signer(servers)

    def ask(question: Question) -> Reply:
        answer = client.ask(question, servers, signer)
        if answer.error:
            raise Failure(answer.error, answer.code)
        return Reply((answer.out.removesuffix("\n"),) if answer.out else (), answer.err, answer.code)

    return ask


def _signer(servers: Servers) -> MungeSigner:
    from slurm_migbatch.node.auth import AuthError, MungeSigner

    try:
        return MungeSigner(servers.munge_socket, servers.uids)
    except AuthError as error:
        sentence = str(error).partition(":")[0]
        raise Failure(f"{sentence}: this command authenticates by munge, which is not available on this host") from None


def _rights(site: QuerySite, *, named: bool) -> Rights:
    """Return this user's rights: everything for a database that he named and can open, else those of the service."""
    from slurm_migbatch.slurm.rights import Rights

    uid = os.getuid()
    if named or uid == 0:
        return Rights(uid, everything=True)
    import asyncio

    from slurm_migbatch.daemon.privacy import Privacy
    from slurm_migbatch.slurm.users import uid_of

    return asyncio.run(Privacy(site.slurm(), uid_of(site.config.cluster.slurm_user)).rights(uid))


def _source(path: str | None, db: str | None, catalog: str = "", submit_socket: str = "") -> QuerySite | Servers:
    """Return the local site if this user can open it, else the services to query.

    A given database, catalog or socket belongs to this host, so such a query is always answered here.
    """
    if db:
        return QuerySite(None, catalog, submit_socket, url=db)
    found = _configuration(path, named=bool(catalog or submit_socket))
    from slurm_migbatch.query.login import Servers

    return found if isinstance(found, Servers) else QuerySite(found, catalog, submit_socket)


def _configuration(path: str | None, *, named: bool) -> Config | Servers:
    """Return the configuration if this user may open its record, or always if `named`; else the services to query."""
    from slurm_migbatch.query.login import CONFIG, RECORD, find_servers

    path = path or os.environ.get("MIGBATCH_CONFIG") or CONFIG
    is_set = os.path.exists(path) or path != CONFIG  # noqa: PTH110 keeps pathlib out of start-up
    if not (named or is_set or os.path.exists(RECORD)):  # noqa: PTH110
        return find_servers()
    from slurm_migbatch.config import Config, ConfigError, load

    try:
        config = load(path) if is_set else Config()
    except ConfigError:
        if os.access(path, os.F_OK) and not os.access(path, os.R_OK):
            return find_servers()
        raise
    return config if named or not config.query.enabled or _may_read(config) else _servers_of(config)


def _may_read(config: Config) -> bool:
    """Return whether this user may open the record; on a database server only root, whoever can read its URL."""
    from slurm_migbatch.query.login import LOGIN_CONF

    scheme, _, rest = config.store.url.partition("://")
    if not scheme.startswith("sqlite"):
        return os.geteuid() == 0
    try:
        os.close(os.open(rest.removeprefix("/").partition("?")[0], os.O_RDONLY | os.O_CLOEXEC))
    except PermissionError:
        return False
    except FileNotFoundError:
        # on the controller migbatchd has not run yet; on other hosts /etc may be the controller's
        return os.geteuid() == 0 and not os.path.exists(LOGIN_CONF)  # noqa: PTH110
    except OSError:
        return True
    return True


def _servers_of(config: Config) -> Servers:
    """Return this host's own service if migbatchd runs here, else the services that any host would query."""
    from slurm_migbatch.doctor.health import url_of
    from slurm_migbatch.query.login import CONFIG, Servers, find_servers
    from slurm_migbatch.slurm.users import uid_of

    directory = config.daemon.run_dir
    uids = frozenset({0, *uid_of(config.cluster.slurm_user)})
    try:
        runs_here = os.stat(directory).st_uid in uids and os.path.exists(config.daemon.api_socket)  # noqa: PTH110, PTH116
    except OSError:
        runs_here = False
    if not runs_here:
        return find_servers()
    url = url_of(config.query.listen, config.query.port)
    return Servers((url,), uids, config.node_api.munge_socket, config.path or CONFIG)


def _print_remarks(reply: Reply) -> None:
    for remark in reply.remarks:
        print(remark, file=sys.stderr)


def _write_all(lines: Iterable[str]) -> None:
    rest = iter(lines)
    while batch := list(islice(rest, _LINES_AT_ONCE)):
        sys.stdout.write("\n".join(batch) + "\n")

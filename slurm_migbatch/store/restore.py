"""Restoring a backup: the database gets a new id, and nodes report everything again.

The backup is copied and migrated in a private directory. For SQLite that copy is placed beside the old file, with the
rights of the directory's owner, and takes its name; the old one is kept. On a server everything happens in one
transaction, so that a failed restore leaves the old data.
"""

from __future__ import annotations

import glob
import os
import secrets
import shutil
import sqlite3
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from sqlalchemy import Connection, Engine, delete, func, select, update
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from slurm_migbatch.store.backup import copy_file, schema_of, sync
from slurm_migbatch.store.engines import file_url, make_engine, private_engine, sqlite_file
from slurm_migbatch.store.errors import StoreError
from slurm_migbatch.store.migrations import Migration, applied, migrate, pending
from slurm_migbatch.store.models import DatabaseIdentity, StoredNode, Term
from slurm_migbatch.store.ownership import acting_as_owner
from slurm_migbatch.store.terms import server_time
from slurm_migbatch.store.transfer import copy_rows, tables_of

_OWN: Final = frozenset({"identity", "terms"})
"""Tables that have rows in an empty database too."""
_WITH_IT: Final = ("-wal", "-shm")
_TEMPORARY: Final = "/var/tmp"  # noqa: S108 - a directory of its own is made there
"""Directory of the copy unless TMPDIR says otherwise: /tmp is often in memory."""


class Restored(NamedTuple):
    """The schema of the backup, and the path of the previous database; None if there was none or on a server."""

    schema: str
    before: Path | None


def restore(source: Path, url: str, history: tuple[Migration, ...], *, replace: bool) -> Restored:
    """Replace the database at `url` by a backup. Nobody else may use it meanwhile.

    Args:
        source: a file written by `backup`, of this release or an older one, from any kind of database.
        replace: also if it is not empty.

    Raises:
        StoreError: the backup is damaged or newer, or the database is in use or not empty.
    """
    schema = schema_of(source)
    with _connected(make_engine(file_url(source), readonly=True)) as connection:
        pending(connection, history)
    try:
        file = sqlite_file(url)
        if file is not None:
            return Restored(schema, _into_file(source, file, url, history, replace))
        _into_server(source, url, history, replace)
    except OSError as error:
        raise StoreError(f"cannot restore {source}: {error.filename or ''}: {error.strerror}") from None
    except (sqlite3.Error, SQLAlchemyError) as error:
        cause = error.orig if isinstance(error, DBAPIError) else error
        raise StoreError(f"cannot restore {source}, the database is unchanged: {cause}") from None
    return Restored(schema, None)


def unfinished(file: Path) -> list[Path]:
    """Return what killed restores of an SQLite file have left beside it: copies of their backups."""
    return sorted(file.parent.glob(f".{glob.escape(file.name)}.{'[0-9a-f]' * 8}.part"))


@contextmanager
def _connected(engine: Engine) -> Iterator[Connection]:
    """Open a transaction on an engine, and dispose of the engine afterwards."""
    try:
        with engine.connect() as connection, connection.begin():
            yield connection
    finally:
        engine.dispose()


@contextmanager
def _up_to_date(source: Path, history: tuple[Migration, ...]) -> Iterator[tuple[Path, Engine]]:
    """Create a copy of the backup with the current schema, in a private directory."""
    with tempfile.TemporaryDirectory(prefix="migbatch-restore-", dir=os.environ.get("TMPDIR", _TEMPORARY)) as directory:
        copy = Path(directory, "copy.db")
        os.close(os.open(copy, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        copy_file(source, copy)
        engine = private_engine(copy)
        try:
            migrate(engine, history)
            yield copy, engine
        finally:
            engine.dispose()


def _holds_something(connection: Connection) -> bool:
    tables = (table for table in tables_of(connection) if table.name not in _OWN)
    return any(connection.execute(select(table).limit(1)).first() is not None for table in tables)


def _refuse(where: str) -> StoreError:
    return StoreError(f"{where} is not empty: use --replace to replace its content (migbatch db backup first)")


def _renew(connection: Connection) -> None:
    """Give the database a new identity, without an active migbatchd."""
    connection.execute(delete(DatabaseIdentity))
    connection.execute(DatabaseIdentity.__table__.insert().values(id=secrets.token_hex(16), made=time.time()))  # type: ignore[attr-defined]
    connection.execute(update(StoredNode).values(told=None))
    connection.execute(update(Term).values(holder="", until=0.0, number=Term.number + 1))


# -- SQLite ------------------------------------------------------------------------------------------------------------


def _into_file(source: Path, file: Path, url: str, history: tuple[Migration, ...], replace: bool) -> Path | None:
    existed = file.exists()
    if existed and not replace and _is_used(url):
        raise _refuse(str(file))
    with _up_to_date(source, history) as (copy, engine):
        with _connected(engine) as connection:
            _renew(connection)
        schema_of(copy)
        with copy.open("rb") as content, acting_as_owner(file.parent, file.stat().st_gid if existed else None):
            if not existed:
                make_engine(url, readonly=False).dispose()  # with the final access rights
            return _take_name(content, file, keep=existed)


def _take_name(made: BinaryIO, file: Path, *, keep: bool) -> Path | None:
    """Replace the content of a file by `made`, and return the path of the previous one if `keep` is set."""
    for left in unfinished(file):
        left.unlink(missing_ok=True)
    part = file.with_name(f".{file.name}.{secrets.token_hex(4)}.part")
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(handle, "wb") as out:
            shutil.copyfileobj(made, out)
            out.flush()
            status = file.stat()
            os.fchown(handle, status.st_uid, status.st_gid)
            os.fchmod(handle, stat.S_IMODE(status.st_mode))
            os.fsync(handle)
        before = _put_aside(file) if keep else None
        part.replace(file)
        sync(file.parent)
    finally:
        part.unlink(missing_ok=True)
    return before


def _is_used(url: str) -> bool:
    try:
        with _connected(make_engine(url, readonly=True)) as connection:
            return _holds_something(connection)
    except (StoreError, SQLAlchemyError):
        return True  # possibly damaged


def _put_aside(file: Path) -> Path:
    """Give an SQLite file and its log a second name, and remove the log's own: it does not belong to the new file."""
    try:
        with closing(sqlite3.connect(file, timeout=1.0)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    except sqlite3.Error:
        pass  # it may be damaged, which is why it is replaced
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    aside = file.with_name(f"{file.name}.replaced-{stamp}-{secrets.token_hex(2)}")
    os.link(file, aside)
    for end in _WITH_IT:
        log = file.with_name(file.name + end)
        if log.exists():
            log.replace(aside.with_name(aside.name + end))
    return aside


# -- servers -----------------------------------------------------------------------------------------------------------


def _into_server(source: Path, url: str, history: tuple[Migration, ...], replace: bool) -> None:
    target = make_engine(url, readonly=False)
    try:
        with target.connect() as connection, connection.begin():
            if applied(connection) and not replace and _holds_something(connection):
                raise _refuse("the database")
        migrate(target, history)
        with (
            _up_to_date(source, history) as (_, engine),
            _connected(engine) as rows,
            target.connect() as connection,
            connection.begin(),
        ):
            # a migbatchd that wants to become active, or to write as the active one, waits until this transaction ends
            term = connection.execute(select(Term.number, Term.holder, Term.until).with_for_update()).first()
            if term is not None and term.holder and term.until > server_time(connection):
                raise StoreError(f"migbatchd on {term.holder} is active: stop migbatchd on every controller first")
            for table in reversed(tables_of(connection)):
                connection.execute(delete(table))
            copy_rows(rows, connection)
            _renew(connection)
            if term is not None:
                highest = connection.scalar(select(func.max(Term.number))) or 0
                connection.execute(delete(Term))
                number = max(highest, term.number + 1)
                connection.execute(Term.__table__.insert().values(id=1, number=number, holder="", until=0.0))  # type: ignore[attr-defined]
    finally:
        target.dispose()

"""Check that migbatchd can write the record: an SQLite file, or the tables on a server; and the file's log."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from sqlalchemy import Connection, delete, false, insert, inspect, select, update
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from slurm_migbatch.doctor.programs import Reader, closed_to
from slurm_migbatch.node.findings import FAIL, OK, UNKNOWN, WARN, Finding
from slurm_migbatch.store.engines import make_engine, without_password
from slurm_migbatch.store.errors import StoreError
from slurm_migbatch.store.models import StoredNode
from slurm_migbatch.store.restore import unfinished
from slurm_migbatch.store.sqlitefile import log_bytes
from slurm_migbatch.store.wal import LARGE_BYTES

_SUBJECT: Final = "database"
_MIB: Final = 1 << 20
_READ_ONLY: Final = frozenset({1290, 1792, 1836, "25006"})
"""Errors of MariaDB and states of PostgreSQL that mean read-only."""
_WRITABLE_POSTGRESQL: Final = (
    "name the primary in [store] url, or set default_transaction_read_only = off for its server, database and user"
)
_WRITABLE_MARIADB: Final = "name the primary in [store] url, or SET GLOBAL read_only = 0, also in its configuration"


def check_file(path: str, writer: Reader | None) -> Iterator[Finding]:
    """Check that an SQLite file can be written by migbatchd's user, if known; it is opened, but nothing is written."""
    folder = str(Path(path).parent)
    if os.geteuid() != 0:
        yield Finding(
            UNKNOWN, _SUBJECT, f"only root can check whether {path} is writable", "run migbatch doctor as root"
        )
        return
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        text = f"{path} is read-only: {error.strerror}; events wait on the nodes"
        yield Finding(FAIL, _SUBJECT, text, f"mount -o remount,rw its file system, or chattr -i {path}")
        return
    if writer is None:
        text = f"migbatchd is down, so its user is unknown, and whether it can write {path}"
        yield Finding(UNKNOWN, _SUBJECT, text, "systemctl start migbatchd")
        return
    for target in (path, folder):
        if closed := closed_to(target, writer, 0o2):
            text = f"read-only for migbatchd, which runs as {writer.name}: {closed}; events wait on the nodes"
            yield Finding(FAIL, _SUBJECT, text, f"chown {writer.name} {folder} {path}*; chmod u+rwX {target}")
            return
    yield Finding(OK, _SUBJECT, f"{path} is writable")


def check_log(path: str) -> Iterator[Finding]:
    """Check that the write-ahead log of an SQLite file is not large; migbatchd bounds it while readers end."""
    size = log_bytes(path)
    if size > LARGE_BYTES:
        text = f"its log {path}-wal has {size // _MIB} MiB, because a process reads the database without end"
        advice = f"fuser -v {path}-shm lists the processes that have it open: end one that is stopped or reads for long"
        yield Finding(WARN, _SUBJECT, text, advice)


def check_restores(file: Path) -> Iterator[Finding]:
    """Check that no restore of an SQLite file was interrupted."""
    for part in unfinished(file):
        text = f"{part} is left of a restore that was interrupted, so {file} may be the record from before"
        yield Finding(WARN, _SUBJECT, text, "run migbatch db restore again, or delete that file")


def check_server(url: str) -> Iterator[Finding]:
    """Check that the tables on a server can be written: statements that match no row are run and rolled back.

    A server without the tables is not checked; migbatchd creates them. `url`: `[store] url`, of MariaDB or PostgreSQL.
    """
    shown = without_password(url)
    try:
        engine = make_engine(url, readonly=False)
    except StoreError as error:
        yield Finding(FAIL, _SUBJECT, str(error), "correct [store] url in migbatch.toml")
        return
    try:
        with engine.connect() as connection:
            if not inspect(connection).has_table(StoredNode.__tablename__):
                return
            refusal = _refusal(connection)
    except SQLAlchemyError as error:
        text = f"cannot check whether {shown} is writable: {_words(error)}"
        yield Finding(UNKNOWN, _SUBJECT, text, "check that the server runs and accepts this user and password")
        return
    finally:
        engine.dispose()
    if refusal is None:
        yield Finding(OK, _SUBJECT, f"{shown} is writable")
    elif not _READ_ONLY.isdisjoint(_codes(refusal)):
        text = f"{shown} is read-only: {_words(refusal)}; events wait on the nodes"
        postgres = engine.dialect.name == "postgresql"
        yield Finding(FAIL, _SUBJECT, text, _WRITABLE_POSTGRESQL if postgres else _WRITABLE_MARIADB)
    else:
        text = f"{shown} rejects writes of migbatchd: {_words(refusal)}; events wait on the nodes"
        advice = "as its administrator: GRANT this user all privileges on that database (docs/install.md)"
        yield Finding(FAIL, _SUBJECT, text, advice)


def _refusal(connection: Connection) -> DBAPIError | None:
    """Return the server's error for statements that would write no row; None if it accepts them."""
    columns = list(StoredNode.__table__.columns)
    no_rows = select(*columns).where(false())
    statements = (
        insert(StoredNode).from_select([column.name for column in columns], no_rows),
        update(StoredNode).where(false()).values(seen=StoredNode.seen),
        delete(StoredNode).where(false()),
    )
    try:
        for statement in statements:
            connection.execute(statement)
    except DBAPIError as error:
        if error.connection_invalidated:
            raise
        return error
    finally:
        connection.rollback()
    return None


def _codes(error: DBAPIError) -> set[object]:
    return {getattr(error.orig, "sqlstate", None), *getattr(error.orig, "args", ())[:1]}


def _words(error: SQLAlchemyError) -> str:
    """Return the server's message in one line."""
    origin = error.orig if isinstance(error, DBAPIError) else error
    cause = origin.args[-1] if origin is not None and origin.args else origin
    return " ".join(str(cause).split())

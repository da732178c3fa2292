"""Check that the record is intact, of this release's schema, and has free space: for `migbatch db check`."""

from __future__ import annotations

import math
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from slurm_migbatch.doctor.database import check_restores
from slurm_migbatch.node.findings import FAIL, OK, WARN, Finding
from slurm_migbatch.store import soundness
from slurm_migbatch.store.backup import size_of
from slurm_migbatch.store.engines import make_engine, sqlite_file
from slurm_migbatch.store.errors import NewerDatabaseError, StoreError
from slurm_migbatch.store.history import HISTORY
from slurm_migbatch.store.migrations import applied, pending

_MIB = 1 << 20
_LEAST_MIB = 128
_LATE_S = 7 * 86400.0
_RESTORE = "restore a backup (migbatch db restore), or rebuild the file: sqlite3 OLD .recover | sqlite3 NEW"
_NO_BACKUP = "give a file that `migbatch db backup` wrote"


def check_record(url: str, keep_s: float = math.inf, *, live: bool = True) -> Iterator[Finding]:
    """Read the whole database at `url`. `live`: it is migbatchd's own, not a backup; `keep_s`: [store] keep."""
    try:
        engine = make_engine(url, readonly=True)
    except StoreError as error:
        advice = "check [store] url of migbatch.toml" if live else _NO_BACKUP
        # the class itself: SQLite's errors of access and locks are of classes derived from it
        is_damaged = live and type(error.__cause__) is sqlite3.DatabaseError
        yield Finding(FAIL, "database", str(error), _RESTORE if is_damaged else advice)
        return
    try:
        with engine.connect() as connection, connection.begin():
            yield from _damages(connection)
            yield from _schema(connection, keep_s if live else math.inf, live=live)
            file = sqlite_file(url) if live else None
            yield from _disk_space(connection, file)
            yield from () if file is None else check_restores(file)
    except SQLAlchemyError as error:
        cause = error.orig if isinstance(error, DBAPIError) else error
        yield Finding(FAIL, "database", f"is not readable: {cause}", _RESTORE)
    finally:
        engine.dispose()


def _damages(connection: Connection) -> Iterator[Finding]:
    errors = list(soundness.damages(connection))
    for text in errors:
        yield Finding(FAIL, "integrity", text, _RESTORE)
    if not errors:
        yield Finding(OK, "integrity", "no errors found")


def _schema(connection: Connection, keep_s: float, *, live: bool) -> Iterator[Finding]:
    try:
        missing = pending(connection, HISTORY)
    except NewerDatabaseError as error:
        yield Finding(FAIL, "schema", str(error), "upgrade, or restore a backup from before")
        return
    present = applied(connection)
    if not present:
        advice = "check [store] url; migbatchd creates it at its start" if live else _NO_BACKUP
        yield Finding(FAIL, "schema", "is not a migbatch record", advice)
        return
    if missing:
        text = f"{present[-1]!r}; this release has {missing[-1]!r}"
        yield Finding(WARN, "schema", text, "start migbatchd, or run migbatch db upgrade")
        return
    yield Finding(OK, "schema", repr(present[-1]))
    errors = [*soundness.differences(connection), *soundness.dangling(connection)]
    for text in errors:
        yield Finding(FAIL, "tables", text, "restore a backup (migbatch db restore)")
    if not errors:
        yield Finding(OK, "tables", "as in this release; no dangling references")
    yield from _age(connection, keep_s)


def _age(connection: Connection, keep_s: float) -> Iterator[Finding]:
    oldest = soundness.oldest_end(connection)
    if oldest is None:
        return
    days = (time.time() - oldest) / 86400
    if time.time() - oldest > keep_s + _LATE_S:
        text = f"goes back {days:.0f} days, [store] keep is {keep_s / 86400:.0f}; runs still in use are kept longer"
        yield Finding(WARN, "age", text, "check whether migbatchd runs and its log about old records")
    else:
        yield Finding(OK, "age", f"goes back {days:.0f} days")


def _disk_space(connection: Connection, file: Path | None) -> Iterator[Finding]:
    spare = soundness.spare_bytes(connection)
    if file is None or spare is None:
        return
    size = size_of(file)
    disk = os.statvfs(file)
    free = disk.f_bavail * disk.f_frsize
    text = f"{size // _MIB} MiB, {spare // _MIB} of them free for new rows; {free // _MIB} MiB free in its file system"
    if free < _LEAST_MIB * _MIB:
        yield Finding(FAIL, "disk space", text, f"free {_LEAST_MIB} MiB below {file.parent}")
    elif free < size:
        yield Finding(WARN, "disk space", text, "an upgrade writes a backup of the same size in that directory")
    else:
        yield Finding(OK, "disk space", text)

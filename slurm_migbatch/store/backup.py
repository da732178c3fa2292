"""Backups: one SQLite file with all data, for any kind of database.

An SQLite database is copied with SQLite's online backup, which blocks nobody: in WAL mode writers continue while it
reads one consistent state. A server's database is read table by table in one repeatable-read transaction. The server's
own dump programs are faster and include more (users, grants); this backup can be restored to any of the three kinds of
database, and needs no program that the controller may lack.

A backup gets its name only when it is complete, verified and synced; it is readable by its owner only.
"""

from __future__ import annotations

import contextlib
import filecmp
import glob
import os
import secrets
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from slurm_migbatch.store.engines import make_engine, one_state, private_engine, sqlite_file
from slurm_migbatch.store.errors import StoreError
from slurm_migbatch.store.migrations import RECORD, Migration, applied, migrate, pending
from slurm_migbatch.store.ownership import acting_as_owner, changeable
from slurm_migbatch.store.sqlitefile import BUSY_TIMEOUT_S, file_uri, readable_mode
from slurm_migbatch.store.transfer import copy_rows

_MIB = 1 << 20


class BackupFacts(NamedTuple):
    """A backup: its path, its size, and the last step of its schema."""

    path: Path
    size: int
    schema: str


def back_up(url: str, target: Path, history: tuple[Migration, ...]) -> BackupFacts:
    """Back up the database at `url` to a new file, while it is in use.

    Raises:
        StoreError: the file exists, there is no space for it, another user could put a file of his in its place, or the
            database cannot be read or is damaged.
    """
    file = sqlite_file(url)

    def fill(part: Path) -> None:
        if file is not None:
            copy_file(file, part)
        else:
            _dump(url, part, history)

    if file is not None and file.exists():
        _require_disk_space(target, size_of(file))
    with acting_as_owner(target.parent) if _of_one_owner(file, target.parent) else contextlib.nullcontext():
        if other := changeable(target.parent):
            raise StoreError(
                f"{other}, and could get the record by another file in the place of {target}: choose a "
                "directory of your own"
            )
        return _publish(target, fill)


def _of_one_owner(file: Path | None, directory: Path) -> bool:
    """Return whether a directory belongs to the owner of the SQLite file, who may read the record."""
    try:
        return file is not None and file.stat().st_uid == directory.stat().st_uid
    except OSError:
        return False


def keep_before_upgrade(file: Path, last: str) -> Path:
    """Write a copy of an SQLite database beside it, named after its schema, unless there is one; raises StoreError.

    Nobody else may be migrating it: what killed programs have left of their copies is removed.
    """
    for part in file.parent.glob(f".{glob.escape(file.name)}.schema-*.part*"):
        with contextlib.suppress(OSError):
            part.unlink()
    number = last.partition(" ")[0]
    earlier: list[Path] = []
    for attempt in range(1, 1000):
        end = f"-{attempt}" if attempt > 1 else ""
        target = file.with_name(f"{file.name}.schema-{number}{end}")
        if target.exists():
            earlier.append(target)
            continue
        try:
            _require_disk_space(target, size_of(file))
            made = _publish(target, lambda part: copy_file(file, part)).path
            for same in earlier:
                with contextlib.suppress(OSError):  # another user's
                    if filecmp.cmp(made, same, shallow=False):  # of an upgrade that was killed
                        made.unlink()
                        return same
            return made
        except StoreError as error:
            raise StoreError(
                f"{file} is from an older release, and the backup before its upgrade failed: {error}; free space, or "
                "back it up elsewhere (migbatch db backup FILE) and continue with `migbatch db upgrade --no-backup`"
            ) from None
    raise StoreError(f"too many backups of {file}; remove those that you do not need")


def size_of(file: Path) -> int:
    """Return the bytes of an SQLite file and its log."""
    total = 0
    for path in (file, file.with_name(f"{file.name}-wal")):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def copy_file(source: Path, target: Path) -> None:
    """Copy one consistent state of an SQLite database, which may be in use, to a new private file.

    Raises:
        StoreError, sqlite3.Error: it cannot be read, or there is no space.
    """
    mode = readable_mode(source)
    path = file_uri(source, mode)
    with (
        closing(sqlite3.connect(path, uri=True, timeout=BUSY_TIMEOUT_S)) as live,
        closing(sqlite3.connect(target, isolation_level=None)) as copy,
    ):
        copy.execute("PRAGMA locking_mode=EXCLUSIVE").fetchall()
        copy.execute("PRAGMA synchronous=OFF")
        live.backup(copy)  # all pages in one step: in WAL mode a reader blocks nobody
        copy.execute("PRAGMA journal_mode=DELETE").fetchall()


def schema_of(file: Path) -> str:
    """Verify an SQLite file; return the last step of its schema.

    Raises:
        StoreError: it is damaged, or not a record of ours.
    """
    try:
        with closing(sqlite3.connect(file_uri(file, readable_mode(file)), uri=True)) as connection:
            results = [row[0] for row in connection.execute("PRAGMA integrity_check(5)")]
            if results != ["ok"]:
                raise StoreError(f"{file} is damaged: {results[0]}")
            try:
                (last,) = connection.execute(f"SELECT max(name) FROM {RECORD.name}").fetchone()  # noqa: S608 names are constants
            except sqlite3.OperationalError:
                last = None
    except sqlite3.Error as error:
        raise StoreError(f"{file} is damaged: {error}") from None
    if last is None:
        raise StoreError(f"{file} is not a migbatch record")
    return str(last)


def sync(path: Path) -> None:
    """Sync a file or a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _dump(url: str, part: Path, history: tuple[Migration, ...]) -> None:
    engine = make_engine(url, readonly=True)
    try:
        with one_state(engine).connect() as source, source.begin():
            pending(source, history)
            present = applied(source)
            if not present:
                raise StoreError("the database is empty; migbatchd creates its tables at its first start")
            copy = private_engine(part)
            try:
                migrate(copy, [step for step in history if step.name in present])
                with copy.connect() as target, target.begin():
                    if target.dialect.has_table(target, "identity"):
                        target.execute(text("DELETE FROM identity"))
                    copy_rows(source, target)
            finally:
                copy.dispose()
    finally:
        engine.dispose()


def _require_disk_space(target: Path, size: int) -> None:
    try:
        free = shutil.disk_usage(target.parent).free
    except OSError as error:
        raise StoreError(f"cannot write {target}: {error.strerror}") from None
    if free < size:
        raise StoreError(f"{target.parent} has {free // _MIB} MiB left, the backup needs {size // _MIB + 1}")


def _publish(target: Path, fill: Callable[[Path], None]) -> BackupFacts:
    """Write a new file with `fill`, verify it and name it `target`; on failure, leave no file."""
    try:
        with _part(target) as part:
            fill(part)
            schema = schema_of(part)
            sync(part)
            size = part.stat().st_size
            _name(part, target)
    except FileExistsError:
        raise StoreError(f"{target} already exists and is not overwritten: choose another name") from None
    except OSError as error:
        raise StoreError(f"cannot write {target}: {error.strerror}") from None
    except (sqlite3.Error, SQLAlchemyError) as error:
        cause = error.orig if isinstance(error, DBAPIError) else error
        raise StoreError(f"the backup {target} failed: {cause}") from None
    return BackupFacts(target, size, schema)


@contextmanager
def _part(target: Path) -> Iterator[Path]:
    """Create a temporary file beside `target`, removed at the end."""
    if os.path.lexists(target):
        raise FileExistsError(target)
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    os.close(os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    try:
        yield part
    finally:
        for name in (part, part.with_name(f"{part.name}-journal")):
            name.unlink(missing_ok=True)


def _name(part: Path, target: Path) -> None:
    """Name the file `target`. Raises FileExistsError if another file has been created there."""
    try:
        os.link(part, target)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links: reserve the name first
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        part.replace(target)
    sync(target.parent)

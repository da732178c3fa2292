"""Whether and how this user can read an SQLite file; without SQLAlchemy, see `runquery`."""

from __future__ import annotations

import os
import sqlite3

from slurm_migbatch.store.errors import MissingDatabaseError, NetworkFilesystemError, StoreError
from slurm_migbatch.store.filesystem import filesystem_type, is_network
from slurm_migbatch.values import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

#: seconds that a connection waits for another one's write
BUSY_TIMEOUT_S = 30.0


def check_local(path: str | Path) -> None:
    """Raise NetworkFilesystemError if several hosts can share the file."""
    kind = filesystem_type(path)
    if is_network(kind):
        raise NetworkFilesystemError(
            f"{path} is on a {kind} filesystem, which several hosts can share; SQLite loses data there. Move it to a "
            "local disk of the controller ([store] url in migbatch.toml), or use MariaDB or PostgreSQL"
        )


def readable_mode(path: str | Path) -> str:
    """Return the URI parameters with which this user can read `path` now.

    Raises:
        StoreError: it cannot be read; the message says why. MissingDatabaseError: there is none.
    """
    mode, connection = open_readable(path)
    connection.close()
    return mode


def open_readable(path: str | Path) -> tuple[str, sqlite3.Connection]:
    """Return the URI parameters with which this user can read `path` now, and a connection with these.

    A reader who may not write the directory cannot create the -shm file that WAL needs. It exists while migbatchd runs;
    after migbatchd has stopped, and merged its log into the file, the file is complete and nobody writes it.
    """
    try:
        os.stat(path)  # noqa: PTH116 see `values`
    except FileNotFoundError:
        raise MissingDatabaseError(path) from None
    except OSError as error:
        raise StoreError(f"cannot read the database {path}: {error.strerror}") from None
    problem: sqlite3.Error | None = None
    for mode in ("mode=ro", "mode=ro&immutable=1"):
        if "immutable" in mode and log_bytes(path):
            break
        try:
            connection = sqlite3.connect(file_uri(path, mode), uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        except sqlite3.Error as error:
            problem = error
            continue
        try:
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            return mode, connection
        except sqlite3.Error as error:
            problem = error
        connection.close()
    advice = ""
    if not os.access(path, os.R_OK):
        advice = "; ask the administrator for membership of its group"
    elif type(problem) is sqlite3.DatabaseError:  # not one of its subclasses: the file is none, or is damaged
        advice = "; restore a backup (migbatch db restore), or name another file"
    raise StoreError(f"cannot read the database {path}: {problem}{advice}") from problem


def file_uri(path: str | Path, parameters: str) -> str:
    """Return the URI with which SQLite opens `path`."""
    escaped = str(path).replace("%", "%25").replace("?", "%3f").replace("#", "%23")
    return f"file:{escaped}?{parameters}"


def log_bytes(path: str | Path) -> int:
    """Return the size of the write-ahead log of an SQLite file; 0 if there is none."""
    try:
        return os.stat(f"{path}-wal").st_size  # noqa: PTH116
    except OSError:
        return 0

"""Connections to the three databases, each with the settings that the store requires."""

from __future__ import annotations

import os
import shutil
import socket
import sqlite3
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError
from sqlalchemy.pool import QueuePool, StaticPool

from slurm_migbatch.store.errors import StoreError
from slurm_migbatch.store.sqlitefile import BUSY_TIMEOUT_S, check_local, file_uri, readable_mode
from slurm_migbatch.store.wal import KEPT_BYTES

#: seconds after which a server ends an idle write transaction: it prevents a takeover of the active migbatchd's term,
#: and a process that is frozen or lost power in it would do so for hours
IDLE_TRANSACTION_S = 20
#: seconds after which an attempt to connect to a server ends; PyMySQL's own default
CONNECT_S = 10
#: by which a connection ends within a minute after the server's host has lost its power or network, of which nobody
#: tells: by default that takes hours, in which nothing is recorded although another server may have its address
_HOST_LOST = (
    (socket.TCP_KEEPIDLE, 20),
    (socket.TCP_KEEPINTVL, 10),
    (socket.TCP_KEEPCNT, 3),
    (socket.TCP_USER_TIMEOUT, 50_000),
)
#: execution option of read-only connections; SQLite then needs no write lock
READ_OPTION = "migbatch_read"

_DRIVERS = {"mysql": "mysql+pymysql", "mariadb": "mariadb+pymysql", "postgresql": "postgresql+psycopg"}
#: parameters that drivers read a password from
_SECRETS = frozenset({"password", "passwd", "sslpassword", "ssl_key_password"})
_EXTRAS = {"mysql": "mysql", "mariadb": "mysql", "postgresql": "postgres"}


def make_engine(text: str, *, readonly: bool) -> Engine:
    """Return an engine for `text`, an SQLAlchemy URL. For SQLite the file is created, or must exist for reading.

    Raises:
        StoreError: the URL is invalid, its driver is not installed, or the file cannot be used.
    """
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):  # its text may have a password
        raise StoreError(
            "[store] url, --db or MIGBATCH_DB is not a database URL; write for instance "
            "sqlite:////var/lib/migbatch/migbatch.db"
        ) from None
    if url.get_backend_name() == "sqlite":
        return _sqlite(url, readonly)
    return _server(url, readonly)


def one_state(engine: Engine) -> Engine:
    """Return an engine on the same connections whose transactions read one consistent state, regardless of writers."""
    if engine.dialect.name == "sqlite":
        return engine.execution_options(**{READ_OPTION: True})
    return engine.execution_options(isolation_level="REPEATABLE READ")


def _server(url: URL, readonly: bool) -> Engine:
    url = url.set(drivername=_DRIVERS.get(url.drivername, url.drivername))
    backend = url.get_backend_name()
    arguments = {} if "connect_timeout" in url.query else {"connect_timeout": CONNECT_S}
    greeted = url.drivername.endswith("+pymysql") and "read_timeout" not in url.query
    try:
        engine = create_engine(
            url,
            isolation_level="READ COMMITTED",
            pool_pre_ping=True,
            pool_recycle=3600,
            hide_parameters=True,  # errors are logged, and these may be texts of users
            connect_args={**arguments, "read_timeout": CONNECT_S} if greeted else arguments,
        )
    except NoSuchModuleError:
        raise StoreError(f"unsupported database: {url.drivername!r}; use sqlite, mariadb or postgresql") from None
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get(backend)
        advice = f"pip install 'slurm-migbatch[{extra}]'" if extra else f"install {error.name}"
        raise StoreError(f"{backend} needs the Python package {error.name}: {advice}") from None
    if greeted:
        event.listen(engine, "connect", _wait_for_results)
    event.listen(engine, "connect", _notice_lost_host)
    event.listen(engine, "connect", partial(_refuse_writes if readonly else _end_idle_transactions, backend))
    return engine


def _wait_for_results(connection: Any, _record: Any) -> None:
    """Let queries take their time: PyMySQL has one time limit for them and for the first message of a server."""
    connection._read_timeout = None


def _notice_lost_host(connection: Any, _record: Any) -> None:
    """Set the options of a connection's socket; one that is not of TCP has none."""
    with suppress(OSError, AttributeError):
        # PyMySQL's connection has no other way to its socket
        handle = getattr(connection, "_sock", connection).fileno()
        with socket.socket(fileno=os.dup(handle)) as link:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _HOST_LOST:
                link.setsockopt(socket.IPPROTO_TCP, option, value)


def _refuse_writes(backend: str, connection: Any, _record: Any) -> None:
    scope = "CHARACTERISTICS AS TRANSACTION" if backend == "postgresql" else "TRANSACTION"
    with connection.cursor() as cursor:
        cursor.execute(f"SET SESSION {scope} READ ONLY")
    connection.commit()


def _end_idle_transactions(backend: str, connection: Any, _record: Any) -> None:
    with connection.cursor() as cursor:
        if backend == "postgresql":
            cursor.execute(f"SET idle_in_transaction_session_timeout = '{IDLE_TRANSACTION_S}s'")
        else:
            cursor.execute("SHOW VARIABLES LIKE 'idle_transaction_timeout'")  # MySQL has none
            if cursor.fetchone():
                cursor.execute(f"SET SESSION idle_transaction_timeout = {IDLE_TRANSACTION_S}")
    connection.commit()


def _sqlite(url: URL, readonly: bool) -> Engine:
    """Return an engine for an SQLite file."""
    if not url.database or url.database == ":memory:" or not Path(url.database).is_absolute():
        raise StoreError(f"{url} is not an absolute path; write four slashes: sqlite:////var/lib/migbatch/migbatch.db")
    path = Path(url.database)
    check_local(path)
    mode = readable_mode(path) if readonly else _create(path)

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(
            file_uri(path, mode),
            uri=True,
            timeout=BUSY_TIMEOUT_S,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            connection.execute("PRAGMA foreign_keys=ON")
            if not readonly:
                # an acknowledged event is deleted on its node: the commit must be synced
                connection.execute("PRAGMA synchronous=FULL")
                connection.execute(f"PRAGMA journal_size_limit={KEPT_BYTES}")
        except BaseException:
            connection.close()
            raise
        return connection

    options = {READ_OPTION: readonly}
    engine = create_engine(
        "sqlite://", creator=connect, poolclass=QueuePool, execution_options=options, hide_parameters=True
    )
    event.listen(engine, "begin", _begin)
    if not readonly:
        _use_wal(connect, path)
    return engine


def sqlite_file(text: str) -> Path | None:
    """Return the file of an SQLite URL; None for a server, and for other text."""
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        return None
    return Path(url.database) if url.get_backend_name() == "sqlite" and url.database else None


def has_password(text: str) -> bool:
    """Return whether a valid URL has a password, in its query too."""
    url = make_url(text)
    return bool(url.password) or not _SECRETS.isdisjoint(url.query)


def without_password(text: str) -> str:
    """Return a valid URL as it may be shown and logged."""
    url = make_url(text)
    return url.difference_update_query(_SECRETS).render_as_string(hide_password=True)


def file_url(path: Path) -> str:
    """Return the URL of an SQLite file."""
    return URL.create("sqlite", database=str(path.absolute())).render_as_string()


def private_engine(path: Path) -> Engine:
    """Return an engine for a file that nobody else opens, without a write-ahead log; the caller syncs the file."""

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(file_uri(path, "mode=rw"), uri=True, isolation_level=None)
        for pragma in ("foreign_keys=ON", "locking_mode=EXCLUSIVE", "journal_mode=MEMORY", "synchronous=OFF"):
            connection.execute(f"PRAGMA {pragma}").fetchall()
        return connection

    engine = create_engine("sqlite://", creator=connect, poolclass=StaticPool)
    event.listen(engine, "begin", _begin)
    return engine


def _begin(connection: Connection) -> None:
    """Begin with the write lock, so that no writer fails half-way because it read before it wrote."""
    reading = connection.get_execution_options().get(READ_OPTION)
    connection.exec_driver_sql("BEGIN" if reading else "BEGIN IMMEDIATE")


def _create(path: Path) -> str:
    """Create the file, 0640 in a directory 0750: the group that may read all runs is the administrator's choice."""
    try:
        if not path.parent.exists():
            path.parent.mkdir(mode=0o750, parents=True)
            path.parent.chmod(0o750)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
        os.fchmod(descriptor, 0o640)
        os.close(descriptor)
    except FileExistsError:
        if not path.is_file():
            raise StoreError(f"{path} is not a file; [store] url must be one") from None
    except OSError as error:
        raise StoreError(f"cannot create the database {path}: {error.strerror}") from None
    return "mode=rw"


def _use_wal(connect: Any, path: Path) -> None:
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            connection = connect()
        except sqlite3.Error as error:
            raise _cannot_open(path, error) from None
        try:
            mode = connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
            break
        except sqlite3.OperationalError as error:
            # SQLite does not wait by itself when two connections change the journal mode
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise _cannot_open(path, error) from None
            time.sleep(0.02)
        except sqlite3.DatabaseError as error:
            raise StoreError(f"{path} is not a usable database: {error}") from None
        finally:
            connection.close()
    if mode != "wal":
        raise StoreError(f"{path}: SQLite cannot keep a write-ahead log there ({mode}); use a local disk")


def _cannot_open(path: Path, error: sqlite3.Error) -> StoreError:
    """Return the error for the user: SQLite says "disk I/O error" if the disk is full."""
    advice = "" if shutil.disk_usage(path.parent).free else f"; the disk is full: free space in {path.parent}"
    return StoreError(f"cannot open {path}: {error}{advice}")

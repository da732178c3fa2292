"""Small migrations: ordered, named, recorded in the database, each in one transaction with its record."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Column, Connection, Double, Engine, MetaData, String, Table, func, inspect, select, text

from slurm_migbatch.store.errors import NewerDatabaseError, StoreError

_META = MetaData()
RECORD = Table(
    "schema_migrations",
    _META,
    Column("name", String(128), primary_key=True),
    Column("applied", Double, nullable=False),
)

#: lock number shared by all versions (advisory lock of PostgreSQL)
_LOCK_KEY = 0x6D69676261746368
_LOCK_NAME = "migbatch-migrations"
_LOCK_WAIT_S = 120


@dataclass(frozen=True)
class Migration:
    """One step: its permanent name, and its function, which must be repeatable after an interruption."""

    name: str
    apply: Callable[[Connection], None]


def table_options(connection: Connection) -> dict[str, Any]:
    """Return the options of new tables: on MariaDB and MySQL all of Unicode, compared by bytes, as the other two do by
    default.

    On those only, because SQLAlchemy imports the dialect that an option is named after.
    """
    dialect = connection.dialect.name
    if dialect not in ("mysql", "mariadb"):
        return {}
    options = {"engine": "InnoDB", "charset": "utf8mb4", "collate": "utf8mb4_bin"}
    return {f"{dialect}_{option}": value for option, value in options.items()}


def applied(connection: Connection) -> list[str]:
    """Return the names of the steps applied to this database, in order; none if it is empty."""
    if not inspect(connection).has_table(RECORD.name):
        return []
    return sorted(connection.scalars(select(RECORD.c.name)))


def pending(connection: Connection, steps: Sequence[Migration]) -> list[str]:
    """Return the names of the missing steps, in order. Reads only.

    Raises:
        NewerDatabaseError: the database has steps that this code does not know.
    """
    done = set(applied(connection))
    step_names = [step.name for step in steps]
    if unknown := sorted(done - set(step_names)):
        raise NewerDatabaseError(
            f"the database was created by a newer migbatch (it has {unknown[-1]!r}, unknown to this version): "
            "upgrade slurm-migbatch on this host, or restore a backup from before the upgrade (migbatch db restore)"
        )
    return [name for name in step_names if name not in done]


def migrate(engine: Engine, steps: Sequence[Migration], before: Callable[[str], object] | None = None) -> list[str]:
    """Migrate the database; returns the names of the steps applied here.

    Several programs may start at once: each step is applied by one of them, and the others wait.

    Args:
        engine, steps: the database, and all its steps.
        before: called before the first step of a non-empty database, with the name of its last step, while nobody else
            can write; an exception aborts the migration.

    Raises:
        NewerDatabaseError: see `pending`.
        StoreError: another program has held the lock for too long.
    """
    done: list[str] = []
    with engine.connect() as connection, _alone(connection):
        with connection.begin():
            _lock_transaction(connection)
            RECORD.dialect_kwargs.update(table_options(connection))
            RECORD.create(connection, checkfirst=True)
            if before is not None and pending(connection, steps) and (present := applied(connection)):
                before(present[-1])
        while True:
            with connection.begin():
                _lock_transaction(connection)
                missing = pending(connection, steps)
                if not missing:
                    return done
                step = next(step for step in steps if step.name == missing[0])
                step.apply(connection)
                connection.execute(RECORD.insert().values(name=step.name, applied=time.time()))
                done.append(step.name)


@contextmanager
def _alone(connection: Connection) -> Iterator[None]:
    """Hold a named lock on a MariaDB or MySQL server, whose DDL ends transactions and so releases row locks."""
    if connection.dialect.name not in ("mysql", "mariadb"):
        yield
        return
    with connection.begin():
        acquired = connection.scalar(select(func.get_lock(_LOCK_NAME, _LOCK_WAIT_S)))
    if acquired != 1:
        raise StoreError(f"another migbatch has been migrating the tables for over {_LOCK_WAIT_S} s; try again later")
    try:
        yield
    finally:
        with connection.begin():
            connection.scalar(select(func.release_lock(_LOCK_NAME)))


def _lock_transaction(connection: Connection) -> None:
    """Lock PostgreSQL for one transaction of a migration; those of SQLite are exclusive from BEGIN IMMEDIATE on.

    SQLite 3.26 answers `PRAGMA table_info` from the schema that the connection read before another one changed it. A
    statement that reads a table reads the schema again.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK_KEY})
    elif connection.dialect.name == "sqlite":
        connection.execute(text("SELECT count(*) FROM sqlite_master"))

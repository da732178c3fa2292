"""Integrity of a database: its own checks, its tables, and references."""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import Connection, exists, func, inspect, select, text

from slurm_migbatch.store.models import Base, Run, StoredLease
from slurm_migbatch.store.runquery import OPEN

_MOST = 20


def damages(connection: Connection) -> Iterator[str]:
    """Yield the errors that the database finds in its files; for PostgreSQL, the tables that cannot be read."""
    if connection.dialect.name == "sqlite":
        results = connection.scalars(text(f"PRAGMA integrity_check({_MOST})")).all()
        yield from (line for line in results if line != "ok")
        return
    names = sorted(inspect(connection).get_table_names())
    if connection.dialect.name == "postgresql":
        for name in names:
            connection.execute(text(f'SELECT count(*) FROM "{name}"'))  # noqa: S608 - the names of its own tables
        return
    for name in names:
        for row in connection.execute(text(f"CHECK TABLE `{name}`")).mappings():
            if row["Msg_type"] in ("error", "warning") or (row["Msg_type"] == "status" and row["Msg_text"] != "OK"):
                yield f"{name}: {row['Msg_text']}"


def differences(connection: Connection) -> Iterator[str]:
    """Yield what the tables lack compared with this release."""
    inspector = inspect(connection)
    names = set(inspector.get_table_names())
    for name, table in Base.metadata.tables.items():
        if name not in names:
            yield f"table {name} is missing"
            continue
        columns = {column["name"] for column in inspector.get_columns(name)}
        for column in table.columns:
            if column.name not in columns:
                yield f"column {name}.{column.name} is missing"
        indexes = {index["name"] for index in inspector.get_indexes(name)}
        for index in table.indexes:
            if index.name not in indexes:
                yield f"index {index.name} of {name} is missing"


def dangling(connection: Connection) -> Iterator[str]:
    """Yield dangling references."""
    count = connection.scalar(
        select(func.count()).select_from(StoredLease).where(~exists().where(Run.id == StoredLease.run_id))
    )
    if count:
        yield f"{count} leases have no run"


def oldest_end(connection: Connection) -> float | None:
    """Return the end of the run that ended first, unix seconds."""
    return connection.scalar(select(func.min(Run.ended)).where(Run.span_class > OPEN))


def spare_bytes(connection: Connection) -> int | None:
    """Return the free space for new rows in an SQLite file; None for a server."""
    if connection.dialect.name != "sqlite":
        return None
    pages = connection.scalar(text("PRAGMA freelist_count")) or 0
    return int(pages) * int(connection.scalar(text("PRAGMA page_size")) or 0)

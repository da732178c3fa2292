"""Copy every row of one database to another of the same schema, of any kind."""

from __future__ import annotations

from itertools import islice
from typing import Any, Final

from sqlalchemy import (
    JSON,
    Column,
    Connection,
    Double,
    MetaData,
    Numeric,
    Table,
    Text,
    bindparam,
    cast,
    func,
    insert,
    select,
    text,
    type_coerce,
)
from sqlalchemy.sql.elements import ColumnElement
from sqlalchemy.types import TypeEngine

from slurm_migbatch.store.migrations import RECORD

_AT_ONCE: Final = 1000


def tables_of(connection: Connection) -> list[Table]:
    """Return the tables, except that of the migrations, in the order in which they can be filled.

    JSON is handled as text, so that it is copied exactly, and an absent document remains distinct from `null`.
    """
    metadata = MetaData()
    metadata.reflect(connection)
    return [table for table in metadata.sorted_tables if table.name != RECORD.name]


def copy_rows(source: Connection, target: Connection) -> None:
    """Copy all rows. Both are inside a transaction, and the target's tables are empty."""
    for table in tables_of(target):
        _copy(table, source, target)
        _go_on_counting(table, target)


def _copy(table: Table, source: Connection, target: Connection) -> None:
    generic = Table(table.name, MetaData(), *(Column(c.name, _type(c)) for c in table.columns))
    names = [column.name for column in generic.columns]
    rows = source.execute(
        select(*(_read(column, source) for column in generic.columns)), execution_options={"yield_per": _AT_ONCE}
    )
    statement = insert(generic).values({column.name: _write(column, target) for column in generic.columns})
    while chunk := list(islice(rows, _AT_ONCE)):
        target.execute(statement, [dict(zip(names, row, strict=True)) for row in chunk])


def _type(column: Column[Any]) -> TypeEngine[Any]:
    # MariaDB's own type would return decimals, with ten decimal places
    return Double() if isinstance(column.type, Numeric) else column.type.as_generic()


def _read(column: Column[Any], source: Connection) -> ColumnElement[Any]:
    if not isinstance(column.type, JSON):
        return column
    # PostgreSQL's driver parses a JSON column by itself
    return cast(column, Text) if source.dialect.name == "postgresql" else type_coerce(column, Text)


def _write(column: Column[Any], target: Connection) -> ColumnElement[Any]:
    if not isinstance(column.type, JSON):
        return bindparam(column.name, type_=column.type)
    value = bindparam(column.name, type_=Text())
    return cast(value, JSON) if target.dialect.name == "postgresql" else value


def _go_on_counting(table: Table, target: Connection) -> None:
    """Make PostgreSQL number new rows after the copied ones; other databases do so by themselves."""
    if target.dialect.name != "postgresql" or "id" not in table.columns:
        return
    highest = target.scalar(select(func.max(table.columns["id"])))
    if isinstance(highest, int):
        sequence = text("SELECT setval(pg_get_serial_sequence(:name, 'id'), :highest)")
        target.execute(sequence, {"name": table.name, "highest": highest})

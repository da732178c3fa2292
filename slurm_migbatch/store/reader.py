"""Reading runs: from an SQLite file without SQLAlchemy, from other databases through the store."""

from __future__ import annotations

import sqlite3
from abc import ABC, abstractmethod

from slurm_migbatch.store.errors import ReadError
from slurm_migbatch.store.runquery import RunFilter, any_run, select_runs
from slurm_migbatch.store.sqlitefile import check_local, open_readable
from slurm_migbatch.store.steps import STEPS
from slurm_migbatch.values import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from typing import Any


_SQLITE = "sqlite:///"
#: the value at a key of a JSON column, and the same as a number
_AT_KEY = {"sqlite": "json_extract({}, '$.{}')", "postgresql": "({} ->> '{}')"}
_AT_KEY_ELSE = "JSON_VALUE({}, '$.{}')"
_NUMBER = {"sqlite": "{}", "postgresql": "CAST({} AS DOUBLE PRECISION)"}
_NUMBER_ELSE = "CAST({} AS DOUBLE)"


class RunReader(ABC):
    """The runs of a record at one time; close it at the end.

    Attributes:
        dialect: of its SQL: sqlite, mariadb (mysql) or postgresql.
    """

    dialect: str

    @abstractmethod
    def close(self) -> None:
        """Release the record."""

    @abstractmethod
    def _execute(self, statement: str, values: Mapping[str, Any]) -> Iterator[Sequence[Any]]:
        """Run a SELECT with named values, `:name` in its text. Raises ReadError, also while rows are read."""

    def runs(
        self, wanted: RunFilter, run_fields: Collection[str], slice_fields: Collection[str] = ()
    ) -> Iterator[tuple[Any, Sequence[Any]]]:
        """Yield runs with their slices, those of an array together, see `runquery.select_runs`. Raises ReadError."""
        return select_runs(self._execute, wanted, run_fields, slice_fields, by_array=True)

    def has_run(self, wanted: RunFilter) -> bool:
        """Return whether there is any such run. Raises ReadError."""
        return any_run(self._execute, wanted)

    def rows(self, statement: str, values: Mapping[str, Any]) -> list[Sequence[Any]]:
        """Return the rows of a SELECT with named values, `:name` in its text. Raises ReadError."""
        return list(self._execute(statement, values))

    def text_in(self, document: str, key: str) -> str:
        """Return the SQL of the value at `key` of a JSON column (`table.column`), null if there is none."""
        return _AT_KEY.get(self.dialect, _AT_KEY_ELSE).format(document, key)

    def number_in(self, document: str, key: str) -> str:
        """Return the SQL of the number at `key` of a JSON column, null if there is none."""
        return _NUMBER.get(self.dialect, _NUMBER_ELSE).format(self.text_in(document, key))

    def wholes(self) -> dict[str, tuple[int, int]]:
        """Return compute and memory slices of GPUs by UUID, as their nodes last described them. Raises ReadError."""
        import json

        from slurm_migbatch.mig.geometry import Geometry, GeometryError

        sizes: dict[str, tuple[int, int]] = {}
        for uuid, text in self._execute("SELECT gpus.uuid, gpus.geometry FROM gpus", {}):
            try:
                geometry = Geometry.from_dict(json.loads(text) if isinstance(text, (str, bytes)) else text)
            except GeometryError:
                continue
            sizes[uuid] = (geometry.compute_slices, geometry.memory_slices)
        return sizes


def open_reader(url: str) -> RunReader:
    """Open the record at `url` for reading runs.

    Raises:
        StoreError: it cannot be used; the message says what to do.
    """
    if url.startswith(f"{_SQLITE}/") and "?" not in url:
        reader = _sqlite(url.removeprefix(_SQLITE))
        if reader is not None:
            return reader
    return _StoreReader(url)


def _sqlite(path: str) -> _SqliteReader | None:
    """Return a connection to a file with the current schema; None to let `store.db` report what is wrong."""
    check_local(path)
    _, connection = open_readable(path)
    try:
        connection.execute("BEGIN")
        names = sorted(name for (name,) in connection.execute("SELECT name FROM schema_migrations"))
    except sqlite3.Error:
        names = []
    if tuple(names) == STEPS:
        return _SqliteReader(connection)
    connection.close()
    return None


class _SqliteReader(RunReader):
    dialect = "sqlite"

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def _execute(self, statement: str, values: Mapping[str, Any]) -> Iterator[Sequence[Any]]:
        try:
            yield from self._connection.execute(statement, dict(values))
        except sqlite3.Error as error:
            raise ReadError(str(error)) from error

    def close(self) -> None:
        self._connection.close()


class _StoreReader(RunReader):
    """Reads through SQLAlchemy, which is only imported here because that takes long (see `runquery`)."""

    def __init__(self, url: str) -> None:
        from contextlib import ExitStack

        from slurm_migbatch.store.db import open_store

        self._store = open_store(url, readonly=True)
        self._closing = ExitStack()
        self._closing.callback(self._store.close)
        self.dialect: str = self._store.engine.dialect.name
        self._connection: Any = None

    def _execute(self, statement: str, values: Mapping[str, Any]) -> Iterator[Sequence[Any]]:
        from sqlalchemy import text
        from sqlalchemy.exc import SQLAlchemyError

        try:
            if self._connection is None:
                self._connection = self._closing.enter_context(self._store.reading())
            yield from self._connection.execute(text(statement), dict(values))
        except SQLAlchemyError as error:
            raise ReadError(str(getattr(error, "orig", error))) from error

    def close(self) -> None:
        self._closing.close()

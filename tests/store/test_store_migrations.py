"""Migrations: in order, once, recorded, by one of many starting processes, and never backwards."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import Connection, MetaData, inspect, text

from slurm_migbatch.store.db import Store, open_store
from slurm_migbatch.store.engines import make_engine
from slurm_migbatch.store.errors import OlderDatabaseError
from slurm_migbatch.store.history import HISTORY
from slurm_migbatch.store.migrations import Migration, migrate, pending
from slurm_migbatch.store.models import Base
from tests.support.processes import at_once
from tests.support.store_events import Node, run_of


def step(name: str, sql: str) -> Migration:
    return Migration(name, lambda connection: connection.execute(text(sql)) and None)


ONE = step("0001 one", "CREATE TABLE one (a INTEGER)")
TWO = step("0002 two", "ALTER TABLE one ADD COLUMN b INTEGER")


def test_steps_are_done_once_in_order_and_recorded(url: str) -> None:
    engine = make_engine(url, readonly=False)
    with engine.begin() as connection:
        assert pending(connection, [ONE, TWO]) == ["0001 one", "0002 two"]
    assert migrate(engine, [ONE]) == ["0001 one"]
    with engine.begin() as connection:
        assert pending(connection, [ONE, TWO]) == ["0002 two"]
    assert migrate(engine, [ONE, TWO]) == ["0002 two"]
    assert migrate(engine, [ONE, TWO]) == []
    with engine.begin() as connection:
        names = connection.execute(text("SELECT name FROM schema_migrations ORDER BY name")).scalars().all()
    assert names == ["0001 one", "0002 two"]
    engine.dispose()


@pytest.mark.sqlite
def test_a_step_that_fails_leaves_neither_tables_nor_record(url: str) -> None:
    def fails(connection: Connection) -> None:
        connection.execute(text("CREATE TABLE half (a INTEGER)"))
        raise RuntimeError("power cut")

    engine = make_engine(url, readonly=False)
    with pytest.raises(RuntimeError):
        migrate(engine, [ONE, Migration("0002 half", fails)])
    with engine.begin() as connection:
        assert pending(connection, [ONE, TWO]) == ["0002 two"]
        assert not inspect(connection).has_table("half")
    engine.dispose()


@pytest.mark.slow
@pytest.mark.parametrize("done", range(len(HISTORY) + 1))
def test_every_earlier_schema_is_upgraded(url: str, done: int) -> None:
    engine = make_engine(url, readonly=False)
    migrate(engine, HISTORY[:done])
    engine.dispose()
    with open_store(url) as store:
        Node(store).send(Node(store).start(100, 7))
        assert run_of(store, 7).run["state"] == "RUNNING"


@pytest.mark.parametrize("step", HISTORY, ids=lambda step: step.name)
def test_every_step_can_be_run_twice(url: str, step: Migration) -> None:
    """MariaDB cannot roll back DDL, so an interrupted step starts again from its beginning."""
    engine = make_engine(url, readonly=False)
    migrate(engine, HISTORY)
    with engine.begin() as connection:
        step.apply(connection)
    engine.dispose()


@pytest.mark.sqlite
def test_migrated_tables_match_the_models(store: Store) -> None:
    found = MetaData()
    found.reflect(store.engine)
    expected = Base.metadata.tables
    assert set(found.tables) == {*expected, "schema_migrations"}
    for name, table in expected.items():
        made = found.tables[name]
        assert {c.name: (str(c.type), c.nullable, c.primary_key) for c in made.columns} == {
            c.name: (c.type.compile(store.engine.dialect), c.nullable, c.primary_key) for c in table.columns
        }, name
        indexes = {(i.name, tuple(c.name for c in i.columns)) for i in table.indexes}
        assert {(i.name, tuple(c.name for c in i.columns)) for i in made.indexes} == indexes, name
        assert {f.target_fullname for f in made.foreign_keys} == {f.target_fullname for f in table.foreign_keys}, name


def test_a_reader_does_not_migrate(url: str) -> None:
    make_engine(url, readonly=False).dispose()
    with pytest.raises(OlderDatabaseError, match="start migbatchd"):
        open_store(url, readonly=True)


def test_concurrent_starts_run_each_step_once(url: str, tmp_path: Path) -> None:
    """Eight processes open an empty database; all succeed and each step was done once."""
    (tmp_path / "store").mkdir()
    at_once(8, "from slurm_migbatch.store.db import open_store\ndef work(n, url): open_store(url).close()\n", url)
    with open_store(url) as store, store.reading() as connection:
        assert connection.execute(text("SELECT count(*) FROM schema_migrations")).scalar() == len(HISTORY)

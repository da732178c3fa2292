"""The kind of database that test clusters and the tests of the record use: pytest's option --database.

Each process of a run has one server of its own, started on first use, and each cluster has an empty database on it.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from sqlalchemy import text

from slurm_migbatch.store.engines import make_engine
from slurm_migbatch.testbed.product import Product
from tests.support.servers import START

KINDS = ("sqlite", *START)


class Databases:
    """Empty databases on one server of a kind."""

    def __init__(self, kind: str, running: ExitStack) -> None:
        """Set the kind; a started server ends with `running`."""
        self.kind = kind
        self._running = running
        self._server = ""
        self._numbers = itertools.count(1)
        self._of: dict[str, str] = {}

    def new(self) -> str:
        """Return the URL of a new database."""
        if not self._server:
            directory = self._running.enter_context(tempfile.TemporaryDirectory(prefix="migbatch-db-"))
            self._server = self._running.enter_context(START[self.kind](Path(directory)))
        name = f"migbatch{next(self._numbers)}"
        engine = make_engine(self._server, readonly=False)
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text(f"CREATE DATABASE {name}"))
        url = engine.url.set(drivername=self.kind, database=name)
        engine.dispose()
        return url.render_as_string(hide_password=False)

    def of(self, owner: str) -> str:
        """Return the URL of an owner's database, always the same."""
        if owner not in self._of:
            self._of[owner] = self.new()
        return self._of[owner]


@contextmanager
def chosen(kind: str) -> Iterator[Databases | None]:
    """Give every test cluster a database of this kind, unless its configuration names one. None for "sqlite"."""
    if kind == "sqlite":
        yield None
        return
    with ExitStack() as running, pytest.MonkeyPatch.context() as patch:
        databases = Databases(kind, running)
        patch.setattr(Product, "default_record", property(lambda product: databases.of(str(product.state))))
        yield databases

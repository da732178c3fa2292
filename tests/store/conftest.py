"""A store in an empty database (a temporary file without --database), and empty databases of every kind."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from slurm_migbatch.store.db import Store, open_store
from tests.support.databases import Databases
from tests.support.servers import KINDS, START, empty
from tests.support.stores import prepared


@pytest.fixture
def url(tmp_path: Path, databases: Databases | None) -> str:
    """Where this test's database is; nothing is in it yet."""
    return databases.new() if databases else f"sqlite:///{tmp_path}/store/migbatch.db"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    """An empty store."""
    with open_store(prepared(url)) as opened:
        yield opened


@pytest.fixture(scope="session")
def server_of() -> Iterator[Callable[[str], str]]:
    """URL of the one server of a kind, which is started for the first test that wants it; emptied for each."""
    with ExitStack() as stack:
        urls: dict[str, str] = {}

        def url_of(kind: str) -> str:
            if kind not in urls:
                directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="migbatch-db-"))
                urls[kind] = stack.enter_context(START[kind](Path(directory)))
            empty(urls[kind])
            return urls[kind]

        yield url_of


@pytest.fixture(params=["sqlite", *(pytest.param(kind, marks=pytest.mark.slurm) for kind in KINDS)])
def database(request: pytest.FixtureRequest, tmp_path: Path, server_of: Callable[[str], str]) -> str:
    """URL of an empty database, of each kind in turn."""
    return f"sqlite:///{tmp_path}/store/migbatch.db" if request.param == "sqlite" else server_of(request.param)

"""A store in a temporary file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_migbatch.store.db import Store, open_store


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Where this test's database is; it is not made yet."""
    return f"sqlite:///{tmp_path}/store/migbatch.db"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    """An empty store."""
    with open_store(url) as opened:
        yield opened

"""Empty records for tests that do not test their creation."""

from __future__ import annotations

import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from sqlalchemy.exc import OperationalError

from slurm_migbatch.store.db import open_store

_SQLITE = "sqlite:///"


def prepared(url: str) -> str:
    """Create an empty record if `url` names a file that does not exist; return `url`.

    It is a copy of a record created in the usual way: creating the tables takes 15 times as long.
    """
    file = Path(url.removeprefix(_SQLITE))
    if url.startswith(_SQLITE) and not file.exists():
        file.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        file.write_bytes(_empty())
        file.chmod(0o640)
    return url


@lru_cache
def _empty() -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        open_store(f"{_SQLITE}{directory}/empty.db").close()
        return Path(directory, "empty.db").read_bytes()


class Away:
    """A database that does not answer."""

    moved = False
    locked_by = ""

    def reconnect(self) -> None:
        """Do nothing; see Store."""

    def __getattr__(self, name: str) -> Any:
        def fail(*args: Any, **more: Any) -> None:
            raise OperationalError("select", {}, Exception("database is locked"))

        return fail

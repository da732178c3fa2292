"""The site of the predictor's tests, and the shim in a real Lua."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_migbatch.predict.learned import LearnedPredictor
from slurm_migbatch.predict.selection import Chooser
from slurm_migbatch.submit.table import TableCompiler, write_table
from tests.support.gpu_kinds import SITE
from tests.support.lua_shim import LUA, Shim, finds_posix


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is silent is not sent away because the machine is slow."""
    monkeypatch.setattr("slurm_migbatch.submit.server.IDLE_S", 600.0)


@pytest.fixture(scope="session", autouse=True)
def posix() -> None:
    """Without lua-posix half of the tests fail, each in its own way."""
    if not finds_posix(LUA):
        pytest.exit(f"{LUA} does not find lua-posix")


@pytest.fixture(scope="session")
def chooser() -> Chooser:
    return Chooser(LearnedPredictor())


@pytest.fixture(scope="session")
def compiler(chooser: Chooser) -> TableCompiler:
    """The compiler of whole tables: a table takes seconds, unless it has the GPUs of the one before."""
    return TableCompiler(chooser)


@pytest.fixture(scope="session")
def table(tmp_path_factory: pytest.TempPathFactory, compiler: TableCompiler) -> Path:
    """The site's compiled table."""
    path = tmp_path_factory.mktemp("table") / "table.lua"
    write_table(path, compiler.text(SITE))
    return path


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory, table: Path) -> Iterator[Shim]:
    """job_submit.lua with the compiled table and without the service."""
    with Shim(tmp_path_factory.mktemp("shim"), table=str(table)) as running:
        yield running

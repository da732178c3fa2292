"""Decisions on loans, dispatch and sharing know no database, no daemon and no clock."""

import ast
from pathlib import Path

import pytest

import slurm_migbatch.cosched
import slurm_migbatch.decide

ROOMS = (slurm_migbatch.cosched, slurm_migbatch.decide)
MODULES = sorted(path for room in ROOMS for path in Path(str(room.__file__)).parent.glob("*.py"))
ALLOWED = tuple(
    f"slurm_migbatch.{room}"
    for room in ("cosched", "decide", "mig", "policy", "predict", "slurm", "supply", "workload")
)


def imported(path: Path) -> list[str]:
    """Every module that a file imports, wherever in it."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path.name}: imports are absolute"
            found.append(f"{node.module}")
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: f"{path.parent.stem}-{path.stem}")
def test_the_room_imports_downwards_and_does_nothing_by_itself(path: Path) -> None:
    names = imported(path)
    assert [name for name in names if name.startswith("slurm_migbatch") and not name.startswith(ALLOWED)] == []
    forbidden = {
        "os",
        "time",
        "random",
        "socket",
        "subprocess",
        "sqlite3",
        "sqlalchemy",
        "asyncio",
        "threading",
        "pathlib",
    }
    assert not forbidden & {name.partition(".")[0] for name in names}

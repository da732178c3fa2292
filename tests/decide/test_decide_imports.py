"""Decisions know neither Slurm's commands nor SQL nor NVML nor a clock, and not the simulator that judges them."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import slurm_migbatch.decide

ROOT = Path(slurm_migbatch.decide.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))
NAMES = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in MODULES}
ALLOWED = tuple(f"slurm_migbatch.{package}" for package in ("decide", "mig", "predict", "slurm", "workload"))
FOREIGN = ("cli", "config", "daemon", "lab", "node", "store", "submit", "testbed")
WORLD = {
    "asyncio",
    "datetime",
    "os",
    "pathlib",
    "random",
    "socket",
    "sqlalchemy",
    "sqlite3",
    "subprocess",
    "threading",
    "time",
}


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


@pytest.mark.parametrize("path", MODULES, ids=NAMES.__getitem__)
def test_a_decision_imports_values_only_and_reads_no_clock_no_file_and_no_chance_of_its_own(path: Path) -> None:
    names = imported(path)
    assert [name for name in names if name.startswith("slurm_migbatch") and not name.startswith(ALLOWED)] == []
    assert "slurm_migbatch.mig.nvml" not in names
    assert not WORLD & {name.partition(".")[0] for name in names}


def test_what_decisions_draw_in_knows_nothing_of_the_world_either() -> None:
    """All of them, imported by a new process: neither they nor what they import brings one of those packages along."""
    names = [f"slurm_migbatch.decide.{NAMES[path]}".removesuffix(".__init__") for path in MODULES]
    program = (
        "import importlib, json, sys\n"
        "for name in json.loads(sys.argv[1]): importlib.import_module(name)\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(names)], check=True, capture_output=True, text=True
    )
    loaded = json.loads(done.stdout)
    assert set(names) <= set(loaded)
    foreign = {f"slurm_migbatch.{package}" for package in FOREIGN}
    assert [name for name in loaded if ".".join(name.split(".")[:2]) in foreign] == []
    assert not {"sqlite3", "sqlalchemy", "pynvml"} & set(loaded)

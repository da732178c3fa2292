"""The decide package imports no Slurm commands, SQL, NVML or clock, and not the simulator that evaluates it."""

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
    """Every module that a file imports, at any level of the file."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path.name}: imports are absolute"
            found.append(f"{node.module}")
    return found


@pytest.mark.parametrize("path", MODULES, ids=NAMES.__getitem__)
def test_decide_module_imports_no_clock_file_random_or_nvml_module(path: Path) -> None:
    names = imported(path)
    assert [name for name in names if name.startswith("slurm_migbatch") and not name.startswith(ALLOWED)] == []
    assert "slurm_migbatch.mig.nvml" not in names
    assert not WORLD & {name.partition(".")[0] for name in names}


def test_importing_all_decide_modules_loads_no_foreign_package() -> None:
    """Imports all modules in a new process: neither they nor their own imports load one of those packages."""
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

"""Policies know neither Slurm nor SQL nor NVML, and not the simulator that judges them."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import slurm_migbatch.policy

MODULES = sorted(Path(slurm_migbatch.policy.__file__).parent.glob("*.py"))
ALLOWED = ("slurm_migbatch.mig", "slurm_migbatch.workload", "slurm_migbatch.policy")
FOREIGN = ("sim", "store", "slurm", "node", "daemon", "supply", "submit", "cli")


def imported(path):
    """Every module that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path.name}: imports are absolute"
            yield f"{node.module}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_policy_imports_values_only(path):
    ours = [name for name in imported(path) if name.split(".")[0] == "slurm_migbatch"]
    assert [name for name in ours if not name.startswith(ALLOWED)] == []
    assert "slurm_migbatch.mig.nvml" not in ours


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_policy_reads_no_clock_no_file_and_no_chance_of_its_own(path):
    assert not {"os", "time", "datetime", "random", "socket", "subprocess", "sqlite3", "pathlib"} & set(imported(path))


def test_what_a_policy_draws_in_knows_nothing_of_the_world_either():
    """All policies, imported by a new process: neither they nor what they import brings one of those packages along."""
    names = [f"slurm_migbatch.policy.{path.stem}" for path in MODULES if path.stem != "__init__"]
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
    foreign = tuple(f"slurm_migbatch.{package}" for package in FOREIGN)
    assert [name for name in loaded if name.startswith(tuple(f"{each}." for each in foreign)) or name in foreign] == []
    assert not {"sqlite3", "sqlalchemy", "pynvml"} & set(loaded)

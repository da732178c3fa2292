"""Policies know neither Slurm nor SQL nor NVML, and not the simulator that judges them."""

import ast
from pathlib import Path

import pytest

import slurm_migbatch.policy

MODULES = sorted(Path(slurm_migbatch.policy.__file__).parent.glob("*.py"))
ALLOWED = ("slurm_migbatch.mig", "slurm_migbatch.workload", "slurm_migbatch.policy")


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

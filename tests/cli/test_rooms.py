"""CONTRIBUTING's table of rooms, held to what the code imports."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "slurm_migbatch"
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| `(\w+)/` \| [^|]+ \| ([^|]+) \|$", TEXT, re.MULTILINE))
ROOMS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
#: what CONTRIBUTING names as exceptions: room, the room below it that it imports, and the modules that it may import
EXCEPTIONS = {
    ("profiling", "predict"): {"facts"},
}


def imported(room):
    """Full names of the modules that a room imports, wherever in its files, without the standard library and itself."""
    found = set()
    for path in (PACKAGE / room).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                whole = node.module in ("slurm_migbatch", *(f"slurm_migbatch.{name}" for name in ROOMS))
                found |= {f"{node.module}.{alias.name}" for alias in node.names} if whole else {str(node.module)}
    return {
        name
        for name in found
        if name.partition(".")[0] not in sys.stdlib_module_names
        and not f"{name}.".startswith(f"slurm_migbatch.{room}.")
    }


def split(names):
    """(rooms, packages of others) of module names."""
    ours = {name.split(".")[1] for name in names if name.startswith("slurm_migbatch.")}
    return ours, {name.partition(".")[0] for name in names} - {"slurm_migbatch"}


def test_every_room_has_a_row():
    assert sorted(ROWS) == ROOMS


@pytest.mark.parametrize("room", ROOMS)
def test_a_row_says_what_the_room_imports(room):
    rooms, packages = split(imported(room))
    cell = re.sub(r"\([^)]*\)", "", ROWS[room])
    told = rooms if cell.startswith("every other room") else set(re.findall(r"`(\w+)/`", cell))
    others = cell.rpartition(";")[2] if ";" in cell else cell
    assert told == rooms
    assert set(re.findall(r"(?<![`\w])[a-z]\w*(?![`\w/])", others)) - {"nothing"} == packages


def test_rooms_import_what_stands_above_them():
    order = list(ROWS)
    below = {}
    for room in order:
        for name in imported(room):
            other = name.split(".")[1] if name.startswith("slurm_migbatch.") else room
            if order.index(other) > order.index(room):
                below.setdefault((room, other), set()).add(name.split(".")[2])
    assert below == EXCEPTIONS


def test_tables_of_profiles_are_where_contributing_says():
    """A file with a row of profile, first units and number of units is one."""
    table = re.compile(r"\d+g\.\d+gb\"[^\n]*\d+[^\n]*\n[^\n]*\d+g\.\d+gb\"[^\n]*\d+[^\n]*\n[^\n]*\d+g\.\d+gb\"")
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if table.search(path.read_text(encoding="utf-8"))
    }
    assert found == {"lab/sim/gpus.py", "profiling/sources/laboratory.py"}

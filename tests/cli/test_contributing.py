"""What CONTRIBUTING says of the packages and import contracts cannot hold."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "slurm_migbatch"
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_every_package_has_a_row():
    rows = re.findall(r"^\| `(\w+)/` \| [^|]+ \|$", TEXT, re.MULTILINE)
    assert sorted(rows) == sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


def test_tables_of_profiles_are_where_contributing_says():
    """A file with a row of profile, first units and number of units is one."""
    table = re.compile(r"\d+g\.\d+gb\"[^\n]*\d+[^\n]*\n[^\n]*\d+g\.\d+gb\"[^\n]*\d+[^\n]*\n[^\n]*\d+g\.\d+gb\"")
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if table.search(path.read_text(encoding="utf-8"))
    }
    assert found == {"lab/sim/gpus.py", "profiling/sources/laboratory.py"}
    assert all(f"`{path}`" in TEXT for path in found)

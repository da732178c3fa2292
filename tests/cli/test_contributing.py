"""What CONTRIBUTING says about the packages and import contracts cannot enforce."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "slurm_migbatch"
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_every_package_has_a_row_in_contributing():
    rows = re.findall(r"^\| `(\w+)/` \| [^|]+ \|$", TEXT, re.MULTILINE)
    assert sorted(rows) == sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


def test_profile_tables_are_where_contributing_says():
    """A file counts as such a table if it has rows of profile, first units and number of units."""
    table = re.compile(r"\d+g\.\d+gb\"[^\n]*\d+[^\n]*\n[^\n]*\d+g\.\d+gb\"[^\n]*\d+[^\n]*\n[^\n]*\d+g\.\d+gb\"")
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if table.search(path.read_text(encoding="utf-8"))
    }
    assert found == {"lab/sim/gpus.py", "profiling/sources/laboratory.py"}
    assert all(f"`{path}`" in TEXT for path in found)

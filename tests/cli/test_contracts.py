"""The import contracts catch the imports that they forbid."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import slurm_migbatch

ROOT = Path(slurm_migbatch.__file__).parent
FORBIDDEN = {
    "layers": ("mig/profile.py", "slurm_migbatch.decide.core"),
    "stages": ("decide/capacity/model.py", "slurm_migbatch.decide.snapshot"),
    "product": ("daemon/main.py", "slurm_migbatch.lab.bars"),
    "hooks": ("node/exits.py", "slurm_migbatch.slurm.gres"),
    "nvml": ("profiling/oom.py", "pynvml"),
    "decisions": ("predict/knee.py", "urllib.request"),
    "plots": ("report/table.py", "matplotlib.pyplot"),
    "roll-ups": ("report/table.py", "pandas"),
    "charts": ("report/lines.py", "plotly"),
    "database": ("site/render.py", "sqlalchemy"),
    "doctor-anywhere": ("doctor/disks.py", "slurm_migbatch.site.render"),
}
"""Contract -> a module, and what it must not import."""


def test_a_forbidden_import_breaks_each_contract(tmp_path: Path) -> None:
    copy = tmp_path / "slurm_migbatch"
    shutil.copytree(ROOT, copy, ignore=lambda folder, names: [n for n in names if n.endswith((".c", ".h", ".pyc"))])
    pyproject = (ROOT.parent / "pyproject.toml").read_text(encoding="utf-8")
    (tmp_path / "pyproject.toml").write_text(pyproject, encoding="utf-8")
    contracts = dict(re.findall(r'^id = "(.*)"\nname = "(.*)"$', pyproject, re.MULTILINE))
    assert contracts.keys() == FORBIDDEN.keys()
    for module, name in FORBIDDEN.values():
        with (copy / module).open("a", encoding="utf-8") as file:
            file.write(f"import {name}\n")
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    line = [sys.executable, "-c", program, "--no-logo", "--no-cache"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    verdicts = dict(re.findall(r"^(.*) (KEPT|BROKEN)$", done.stdout, re.MULTILINE))
    assert verdicts == dict.fromkeys(contracts.values(), "BROKEN"), done.stdout + done.stderr
    for module, name in FORBIDDEN.values():
        importer = f"slurm_migbatch.{module.removesuffix('.py').replace('/', '.')}"
        assert f"{importer} -> {name if name.startswith('slurm_migbatch') else name.partition('.')[0]}" in done.stdout

"""Training environments belong to the users: the library needs no further packages in them."""

import subprocess
import sys
from pathlib import Path

import slurm_migbatch

CODE = """
import sys
sys.path.insert(0, sys.argv[1])
import slurm_migbatch.elastic as elastic
elastic.Trainer(sys.argv[2], effective_batch=4, items=10)
print(*sorted(sys.modules))
"""


def test_elastic_imports_only_the_standard_library(tmp_path):
    root = str(Path(slurm_migbatch.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-ISB", "-W", "error", "-c", CODE, root, str(tmp_path)],
        env={}, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    names = set(done.stdout.split())
    ours = {name for name in names if name.split(".")[0] == "slurm_migbatch"}
    assert {name for name in ours if not name.startswith("slurm_migbatch.elastic")} == {"slurm_migbatch"}
    others = {name.split(".")[0] for name in names - ours}
    assert others <= sys.stdlib_module_names | {"__main__"}

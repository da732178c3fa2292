"""Root's hooks import this package when the agent does not answer, so importing it must be cheap and do nothing."""

import subprocess
import sys

HEAVY = {"dataclasses", "inspect", "json", "sqlite3", "asyncio", "logging", "subprocess", "pynvml", "socket", "ssl"}


def loaded(*modules):
    code = (
        "import sys; sys.path[:0] = sys.argv[1].split(':')\n"
        "import " + ", ".join(modules) + "\n"
        "print(*sorted(sys.modules))"
    )
    path = ":".join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-ISB", "-c", code, path], env={}, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return set(done.stdout.split())


def test_values_and_planner_import_no_heavy_modules():
    names = ["profile", "placement", "layout", "geometry", "planning", "grant", "driver", "naming", "text"]
    assert not loaded(*(f"slurm_migbatch.mig.{name}" for name in names)) & HEAVY


def test_nvml_adapter_imports_only_pynvml_and_its_dependencies():
    extra = loaded("slurm_migbatch.mig.nvml") - loaded("pynvml", "slurm_migbatch.mig.driver")
    assert {name for name in extra if not name.startswith("slurm_migbatch.")} == set()

"""The header of a test run says what a Slurm release lacks and which tests are left out for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("file", "marker"),
    [("tests/slurm/test_contract_slurmrestd.py", "slurmrestd"), ("tests/testbed/test_autodetect.py", "nvml_plugin")],
)
def test_header_names_the_markers_left_out_for_this_slurm(tmp_path: Path, file: str, marker: str) -> None:
    options = ["--collect-only", "-p", "no:cacheprovider", f"--slurm-root={tmp_path}", f"--basetemp={tmp_path}/base"]
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, file], cwd=HERE, env=env, capture_output=True, text=True
    )
    assert f"left out: tests marked {marker}, as the Slurm of {tmp_path} has no " in done.stdout, done.stdout
    assert "deselected" in done.stdout

"""The commands of docs/developers.md that start a test bed by hand and take it down again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_migbatch.testbed import registry
from tests.support.transcripts import ROOT

pytestmark = pytest.mark.slurm


def commands(directory: Path, slurm_root: str) -> str:
    """The page's commands, for a test bed in that directory: the page's own is one for the whole machine."""
    page = (ROOT / "docs/developers.md").read_text(encoding="utf-8")
    block = re.search(r"^## The test bed\n.*?^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert block
    text = re.sub(r"migbatch testbed (\w+)", rf"migbatch testbed \1 --dir {directory}", block[1])
    return text.replace("testbed up", f"testbed up --slurm-root {slurm_root}") if slurm_root else text


def test_documented_commands_start_and_remove_a_test_bed(slurm_root: str) -> None:
    directory = registry.new_directory()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    try:
        done = subprocess.run(
            ["sh", "-e", "-c", commands(directory, slurm_root)],
            env={**os.environ, "PATH": path}, check=False, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done
        assert "Submitted batch job 1" in done.stdout
        assert re.search(r"^n2 ", done.stdout, re.MULTILINE) and f"removed {directory}" in done.stdout
        assert not directory.exists()
    finally:
        if record := registry.find(directory):
            registry.destroy(record)

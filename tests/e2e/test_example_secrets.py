"""The secrets of the examples' servers if the job is submitted in a directory that others can write too."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.directories import open_to_users
from tests.support.nodes import ALICE, BOB

EXAMPLES = Path(__file__).resolve().parents[2] / "sbatch_examples"


@pytest.mark.parametrize(("script", "secret"), [("vllm.sh", "vllm-7.key"), ("jupyter.sh", "jupyter-7.token")])
def test_secret_is_not_written_into_a_file_that_another_user_has_put_there(
    tmp_path: Path, script: str, secret: str
) -> None:
    """Job ids are known, and directories of projects are often writable for a group."""
    open_to_users(tmp_path)
    shared, home, programs = (tmp_path / name for name in ("shared", "home", "bin"))
    for folder in (shared, home, programs):
        folder.mkdir()
    shared.chmod(0o777)
    os.chown(home, ALICE, ALICE)
    (programs / "srun").write_text(f'#!/bin/sh\nstat -c %a "{home}/{secret}" >&2\n')
    (programs / "vllm").touch()
    for program in programs.iterdir():
        program.chmod(0o755)
    planted = shared / secret
    planted.touch()
    os.chown(planted, BOB, BOB)
    planted.chmod(0o666)
    environ = {"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(home), "SLURM_SUBMIT_DIR": str(shared)}
    ended = subprocess.run(
        ["bash", str(EXAMPLES / script)],
        env=environ | {"SLURM_JOB_ID": "7"},
        cwd=shared,
        capture_output=True,
        text=True,
        check=True,
        user=ALICE,
        group=ALICE,
    )
    assert not planted.read_text()
    assert ended.stderr.splitlines()[-1] == "600"

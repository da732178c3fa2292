"""The example training jobs on a real Slurm: on USR1 they save and pause; when requeued, they continue where they were.

Their state is checked by their own arithmetic: what they print at the end is that of an uninterrupted run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import slurm_migbatch
from slurm_migbatch.store.db import open_store
from slurm_migbatch.store.progress import RunProgressRow
from slurm_migbatch.testbed.cluster import Cluster
from tests.support.end_to_end import account, cancel, hasten, settled, until

PACKAGE = Path(slurm_migbatch.__file__).parent
EXAMPLES = PACKAGE.parent / "sbatch_examples"
STEPS = 100
SPEED = {"STEPS": str(STEPS), "STEP_SECONDS": "0.1", "PYTHON": "/usr/bin/python3"}


@pytest.fixture
def training(stack: Cluster) -> Iterator[Path]:
    """The examples and the library in a user's home, readable by the user."""
    home = stack.home("mbalice") / f"training{time.monotonic_ns()}"
    library = home / "slurm_migbatch"
    shutil.copytree(PACKAGE / "elastic", library / "elastic", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PACKAGE / "__init__.py", library)
    for path in EXAMPLES.glob("elastic_*"):
        shutil.copy(path, home)
    user = stack.user("mbalice")
    for path in (home, *home.rglob("*")):
        os.chown(path, user.uid, user.gid)
    yield home
    cancel(stack)


def submit(bed: Cluster, home: Path, script: str) -> int:
    argv = ["env", "-C", str(home), *(f"{key}={value}" for key, value in SPEED.items()), f"PYTHONPATH={home}"]
    return int(bed.run([*argv, bed.root.locate("sbatch"), "--parsable", "--export=ALL", script], "mbalice").stdout)


def undisturbed(home: Path, script: str, tmp_path: Path) -> str:
    """The last line that the example prints, run here."""
    environ = {**SPEED, "STEP_SECONDS": "0", "PYTHON": sys.executable, "PYTHONPATH": str(PACKAGE.parent)}
    job_environ = {
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "TRAINING": str(home / "elastic_training.py"),
        "PATH": os.environ["PATH"],
    }
    done = subprocess.run(
        ["bash", str(home / script)], env={**environ, **job_environ}, capture_output=True, text=True, check=True
    )
    return results(done.stdout)[-1]


def results(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith((f"step {STEPS}:", "state "))]


def progress_rows(bed: Cluster, job: int) -> list[RunProgressRow]:
    """The record's rows of each run of a job."""
    with open_store(bed.product.record, readonly=True) as store:
        return store.job_progress([job])


@pytest.mark.parametrize("script", ["elastic_training.sh", "elastic_bash.sh"])
def test_training_job_saves_on_signal_and_continues_after_its_requeue(
    stack: Cluster, training: Path, script: str, tmp_path: Path
) -> None:
    expected = undisturbed(training, script, tmp_path)
    job = submit(stack, training, script)
    stack.wait_job(job, "RUNNING")
    out = training / f"{script.removesuffix('.sh').replace('_training', '').replace('_', '-')}-{job}.out"
    until("the training's beginning", lambda: out.exists() and "from step 0" in out.read_text())
    time.sleep(1.0)

    asked = time.time()
    stack.run(["scancel", "--full", "--signal=USR1", str(job)])
    until("a checkpoint in the record", lambda: (progress_rows(stack, job)[0].checkpoint or 0.0) >= asked)
    print(f"checkpoint in the record {time.time() - asked:.2f} s after the signal")
    (first,) = progress_rows(stack, job)
    assert first.steps is not None and 0 < first.steps < STEPS
    assert stack.job_state(job) == "RUNNING"

    stack.run(["scontrol", "requeue", str(job)])
    until("the job's return to the queue", lambda: stack.job_state(job) in ("PENDING", "RUNNING"))
    assert hasten(stack, job) == "COMPLETED", out.read_text()
    assert results(out.read_text())[-1] == expected
    assert f"from step {first.steps}" in out.read_text()  # no step was done twice
    account(stack, job)
    until("the last report", lambda: progress_rows(stack, job)[-1].steps == STEPS)
    runs = progress_rows(stack, job)
    assert [(run.restart, run.restored) for run in runs] == [(0, None), (1, first.steps)]
    assert all(run.profile == "1g.10gb" and run.ended is not None for run in runs)
    settled(stack)


def test_training_job_requeued_without_a_signal_saves_on_sigterm(
    stack: Cluster, training: Path, tmp_path: Path
) -> None:
    expected = undisturbed(training, "elastic_training.sh", tmp_path)
    job = submit(stack, training, "elastic_training.sh")
    stack.wait_job(job, "RUNNING")
    out = training / f"elastic-{job}.out"
    until("the training's beginning", lambda: out.exists() and "from step 0" in out.read_text())
    until("its first checkpoint", lambda: bool(list((training / f"elastic-{job}").glob("step-*.ckpt"))))
    stack.run(["scontrol", "requeue", str(job)])  # which sends TERM, and KILL later
    until("the job's return to the queue", lambda: stack.job_state(job) in ("PENDING", "RUNNING"))
    assert hasten(stack, job) == "COMPLETED", out.read_text()
    assert results(out.read_text())[-1] == expected
    saved = re.search(r"terminating after step (\d+); step \1 is saved", out.read_text())
    assert saved and f"from step {saved[1]}" in out.read_text()
    settled(stack)

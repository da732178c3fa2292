"""`migbatch progress`: the node can parse what it writes, and it never harms a job."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slurm_migbatch.node import progress, progressreport
from slurm_migbatch.query.show import training


def report(path: Path | None, *arguments: str, **environ: str) -> tuple[int, str]:
    """Exit code and stderr, in the environment of a job."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "MIGBATCH_"))}
    location = {} if path is None else {"MIGBATCH_PROGRESS": str(path)}
    line = [sys.executable, "-m", "slurm_migbatch.cli", "progress", *arguments]
    done = subprocess.run(line, env={**kept, **location, **environ}, capture_output=True, text=True, check=False)
    assert done.stdout == ""
    return done.returncode, done.stderr


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "17.0"
    path.touch()
    return path


def understood(file: Path) -> list[progressreport.ProgressLine | None]:
    return [progressreport.parse(line) for line in file.read_bytes().splitlines()]


def test_node_parses_the_reported_progress(file: Path) -> None:
    arguments = (
        "--items",
        "5e3",
        "--seconds",
        "12.5",
        "--batch",
        "32",
        "--latency-ms",
        "0.0004",
        "--p99-ms",
        "31",
        "--done",
    )
    assert report(file, *arguments) == (0, "")
    assert report(file, "--items", "6000") == (0, "")
    first, second = understood(file)
    assert first is not None and second is not None
    assert first._replace(at=None) == progressreport.ProgressLine(5000, 12.5, 32, 0.0004, 31, None, None, 1)
    assert first.at is not None and second.at is not None and first.at <= second.at
    assert second.items == 6000


def test_training_job_reports_steps_and_checkpoints(file: Path) -> None:
    begun = time.time()
    assert report(file, "--restored", "800") == (0, "")
    assert report(file, "--steps", "1200", "--checkpoint", "--ckpt-seconds", "2.5") == (0, "")
    assert report(file, "--checkpoint=1790000000.5") == (0, "")
    assert report(file, "--checkpoint", "1790000001") == (0, "")
    restored, now, *given = understood(file)
    assert restored is not None and now is not None
    assert restored.restored == 800
    assert (now.steps, now.ckpt_s) == (1200, 2.5)
    assert now.checkpoint is not None and begun <= now.checkpoint + 1e-6 <= time.time()
    assert [line.checkpoint for line in given if line is not None] == [1790000000.5, 1790000001]


@pytest.mark.parametrize(
    ("environ", "task"),
    [
        ({}, None),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "3"}, 3),
        ({"SLURM_STEP_ID": "-5", "SLURM_PROCID": "0"}, None),
        ({"SLURM_STEP_ID": "4294967291", "SLURM_PROCID": "0"}, None),
        ({"SLURM_PROCID": "0"}, None),
    ],
)
def test_progress_names_the_task_of_a_step(file: Path, environ: dict[str, str], task: int | None) -> None:
    assert report(file, "--items", "1", **environ)[0] == 0
    (line,) = understood(file)
    assert line is not None and line.task == task


def test_progress_without_a_slice_or_a_file_exits_with_0(tmp_path: Path) -> None:
    code, errors = report(None, "--items", "1")
    assert (code, "nothing reported" in errors) == (0, True)
    code, errors = report(tmp_path / "gone", "--items", "1")
    assert (code, "No such file" in errors) == (0, True)
    (tmp_path / "link").symlink_to("/etc/passwd")
    assert report(tmp_path / "link", "--items", "1")[0] == 0


@pytest.mark.parametrize(
    "arguments",
    [[], ["--batch", "3"], ["--items", "-1"], ["--items", "1.5"], ["--items", "nan"], ["--items", "1e16"],
     ["--items", "1", "--seconds", "0"], ["--items", "1", "--latency-ms", "x"], ["--steps", "1.5"],
     ["--checkpoint", "soon"], ["--checkpoint", "-5"], ["--checkpoint", "nan"], ["--ckpt-seconds", "3"]],
)  # fmt: skip
def test_invalid_values_are_wrong_usage(file: Path, arguments: list[str]) -> None:
    code, errors = report(file, *arguments)
    assert (code, errors.count("\n")) == (2, 1)
    assert file.read_text() == ""


def test_show_prints_the_progress_of_a_training_job() -> None:
    safe = {"steps": 70, "checkpoint": 1790000000.5, "ckpt_s": 0.5, "restored": 30}
    (line,) = training({"measured_facts": {"safe": safe}})
    assert line.startswith("70 steps done, continued from step 30, last checkpoint ")
    assert line.endswith(" (it took 0.5 s)")
    assert list(training({"measured_facts": {"safe": {"steps": 0}}})) == ["0 steps done"]
    assert list(training({"measured_facts": {"by": {}}})) == list(training({"measured_facts": None})) == []


def test_job_reports_that_memory_ran_out(file: Path) -> None:
    assert report(file, "--oom") == (0, "")
    assert [line is not None and line.oom for line in understood(file)] == [1]
    content = progress.Content(b"", file.read_bytes(), file.stat().st_size, time.time())
    summary = progressreport.understand(content, time.time() - 60)
    assert summary is not None and (summary.oom, summary.items) == (True, None)

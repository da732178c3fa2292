"""The program that slurm.conf names as TaskProlog, in a container, where migbatch does not exist."""

import subprocess

import pytest

from slurm_migbatch.install import scripts
from slurm_migbatch.node.task_prolog import share

MISSING = "/nonexistent/hooks/task_prolog"


def run(environ, hook=MISSING):
    """Return what the program exports."""
    command = ["sh", "-c", scripts.stub(str(hook))]
    done = subprocess.run(command, env={"PATH": "/usr/bin:/bin", **environ}, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return dict(line.removeprefix("export ").split("=", 1) for line in done.stdout.splitlines())


def step(slices, tasks, local):
    """The environment of a task in a container that has these slices."""
    devices = ",".join(f"MIG-{i}" for i in range(slices))
    numbers = ",".join(str(number) for number in range(7, 7 + tasks))
    environ = {"SLURM_STEP_ID": "0", "SLURM_LOCALID": str(local), "SLURM_GTIDS": numbers}
    environ |= {"MIGBATCH_PROFILE": ",".join(f"{i + 1}g.10gb" for i in range(slices))}
    return environ | {"MIGBATCH_DEVICES": devices, "CUDA_VISIBLE_DEVICES": devices}


@pytest.mark.parametrize("slices", range(1, 6))
@pytest.mark.parametrize("tasks", [1, 2, 3, 5, 8])
def test_each_task_gets_the_share_that_it_gets_outside(slices, tasks):
    rows = [[f"MIG-{i}", f"{i + 1}g.10gb", "9728", "GPU-0"] for i in range(slices)]
    for local in range(tasks):
        environ = step(slices, tasks, local)
        expected = share(rows, {key.encode(): value.encode() for key, value in environ.items()})
        devices, profiles = (",".join(row[i] for row in expected) for i in (0, 1))
        found = run(environ)
        assert found.pop("CUDA_VISIBLE_DEVICES") == found.pop("MIGBATCH_DEVICES") == devices
        assert found == {"MIGBATCH_SLICES": str(len(expected)), "MIGBATCH_PROFILE": profiles}


@pytest.mark.parametrize(
    "changed",
    [
        {"MIGBATCH_DEVICES": ""},
        {"CUDA_VISIBLE_DEVICES": "MIG-1"},  # chosen by the user
        {"CUDA_VISIBLE_DEVICES": "0"},  # cuda=index
        {"SLURM_STEP_ID": "4294967291"},  # the batch script
        {"SLURM_STEP_ID": ""},
        {"SLURM_LOCALID": "$(false)"},
    ],
)
def test_other_tasks_keep_their_environment(changed):
    assert run(step(2, 2, 1) | changed) == {}


def test_hook_runs_where_it_exists(tmp_path):
    hook = tmp_path / "task_prolog"
    hook.write_text("#!/bin/sh\necho export of=hook\n")
    hook.chmod(0o755)
    assert run(step(2, 2, 1), hook) == {"of": "hook"}

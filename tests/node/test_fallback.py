"""A hook that finds itself inside its job's cgroup says what to change."""

from __future__ import annotations

import builtins
import io

import pytest

from slurm_migbatch.node.fallback import inside_job


@pytest.mark.parametrize(
    ("path", "inside"),
    [
        ("/system.slice/slurmstepd.scope/job_17/step_extern/slurm", True),
        ("/system.slice/slurmstepd.scope/s7KNM8MYJHFN00/step_extern/slurm", True),
        ("/system.slice/slurmstepd.scope/job_171/step_extern/slurm", False),
        ("/system.slice/slurmstepd.scope/s7KNM8MYJHWD00/step_0/user/task_0", False),
        ("/system.slice/slurmd.service", False),
    ],
)
def test_hook_inside_its_job_is_recognised_by_both_names_of_the_jobs_cgroup(
    monkeypatch: pytest.MonkeyPatch, path: str, inside: bool
) -> None:
    """Slurm 26.05 names it by the SLUID, which is in the Prolog's environment from 25.11 on."""
    monkeypatch.setattr(builtins, "open", lambda *args, **options: io.StringIO(f"0::{path}\n"))
    said = inside_job(17, b"s7KNM8MYJHFN00")
    monkeypatch.undo()
    assert ("remove RunInJob" in said) == inside

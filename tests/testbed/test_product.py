"""migbatch on a test bed: a job gets its own slice, as on a site."""

from __future__ import annotations

import pwd
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_migbatch.testbed.cluster import Cluster

SHOW = "echo $CUDA_VISIBLE_DEVICES; srun -n2 sh -c 'echo $SLURM_LOCALID $CUDA_VISIBLE_DEVICES'"


def devices(bed: Cluster) -> set[str]:
    """UUIDs of every slice on every node."""
    return {
        compute["uuid"]
        for node in bed.spec.node_names
        for gpu in bed.machine(node).dump()["gpus"]
        for instance in gpu["instances"]
        for compute in instance["compute_instances"]
    }


def test_tasks_see_their_own_slices(stack: Cluster) -> None:
    job = stack.submit("-n2", "--gres=mig:1g.10gb:2", wrap=f"{SHOW}; echo end; sleep 600")
    path = stack.home("mbalice") / f"slurm-{job}.out"
    stack.wait("its steps", lambda: path.exists() and path.read_text().endswith("end\n"))
    batch, *tasks, _ = stack.output(job).splitlines()
    seen = dict(line.split() for line in tasks)
    assert set(batch.split(",")) == set(seen.values()) <= devices(stack)
    assert set(seen) == {"0", "1"}
    stack.run(["scancel", str(job)])
    stack.wait_job(job)


def uids(bed: Cluster, name: str) -> set[int]:
    """The user ids of a process of the test bed."""
    daemon = bed.daemons.get(name)
    assert daemon is not None
    status = Path(f"/proc/{daemon.pid}/status").read_text()
    return {int(uid) for uid in status.partition("\nUid:")[2].splitlines()[0].split()}


def test_slurmctld_runs_as_slurmuser_and_migbatchd_as_root(stack: Cluster) -> None:
    """As on most sites, and as `migbatch install` installs it."""
    assert uids(stack, "slurmctld") == {pwd.getpwnam("slurm").pw_uid}
    assert [uids(stack, name) for name in ("migbatchd", "slurmd-n1", "agent-n1")] == [{0}] * 3


def test_submit_filter_refuses_and_rewrites_requests_of_users(stack: Cluster) -> None:
    refused = stack.run(["sbatch", "--gres=mig:1g", "--wrap", "true"], "mbbob", check=False)
    assert refused.returncode != 0
    assert "1g.10gb" in refused.stderr
    job = stack.submit("--gres=mig:auto", wrap="echo $MIGBATCH_PROFILE", user="mbbob")
    assert stack.wait_job(job) == "COMPLETED"
    assert stack.output(job, "mbbob").strip() == "1g.10gb"


def test_hooks_work_without_agents_and_controller(new_cluster: Callable[..., Cluster]) -> None:
    bed = new_cluster(nodes=1, gpus=1, migbatch="hooks")
    job = bed.submit("--gres=mig:1g.10gb:1", "--comment=[mig:1g.10gb:1]", wrap="echo $CUDA_VISIBLE_DEVICES")
    assert bed.wait_job(job) == "COMPLETED"
    assert bed.output(job).strip() in devices(bed)
    bed.wait("the node", lambda: bed.node_states() == {"n1": "idle"})


@pytest.mark.parametrize("auth", ["munge", "token"])
def test_agents_and_controller_authenticate_each_other(new_cluster: Callable[..., Cluster], auth: str) -> None:
    bed = new_cluster(nodes=1, gpus=1, migbatch="all", auth=auth)
    bed.restart("agent-n1")
    bed.restart("migbatchd")
    bed.wait("migbatchd", lambda: (bed.product.health() or {}).get("ok") is True)

"""A site that differs from the test bed's usual settings.

migbatchd runs as SlurmUser, as `migbatch install --user` installs it, so it may write nothing that is root's. Slurm has
its defaults where the test bed is usually faster or more patient, memory is a consumable resource, and slurmdbd runs:
without accounts the main scheduler of 23.11 passes over jobs, which then wait for backfill. Idle nodes can be powered
down.
"""

from __future__ import annotations

import pwd
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_migbatch.testbed.cluster import Cluster
from tests.support.end_to_end import account, cancel, offer, sbatch, settled, until
from tests.support.lending import LENDING, begun, loans, running, saved, train

USER = "slurm"
SITE = {
    "SelectTypeParameters": "CR_Core_Memory",
    "DefMemPerCPU": "100",
    "EnforcePartLimits": "ALL",
    "SchedulerParameters": "bf_interval=30,batch_sched_delay=3",
    "KillWait": "30",
    "MessageTimeout": "10",
    "MinJobAge": "300",
    "SuspendProgram": "/bin/true",
    "ResumeProgram": "/bin/true",
    "SuspendTime": "3600",
    "SuspendTimeout": "1",
    "ResumeTimeout": "300",
    "PartitionName": "GPU-Long Nodes=n1 MaxTime=INFINITE State=UP PriorityTier=10",
}


@pytest.fixture(scope="module")
def bed(slurm_root: str) -> Iterator[Cluster]:
    spec = {"nodes": 1, "gpus": 1, "dbd": True, "daemon_user": USER, "config": {"lending": LENDING}, "options": SITE}
    with Cluster(None, slurm_root=slurm_root, migbatch="all", **spec) as running_cluster:
        yield running_cluster


def test_jobs_get_their_slices_and_are_accounted(bed: Cluster) -> None:
    daemon = bed.daemons.get("migbatchd")
    assert daemon is not None
    assert Path(f"/proc/{daemon.pid}").stat().st_uid == pwd.getpwnam(USER).pw_uid
    for request in ("mig:auto", "mig:7g.80gb", "mig:2g.20gb:2"):
        job, message = sbatch(bed, "-p", "gpu", f"--gres={request}", wrap="echo $CUDA_VISIBLE_DEVICES")
        assert job, message
        assert bed.wait_job(job) == "COMPLETED"
        assert all(found["mig_uuid"] for found in account(bed, job)["slices"])
    settled(bed)


def test_slices_are_offered_to_a_partition_with_capital_letters(bed: Cluster) -> None:
    job, message = sbatch(bed, "-p", "GPU-Long", "--gres=mig:3g.40gb", wrap="echo $CUDA_VISIBLE_DEVICES")
    assert job, message
    assert bed.wait_job(job) == "COMPLETED"
    found = account(bed, job)
    assert (found["partition"], [slice_["profile"] for slice_ in found["slices"]]) == ("GPU-Long", ["3g.40gb"])
    settled(bed)


def test_loan_is_reclaimed_and_returns(bed: Cluster) -> None:
    job = train(bed, "signal=usr1 min=7g.80gb")
    until("the loan", lambda: running(bed) == {job: "7g.80gb"})
    until("some steps", lambda: begun(bed, job) == [0])
    inference, message = sbatch(bed, "-p", "gpu", "--gres=mig:3g.40gb", wrap="sleep 3", user="mbbob")
    assert inference, message
    assert bed.wait_job(inference) == "COMPLETED"
    until("its return", lambda: len(begun(bed, job)) == 2)
    assert begun(bed, job)[1] == saved(bed, job) > 0
    cancel(bed)
    until("the end of the loans", lambda: not loans(bed))
    settled(bed)


def test_migbatchd_continues_after_a_crash(bed: Cluster) -> None:
    bed.kill("migbatchd")
    bed.restart("migbatchd")
    bed.wait("migbatchd", lambda: (bed.product.health() or {}).get("ok") is True)
    job, message = sbatch(bed, "--gres=mig:auto", wrap="true")
    assert job, message
    assert bed.wait_job(job) == "COMPLETED"
    settled(bed)


def test_powered_down_node_boots_for_a_job_whose_profile_it_did_not_offer(bed: Cluster) -> None:
    settled(bed)
    profile = "2g.20gb" if "7g.80gb" in offer(bed) else "7g.80gb"
    bed.run(["scontrol", "update", "NodeName=n1", "State=POWER_DOWN"])
    bed.wait("a powered-down node", lambda: bed.node_states() == {"n1": "idle~"})
    for program in ("slurmd-n1", "agent-n1"):
        bed.stop(program)
    bed.machine("n1").reboot()
    job, message = sbatch(bed, f"--gres=mig:{profile}", wrap="echo $CUDA_VISIBLE_DEVICES")
    assert job, message
    until("power for the node", lambda: bed.node_states() == {"n1": "mixed#"})
    bed.product.migbatch("node", "init", "--etc", str(bed.product.etc), "--node", "n1")
    bed.restart("agent-n1")
    bed.spawn("slurmd-n1", [bed.root.locate("slurmd"), "-D", "-N", "n1", "-b"], in_root=True)
    assert bed.wait_job(job) == "COMPLETED"
    assert account(bed, job)["restarts"] == 0
    settled(bed)

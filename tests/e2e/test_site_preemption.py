"""A site's own preemption, by partition and by QOS, for slices of other profiles than those of the preempted jobs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slurm_migbatch.testbed.cluster import Cluster
from slurm_migbatch.testbed.proc import wait_until
from tests.support.end_to_end import PATIENCE_S, cancel, holding, more_rounds, sbatch, settled, untroubled
from tests.support.lending import actions
from tests.support.recordings import assert_decided_alike

MOVES = {"preempt": True, "after_s": 1.0}
ONE = {"nodes": 1, "gpus": 1, "config": {"moves": MOVES}}


@pytest.fixture(scope="module")
def by_partition(slurm_root: str) -> Iterator[Cluster]:
    options = {"PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE"}
    with Cluster(None, slurm_root=slurm_root, migbatch="all", options=options, **ONE) as running:
        running.run(["scontrol", "update", "PartitionName=gpu", "PriorityTier=10", "PreemptMode=OFF"])
        running.run(["scontrol", "update", "PartitionName=train", "PriorityTier=1", "PreemptMode=REQUEUE"])
        running.restart("migbatchd")  # so that it reads this at once
        yield running
        assert_decided_alike(running)


@pytest.fixture(scope="module")
def by_qos(slurm_root: str) -> Iterator[Cluster]:
    options = {
        "PreemptType": "preempt/qos",
        "PreemptMode": "REQUEUE",
        "AccountingStorageEnforce": "associations,limits,qos",
    }
    with Cluster(None, slurm_root=slurm_root, migbatch="all", dbd=True, options=options, **ONE) as running:
        for change in (
            "add qos scavenger set PreemptMode=cancel GraceTime=5",
            "add qos patient set GraceTime=2",
            "add qos urgent set Preempt=scavenger,patient",
            "modify user mbbob set QOS+=scavenger,patient",
            "modify user mbalice set QOS+=urgent",
        ):
            running.run(["sacctmgr", "-i", *change.split()])
        running.restart("migbatchd")
        yield running
        assert_decided_alike(running)


def running_job(bed: Cluster, gres: str, *options: str, wrap: str = "sleep 3600", user: str = "mbbob") -> int:
    job, message = sbatch(bed, f"--gres=mig:{gres}", "--time=1-0", *options, wrap=wrap, user=user)
    assert job, message
    assert bed.wait_job(job, "RUNNING") == "RUNNING"
    return job


def restarts(bed: Cluster, job: int) -> str:
    return bed.run(["squeue", "-h", "-O", "RestartCnt", "-j", str(job)]).stdout.strip()


def test_jobs_of_a_lower_tier_are_requeued_for_a_larger_slice(by_partition: Cluster) -> None:
    bed = by_partition
    first, second = (running_job(bed, gres, "-p", "train") for gres in ("4g.40gb", "3g.40gb"))
    whole, message = sbatch(bed, "-p", "gpu", "--gres=mig:7g.80gb", "--time=10", wrap="sleep 5", user="mbalice")
    assert whole, message
    assert bed.wait_job(whole, timeout=PATIENCE_S) == "COMPLETED"
    for job in (first, second):
        (done,) = actions(bed, job)
        assert (done["kind"], done["after"]) == ("preempt", "PENDING") and not done["outcome"]
        assert f"job {whole}, which may preempt it" in done["why"]
        assert restarts(bed, job) == "1"
    cancel(bed)
    settled(bed)
    untroubled(bed)


def test_slurm_preempts_by_itself_for_the_same_profile(by_partition: Cluster) -> None:
    bed = by_partition
    job = running_job(bed, "7g.80gb", "-p", "train")
    whole, message = sbatch(bed, "-p", "gpu", "--gres=mig:7g.80gb", "--time=10", wrap="sleep 5", user="mbalice")
    assert whole, message
    assert bed.wait_job(whole, timeout=PATIENCE_S) == "COMPLETED"
    assert not actions(bed, job)
    cancel(bed)
    settled(bed)


def test_jobs_of_a_qos_are_cancelled_after_their_grace_time_also_by_a_restarted_service(by_qos: Cluster) -> None:
    bed = by_qos
    warned = "srun sh -c \"trap 'echo warned' TERM; while :; do sleep 0.2; done\""
    job = running_job(bed, "4g.40gb", "--qos=scavenger", "-p", "gpu", wrap=warned)
    kept = running_job(bed, "3g.40gb", "-p", "gpu")
    holding(bed, kept)
    urgent, message = sbatch(bed, "-p", "gpu", "--qos=urgent", "--gres=mig:2g.20gb", "--time=10", wrap="sleep 5")
    assert urgent, message
    wait_until(lambda: actions(bed, job), PATIENCE_S, "SIGTERM in the record", every=0.1)
    bed.restart("migbatchd")
    assert bed.wait_job(urgent, timeout=PATIENCE_S) == "COMPLETED"
    assert [(row["kind"], row["after"]) for row in actions(bed, job)] == [("preempt", "TERM"), ("preempt", "CANCELLED")]
    assert "warned" in bed.output(job, "mbbob")
    assert bed.wait_job(job, timeout=PATIENCE_S) == "CANCELLED"
    assert bed.wait_job(kept, "RUNNING") == "RUNNING" and not actions(bed, kept), "its QOS is not preempted"
    cancel(bed)
    settled(bed)
    untroubled(bed)


def test_a_script_without_steps_is_requeued_after_its_grace_time(by_qos: Cluster) -> None:
    """Like Slurm's, the SIGTERM at the beginning of the grace time is for the steps: it ends no batch script."""
    bed = by_qos
    job = running_job(bed, "7g.80gb", "--qos=patient", "-p", "gpu")
    urgent, message = sbatch(bed, "-p", "gpu", "--qos=urgent", "--gres=mig:2g.20gb", "--time=10", wrap="sleep 5")
    assert urgent, message
    assert bed.wait_job(urgent, timeout=PATIENCE_S) == "COMPLETED"
    assert [(row["kind"], row["after"]) for row in actions(bed, job)] == [("preempt", "TERM"), ("preempt", "PENDING")]
    assert restarts(bed, job) == "1"
    cancel(bed)
    settled(bed)
    untroubled(bed)


def test_a_job_without_the_right_preempts_nothing(by_qos: Cluster) -> None:
    bed = by_qos
    job = running_job(bed, "3g.40gb", "--qos=scavenger", "-p", "gpu")
    whole, message = sbatch(bed, "-p", "gpu", "--gres=mig:7g.80gb", "--time=10", wrap="sleep 5", user="mbalice")
    assert whole, message
    more_rounds(bed, "supply", 8)
    assert bed.wait_job(whole, "PENDING") == "PENDING"
    assert not actions(bed, job)
    cancel(bed)
    settled(bed)

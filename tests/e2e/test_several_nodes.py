"""Jobs of several nodes, where the site has fewer catalog nodes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slurm_migbatch.testbed.cluster import Cluster
from tests.support.end_to_end import cancel, on_offer, sbatch, shown, until

pytestmark = pytest.mark.slurm
NODES = ("n1", "n2")


@pytest.fixture(scope="module")
def whole(slurm_root: str) -> Iterator[Cluster]:
    with Cluster(nodes=2, gpus=2, catalog_nodes=1, migbatch="all", slurm_root=slurm_root) as bed:
        yield bed


@pytest.fixture
def bed(whole: Cluster) -> Iterator[Cluster]:
    """Both GPUs of n1 are offered whole: Slurm takes a job for two nodes with it and the catalog node."""
    job, message = sbatch(whole, "--gres=mig:7g.80gb:2", "-w", "n1", wrap="true")
    assert job, message
    whole.wait_job(job, "COMPLETED")
    yield whole
    cancel(whole)


def test_slices_in_total_that_no_node_has_are_granted_on_two(bed: Cluster) -> None:
    job, message = sbatch(
        bed, "-n", "4", "--gpus-per-task=1", wrap="srun sh -c 'echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES'"
    )
    assert "they are on 2 nodes, 2 on each, because no node has all of them" in message
    bed.wait_job(job, "COMPLETED")
    tasks = (bed.home("mbalice") / f"slurm-{job}.out").read_text().split()
    assert sorted(tasks[::2]) == ["n1", "n1", "n2", "n2"]
    assert len({device for device in tasks[1::2] if device.startswith("MIG-")}) == 4


def test_job_of_two_nodes_that_slurm_has_given_up_starts_when_there_is_room(bed: Cluster) -> None:
    job, message = sbatch(bed, "-N2", "--gres=mig:7g.80gb:2", "--begin=now+3600", wrap="true")
    assert job and "fewer than 2 nodes offer these slices at this moment" in message
    holders = [sbatch(bed, "--gres=mig:1g.10gb", "-w", node, wrap="sleep 600")[0] for node in NODES]
    for holder in holders:
        bed.wait_job(holder, "RUNNING")
    until("a GPU divided", lambda: all(on_offer(bed, node)["7g.80gb"] < 2 for node in NODES))
    bed.run(["scontrol", "update", f"JobId={job}", "StartTime=now"])
    if bed.root.version() == (23, 11):  # which examines it again in every round instead
        until("Slurm to examine it", lambda: "LastSchedEval=Unknown" not in shown(bed, job))
    else:
        until("Slurm to give it up", lambda: "Reason=BadConstraints" in shown(bed, job))
    bed.run(["scancel", *map(str, holders)])
    bed.wait_job(job, "COMPLETED")

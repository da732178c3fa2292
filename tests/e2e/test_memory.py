"""Jobs that request memory, on a site where it is a consumable resource and other jobs hold that of a node."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slurm_migbatch.testbed.cluster import Cluster
from tests.support.end_to_end import cancel, sbatch, settled, shown

SITE = {"SelectTypeParameters": "CR_CPU_Memory", "DefMemPerNode": "100"}


@pytest.fixture(scope="module")
def bed(slurm_root: str) -> Iterator[Cluster]:
    spec = {"nodes": 3, "gpus": 1, "options": SITE, "migbatch": "all"}
    with Cluster(None, slurm_root=slurm_root, **spec) as running_cluster:
        yield running_cluster


@pytest.mark.parametrize("asks", [["--mem=100G"], ["--mem-per-cpu=50G", "-n", "2", "-N", "1"], ["--mem=0"]])
def test_slices_are_offered_where_a_job_finds_its_memory(bed: Cluster, asks: list[str]) -> None:
    cancel(bed)
    settled(bed)
    for node in ("n1", "n2"):
        job, message = sbatch(bed, "-p", "train", "-w", node, "--mem=450G", wrap="sleep 600", user="mbbob")
        assert job, message
        bed.wait_job(job, "RUNNING")
    job, message = sbatch(bed, "-p", "gpu", "--gres=mig:7g.80gb", *asks, wrap="sleep 600")
    assert job, message
    bed.wait_job(job, "RUNNING")
    assert "Nodes=n3 " in shown(bed, job)

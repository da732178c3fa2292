"""Jobs can open the GPU of their slice on a site where Slurm's cgroups deny jobs all devices that they do not have."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_migbatch.testbed import conf
from slurm_migbatch.testbed.cluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.device_cgroup]
GPU, NIC = conf.DEVICES["gpu"], conf.DEVICES["nic"]
SITE = {
    "TaskPlugin": "task/cgroup,task/affinity",
    "PrologFlags": "Contain",
    "SelectTypeParameters": "CR_CPU_Memory",
    "DefMemPerCPU": "100",
}
OPEN = "for file in {}; do (: < $file) && echo opened $file; done 2>&1; true"


@pytest.fixture(scope="module")
def bed(slurm_root: str) -> Iterator[Cluster]:
    spec = {"nodes": 1, "gpus": 1, "constrained": True, "options": SITE}
    with Cluster(None, slurm_root=slurm_root, migbatch="all", **spec) as running:
        yield running
    for hierarchy in ("devices", "freezer"):  # slurmd leaves its own
        for directory, _, _ in os.walk(f"/sys/fs/cgroup/{hierarchy}/slurm_n1", topdown=False):
            Path(directory).rmdir()


@pytest.mark.parametrize("option", ["--gres=mig:1g.10gb", "--gpus=1", "--gres=mig:2g.20gb,nic:1"])
def test_job_opens_the_gpu_of_its_slice_and_no_device_of_other_gres(bed: Cluster, option: str) -> None:
    job = bed.submit(option, wrap=OPEN.format(f"{GPU} {NIC}"))
    bed.wait_job(job, "COMPLETED")
    opened = re.findall(r"opened (\S+)", bed.output(job))
    assert opened == ([GPU, NIC] if "nic" in option else [GPU]), bed.output(job)


def test_steps_open_the_gpu_and_no_other_device_too(bed: Cluster) -> None:
    job = bed.submit("--gpus=1", wrap=f"srun --gpus=1 sh -c '{OPEN.format(f'{GPU} {NIC}')}'")
    bed.wait_job(job, "COMPLETED")
    assert re.findall(r"opened (\S+)", bed.output(job)) == [GPU], bed.output(job)


def test_nodes_no_longer_count_gpus_that_have_slices(bed: Cluster) -> None:
    (gres,) = re.findall(r"^NodeName=n1 .* Gres=(\S+)", bed.conf_text(), re.MULTILINE)
    assert gres.startswith("nic:1,mig:")

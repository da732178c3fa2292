"""A private cluster does what a cluster does and leaves nothing behind."""

from __future__ import annotations

import pwd
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_migbatch.testbed import registry
from slurm_migbatch.testbed.cluster import Cluster

pytestmark = pytest.mark.slurm


def test_a_user_runs_a_job_in_a_slice(cluster: Cluster) -> None:
    job = cluster.submit("--gres=mig:1g.10gb:1", wrap="id -un; echo $SLURMD_NODENAME", user="mbbob")
    assert cluster.wait_job(job) == "COMPLETED"
    out = (cluster.home("mbbob") / f"slurm-{job}.out").read_text().split()
    assert out[0] == "mbbob"
    assert out[1] in cluster.spec.node_names


def test_down_leaves_no_process_user_group_or_file(new_cluster: Callable[..., Cluster]) -> None:
    before = Path("/proc/self/mounts").read_text()
    bed = new_cluster(nodes=1, gpus=1)
    bed.wait_job(bed.submit(wrap="setsid sleep 600 & sleep 600"), "RUNNING")
    cage = bed.daemons.cage
    assert len(cage.members()) > 3
    record = registry.find(bed.directory)
    assert record is not None
    bed.down()
    assert cage.members() == set()
    assert not bed.directory.exists()
    assert not record.path.exists()
    assert not record.cage or not Path(record.cage).exists()
    assert Path("/proc/self/mounts").read_text() == before
    others = {name for other in registry.records() for name in other.users}
    assert not {entry.pw_name for entry in pwd.getpwall()} & (set(record.users) - others)

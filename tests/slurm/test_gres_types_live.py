"""A real Slurm compares GRES types by `type_number`."""

from __future__ import annotations

import pytest

from slurm_migbatch.slurm.gres import type_number
from slurm_migbatch.testbed.cluster import Cluster

pytestmark = pytest.mark.slurm

OFFERED, SAME, OTHER = "1g.23gb", "4g.20gb", "1g.32gb"


def test_types_with_the_same_number_are_the_same_to_slurm(slurm_root: str) -> None:
    assert type_number(SAME) == type_number(OFFERED) != type_number(OTHER)
    with Cluster(None, slurm_root=slurm_root, nodes=1, cpus=8, counts={OFFERED: 2}) as bed:
        jobs = {
            kind: int(bed.run(["sbatch", "--parsable", f"--gres=mig:{kind}:1", "--wrap=sleep 600"], "mbalice").stdout)
            for kind in (SAME, OFFERED)
        }
        for kind, job in jobs.items():
            assert bed.wait_job(job, "RUNNING") == "RUNNING", kind
        refused = bed.run(["sbatch", f"--gres=mig:{OTHER}:1", "--wrap=true"], "mbalice", check=False)
        assert refused.returncode, "no node has such a type"

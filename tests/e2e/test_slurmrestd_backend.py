"""migbatchd with slurmrestd: jobs get their slices, and while slurmrestd is down nothing is concluded and nothing lost.

It needs a Slurm that has slurmrestd: `pytest --slurm-root=...` of 24.11 or 26.05.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slurm_migbatch.testbed import restd
from slurm_migbatch.testbed.cluster import Cluster
from tests.support.end_to_end import account, gate, holding, output_so_far, sbatch, sights, until, untroubled

pytestmark = pytest.mark.slurmrestd
SHOW = "echo batch $CUDA_VISIBLE_DEVICES"


def test_jobs_get_their_slices_before_and_after_slurmrestd_is_down(new_cluster: Callable[..., Cluster]) -> None:
    bed = new_cluster(nodes=1, gpus=1, migbatch="all", rest=True, config={"cluster": {"backend": "slurmrestd"}})
    log = bed.daemons.log("migbatchd")
    assert "with API version v0.0.4" in log.read_text()

    opened, until_then = gate(bed)
    first, message = sbatch(bed, "--gres=mig:3g.40gb:1", wrap=f"{SHOW}; {until_then}")
    assert first, message
    bed.wait_job(first, "RUNNING")
    node, uuid = holding(bed, first)
    until("its output", lambda: sights(output_so_far(bed, first)) == {"batch": [uuid]})

    bed.kill(restd.NAME)
    until("migbatchd's word that it cannot ask", lambda: "cannot be reached" in log.read_text())
    second, message = sbatch(bed, "--gres=mig:7g.80gb:1", wrap=SHOW)
    assert second, message
    assert holding(bed, first) == (node, uuid)
    opened.touch()
    bed.wait_job(first, "COMPLETED")
    assert bed.job_state(second) == "PENDING"  # no node offers what it requests

    restd.start(bed)
    bed.wait_job(second, "COMPLETED")
    rows = [account(bed, job) for job in (first, second)]
    assert [slice_row["profile"] for row in rows for slice_row in row["slices"]] == ["3g.40gb", "7g.80gb"]
    untroubled(bed)

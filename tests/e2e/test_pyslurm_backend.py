"""migbatchd with pyslurm: jobs get their slices, and when pyslurm's process dies the next round starts another.

It needs a Slurm that pyslurm was built for: `make pyslurm`, then `pytest --slurm-root=...` of 25.11.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_migbatch.testbed import pyslurmroot
from slurm_migbatch.testbed.cluster import Cluster
from tests.support.end_to_end import account, gate, holding, output_so_far, sbatch, sights, until, untroubled

pytestmark = pytest.mark.pyslurm
SHOW = "echo batch $CUDA_VISIBLE_DEVICES"


def workers(bed: Cluster) -> set[int]:
    """Return the processes in which pyslurm runs for this test cluster."""
    place = str(bed.directory / "pyslurm")
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().split(b"\0")
            environment = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if command[0].decode() == pyslurmroot.PYTHON and f"PYTHONPATH={place}".encode() in environment:
            found.add(int(entry.name))
    return found


def test_jobs_get_their_slices_before_and_after_a_crash_of_pyslurm(new_cluster: Callable[..., Cluster]) -> None:
    bed = new_cluster(nodes=1, gpus=1, migbatch="all")
    bed.product.reconfigure(cluster={"backend": "pyslurm", "pyslurm_python": str(pyslurmroot.python(bed))})
    log = bed.daemons.log("migbatchd")
    until("pyslurm's use", lambda: "using pyslurm to list the queue" in log.read_text())

    opened, until_then = gate(bed)
    first, message = sbatch(bed, "--gres=mig:3g.40gb:1", wrap=f"{SHOW}; {until_then}")
    assert first, message
    bed.wait_job(first, "RUNNING")
    node, uuid = holding(bed, first)
    until("its output", lambda: sights(output_so_far(bed, first)) == {"batch": [uuid]})

    before = workers(bed)
    assert before
    for process in before:
        os.kill(process, signal.SIGKILL)
    until("another process", lambda: workers(bed) and not workers(bed) & before)
    second, message = sbatch(bed, "--gres=mig:auto", "--comment=migbatch: mem=30gb", wrap=SHOW)
    assert second, message
    bed.wait_job(second, "COMPLETED")
    assert holding(bed, first) == (node, uuid)
    opened.touch()
    bed.wait_job(first, "COMPLETED")
    assert [slice_row["profile"] for job in (first, second) for slice_row in account(bed, job)["slices"]] == [
        "3g.40gb"
    ] * 2
    untroubled(bed)

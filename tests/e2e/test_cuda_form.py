"""Programs that read CUDA_VISIBLE_DEVICES as numbers start on a slice if a number can mean no other device.

The stubs parse the variable as the programs did at the versions that failed: vLLM 0.10 (`vllm/platforms/cuda.py`,
`int(device_ids[0])`, issues 6551 and 41848) and relion 5 (`--gpu` from the variable, digits only, issue 1262).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slurm_migbatch.testbed.cluster import Cluster
from tests.support.end_to_end import PYTHON, UUID, cancel, gate, sbatch

pytestmark = pytest.mark.slurm
VLLM = 'import os; print("star" + "ted", int(os.environ["CUDA_VISIBLE_DEVICES"].split(",")[0]))'
RELION = "case $CUDA_VISIBLE_DEVICES in (*[!0-9:,]*|'') exit 1;; (*) echo started;; esac"
INDEX = "--comment=migbatch: cuda=index"
SHOW = "echo batch=$CUDA_VISIBLE_DEVICES form=$MIGBATCH_CUDA uuid=$MIGBATCH_DEVICES"


@pytest.fixture(scope="module")
def whole(slurm_root: str) -> Iterator[Cluster]:
    with Cluster(nodes=1, gpus=2, migbatch="all", slurm_root=slurm_root) as bed:
        yield bed


@pytest.fixture
def bed(whole: Cluster) -> Iterator[Cluster]:
    yield whole
    cancel(whole)


def output(bed: Cluster, *options: str, wrap: str = SHOW, user: str = "mbalice", state: str = "COMPLETED") -> str:
    job, message = sbatch(bed, "--gres=mig:1g.10gb", *options, wrap=wrap, user=user)
    assert job, message
    bed.wait_job(job, state)
    return bed.output(job, user)


@pytest.mark.parametrize("stub", [f"{PYTHON} -c '{VLLM}'", RELION])
def test_programs_that_require_device_numbers_start(bed: Cluster, stub: str) -> None:
    assert "started" in output(bed, INDEX, wrap=stub)
    assert "started" in output(bed, "--comment=migbatch: engine=vllm", wrap=stub)
    for comment in ("", "migbatch: engine=vllm cuda=uuid", "cuda=index", "migbatch: cuda=uuid"):
        assert "started" not in output(bed, f"--comment={comment}", wrap=stub, state="FAILED")


def test_tasks_get_the_index_too_and_the_uuid_in_another_variable(bed: Cluster) -> None:
    found = output(bed, INDEX, wrap=f"{SHOW}; srun sh -c 'echo task=$CUDA_VISIBLE_DEVICES'")
    assert "batch=0 form=index uuid=MIG-" in found and "task=0" in found


def test_job_with_several_slices_gets_uuids(bed: Cluster) -> None:
    job, message = sbatch(bed, "--gres=mig:1g.10gb:2", INDEX, wrap=SHOW)
    assert job, message
    bed.wait_job(job)
    found = bed.output(job)
    assert "batch=MIG-" in found and "form= " in found and len(UUID.findall(found)) == 4
    assert "cuda=index cannot be used, CUDA_VISIBLE_DEVICES has UUIDs: the job has 2 slices" in found


def test_index_is_not_given_while_the_same_user_has_another_slice_on_the_node(bed: Cluster) -> None:
    path, wait = gate(bed)
    bed.home("mbalice").chmod(0o755)
    holder, message = sbatch(bed, "--gres=mig:1g.10gb", wrap=wait)
    assert holder, message
    bed.wait_job(holder, "RUNNING")
    assert "can also open another slice of this node" in output(bed, INDEX)
    assert "batch=0 form=index" in output(bed, INDEX, user="mbbob")
    path.touch()
    bed.wait_job(holder)
    assert "batch=0 form=index" in output(bed, INDEX)


def test_job_submitted_from_a_job_inherits_no_index(bed: Cluster) -> None:
    inner = "sbatch --wait --output=inner.out --wrap 'echo inner=[$CUDA_VISIBLE_DEVICES$MIGBATCH_CUDA]'"
    output(bed, INDEX, wrap=inner)
    assert "inner=[]" in (bed.home("mbalice") / "inner.out").read_text()

"""Two training jobs of one user on one slice, decided by migbatchd and carried out by Slurm and the node, and ended.

The training jobs are `sbatch_examples/elastic_bash.sh` as it is shipped. The whole GPU is the slice, so that no other
job fits. Slurm up to 23.02 remembers former types of a job, so there the job stays alone, which is tested too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_migbatch.store.db import open_store
from slurm_migbatch.testbed.cluster import Cluster
from slurm_migbatch.workload.loans import drops_old_gres_type
from tests.support.end_to_end import (
    PATIENCE_S,
    cancel,
    held,
    leases,
    more_rounds,
    on_offer,
    sbatch,
    settled,
    until,
    untroubled,
)

EXAMPLE = Path(__file__).resolve().parents[2] / "sbatch_examples/elastic_bash.sh"
LENDING = {
    "enabled": True,
    "share": True,
    "partitions": ["train"],
    "min_idle_s": 2.0,
    "horizon_s": 10.0,
    "day_s": 864.0,
    "grace_s": 20.0,
    "restart_s": 2.0,
}
HINTS = "role=train signal=usr1 min=7g.80gb max=7g.80gb mem=20GB"


@pytest.fixture(scope="module")
def bed(slurm_root: str) -> Iterator[Cluster]:
    with Cluster(None, slurm_root=slurm_root, migbatch="all", nodes=1, gpus=1, config={"lending": LENDING}) as running:
        yield running


@pytest.fixture(autouse=True)
def _clean(bed: Cluster) -> Iterator[None]:
    yield
    cancel(bed)
    settled(bed)


def train(bed: Cluster, minutes: int, steps: int, user: str = "mbalice") -> int:
    """Submit a training job of so many steps of a tenth of a second, with a time limit of so many minutes."""
    script = bed.home(user) / "elastic_bash.sh"
    if not script.exists():
        script.write_bytes(EXAMPLE.read_bytes())
        script.chmod(0o755)
    options = [
        "-p",
        "train",
        "--parsable",
        f"--time={minutes}",
        f"--comment=migbatch: {HINTS}",
        "--output=train-%j.out",
    ]
    done = bed.run(["env", f"STEPS={steps}", bed.root.locate("sbatch"), *options, str(script)], user, check=False)
    assert done.stdout.strip().isdigit(), done.stdout + done.stderr
    return int(done.stdout)


def holders(bed: Cluster) -> list[int | None]:
    return [job for _, job, state in held(bed) if state == "held"]


def actions(bed: Cluster, job: int) -> list[dict[str, Any]]:
    with open_store(bed.product.record, readonly=True) as store:
        return store.actions([job])


def reported(bed: Cluster, jobs: list[int]) -> set[int]:
    with open_store(bed.product.record, readonly=True) as store:
        return {row.job for row in store.job_progress(jobs) if row.reported is not None}


def misfits(bed: Cluster) -> list[str]:
    with open_store(bed.product.record, readonly=True) as store:
        return [str(row.run["reason"]) for row in store.runs() if "misfit" in str(row.run["reason"])]


def pair(bed: Cluster, guest_steps: int = 150) -> tuple[int, int] | None:
    """A long job on the whole GPU, and a short one that shares it; None where it may not share, and does not."""
    host = train(bed, 600, 6000)
    bed.wait("the host's slice", lambda: holders(bed) == [host], PATIENCE_S)
    guest = train(bed, 10, guest_steps)
    if not drops_old_gres_type(bed.run(["squeue", "-h", "-j", str(guest), "-o", "%b"]).stdout.strip()):
        more_rounds(bed, "lending", 10)
        assert holders(bed) == [host] and bed.job_state(guest) == "PENDING" and not actions(bed, guest)
        return None
    bed.wait("both on it", lambda: holders(bed) == [host, guest], PATIENCE_S)
    # a job that has not reported is requeued without a signal to save first
    bed.wait("reports of both", lambda: reported(bed, [host, guest]) == {host, guest}, PATIENCE_S)
    more_rounds(bed, "lending", 2)
    return host, guest


def devices(bed: Cluster) -> set[tuple[int, int]]:
    """Owner and mode of the capability devices of what is held."""
    (node,) = bed.spec.node_names
    place = bed.machine(node).dev_root / "nvidia-caps"
    stats = [path.stat() for path in place.glob("nvidia-cap*")]
    return {(found.st_uid, found.st_mode & 0o777) for found in stats}


def uid_of(bed: Cluster, name: str) -> int:
    return next(user.uid for user in bed.users if user.name == name)


def test_guest_starts_and_ends_without_affecting_the_host(bed: Cluster) -> None:
    found = pair(bed)
    if found is None:
        return
    host, guest = found
    (node,) = bed.spec.node_names
    assert devices(bed) == {(uid_of(bed, "mbalice"), 0o400)}
    both = leases(bed, host) + leases(bed, guest)
    assert len({uuid for _, uuid, _ in both}) == 1 and all(end is None for *_, end in both)
    other = train(bed, 10, 50, user="mbbob")
    until("the guest's end", lambda: bed.job_state(guest) == "COMPLETED")
    bed.wait("one holder", lambda: holders(bed) == [host], PATIENCE_S)
    assert devices(bed) == {(uid_of(bed, "mbalice"), 0o400)}
    assert bed.job_state(host) == "RUNNING" and [restart for restart, *_ in leases(bed, host)] == [0]
    assert bed.job_state(other) == "PENDING", "another user's job does not share"
    (share,) = actions(bed, guest)
    assert share["kind"] == "share" and f"beside job {host}" in share["why"]
    bed.wait("its lease over", lambda: all(end is not None for *_, end in leases(bed, guest)))
    bed.wait("no offer for a guest", lambda: not on_offer(bed, node)["guest"], PATIENCE_S)
    untroubled(bed)
    assert not misfits(bed)


def test_guest_keeps_the_slice_when_the_host_ends_and_inference_reclaims_it(bed: Cluster) -> None:
    both = pair(bed, guest_steps=6000)
    if both is None:
        return
    host, guest = both
    bed.run(["scancel", str(host)])
    bed.wait("the guest alone", lambda: holders(bed) == [guest], PATIENCE_S)
    assert devices(bed) == {(uid_of(bed, "mbalice"), 0o400)} and bed.job_state(guest) == "RUNNING"
    job, message = sbatch(bed, "--gres=mig:7g.80gb:1", wrap="sleep 2; echo $CUDA_VISIBLE_DEVICES", user="mbbob")
    assert job, message
    until("the inference job", lambda: bed.job_state(job) == "COMPLETED")
    kinds = [row["kind"] for row in actions(bed, guest)]
    assert kinds[:3] == ["share", "signal", "requeue"], kinds
    until("a slice of its own", lambda: holders(bed) == [guest])
    assert [row["kind"] for row in actions(bed, guest)][3:] == ["retype", "release"]
    untroubled(bed)
    assert not misfits(bed)


def test_inference_reclaims_the_slice_from_host_and_guest(bed: Cluster) -> None:
    both = pair(bed, guest_steps=6000)
    if both is None:
        return
    host, guest = both
    job, message = sbatch(bed, "--gres=mig:3g.40gb:1", wrap="sleep 2", user="mbbob")
    assert job, message
    until("the inference job", lambda: bed.job_state(job) == "COMPLETED")
    for training in (host, guest):
        assert [row["kind"] for row in actions(bed, training)][1:3] == ["signal", "requeue"]
    # Jobs of equal priority are in the order of their submission, and a requeue is one: the first that was requeued
    # gets the slice. A long job does not start beside a short one, whose end it would delay by as much as its own is
    # earlier.
    until("the slice lent again", lambda: bool(leases(bed, host)[1:] or leases(bed, guest)[1:]))
    if leases(bed, host)[1:]:
        until("both on one slice again", lambda: sorted(holders(bed), key=str) == [host, guest])
    else:
        more_rounds(bed, "lending", 3)
        assert holders(bed) == [guest] and bed.job_state(host) == "PENDING"
        bed.run(["scancel", str(guest)])
        until("the host on it alone", lambda: holders(bed) == [host])
    untroubled(bed)
    assert not misfits(bed)

"""Lending while components die: nothing leaks, inference starts, all state converges, `migbatch loans` is right."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

from slurm_migbatch.testbed.cluster import Cluster
from tests.support.end_to_end import PATIENCE_S, cancel, sbatch, settled, until
from tests.support.lending import LENDING, actions, begun, loans, running, saved, train


@pytest.fixture
def bed(slurm_root: str) -> Iterator[Cluster]:
    with Cluster(None, slurm_root=slurm_root, migbatch="all", nodes=2, gpus=1, config={"lending": LENDING}) as running:
        yield running


def in_slurm(bed: Cluster) -> dict[int, str]:
    """Profile of each training job that Slurm runs."""
    text = bed.run(["squeue", "-h", "-a", "-p", "train", "-t", "running", "-o", "%A %b"]).stdout
    return {int(job): gres.split("mig:")[1].split(":")[0] for job, gres in (line.split() for line in text.splitlines())}


def truth(bed: Cluster) -> None:
    """Wait until `migbatch loans` says what squeue says both before and after it."""
    seen: list[object] = []

    def agree() -> bool:
        seen[:] = [before := in_slurm(bed), running(bed), in_slurm(bed)]
        return before == seen[1] == seen[2]

    until("loans as Slurm has them", agree)


def whole(bed: Cluster, job: int) -> None:
    """Each run continued from what the run before had saved, or from its last step if it was signalled in time."""
    text = (bed.home("mbalice") / f"train-{job}.out").read_text()
    steps = begun(bed, job)
    assert steps == sorted(steps), text
    assert steps[0] == 0, text


def test_training_and_inference_complete_while_components_are_killed(bed: Cluster) -> None:
    dice = random.Random(7)
    jobs = [train(bed, "signal=usr1 max=2g.20gb", steps=250) for _ in range(5)]
    until("some loans", lambda: len(running(bed)) >= 2)
    inference = []
    disasters = ["migbatchd", "slurmctld", "node", "migbatchd", "agent"]
    dice.shuffle(disasters)
    for disaster in disasters:
        job, message = sbatch(
            bed, "-p", "gpu", f"--gres=mig:{dice.choice(['1g.10gb', '3g.40gb', '7g.80gb'])}", wrap="sleep 2",
            user="mbbob",
        )  # fmt: skip
        assert job, message
        inference.append(job)
        time.sleep(dice.uniform(0.0, 3.0))
        if disaster == "node":
            bed.run(["scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=chaos"])
            time.sleep(dice.uniform(1.0, 3.0))
            bed.run(["scontrol", "update", "NodeName=n2", "State=RESUME"], check=False)  # it may be back by itself
        elif disaster == "slurmctld":  # if killed, it would still list jobs whose end it had not saved
            bed.restart(disaster)
            bed.wait(disaster, lambda: "UP" in bed.run(["scontrol", "ping"], check=False).stdout)
        else:
            name = "agent-n1" if disaster == "agent" else disaster
            bed.kill(name)
            time.sleep(dice.uniform(0.0, 3.0))
            bed.restart(name)
    for job in inference:
        assert bed.wait_job(job, timeout=PATIENCE_S) == "COMPLETED"
    truth(bed)
    for job in jobs:
        assert bed.wait_job(job, timeout=2 * PATIENCE_S) == "COMPLETED"
        whole(bed, job)
    until("the end of the loans", lambda: not loans(bed))
    settled(bed)


def test_loans_that_ignore_the_signal_or_cannot_save_are_reclaimed(bed: Cluster) -> None:
    """Neither keeps inference from its slice, and the one with an old checkpoint continues from that."""
    deaf, message = sbatch(
        bed, "-p", "train", "--gres=mig:auto", "--comment=migbatch: role=train signal=usr1 min=7g.80gb",
        wrap="trap '' USR1 TERM; while :; do sleep 1; done",
    )  # fmt: skip
    assert deaf, message
    full = train(bed, "signal=usr1 min=7g.80gb", steps=5000)
    until("both loans", lambda: set(running(bed)) == {deaf, full})
    until("a first checkpoint", lambda: saved(bed, full) > 0)
    fresh = bed.home("mbalice") / f"elastic-{full}.state.new"
    bed.run(["ln", "-s", "/dev/full", str(fresh)], "mbalice")
    time.sleep(1.0)  # for a checkpoint that had begun before
    old = saved(bed, full)
    inference = [sbatch(bed, "-p", "gpu", "--gres=mig:7g.80gb", wrap="sleep 3", user="mbbob")[0] for _ in range(2)]
    assert all(inference)
    for job in inference:
        assert bed.wait_job(job, timeout=PATIENCE_S) == "COMPLETED"
    until("the end of its grace", lambda: "requeue" in [row["kind"] for row in actions(bed, full)])
    assert saved(bed, full) == old, "the disk was full, so no other checkpoint was written"
    until("the return of both", lambda: set(running(bed)) == {deaf, full})
    until("its second run", lambda: len(begun(bed, full)) == 2)
    assert begun(bed, full) == [0, old], "the disk stayed full until the end of the test"
    truth(bed)
    cancel(bed)
    until("the end of the loans", lambda: not loans(bed))
    settled(bed)

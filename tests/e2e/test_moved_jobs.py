"""A training job is moved to free a whole GPU and continues elsewhere, even if migbatchd dies meanwhile.

The training job is `sbatch_examples/elastic_bash.sh` as it is shipped, with a slice of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slurm_migbatch.testbed.cluster import Cluster
from tests.support.end_to_end import PATIENCE_S, cancel, holding, marked, more_rounds, sbatch, settled, status, until
from tests.support.lending import actions, begun, saved, train

MOVES = {"after_s": 1.0, "gain_s": 30.0, "rest_s": 2.0, "grace_s": 30.0}


@pytest.fixture(scope="module")
def site(slurm_root: str) -> Iterator[Cluster]:
    with Cluster(None, slurm_root=slurm_root, migbatch="all", nodes=1, gpus=2, config={"moves": MOVES}) as running:
        yield running


@pytest.fixture
def bed(site: Cluster) -> Iterator[Cluster]:
    """One cluster for all tests, without jobs at the beginning of each."""
    yield site
    cancel(site)
    settled(site)


def asleep(bed: Cluster, gres: str) -> int:
    job, message = sbatch(bed, "-p", "gpu", f"--gres=mig:{gres}", "--time=1-0", wrap="sleep 3600", user="mbbob")
    assert job, message
    return job


def gpu_of(bed: Cluster, job: int) -> int:
    holding(bed, job)
    gpus = enumerate(status(bed, "n1")["gpus"])
    (found,) = [number for number, gpu in gpus if any(row["job"] == job for row in gpu["slices"])]
    return found


def halves(bed: Cluster, steps: int) -> int:
    """Leave a training job on a half of one GPU and a job on a half of the other; return the training job."""
    first = asleep(bed, "4g.40gb")
    assert bed.wait_job(first, "RUNNING") == "RUNNING"
    training = train(bed, steps=steps, own="3g.40gb")
    assert bed.wait_job(training, "RUNNING") == "RUNNING"
    second = asleep(bed, "4g.40gb")
    assert bed.wait_job(second, "RUNNING") == "RUNNING"
    assert gpu_of(bed, training) == gpu_of(bed, first) != gpu_of(bed, second)
    until("some steps of the training", lambda: begun(bed, training) == [0])
    bed.run(["scancel", str(first)])
    until("the end of the first", lambda: str(first) not in bed.run(["squeue", "-h", "-o", "%i"]).stdout.split())
    return training


def test_training_job_is_moved_to_free_a_whole_gpu(bed: Cluster) -> None:
    training = halves(bed, steps=150)
    whole, message = sbatch(bed, "-p", "gpu", "--gres=mig:7g.80gb", wrap="sleep 5", user="mbbob")
    assert whole, message
    assert bed.wait_job(whole, "RUNNING", "COMPLETED", timeout=PATIENCE_S) in ("RUNNING", "COMPLETED")
    # up to Slurm 23.02 only after the two minutes by which Slurm delays a requeued job
    until("the training to go on", lambda: len(begun(bed, training)) == 2, PATIENCE_S + 120)
    assert begun(bed, training)[1] > 0, "from its checkpoint"
    assert bed.wait_job(training, timeout=PATIENCE_S) == "COMPLETED"
    assert saved(bed, training) == 150
    done = actions(bed, training)
    assert [(row["kind"], row["before"], row["after"]) for row in done] == [
        ("move", "RUNNING", "USR1"),
        ("move", "RUNNING", "PENDING"),
    ]
    assert not any(row["outcome"] for row in done)
    assert all(f"job {whole} needs a larger slice" in row["why"] for row in done)


def test_move_continues_if_migbatchd_dies(bed: Cluster) -> None:
    training = halves(bed, steps=2000)
    whole, message = sbatch(bed, "-p", "gpu", "--gres=mig:7g.80gb", wrap="sleep 5", user="mbbob")
    assert whole, message
    until("the signal", lambda: bool(actions(bed, training)))
    bed.kill("migbatchd")
    bed.restart("migbatchd")
    assert bed.wait_job(whole, "RUNNING", "COMPLETED", timeout=PATIENCE_S) in ("RUNNING", "COMPLETED")
    assert saved(bed, training) > 0
    assert "PENDING" in [row["after"] for row in actions(bed, training)]
    assert marked(bed, training)[0] == "3g.40gb:1"


def test_training_job_without_signal_hint_is_not_moved(bed: Cluster) -> None:
    first = asleep(bed, "4g.40gb")
    assert bed.wait_job(first, "RUNNING") == "RUNNING"
    training = train(bed, "", steps=3000, own="3g.40gb")
    assert bed.wait_job(training, "RUNNING") == "RUNNING"
    second = asleep(bed, "4g.40gb")
    assert bed.wait_job(second, "RUNNING") == "RUNNING"
    bed.run(["scancel", str(first)])
    whole = asleep(bed, "7g.80gb")
    more_rounds(bed, "supply", 8)
    assert bed.wait_job(whole, "PENDING") == "PENDING"
    assert not actions(bed, training)

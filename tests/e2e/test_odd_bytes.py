"""A user's jobs have odd bytes wherever Slurm accepts them; supply, dispatch, lending and audit work for others."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from slurm_migbatch.testbed.cluster import Cluster
from tests.support.end_to_end import PATIENCE_S, account, sbatch, settled, shown, until, untroubled
from tests.support.lending import LENDING, train

ANY = bytes(range(1, 256)).decode("utf-8", "surrogateescape")
HINTS = "migbatch: model=mobilenet-v2 batch=1 deadline=1h items=1000"
#: options of jobs that wait for ever
WAITING = (
    ("--gres=gpu:a\x1fb:0",),
    ("--account=a\x1fb",),
    ("--gres=gpu:a\nb:0",),
    ("--gres=gpu:a|b:0",),
    ("--gres=mig:1g.10gb:1,gpu:a\x1fb\n|:0",),
    (f"--job-name={ANY}", "--gres=mig:1g.10gb"),
    (f"--comment={ANY}", "--gres=mig:1g.10gb"),
    (f"--wckey={ANY}", f"--account={ANY}", "--gres=mig:2g.20gb"),
    ("--gres=mig:1g.10gb", f"--comment=migbatch: role=train {ANY}", "--partition=train"),
    ("--gres=mig:auto", "--array=1-9%2", f"--comment={HINTS}\x1f\n\udcff"),
    ("--gres=mig:1g.10gb", "--array=1-9%2", f"--job-name={ANY}"),
)
#: options of jobs that start
STARTING = (
    ("--gres=mig:1g.10gb:1,gpu:a\x1fb:0",),
    ("--gres=mig:1g.10gb:1", f"--job-name={ANY}", f"--account={ANY}"),
    ("--gres=mig:1g.10gb:1", "--comment=a\x1f\n\udcff"),
)


@pytest.fixture
def bed(slurm_root: str) -> Iterator[Cluster]:
    config = {"lending": LENDING, "dispatch": {"every_s": 0.5}}
    with Cluster(None, slurm_root=slurm_root, migbatch="all", nodes=2, gpus=1, config=config) as running:
        yield running


def test_odd_bytes_in_jobs_of_one_user_do_not_affect_other_users(bed: Cluster) -> None:
    taken = [sbatch(bed, "--hold", *options, user="mbbob") for options in WAITING]
    assert sum(job > 0 for job, _ in taken) >= 8, taken
    assert all(job for job, _ in taken[:4]), "those that once stopped the service"
    # audit: only root gets such a marker past the filter
    forged, message = sbatch(bed, "--gres=mig:1g.10gb:1", "--hold", wrap="sleep 600")
    assert forged, message
    bed.run(["scontrol", "update", f"JobId={forged}", "Comment=[mig:2g.20gb:1]"])
    bed.run(["scontrol", "release", str(forged)])
    until("its end", lambda: bed.job_state(forged) not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"))
    assert bed.job_state(forged).startswith("CANCELLED")

    started = [sbatch(bed, *options, user="mbbob", wrap="sleep 600")[0] for options in STARTING]
    assert any(started)

    # supply: no node offers it yet
    large, message = sbatch(bed, "--gres=mig:4g.40gb:1", wrap="sleep 600")
    assert large, message
    bed.wait_job(large, "RUNNING", timeout=PATIENCE_S)

    # lending
    trained = train(bed, "signal=usr1 max=1g.10gb", steps=20)
    assert bed.wait_job(trained, timeout=PATIENCE_S) == "COMPLETED"

    # dispatch: the throttle of an elastic array is set
    array, message = sbatch(bed, "--gres=mig:auto", "--array=0-9", f"--comment={HINTS}", wrap="sleep 600")
    assert array, message
    until("a throttle", lambda: re.search(r"ArrayTaskThrottle=[1-9]", shown(bed, array)) is not None)

    # jobs that have odd bytes run as any other, and are in the record
    for job in filter(None, started):
        assert bed.wait_job(job, "RUNNING", timeout=PATIENCE_S) == "RUNNING"
        assert account(bed, job, "RUNNING")["profile"] == "1g.10gb"
    health = bed.product.health()
    assert health is not None and health["ok"], health
    log = bed.daemons.log("migbatchd").read_text(errors="replace")
    assert not re.search(r"cannot be observed|cannot be read|internal error|not understood|Traceback", log), log[-3000:]
    for user in bed.users:
        bed.run(["scancel", f"--user={user.name}"])
    until("an empty queue", lambda: bed.run(["squeue", "-h"]).stdout == "")
    settled(bed)
    untroubled(bed)


def test_odd_comment_of_a_node_does_not_affect_other_nodes(bed: Cluster) -> None:
    """A comment of n1 that looks like a row of n2, and one that looks like no row."""
    row_of_n2 = "NodeName=n2 CPUAlloc=0 CPUTot=8 Gres=mig:none:1 GresUsed=mig:none:0 State=DOWN"
    forged = f"x\n{row_of_n2}\nNodeName=n3 Gres=x State=IDLE"
    bed.run(["scontrol", "update", "NodeName=n1", f"Comment={forged}"])
    for options in (["--gres=mig:4g.40gb:1", "--nodelist=n1"], ["--gres=mig:7g.80gb:1", "--nodes=2"]):
        job, message = sbatch(bed, *options, wrap="true")
        assert job, message
        assert bed.wait_job(job, timeout=PATIENCE_S) == "COMPLETED"
    assert not re.search(r"cannot parse.*node n[12]\b", bed.daemons.log("migbatchd").read_text(errors="replace"))
    bed.run(["scontrol", "update", "NodeName=n1", "Comment="])
    settled(bed)


def test_names_of_partitions_may_have_letters_beyond_ascii(bed: Cluster) -> None:
    """The submit service gets Slurm's bytes, migbatchd reads text."""
    nodes = "Nodes=n1,n2,no-mig-slice-free1"
    for name in ("großrechner", "кластер"):
        bed.run(["scontrol", "create", f"PartitionName={name}", nodes, "State=UP"])
        until("its jobs", lambda name=name: sbatch(bed, "-p", name, "--gres=mig:7g.80gb", "--hold")[0])
        for option in ("--gres=mig:auto", "--gpus=1"):
            job, message = sbatch(bed, "-p", name, option, wrap="echo $MIGBATCH_PROFILE")
            assert job, message
            assert bed.wait_job(job, timeout=PATIENCE_S) == "COMPLETED" and bed.output(job).strip(), message
            until("its partition in migacct", lambda job=job, name=name: account(bed, job)["partition"] == name)
            assert (account(bed, job)["asked"], account(bed, job)["source"]) == (option, "service")
    refused, message = sbatch(bed, "-p", "other", "--gres=mig:auto")
    assert not refused and "großrechner" in message, message

"""A training job without a profile on a real Slurm: how it waits, is released, is requeued, and what its user may do.

migbatchd only watches here (dry run); the test itself releases jobs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm.cli import CliClient
from slurm_migbatch.slurm.client import JobRow
from slurm_migbatch.testbed.cluster import Cluster
from slurm_migbatch.workload.loans import LOAN, LoanHints, drops_old_gres_type, emptied, loan_hints, retyped
from tests.support.end_to_end import SHOW, backfilled, first_step, offer, refused, sbatch, shown, sights, until

TRAIN = ("-p", "train", "--gres=mig:auto", "--comment=migbatch: role=train max=4g.40gb signal=usr1")
LASTS = f"{SHOW}; sleep 600"


@pytest.fixture(scope="module")
def bed(slurm_root: str) -> Iterator[Cluster]:
    config = {"lending": {"enabled": True, "partitions": ["train"], "dry_run": True}}
    options = {"PreemptExemptTime": "00:00:01"}
    with Cluster(
        None, slurm_root=slurm_root, migbatch="all", nodes=1, gpus=1, config=config, options=options
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(bed: Cluster) -> CliClient:
    return CliClient(bed.bin, bed.slurm_conf)


@pytest.fixture(autouse=True)
def nobody_left(bed: Cluster) -> Iterator[None]:
    yield
    bed.run(["scancel", "-p", "train"], check=False)
    bed.run(["scancel", "-p", "gpu"], check=False)
    until("an empty queue", lambda: not bed.run(["squeue", "-h"]).stdout.strip())


def row(client: CliClient, job: int) -> JobRow:
    return next(found for found in client.jobs() if found.job_id == job)


def hints(client: CliClient, job: int) -> LoanHints | None:
    found = row(client, job)
    return loan_hints(found.comment, found.partition, found.gres, {"train"})


def retype(client: CliClient, job: int, kind: str, **more: str) -> None:
    """Re-type a job as lending does to release it, and to put it back."""
    found = row(client, job)
    if first := emptied(found.gres):
        client.update_jobs({str(job): first})
    client.update_jobs({str(job): {**retyped(found.gres, found.comment, kind), **more}})


def wanted(bed: Cluster, profile: str) -> None:
    """Make supply offer a profile by a job that requests it and ends."""
    job, _ = sbatch(bed, "-p", "gpu", f"--gres=mig:{profile}:1", wrap="true")
    bed.wait_job(job)
    until(f"an offer of {profile}", lambda: offer(bed).get(profile, 0) > 0)


def test_waiting_training_job_keeps_its_priority_and_delays_no_other_job(bed: Cluster, client: CliClient) -> None:
    waiting = []
    for _ in range(5):
        job, message = sbatch(bed, *TRAIN, wrap=LASTS)
        assert "waits for an idle slice between 1g.10gb and 4g.40gb" in message and "--gres=mig:1g.10gb" in message
        waiting.append(job)
    behind = [
        sbatch(bed, "-p", "train", "--gres=mig:1g.10gb:1", wrap=LASTS)[0],
        sbatch(bed, "-p", "train", wrap="sleep 600")[0],
        sbatch(bed, "-p", "gpu", "--gres=mig:1g.10gb:1", wrap=LASTS)[0],
    ]
    for job in behind:
        bed.wait_job(job, "RUNNING")
    backfilled(bed)
    for job in waiting:
        found = row(client, job)
        # 23.11 clears the reason of a job that its backfill scheduler has looked at
        assert found.state == "PENDING" and found.reason.partition(",")[0] in ("ReqNodeNotAvail", "None")
        assert found.priority >= row(client, behind[1]).priority > 0  # a held job has none
        assert "Requeue=1" in shown(bed, job)
        loan = hints(client, job)
        assert loan is not None and loan.waiting and loan.signal == "usr1" and loan.max == Profile(4, 40)


def test_training_job_starts_on_release_and_waits_again_after_a_requeue(bed: Cluster, client: CliClient) -> None:
    job, _ = sbatch(bed, *TRAIN, "--open-mode=append", wrap=LASTS)
    other, _ = sbatch(bed, *TRAIN, wrap=LASTS)
    wanted(bed, "2g.20gb")
    retype(client, job, "2g.20gb")
    bed.wait_job(job, "RUNNING")
    first_step(bed, job)
    assert len(sights(bed.output(job))["task 0"]) == 1
    loan = hints(client, job)
    assert loan is not None and loan.slice == Profile(2, 20)
    lasting = drops_old_gres_type(row(client, job).gres)
    assert loan.max == (Profile(4, 40) if lasting else Profile(2, 20))

    client.requeue_all([job])
    until("the job back in the queue", lambda: row(client, job).pending)
    retype(client, job, LOAN, StartTime="now+2")
    until("the end of the delay", lambda: row(client, job).reason != "BeginTime")
    backfilled(bed)
    loan = hints(client, job)
    assert loan is not None and loan.waiting and row(client, job).restarts == 1
    assert bed.job_state(other) == "PENDING" and (loan.min == Profile(2, 20)) == (not lasting)

    if lasting:  # where a job keeps its first profile slurmd may need its two minutes; `test_loan_lifecycle` tests that
        wanted(bed, "1g.10gb")
        retype(client, job, "1g.10gb")
        bed.wait_job(job, "RUNNING")
        until("a slice in its second run", lambda: bed.output(job).count("task 0 MIG-") == 2)


def test_training_job_released_without_a_free_slice_waits_again(bed: Cluster, client: CliClient) -> None:
    first, _ = sbatch(bed, "-p", "gpu", "--gres=mig:7g.80gb:1", wrap=LASTS)
    bed.wait_job(first, "RUNNING")
    job, _ = sbatch(bed, *TRAIN, wrap=LASTS)
    retype(client, job, "1g.10gb")
    backfilled(bed)
    assert bed.job_state(job) == "PENDING" and bed.job_state(first) == "RUNNING"
    retype(client, job, LOAN)
    bed.run(["scancel", str(first)])
    until("supply for small jobs", lambda: bool(offer(bed)))
    backfilled(bed)
    loan = hints(client, job)
    assert bed.job_state(job) == "PENDING" and loan is not None and loan.waiting


def test_user_may_make_only_valid_changes_to_a_waiting_training_job(bed: Cluster, client: CliClient) -> None:
    job, _ = sbatch(bed, *TRAIN, wrap=LASTS)

    def change(*words: str) -> str:
        done = bed.run(["scontrol", "update", f"JobId={job}", *words], "mbalice", check=False)
        return "" if done.returncode == 0 else done.stderr or "refused"

    assert change("Comment=migbatch: role=train min=2g.20gb max=3g.40gb") == ""
    loan = hints(client, job)
    assert loan is not None and loan.waiting and (loan.min, loan.max) == (Profile(2, 20), Profile(3, 40))
    for words in (
        ["Gres=mig:loan:1"],
        ["Comment=migbatch: role=train min=4g.40gb max=1g.10gb"],
        ["Comment=x [mig:7g.80gb:1#loan]"],
        ["Requeue=0"],
    ):
        assert change(*words), words
    message = change("Gres=mig:3g.40gb:1")
    if drops_old_gres_type(row(client, job).gres):
        assert message == ""
        bed.wait_job(job, "RUNNING")
        assert hints(client, job) is None  # the user's own from here on, never reclaimed
    else:
        assert message and bed.job_state(job) == "PENDING"


def test_bad_requests_are_refused_with_advice(bed: Cluster) -> None:
    for gres, more, words in (
        ("mig:auto:2", "", "one idle slice"),
        ("mig:loan:1", "", "is reserved"),
        ("mig:auto", " min=4g.40gb max=1g.10gb", "swap them"),
        ("mig:auto", " signal=kill", "usr1 or usr2"),
        ("mig:auto", " max=9g.90gb", "1g.10gb"),
    ):
        message = refused(bed, "-p", "train", f"--gres={gres}", f"--comment=migbatch: role=train{more}")
        assert words in message, message


def test_tasks_of_a_training_array_are_released_one_by_one(bed: Cluster, client: CliClient) -> None:
    job, _ = sbatch(bed, *TRAIN, "--array=1-3", wrap=LASTS)
    until("the array", lambda: any(found.job_id == job for found in client.jobs()))
    assert row(client, job).tasks == 3 and bed.job_state(job) == "PENDING"
    wanted(bed, "1g.10gb")
    found = row(client, job)
    for fields in (emptied(found.gres), retyped(found.gres, found.comment, "1g.10gb")):
        if fields:
            client.update_jobs({f"{job}_2": fields})

    def states() -> dict[str, str]:
        listed = bed.run(["squeue", "-h", "-r", "-j", str(job), "-o", "%K %T"]).stdout
        return dict(line.split() for line in listed.splitlines())

    until("the second task", lambda: states().get("2") == "RUNNING")
    assert states() == {"1": "PENDING", "2": "RUNNING", "3": "PENDING"}


def test_slurm_preempts_a_loan_for_inference(bed: Cluster, client: CliClient) -> None:
    job, _ = sbatch(bed, "-p", "train", "--gres=mig:auto", "--comment=migbatch: role=train", wrap=LASTS)
    wanted(bed, "7g.80gb")
    retype(client, job, "7g.80gb")
    bed.wait_job(job, "RUNNING")
    inference, _ = sbatch(bed, "-p", "gpu", "--gres=mig:7g.80gb:1", wrap=LASTS)
    bed.wait_job(inference, "RUNNING")
    until("the loan in the queue", lambda: row(client, job).pending)
    assert row(client, job).restarts == 1


def test_training_submission_is_handled_the_same_without_migbatchd(bed: Cluster, client: CliClient) -> None:
    with_service, before = sbatch(bed, *TRAIN, wrap=LASTS)
    bed.kill("migbatchd")
    try:
        alone, after = sbatch(bed, *TRAIN, wrap=LASTS)
        assert re.sub(r"\d{2,}", "", after) == re.sub(r"\d{2,}", "", before) or "waits for idle slices" in after
        assert row(client, alone).gres == row(client, with_service).gres
        assert row(client, alone).comment.endswith("[mig:loan:1#loan]") and "Requeue=1" in shown(bed, alone)
        hints_alone, hints_before = hints(client, alone), hints(client, with_service)
        assert hints_alone == hints_before and hints_alone is not None and hints_alone.waiting
    finally:
        bed.product.start_daemon()


def test_job_between_the_two_updates_of_a_retype_does_not_start(slurm_root: str) -> None:
    """Where Slurm needs two updates for a new type: two nodes with a `loan` each do not meet its request."""
    config = {"lending": {"enabled": True, "partitions": ["train"], "dry_run": True}}
    with Cluster(None, slurm_root=slurm_root, migbatch="all", nodes=2, gpus=1, config=config) as bed:
        client = CliClient(bed.bin, bed.slurm_conf)
        job, _ = sbatch(bed, *TRAIN, wrap=LASTS)
        until("the job", lambda: any(found.job_id == job for found in client.jobs()))
        if first := emptied(row(client, job).gres):
            client.update_jobs({str(job): first})
        for _ in range(4):
            other, _ = sbatch(bed, "-p", "gpu", "--gres=mig:1g.10gb:1", wrap="true")  # lets Slurm's scheduler run
            bed.wait_job(other)
        assert row(client, job).pending
        assert row(client, job).restarts == 0

"""A training job without a profile on a real Slurm: how it waits, is released, comes back, and what its user may do.

migbatchd only watches here (dry run); the hand that releases is the test's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm.cli import CliClient
from slurm_migbatch.slurm.client import JobRow
from slurm_migbatch.testbed.cluster import Cluster
from slurm_migbatch.workload.loans import LOAN, LoanHints, emptied, forgets, loan_hints, retyped
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
    """What lending does to release a job, and to put it back."""
    found = row(client, job)
    if first := emptied(found.gres):
        client.update_jobs({str(job): first})
    client.update_jobs({str(job): {**retyped(found.gres, found.comment, kind), **more}})


def wanted(bed: Cluster, profile: str) -> None:
    """Have supply offer a profile by asking for it, and taking that back."""
    job, _ = sbatch(bed, "-p", "gpu", f"--gres=mig:{profile}:1", wrap="true")
    bed.wait_job(job)
    until(f"an offer of {profile}", lambda: offer(bed).get(profile, 0) > 0)


def test_it_waits_with_its_priority_and_holds_nobody_up(bed: Cluster, client: CliClient) -> None:
    waiting = []
    for _ in range(5):
        job, said = sbatch(bed, *TRAIN, wrap=LASTS)
        assert "waits for an idle slice between 1g.10gb and 4g.40gb" in said and "--gres=mig:1g.10gb" in said
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
        # 23.11 takes the reason of a job back that its backfill scheduler has looked at
        assert found.state == "PENDING" and found.reason.partition(",")[0] in ("ReqNodeNotAvail", "None")
        assert found.priority >= row(client, behind[1]).priority > 0  # a job that is held has none
        assert "Requeue=1" in shown(bed, job)
        told = hints(client, job)
        assert told is not None and told.waiting and told.signal == "usr1" and told.max == Profile(4, 40)


def test_a_release_starts_it_and_a_requeue_brings_it_back(bed: Cluster, client: CliClient) -> None:
    job, _ = sbatch(bed, *TRAIN, "--open-mode=append", wrap=LASTS)
    other, _ = sbatch(bed, *TRAIN, wrap=LASTS)
    wanted(bed, "2g.20gb")
    retype(client, job, "2g.20gb")
    bed.wait_job(job, "RUNNING")
    first_step(bed, job)
    assert len(sights(bed.output(job))["task 0"]) == 1
    told = hints(client, job)
    assert told is not None and told.slice == Profile(2, 20)
    lasting = forgets(row(client, job).gres)
    assert told.max == (Profile(4, 40) if lasting else Profile(2, 20))

    client.requeue_all([job])
    until("the job back in the queue", lambda: row(client, job).pending)
    retype(client, job, LOAN, StartTime="now+2")
    until("the end of the delay", lambda: row(client, job).reason != "BeginTime")
    backfilled(bed)
    told = hints(client, job)
    assert told is not None and told.waiting and row(client, job).restarts == 1
    assert bed.job_state(other) == "PENDING" and (told.min == Profile(2, 20)) == (not lasting)

    if lasting:  # where a job keeps its first profile slurmd may want its two minutes; `test_way_of_a_loan` has that
        wanted(bed, "1g.10gb")
        retype(client, job, "1g.10gb")
        bed.wait_job(job, "RUNNING")
        until("a slice in its second run", lambda: bed.output(job).count("task 0 MIG-") == 2)


def test_one_that_was_released_in_vain_is_put_back(bed: Cluster, client: CliClient) -> None:
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
    told = hints(client, job)
    assert bed.job_state(job) == "PENDING" and told is not None and told.waiting


def test_what_its_user_may_change(bed: Cluster, client: CliClient) -> None:
    job, _ = sbatch(bed, *TRAIN, wrap=LASTS)

    def change(*words: str) -> str:
        done = bed.run(["scontrol", "update", f"JobId={job}", *words], "mbalice", check=False)
        return "" if done.returncode == 0 else done.stderr or "refused"

    assert change("Comment=migbatch: role=train min=2g.20gb max=3g.40gb") == ""
    told = hints(client, job)
    assert told is not None and told.waiting and (told.min, told.max) == (Profile(2, 20), Profile(3, 40))
    for words in (
        ["Gres=mig:loan:1"],
        ["Comment=migbatch: role=train min=4g.40gb max=1g.10gb"],
        ["Comment=x [mig:7g.80gb:1#loan]"],
        ["Requeue=0"],
    ):
        assert change(*words), words
    said = change("Gres=mig:3g.40gb:1")
    if forgets(row(client, job).gres):
        assert said == ""
        bed.wait_job(job, "RUNNING")
        assert hints(client, job) is None  # his own from here on, and nobody calls it back
    else:
        assert said and bed.job_state(job) == "PENDING"


def test_bad_requests_are_refused_with_advice(bed: Cluster) -> None:
    for gres, more, words in (
        ("mig:auto:2", "", "one idle slice"),
        ("mig:loan:1", "", "is reserved"),
        ("mig:auto", " min=4g.40gb max=1g.10gb", "swap them"),
        ("mig:auto", " signal=kill", "usr1 or usr2"),
        ("mig:auto", " max=9g.90gb", "1g.10gb"),
    ):
        said = refused(bed, "-p", "train", f"--gres={gres}", f"--comment=migbatch: role=train{more}")
        assert words in said, said


def test_an_array_waits_task_by_task(bed: Cluster, client: CliClient) -> None:
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


def test_slurm_itself_takes_it_back_for_inference(bed: Cluster, client: CliClient) -> None:
    job, _ = sbatch(bed, "-p", "train", "--gres=mig:auto", "--comment=migbatch: role=train", wrap=LASTS)
    wanted(bed, "7g.80gb")
    retype(client, job, "7g.80gb")
    bed.wait_job(job, "RUNNING")
    inference, _ = sbatch(bed, "-p", "gpu", "--gres=mig:7g.80gb:1", wrap=LASTS)
    bed.wait_job(inference, "RUNNING")
    until("the loan in the queue", lambda: row(client, job).pending)
    assert row(client, job).restarts == 1


def test_without_the_service_the_answer_is_the_same(bed: Cluster, client: CliClient) -> None:
    with_service, before = sbatch(bed, *TRAIN, wrap=LASTS)
    bed.kill("migbatchd")
    try:
        alone, after = sbatch(bed, *TRAIN, wrap=LASTS)
        assert re.sub(r"\d{2,}", "", after) == re.sub(r"\d{2,}", "", before) or "waits for idle slices" in after
        assert row(client, alone).gres == row(client, with_service).gres
        assert row(client, alone).comment.endswith("[mig:loan:1#loan]") and "Requeue=1" in shown(bed, alone)
        told, same = hints(client, alone), hints(client, with_service)
        assert told == same and told is not None and told.waiting
    finally:
        bed.product.start_daemon()


def test_half_way_between_two_types_it_starts_nowhere(slurm_root: str) -> None:
    """Where Slurm needs two requests for a new type: two nodes with a `loan` each are not what it waits for."""
    config = {"lending": {"enabled": True, "partitions": ["train"], "dry_run": True}}
    with Cluster(None, slurm_root=slurm_root, migbatch="all", nodes=2, gpus=1, config=config) as bed:
        client = CliClient(bed.bin, bed.slurm_conf)
        job, _ = sbatch(bed, *TRAIN, wrap=LASTS)
        until("the job", lambda: any(found.job_id == job for found in client.jobs()))
        if first := emptied(row(client, job).gres):
            client.update_jobs({str(job): first})
        for _ in range(4):
            other, _ = sbatch(bed, "-p", "gpu", "--gres=mig:1g.10gb:1", wrap="true")  # Slurm's scheduler goes round
            bed.wait_job(other)
        assert row(client, job).pending
        assert row(client, job).restarts == 0

"""Training on slices that inference does not need: lent, reclaimed, lent again, by a service that may die meanwhile.

The training jobs are `sbatch_examples/elastic_bash.sh` as it is shipped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from slurm_migbatch.testbed.cluster import Cluster
from slurm_migbatch.workload.loans import drops_old_gres_type
from tests.support.end_to_end import PATIENCE_S, cancel, marked, more_rounds, sbatch, settled, until
from tests.support.lending import LENDING, actions, begun, loans, running, saved, train

GRACE_S = 10.0
SETTINGS = {**LENDING, "grace_s": GRACE_S}
"""A run that has reported nothing is signalled before its requeue once it has lasted for `grace_s`."""


@pytest.fixture(scope="module")
def site(slurm_root: str) -> Iterator[Cluster]:
    with Cluster(None, slurm_root=slurm_root, migbatch="all", nodes=1, gpus=1, config={"lending": SETTINGS}) as running:
        yield running


@pytest.fixture
def bed(site: Cluster) -> Iterator[Cluster]:
    """One cluster for all tests but one, without jobs and loans at the beginning of each."""
    yield site
    cancel(site)
    until("the end of the loans", lambda: not loans(site))
    settled(site)


def ended(bed: Cluster) -> list[dict[str, Any]]:
    """The loans that the record has as ended."""
    return [loan for loan in loans(bed, "--all") if loan["state"] == "ended"]


def test_idle_slices_are_lent_to_training_jobs(bed: Cluster) -> None:
    jobs = [
        train(bed, "signal=usr1 max=2g.20gb", steps=50),
        train(bed, "signal=usr1 min=3g.40gb max=4g.40gb", steps=50),
    ]
    until("both to run", lambda: set(running(bed)) == set(jobs) or not bed.run(["squeue", "-h"]).stdout.strip())
    for job in jobs:
        assert bed.wait_job(job) == "COMPLETED", bed.home("mbalice").joinpath(f"train-{job}.out").read_text()
    until("the end of the loans", lambda: not loans(bed))
    over = {loan["job"]: loan for loan in loans(bed, "--all")}
    assert over[jobs[0]]["profile"] in ("1g.10gb", "1g.20gb", "2g.20gb")
    assert over[jobs[1]]["profile"] in ("3g.40gb", "4g.40gb")
    assert all((over[job]["node"], over[job]["gpu"], over[job]["user"]) == ("n1", "0", "mbalice") for job in jobs)
    assert [row["kind"] for row in actions(bed, jobs[0])] == ["release"]
    output = bed.product.migbatch("loans", "-c", str(bed.product.config), "--json", "--all")  # the program
    assert set(jobs) <= {loan["job"] for loan in json.loads(output)["loans"]}
    assert marked(bed, jobs[0])[1] == over[jobs[0]]["profile"] + ":1"


def test_three_loans_are_reclaimed_for_one_large_slice_without_loss(bed: Cluster) -> None:
    """A 4g job beside them keeps its slice, so that only the three can be reclaimed."""
    held, message = sbatch(bed, "-p", "gpu", "--gres=mig:4g.40gb", wrap="sleep 3600", user="mbbob")
    assert held, message
    assert bed.wait_job(held, "RUNNING") == "RUNNING"
    jobs = [train(bed, "signal=usr1 max=1g.10gb") for _ in range(3)]
    until("three loans", lambda: set(running(bed)) == set(jobs))
    until("some steps of each", lambda: all(begun(bed, job) == [0] for job in jobs))
    until("their first seconds", lambda: all(time.time() - loan["since"] > GRACE_S for loan in loans(bed)))
    inference, message = sbatch(bed, "-p", "gpu", "--gres=mig:3g.40gb", wrap="sleep 5", user="mbbob")
    assert inference, message
    assert bed.wait_job(inference, "RUNNING", "COMPLETED", timeout=PATIENCE_S) in ("RUNNING", "COMPLETED")
    why = f"inference job {inference} needs 3g.40gb"
    until(
        "the end of the three in the record",
        lambda: sorted(loan["job"] for loan in ended(bed) if why in loan["why"]) == jobs,
    )
    steps = {job: saved(bed, job) for job in jobs}
    assert all(steps.values()), "each wrote a checkpoint on its signal"
    assert bed.wait_job(inference) == "COMPLETED"
    until("the return of the three", lambda: all(len(begun(bed, job)) == 2 for job in jobs))
    assert {job: begun(bed, job)[1] for job in jobs} == steps
    expected = ["signal", "requeue", "retype", "release"]
    until("all of it in the record", lambda: [row["kind"] for row in actions(bed, jobs[0])][-4:] == expected)
    assert bed.job_state(held) == "RUNNING"


def test_loan_is_reclaimed_for_inference_that_lacks_only_cpus(bed: Cluster) -> None:
    """Slurm itself would preempt it only after half an hour."""
    job = train(bed, "signal=usr1 max=1g.10gb", f"--cpus-per-task={bed.spec.cpus - 2}")
    until("the loan", lambda: running(bed) == {job: "1g.10gb"})
    until("some steps", lambda: begun(bed, job) == [0])
    inference, message = sbatch(bed, "-p", "gpu", "--gres=mig:2g.20gb", "-c", "8", wrap="sleep 5", user="mbbob")
    assert inference, message
    assert bed.wait_job(inference, timeout=PATIENCE_S) == "COMPLETED"
    why = f"inference job {inference} needs its CPUs"
    until("its end in the record", lambda: [loan["job"] for loan in ended(bed) if why in loan["why"]] == [job])
    until("the return of the job", lambda: len(begun(bed, job)) == 2)
    assert begun(bed, job)[1] == saved(bed, job) > 0


def test_reclaim_continues_if_migbatchd_dies_between_signal_and_requeue(bed: Cluster) -> None:
    """The job ignores the signal; its grace period continues while migbatchd is dead."""
    deaf, message = sbatch(
        bed, "-p", "train", "--gres=mig:auto", "--comment=migbatch: role=train signal=usr1 min=7g.80gb",
        wrap="trap '' USR1; sleep 3600 & wait", user="mbbob",
    )  # fmt: skip
    assert deaf, message
    until("the loan", lambda: running(bed) == {deaf: "7g.80gb"})
    until("their first seconds", lambda: all(time.time() - loan["since"] > GRACE_S for loan in loans(bed)))
    inference, message = sbatch(bed, "-p", "gpu", "--gres=mig:1g.10gb", wrap="sleep 5")
    assert inference, message
    until("the signal", lambda: any(loan["state"] == "signalled" for loan in loans(bed)))
    bed.kill("migbatchd")
    assert [loan["state"] for loan in loans(bed)] == ["signalled"], "the record has it without the service"
    bed.restart("migbatchd")
    assert bed.wait_job(inference, timeout=PATIENCE_S) == "COMPLETED"
    until("the requeue in the record", lambda: "retype" in [row["kind"] for row in actions(bed, deaf)])
    assert [row["kind"] for row in actions(bed, deaf)][:4] == ["release", "signal", "requeue", "retype"]
    until("its end in the record", lambda: [loan["restarts"] for loan in ended(bed) if loan["job"] == deaf] == [0])
    until("the return of the job", lambda: running(bed) == {deaf: "7g.80gb"})


def test_slurm_preempts_a_loan_of_the_requested_profile_without_migbatchd(
    new_cluster: Callable[..., Cluster],
) -> None:
    """By partition priority, even while migbatchd is dead; the record follows, and the job loses no work."""
    exempt = {"PreemptExemptTime": "00:00:01"}
    bed = new_cluster(migbatch="all", nodes=1, gpus=1, config={"lending": LENDING}, options=exempt)
    job = train(bed, "signal=usr1 min=7g.80gb")
    until("the loan", lambda: running(bed) == {job: "7g.80gb"})
    until("some steps", lambda: begun(bed, job) == [0])
    time.sleep(2.0)
    bed.kill("migbatchd")
    inference, message = sbatch(bed, "-p", "gpu", "--gres=mig:7g.80gb", wrap="sleep 5", user="mbbob")
    assert inference, message
    assert bed.wait_job(inference, timeout=PATIENCE_S) == "COMPLETED"
    step = saved(bed, job)
    bed.restart("migbatchd")
    until("the return of the job", lambda: running(bed) == {job: "7g.80gb"} and len(begun(bed, job)) == 2)
    over = [loan["why"] for loan in ended(bed)]
    late = [why for why in over if "has not started within" in why]  # a return that a busy machine delayed
    assert len(over) - len(late) == 1 and any("preemption" in why for why in over), over
    assert begun(bed, job)[1] == step > 0
    again = ["withdraw", "release"] * len(late)
    assert [row["kind"] for row in actions(bed, job)] == ["release", "retype", "release", *again], over
    cancel(bed)
    settled(bed)


def test_two_training_jobs_divide_a_gpu_and_the_last_one_gets_all_of_it(
    new_cluster: Callable[..., Cluster],
) -> None:
    """Up to Slurm 23.02 a job cannot come back at once to the node where it ran, so the second one waits there."""
    settings = {**LENDING, "payback_s": 100.0, "settle_s": 15.0, "checkpoint_s": 1.0}
    bed = new_cluster(migbatch="all", nodes=1, gpus=1, config={"lending": settings})
    first = train(bed, "signal=usr1 min=1g.10gb")
    until("the loan of the whole GPU", lambda: running(bed) == {first: "7g.80gb"})
    until("some steps", lambda: begun(bed, first) == [0])
    second = train(bed, "signal=usr1 min=1g.10gb")
    if not drops_old_gres_type(bed.run(["squeue", "-h", "-j", str(second), "-o", "%b"]).stdout.strip()):
        more_rounds(bed, "lending", 20)
        assert running(bed) == {first: "7g.80gb"}
        return
    until("two loans", lambda: sorted(running(bed).values()) == ["3g.40gb", "4g.40gb"])
    until("the return of the first", lambda: len(begun(bed, first)) == 2)
    assert begun(bed, first)[1] > 0, "it wrote a checkpoint before it was stopped"
    assert [row["kind"] for row in actions(bed, first)] == ["release", "signal", "requeue", "retype", "release"]
    (over,) = [loan["why"] for loan in ended(bed) if loan["job"] == first]
    assert "divided anew among 2 jobs" in over
    bed.run(["scancel", str(second)])
    until("the whole GPU again", lambda: running(bed) == {first: "7g.80gb"})
    until("its third run", lambda: len(begun(bed, first)) == 3)


def test_training_job_gets_no_loan_on_nodes_that_it_excludes(new_cluster: Callable[..., Cluster]) -> None:
    """What it excludes may change while it waits."""
    bed = new_cluster(migbatch="all", nodes=3, gpus=1, config={"lending": LENDING})
    held, message = sbatch(bed, "-p", "gpu", "-w", "n3", "--gres=mig:7g.80gb", wrap="sleep 3600", user="mbbob")
    assert held, message
    assert bed.wait_job(held, "RUNNING") == "RUNNING"
    first = train(bed, "signal=usr1 min=7g.80gb", "-x", "n1")
    second = train(bed, "signal=usr1 min=7g.80gb", "--exclude=n[1-2]")
    until("one loan", lambda: running(bed) == {first: "7g.80gb"})
    more_rounds(bed, "lending")
    assert nodes_of(bed) == {first: "n2"}, "n1 is idle, and both exclude it"
    bed.run(["scontrol", "update", f"JobId={second}", "ExcNodeList=n2"], "mbalice")
    until("the loan on n1", lambda: nodes_of(bed) == {first: "n2", second: "n1"})
    cancel(bed)
    settled(bed)


def nodes_of(bed: Cluster) -> dict[int, str]:
    """Node of each loan that runs, by job."""
    return {loan["job"]: loan["node"] for loan in loans(bed) if loan["state"] == "running"}


def test_dry_run_changes_nothing_and_records_the_same_decision(bed: Cluster) -> None:
    bed.product.reconfigure(lending={"dry_run": True})
    job = train(bed, "signal=usr1 max=2g.20gb", steps=20)
    before = bed.run(["squeue", "-h", "-j", str(job), "-o", "%T %b %k"]).stdout
    until("a decision", lambda: bool(actions(bed, job)))
    (would,) = actions(bed, job)
    more_rounds(bed, "lending")
    assert actions(bed, job) == [would], "it is recorded once"
    assert would["dry_run"]
    assert bed.run(["squeue", "-h", "-j", str(job), "-o", "%T %b %k"]).stdout == before
    assert "would release" in next(loan["why"] for loan in loans(bed) if loan["job"] == job)
    bed.product.reconfigure(lending={"dry_run": False})
    assert bed.wait_job(job) == "COMPLETED"
    acted = actions(bed, job)[1]
    same = ("kind", "job_id", "restart", "before", "after", "why")
    assert {name: acted[name] for name in same} == {name: would[name] for name in same}


def placed(bed: Cluster) -> dict[str, Any]:
    """The only loan, once its node is known: its state comes from slurmctld, its slice from the node."""
    until("its node", lambda: all(loan["node"] for loan in loans(bed)))
    (found,) = loans(bed)
    return found


def test_requeued_loan_starts_on_a_node_where_slurmd_runs_its_prolog(
    new_cluster: Callable[..., Cluster],
) -> None:
    """Up to 23.02 slurmd often starts no Prolog where the job ran: it then excludes that node and goes to another."""
    bed = new_cluster(migbatch="all", nodes=2, gpus=1, config={"lending": LENDING})
    job = train(bed, "signal=usr1 min=3g.40gb max=3g.40gb")
    until("the loan", lambda: job in running(bed))
    until("some steps", lambda: begun(bed, job) == [0])
    before = placed(bed)
    bed.run(["scontrol", "requeue", str(job)])
    until("its return", lambda: len(begun(bed, job)) == 2 and job in running(bed))
    after = placed(bed)
    assert after["restarts"] == 1, "no run started again immediately"
    if not drops_old_gres_type(bed.run(["squeue", "-h", "-j", str(job), "-o", "%b"]).stdout.strip()):
        excluded = bed.run(["squeue", "-h", "-j", str(job), "-o", "%x"]).stdout.strip()
        assert {before["node"], after["node"]} == {"n1", "n2"} and excluded == before["node"]
    cancel(bed)
    settled(bed)

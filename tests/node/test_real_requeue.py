"""Jobs that a node requeues under a real slurmd: only that job is requeued, and the whole of it."""

import fcntl

import pytest

from slurm_migbatch.node.config import load
from slurm_migbatch.node.executor import Executor
from slurm_migbatch.node.run_repair import run_lock

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def bed(slurm_root):
    from slurm_migbatch.testbed.cluster import Cluster

    with Cluster(None, nodes=2, gpus=2, migbatch="hooks", slurm_root=slurm_root) as running:
        yield running


@pytest.fixture(autouse=True)
def no_jobs_left(bed):
    yield
    bed.run(["scancel", "-u", "mbalice"])
    bed.wait("the end of all jobs", lambda: not bed.run(["squeue", "-h"]).stdout and not having(bed))
    assert not [state for state in bed.node_states().values() if "drain" in state]


def journals(bed):
    for node in bed.spec.node_names:
        executor = Executor(load(str(bed.directory / "etc"), node))
        try:
            yield executor.journal
        finally:
            executor.close()
            executor.gpus.reset()


def having(bed):
    """Jobs that have their slices."""
    return {run.job for journal in journals(bed) for run in journal.runs("state='running'")}


def misfits(bed):
    return {event["job"] for journal in journals(bed) for event in journal.spooled(10000) if event["kind"] == "misfit"}


def test_misfit_of_an_arrays_last_task_leaves_its_other_tasks_alone(bed):
    """The record of the task that starts last has the array's own id, which means all of its tasks to scontrol."""
    options = ("--array=0-2%2", "--nodelist=n1", "--requeue", "--comment=try [mig:7g.80gb:1]")
    array = bed.submit(*options, wrap="sleep 600")
    bed.wait("two tasks with a GPU each", lambda: len(having(bed)) == 2)
    bed.run(["scontrol", "update", f"JobId={array}", "ArrayTaskThrottle=3"])
    bed.wait("the misfit", lambda: int(array) in misfits(bed))
    bed.wait("its requeue", lambda: bed.job_state(f"{array}_2") == "PENDING")
    fields = "--Format=ArrayTaskID,State,RestartCnt"
    shown = bed.run(["squeue", "-h", "-r", "-j", str(array), "-t", "all", fields]).stdout
    assert sorted(map(str.split, shown.splitlines())) == [
        ["0", "RUNNING", "0"],
        ["1", "RUNNING", "0"],
        ["2", "PENDING", "1"],
    ]


def test_misfit_of_one_component_requeues_the_whole_heterogeneous_job(bed):
    parts = ("--comment=try [mig:7g.80gb:1]", ":", "--comment=try [mig:7g.80gb:3]")
    job = int(bed.submit("--requeue", *parts, wrap="echo I RAN; sleep 600"))
    bed.wait("the misfit", lambda: job + 1 in misfits(bed))
    bed.wait("its requeue", lambda: [bed.job_state(job + part) for part in (0, 1)] == ["PENDING"] * 2)


def test_job_cancelled_during_its_prolog_is_not_requeued(bed):
    job = int(bed.submit("--nodelist=n1", "--requeue", "--hold", "--comment=try [mig:7g.80gb:3]", wrap="echo I RAN"))
    locks = bed.node_directory("n1") / "run" / "lock"
    locks.mkdir(mode=0o700, parents=True, exist_ok=True)  # no hook has run there yet if this test is the first
    with (locks / run_lock(job)).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        bed.run(["scontrol", "release", str(job)])
        bed.wait_job(job, "RUNNING")
        bed.run(["scancel", str(job)])
    bed.wait("the misfit", lambda: job in misfits(bed))
    bed.wait("its end", lambda: bed.job_state(job) not in ("RUNNING", "COMPLETING"))
    assert bed.job_state(job) == "CANCELLED"

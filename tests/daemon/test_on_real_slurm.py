"""migbatchd on a private cluster: what users see, and what survives the loss of each part."""

import re
import time
from datetime import datetime

import pytest

from slurm_migbatch.store.db import open_store
from slurm_migbatch.store.runquery import JobId, RunFilter
from slurm_migbatch.testbed.proc import wait_until
from tests.support.commands import migbatch

pytestmark = pytest.mark.slurm

USER = "mbalice"
PATIENCE_S = 180.0  # machines that do much else at the same time are slow


@pytest.fixture(scope="module")
def bed(slurm_root):
    from slurm_migbatch.testbed.cluster import Cluster

    with Cluster(nodes=2, gpus=1, slurm_root=slurm_root, migbatch="all", node_conf={"CheckEvery": "1"}) as bed:
        yield bed


def run_of(bed, job, state="COMPLETED", over=True):
    """The record's run of a job, once it is in this state and Slurm, nodes and filter have reported all."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        with open_store(bed.product.record, readonly=True) as store:
            for row in store.runs(RunFilter(jobs=(JobId(int(job)),))):
                released = all(held["until"] is not None for held in row.slices)
                if row.run["state"] == state and row.slices and released == over:
                    return row
        time.sleep(0.1)
    raise AssertionError(f"job {job} is not {state} in the record")


def wait(what, check, timeout=PATIENCE_S):
    wait_until(check, timeout, what, every=0.1)


def test_show_and_nodes_report_a_completed_job(bed):
    job = bed.submit(
        "--gres=mig:auto", "--comment=migbatch: model=bert-large batch=32 slo=500ms", wrap="true", user=USER
    )
    assert bed.wait_job(job) == "COMPLETED"
    wait("the decision", lambda: run_of(bed, job).run["bucket"])
    run = run_of(bed, job)
    assert run.run["bucket"].startswith("bert-large/infer/b32/")
    assert run.run["exit_code"] == 0
    shown = bed.product.migbatch("show", str(job))
    assert "mig:auto" in shown
    assert run.slices[0]["mig_uuid"] in shown
    assert "n1" in bed.product.migbatch("nodes")
    wait("a healthy site", lambda: healthy(bed))


def healthy(bed):
    """Whether doctor finds nothing to correct; findings of nodes at their start are shown until they check again."""
    try:
        return " 0 failed" in migbatch(bed, "doctor")
    except AssertionError:
        return False


def test_why_explains_a_pending_job(bed):
    fill = [bed.submit("--gres=gpu:1", wrap="sleep 600", user=USER) for _ in range(2)]
    for job in fill:
        bed.wait_job(job, "RUNNING")
    waiting = bed.submit("--gres=mig:3g.40gb:1", wrap="true", user=USER)

    def why_is_complete():
        output = migbatch(bed, "why", str(waiting))
        return all(words in output for words in ("reserved: 3g.40gb", "not offered at the"))

    wait("a reservation", why_is_complete)
    bed.run(["scancel", *map(str, fill)])
    assert bed.wait_job(waiting) == "COMPLETED"


def test_jobs_run_without_migbatchd_and_are_recorded_after_its_restart(bed):
    gate = bed.home(USER) / "gate"
    running = bed.submit("--gres=mig:1g.10gb:1", wrap=f"until test -e {gate}; do sleep 0.2; done", user=USER)
    bed.wait_job(running, "RUNNING")
    bed.kill("migbatchd")
    gate.touch()  # its slice stays on offer, whatever else was on offer when migbatchd was killed
    new = bed.submit("--gres=mig:auto", "--comment=migbatch: mem=5gb", wrap="echo $MIGBATCH_PROFILE", user=USER)
    assert bed.wait_job(new) == "COMPLETED"
    assert bed.output(new, USER).strip() == "1g.10gb"
    assert bed.wait_job(running) == "COMPLETED"
    bed.product.start_daemon()
    assert run_of(bed, running).run["profile"] == "1g.10gb"
    assert run_of(bed, new).slices[0]["profile"] == "1g.10gb"
    wait("idle nodes", lambda: set(bed.node_states().values()) == {"idle"})


def test_ends_of_jobs_without_slices_while_migbatchd_is_down_are_slurms(bed):
    gate = bed.home(USER) / "gate2"
    fails = bed.submit(wrap=f"until test -e {gate}; do sleep 0.2; done; exit 5", user=USER)
    held = bed.submit("--gres=mig:1g.10gb:1", "--hold", wrap="true", user=USER)
    bed.wait_job(fails, "RUNNING")
    known = {fails: "RUNNING", held: "PENDING"}
    wait("both in the record", lambda: known == {job: run["state"] for job, run in recorded(bed, fails, held).items()})
    bed.kill("migbatchd")
    gate.touch()
    bed.run(["scancel", str(held)])
    assert bed.wait_job(fails) == "FAILED"
    ended = {job: ended_at(bed, job) for job in (fails, held)}
    wait("another second", lambda: time.time() > max(ended.values()) + 1)
    bed.product.start_daemon()
    expected = {fails: ("FAILED", 5, ended[fails]), held: ("CANCELLED", 0, ended[held])}
    wait(
        "Slurm's ends",
        lambda: (
            {job: (run["state"], run["exit_code"], run["ended"]) for job, run in recorded(bed, fails, held).items()}
            == expected
        ),
    )


def recorded(bed, *jobs):
    """The record's fields of the runs of these jobs."""
    with open_store(bed.product.record, readonly=True) as store:
        return {row.run["job_id"]: row.run for row in store.runs(RunFilter(jobs=tuple(map(JobId, jobs))))}


def assert_jobs_start(bed):
    """Assert that a job for each free half of each GPU runs.

    A node sends one back at most once. It does if Slurm, which counts a slice in use as free then, starts a job there
    before migbatchd sees that.
    """
    jobs = [bed.submit("--gres=mig:3g.40gb:1", wrap="sleep 1", user=USER) for _ in range(3)]
    for job in jobs:
        assert bed.wait_job(job) == "COMPLETED"
        (restarts,) = re.findall(r"Restarts=(\d+)", bed.run(["scontrol", "show", "job", str(job)]).stdout)
        assert int(restarts) <= 1


def ended_at(bed, job):
    """When a job ended according to scontrol, unix seconds."""
    (text,) = re.findall(r"EndTime=(\S+)", bed.run(["scontrol", "show", "job", str(job)]).stdout)
    return datetime.fromisoformat(text).timestamp()


def test_jobs_start_after_a_slurmctld_restart_and_no_node_is_drained(bed):
    job = bed.submit("--gres=mig:3g.40gb:1", wrap="sleep 600", user=USER)
    bed.wait_job(job, "RUNNING")
    bed.restart("slurmctld")
    assert_jobs_start(bed)
    bed.run(["scontrol", "reconfigure"])
    assert_jobs_start(bed)
    assert bed.job_state(job) == "RUNNING"
    bed.run(["scancel", str(job)])
    wait("idle nodes", lambda: set(bed.node_states().values()) == {"idle"})


def test_job_that_slurmctld_lost_is_recorded_as_cancelled_as_in_sacct(bed):
    job = bed.submit("--gres=mig:1g.10gb:1", wrap="sleep 600", user=USER)
    bed.wait_job(job, "RUNNING")
    wait("Slurm's own row of the run", lambda: run_of(bed, job, "RUNNING", over=False).run["placed"])
    slurmctld = [bed.root.locate("slurmctld"), "-D"]
    bed.stop("slurmctld")
    bed.spawn("slurmctld", [*slurmctld, "-c"], in_root=True)
    run = run_of(bed, job, "CANCELLED").run
    assert run["state_from"] == "slurm" and run["exit_code"] in (0, None)
    bed.stop("slurmctld")
    bed.spawn("slurmctld", slurmctld, in_root=True)
    wait("idle nodes", lambda: set(bed.node_states().values()) == {"idle"})


def test_job_whose_marker_is_larger_than_its_gres_is_cancelled(bed):
    job = bed.submit("--gres=mig:1g.10gb:1", "--hold", wrap="sleep 600", user=USER)
    # only root can: the filter lets root's changes pass
    bed.run(["scontrol", "update", f"JobId={job}", "Comment=[mig:2g.20gb:1]"])
    bed.run(["scontrol", "release", str(job)])
    wait("the end of the job", lambda: bed.job_state(job) not in ("PENDING", "RUNNING", "COMPLETING"))
    assert bed.job_state(job).startswith("CANCELLED")
    wait("idle nodes", lambda: set(bed.node_states().values()) == {"idle"})

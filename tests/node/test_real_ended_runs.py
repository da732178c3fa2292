"""Epilogs killed under a real slurmd: Slurm continues without them, and so must the node."""

import json
import time

import pytest

pytestmark = pytest.mark.slurm

KILLED = """#!/bin/sh
if test -e {gate}; then rm {gate}; kill -9 $$; fi
exec {real}
"""


@pytest.fixture(scope="module")
def bed(slurm_root):
    from slurm_migbatch.testbed.cluster import Cluster

    often = {"ReconcileEvery": "2"}
    with Cluster(None, nodes=2, gpus=1, migbatch="hooks", node_conf=often, slurm_root=slurm_root) as running:
        epilog = running.directory / "hooks" / "epilog"
        real = epilog.rename(epilog.with_name("epilog.real"))
        epilog.write_text(KILLED.format(gate=running.directory / "kill", real=real))
        epilog.chmod(0o755)
        yield running


@pytest.fixture(autouse=True)
def nodes_in_service(bed):
    yield
    bed.run(["scontrol", "update", "NodeName=n1,n2", "State=RESUME"], check=False)
    bed.wait("the nodes", lambda: not [s for s in bed.node_states().values() if "drain" in s])


def command(bed, *words):
    etc = str(bed.directory / "etc")
    return json.loads(bed.product.migbatch("node", *words, "--etc", etc, "--node", "n1", "--json"))


def held(bed):
    status = command(bed, "status")
    return {row["job"] for gpu in status["gpus"] for row in gpu["slices"] if row["state"] == "held"}


def left_behind(bed):
    """A job whose Epilog was killed before its first instruction."""
    job = bed.submit("--comment=try [mig:2g.20gb:1]", "--nodelist=n1", wrap="sleep 12")
    bed.wait_job(job, "RUNNING")
    (bed.directory / "kill").touch()
    assert bed.wait_job(job) == "COMPLETED"
    bed.wait("its killed Epilog", lambda: not (bed.directory / "kill").exists())
    bed.wait("Slurm's end of it", lambda: bed.job_state(job) == "COMPLETED")
    assert held(bed) == {job}
    return job


def root_alone(bed):
    dev = bed.machine("n1").dev_root / "nvidia-caps"
    return all(path.stat().st_uid == 0 for path in dev.iterdir())


def test_reconcile_ends_the_run_of_a_killed_epilog(bed):
    job = left_behind(bed)
    bed.wait("word of it", lambda: [line for line in command(bed, "status")["over"] if f"job {job} " in line])
    assert [line for line in command(bed, "reconcile")["changes"] if f"job {job} " in line]
    assert held(bed) == set() and root_alone(bed)


def test_next_hook_ends_the_run_of_a_killed_epilog(bed):
    job = left_behind(bed)
    bed.run(["scontrol", "update", "NodeName=n1", "State=RESUME"], check=False)
    other = bed.submit("--comment=try [mig:1g.10gb:1]", "--nodelist=n1", wrap="true", user="mbbob")
    assert bed.wait_job(other) == "COMPLETED"
    bed.wait("the release", lambda: job not in held(bed))
    bed.wait("the devices", lambda: root_alone(bed))


def test_no_run_is_ended_while_slurmctld_is_down(bed):
    job = bed.submit("--comment=try [mig:2g.20gb:1]", "--nodelist=n1", wrap="sleep 600")
    bed.wait_job(job, "RUNNING")
    bed.wait("its slice", lambda: held(bed) == {job})
    time.sleep(11)
    bed.stop("slurmctld")
    try:
        bed.kill("slurmd-n1")  # its steps go on
        status = command(bed, "status")
        assert status["over"] == [] and held(bed) == {job}
        bed.product.migbatch("node", "reconcile", "--etc", str(bed.directory / "etc"), "--node", "n1")
        assert held(bed) == {job}
    finally:
        bed.restart("slurmd-n1")
        bed.restart("slurmctld")
    bed.run(["scancel", str(job)])
    bed.wait("its end", lambda: held(bed) == set())


def test_agent_ends_only_the_run_of_a_killed_epilog(bed):
    """It leaves a suspended job, a job without a step and a requeued job alone."""
    suspended = bed.submit("--comment=try [mig:1g.10gb:1]", "--nodelist=n1", wrap="sleep 600")
    again = bed.submit("--comment=try [mig:1g.10gb:1]", "--nodelist=n1", "--requeue", wrap="sleep 600")
    idle = ["salloc", "--no-shell", "--comment=try [mig:1g.10gb:1]", "--nodelist=n1"]
    idle_job = int(bed.run(idle, "mbbob").stderr.split("allocation")[1].split()[0])
    bed.wait("three jobs", lambda: held(bed) == {suspended, again, idle_job})
    bed.run(["scontrol", "suspend", str(suspended)])
    bed.run(["scontrol", "requeue", str(again)])
    bed.wait("the requeue", lambda: bed.job_state(again) == "PENDING")
    time.sleep(5)
    bed.run(["scontrol", "update", f"JobId={again}", "StartTime=now"])
    bed.wait("its second run", lambda: held(bed) == {suspended, again, idle_job})
    job = left_behind_beside(bed)
    bed.product.start_agent("n1")
    try:
        bed.wait("the agent's repair", lambda: job not in held(bed))
        bed.run(["scontrol", "update", "NodeName=n1", "State=RESUME"], check=False)
        job = left_behind_beside(bed)
        bed.wait("another round of the agent", lambda: job not in held(bed))
        assert held(bed) == {suspended, again, idle_job}
    finally:
        bed.run(["scontrol", "resume", str(suspended)])
        bed.run(["scancel", str(suspended), str(again), str(idle_job)])
    bed.wait("their ends", lambda: held(bed) == set())


def left_behind_beside(bed):
    job = bed.submit("--comment=try [mig:2g.20gb:1]", "--nodelist=n1", wrap="sleep 12")
    bed.wait_job(job, "RUNNING")
    (bed.directory / "kill").touch()
    assert bed.wait_job(job) == "COMPLETED"
    bed.wait("its killed Epilog", lambda: not (bed.directory / "kill").exists())
    return job

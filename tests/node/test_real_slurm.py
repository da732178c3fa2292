"""The hooks under a real slurmd, without the submit filter: the tests write the marker as the filter would."""

import json
import time

import pytest

from slurm_migbatch.node import exits

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def bed(slurm_root):
    from slurm_migbatch.testbed.cluster import Cluster

    with Cluster(None, nodes=1, gpus=2, migbatch="hooks", slurm_root=slurm_root) as running:
        yield running


def slices(bed):
    return [
        (gpu["minor"], i["profile"], i["start"], [c["uuid"] for c in i["compute_instances"]])
        for gpu in bed.machine("n1").dump()["gpus"]
        for i in gpu["instances"]
    ]


def output(bed, job, user="mbalice"):
    return (bed.home(user) / f"slurm-{job}.out").read_text()


def status(bed):
    from slurm_migbatch.node import status as module
    from slurm_migbatch.node.config import load
    from slurm_migbatch.node.executor import Executor

    executor = Executor(load(str(bed.directory / "etc"), "n1"))
    try:
        return module.status(executor.config, executor) | {"events": executor.journal.spooled(10000)}
    finally:
        executor.close()
        executor.gpus.reset()


def submit(bed, marker, *options, wrap, user="mbalice"):
    return bed.submit(*options, f"--comment=try {marker}", wrap=wrap, user=user)


def fill(bed):
    """Start a job that holds both GPUs whole; Slurm calls it running before its Prolog ends: wait for its script."""
    job = submit(bed, "[mig:7g.80gb:2]", wrap="echo started; sleep 600")
    path = bed.home("mbalice") / f"slurm-{job}.out"
    bed.wait("the job on both GPUs", lambda: path.exists() and "started" in path.read_text())
    return job


def test_batch_script_and_tasks_see_their_slices(bed):
    wrap = "echo batch $CUDA_VISIBLE_DEVICES; srun -n2 sh -c 'echo task $SLURM_LOCALID $CUDA_VISIBLE_DEVICES'"
    job = submit(bed, "[mig:1g.10gb:2]", "-n2", wrap=wrap)
    assert bed.wait_job(job) == "COMPLETED"
    lines = [line.split() for line in output(bed, job).splitlines()]
    batch = next(line[1] for line in lines if line[0] == "batch").split(",")
    tasks = {line[1]: line[2] for line in lines if line[0] == "task"}
    assert len(batch) == 2 and [tasks["0"], tasks["1"]] == batch
    assert {uuid for *_, uuids in slices(bed) for uuid in uuids} >= set(batch)


def test_the_user_owns_the_devices_while_the_job_runs(bed):
    dev = bed.machine("n1").dev_root / "nvidia-caps"
    job = submit(bed, "[mig:2g.20gb:1]", wrap=f"sleep 0.5; find {dev} -user $(id -un) | wc -l")
    assert bed.wait_job(job) == "COMPLETED"
    assert output(bed, job).strip() == "2"
    bed.wait("the epilog", lambda: all(path.stat().st_uid == 0 for path in dev.iterdir()))


def test_misfit_job_does_not_run_and_drains_no_node(bed):
    first = fill(bed)
    job = submit(bed, "[mig:1g.10gb:1]", wrap="echo I RAN $CUDA_VISIBLE_DEVICES", user="mbbob")
    bed.wait("the misfit", lambda: [e for e in status(bed)["events"] if e["kind"] == "misfit" and e["job"] == int(job)])
    time.sleep(1)
    path = bed.home("mbbob") / f"slurm-{job}.out"
    assert not path.exists() or "I RAN" not in path.read_text()
    assert not [state for state in bed.node_states().values() if "drain" in state]
    shown = bed.run(["scontrol", "-o", "show", "job", str(job)]).stdout
    assert "JobState=PENDING" in shown or "JobState=CONFIGURING" in shown or "JobState=RUNNING" in shown, shown
    bed.run(["scancel", str(first)])
    time.sleep(5)  # until then slurmd may still consider the job known, see TOMBSTONE_S
    bed.run(["scontrol", "update", f"JobId={job}", "StartTime=now"])
    assert bed.wait_job(job) == "COMPLETED"
    assert output(bed, job, "mbbob").startswith("I RAN MIG-")


def test_misfit_that_cannot_be_requeued_fails_only_its_tasks(bed):
    first = fill(bed)
    done = bed.run(["srun", "-n1", "--comment=try [mig:1g.10gb:1]", "sh", "-c", "echo I RAN"], "mbbob", check=False)
    assert "I RAN" not in done.stdout and done.returncode != 0
    assert not [state for state in bed.node_states().values() if "drain" in state]
    bed.run(["scancel", str(first)])
    bed.wait_job(first, "CANCELLED")


def test_requeued_job_starts_a_new_run(bed):
    job = submit(bed, "[mig:3g.40gb:1]", "--requeue", wrap="echo $SLURM_RESTART_COUNT $CUDA_VISIBLE_DEVICES; sleep 600")
    bed.wait_job(job, "RUNNING")
    bed.run(["scontrol", "requeue", str(job)])
    bed.wait("the requeue", lambda: bed.job_state(job) == "PENDING")
    time.sleep(5)
    bed.run(["scontrol", "update", f"JobId={job}", "StartTime=now"])
    bed.wait("the second run", lambda: {1} <= {r["restart"] for r in status(bed)["runs"] if r["job"] == int(job)})
    assert [r["restart"] for r in status(bed)["runs"] if r["job"] == int(job)] == [1]
    bed.run(["scancel", str(job)])
    bed.wait("its end", lambda: not [r for r in status(bed)["runs"] if r["job"] == int(job)])
    stops = [e["restart"] for e in status(bed)["events"] if e["kind"] == "stop" and e["job"] == int(job)]
    assert stops == [0, 1]


def test_job_restarted_without_a_prolog_does_not_run_without_a_slice(bed):
    """slurmd skips the Prolog then (22.05); TaskProlog notices and sends the job back."""
    wrap = "echo I RAN ${CUDA_VISIBLE_DEVICES:-without}; sleep 600"
    job = submit(bed, "[mig:3g.40gb:1]", "--requeue", wrap=wrap)
    bed.wait_job(job, "RUNNING")
    bed.run(["scontrol", "requeue", str(job)])
    bed.wait("the requeue", lambda: bed.job_state(job) == "PENDING")
    bed.run(["scontrol", "update", f"JobId={job}", "StartTime=now"])
    time.sleep(4)
    path = bed.home("mbalice") / f"slurm-{job}.out"
    assert not path.exists() or "I RAN without" not in path.read_text()
    bed.run(["scancel", str(job)])  # 22.05 itself may have called it a failed launch by now
    bed.wait("its end", lambda: not [r for r in status(bed)["runs"] if r["job"] == int(job)])


def test_many_short_jobs_leave_only_idle_slices(bed):
    markers = ["[mig:1g.10gb:1]", "[mig:2g.20gb:1]", "[mig:1g.10gb:1]"]  # all fit at once: nothing limits them here
    jobs = [submit(bed, markers[i % 3], wrap="echo $CUDA_VISIBLE_DEVICES", user=u) for i in range(3) for u in USERS]
    for job in jobs:
        assert bed.wait_job(job) == "COMPLETED", [e for e in status(bed)["events"] if e["kind"] == "misfit"]
    bed.wait("the last epilog", lambda: not [r for r in status(bed)["runs"] if r["state"] != "misfit"])
    found = status(bed)
    assert found["zombies"] == 0
    assert {row["state"] for gpu in found["gpus"] for row in gpu["slices"]} <= {"idle"}
    json.dumps(found)


USERS = ["mbalice", "mbbob", "mbcarol"]


def test_unsafe_configuration_drains_the_node_with_prolog_error(bed):
    """A hook can stop the node by its exit code: a configuration writable by others drains it with Prolog error."""
    conf = bed.directory / "etc" / "node.conf"
    conf.chmod(0o666)
    try:
        job = submit(bed, "[mig:1g.10gb:1]", wrap="echo I RAN")
        bed.wait("the drain", lambda: [s for s in bed.node_states().values() if "drain" in s])
        assert exits.INSTALLATION
        reason = bed.run(["sinfo", "-h", "-R"]).stdout
        assert "Prolog error" in reason
    finally:
        conf.chmod(0o644)
        bed.run(["scancel", str(job)])
        # Only after its Epilog, which also drains the node if it still finds the file writable by others.
        bed.wait("the job's end", lambda: str(job) not in bed.run(["squeue", "-h", "-o", "%i"]).stdout.split())
        bed.run(["scontrol", "update", "NodeName=n1", "State=RESUME"])
    bed.wait("the node", lambda: not [s for s in bed.node_states().values() if "drain" in s])


def having(bed):
    """Jobs that have their slices."""
    return {run["job"] for run in status(bed)["runs"] if run["state"] == "running"}


def let_share(bed, host, *guests):
    """Store a plan in which these jobs share the slice that the host's first run holds."""
    from slurm_migbatch.node import plan
    from slurm_migbatch.node.config import load

    (gpu, row) = next((g, p) for g in status(bed)["gpus"] for p in g["slices"] if p["job"] == int(host))
    slot = [row["profile"], row["start"], row["size"]]
    wire = {str(guest): [gpu["uuid"], *slot, int(host), 0] for guest in guests}
    new_plan = {"version": 1, "gpus": {gpu["uuid"]: [slot]}, "guests": wire}
    plan.store(load(str(bed.directory / "etc"), "n1").state_dir, json.dumps(new_plan).encode())
    return row["mig_uuid"]


@pytest.mark.parametrize("host_first", [True, False])
def test_two_jobs_of_one_user_share_a_slice_and_end_in_either_order(bed, host_first):
    home, dev = bed.home("mbalice"), bed.machine("n1").dev_root / "nvidia-caps"
    tag = "a" if host_first else "b"
    wrap = "echo $CUDA_VISIBLE_DEVICES; srun sh -c 'echo $CUDA_VISIBLE_DEVICES'; until test -e %s; do sleep 0.2; done; "
    wrap += f"find {dev} -user $(id -un) -perm 400 | wc -l"
    gates = {name: home / f"{tag}-{name}" for name in ("host", "guest")}
    host = submit(bed, "[mig:2g.20gb:1]", wrap=wrap % gates["host"])
    bed.wait_job(host, "RUNNING")
    guest = submit(bed, "[mig:guest:1]", "--hold", wrap=wrap % gates["guest"])
    other = submit(bed, "[mig:guest:1]", "--hold", wrap="echo I RAN", user="mbbob")
    bed.wait("the host's slice", lambda: int(host) in having(bed))
    uuid = let_share(bed, host, guest, other)
    before = slices(bed)
    bed.run(["scontrol", "release", f"{guest},{other}"])
    bed.wait_job(guest, "RUNNING")
    bed.wait(
        "the refusal", lambda: [e for e in status(bed)["events"] if e["kind"] == "misfit" and e["job"] == int(other)]
    )
    (refusal,) = [e for e in status(bed)["events"] if e["kind"] == "misfit" and e["job"] == int(other)]
    assert "belongs to another user" in refusal["reason"]
    bed.wait("both", lambda: {int(host), int(guest)} <= having(bed))
    assert slices(bed) == before, "nothing was made for the guest"
    first, second = ("host", "guest") if host_first else ("guest", "host")
    jobs = {"host": host, "guest": guest}
    for name in (first, second):
        held = [p for g in status(bed)["gpus"] for p in g["slices"] if p["mig_uuid"] == uuid]
        assert {p["state"] for p in held} == {"held"} and len(held) == (2 if name == first else 1)
        gates[name].touch()
        assert bed.wait_job(jobs[name]) == "COMPLETED"
        assert output(bed, jobs[name]).split() == [uuid, uuid, "2"], "it kept its slice and devices until its end"
        bed.wait("the epilog", lambda name=name: int(jobs[name]) not in {r["job"] for r in status(bed)["runs"]})
    bed.wait("devices of root", lambda: all(path.stat().st_uid == 0 for path in dev.iterdir()))
    assert {p["state"] for g in status(bed)["gpus"] for p in g["slices"]} <= {"idle"}
    assert not [s for s in bed.node_states().values() if "drain" in s]
    path = bed.home("mbbob") / f"slurm-{other}.out"
    assert not path.exists() or "I RAN" not in path.read_text()
    bed.run(["scancel", str(other)])

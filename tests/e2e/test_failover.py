"""Two controllers: the primary is killed, and slurmctld and migbatchd of the other continue where it was.

Two real slurmctlds share a StateSaveLocation, each with its own host name and address; the record is in MariaDB.
"""

import json
import re
import signal
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from slurm_migbatch.testbed.errors import TestbedError
from tests.support.end_to_end import UUID, account, gate, hasten, held, sbatch, settled, shown, until
from tests.support.servers import mariadb

TIMEOUT_S = 4


pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def bed(new_cluster):
    with tempfile.TemporaryDirectory(prefix="migbatch-db-") as directory, mariadb(Path(directory)) as url:
        yield new_cluster(
            nodes=1,
            gpus=2,
            backup=True,
            migbatch="all",
            latency=9.0,
            config={"store": {"url": url}},
            options={"SlurmctldTimeout": TIMEOUT_S},
        )


def standby(bed, controller):
    """The message of a migbatchd on standby; empty for the active one."""
    return (bed.product.health(controller) or {}).get("standby", "")


def active(bed, controller):
    """Whether a migbatchd answers and is not on standby: while it takes over, it does not listen."""
    health = bed.product.health(controller)
    return health is not None and not health.get("standby")


def refusal(bed, controller):
    """Status and message of the answer to a node."""
    request = urllib.request.Request(f"{bed.product.url(controller)}/node/v1/plan", data=b"{}")
    with pytest.raises(urllib.error.HTTPError) as refused, urllib.request.urlopen(request):
        pass
    with refused.value as error:
        return error.code, json.loads(error.read())["error"]


def answers(bed):
    return bed.run(["squeue", "-h"], check=False).returncode == 0


def sound(bed, *processes):
    """Check that none of these processes has written a traceback."""
    for name in processes:
        assert "Traceback" not in bed.daemons.log(name).read_text(), bed.daemons.tail(name, 40)


def terms(bed):
    """The terms that each controller's migbatchd has had, by its log."""
    logs = (bed.daemons.log(name).read_text() for name in ("migbatchd", "migbatchd-2"))
    return [[int(number) for number in re.findall(r"term (\d+) begins", log)] for log in logs]


def test_backup_controller_takes_over_when_the_primary_dies_creating_a_slice(bed, record_property):
    assert standby(bed, 1) == ""
    until("the migbatchd that stands by", lambda: standby(bed, 2))
    assert refusal(bed, 2) == (503, "this migbatchd is on standby: slurmctld's primary is mbctl1")
    open_gate, wait = gate(bed)
    running = bed.submit("--gres=mig:1g.10gb:1", wrap=f"echo $CUDA_VISIBLE_DEVICES; {wait}")
    bed.wait_job(running, "RUNNING")
    bed.wait("its slice", lambda: [state for _, job, state in held(bed) if job == running] == ["held"])

    making = bed.submit("--gres=mig:2g.20gb:1", wrap="echo $CUDA_VISIBLE_DEVICES")
    bed.wait("a slice that is being made", lambda: any(s == "intent" for _, job, s in held(bed) if job == making))
    saved = bed.directory / "state/job_state"
    started = time.time()  # slurmctld writes its own state every few seconds
    bed.run(["scontrol", "update", f"JobId={running}", "Nice=1"])
    bed.wait("slurmctld's own record of the job", lambda: saved.exists() and saved.stat().st_mtime > started)
    assert any(state == "intent" for _, job, state in held(bed) if job == making)
    bed.kill("slurmctld")
    bed.kill("migbatchd")
    killed = time.monotonic()

    until("a slurmctld that answers", lambda: answers(bed))
    taken = time.monotonic()
    # of a size that was not on offer: decided, created and started by the other controller
    job, message = sbatch(bed, "--partition=gpu", "--gres=mig:7g.80gb:1", wrap="echo $CUDA_VISIBLE_DEVICES")
    assert job, message
    auto, message = sbatch(bed, "--gres=mig:auto", "--comment=migbatch: mem=15gb", wrap="echo $CUDA_VISIBLE_DEVICES")
    assert auto, message
    until("the second migbatchd", lambda: active(bed, 2))
    until("a round of it", lambda: re.search(r"_round_seconds_count [1-9]", bed.product.metrics(2)) is not None)
    supplied = time.monotonic()
    record_property("seconds from the kill to slurmctld's takeover", round(taken - killed, 1))
    record_property("seconds from takeover to the first round of supply", round(supplied - taken, 1))
    print(f"\ntakeover after {taken - killed:.1f} s, supply {supplied - taken:.1f} s later")
    open_gate.touch()
    for job_id in (running, job, auto):
        until(f"the end of job {job_id}", lambda job_id=job_id: bed.job_state(job_id) == "COMPLETED")
    print(f"started and ended {time.monotonic() - taken:.1f} s after the takeover")
    # A killed slurmctld forgets what it had not yet sent, here the batch script that waited for the Prolog
    # (DeferBatch). It requeues the job when the node registers and the job has been there for BatchStartTimeout and
    # ten seconds; by itself that takes minutes.
    assert [state for _, held_job, state in held(bed) if held_job == making] == ["held"]
    until("BatchStartTimeout", lambda: re.search(r"RunTime=00:00:[3-5]|RunTime=00:0[1-9]", shown(bed, making)))
    bed.restart("slurmd-n1")
    until("the job's return to the queue", lambda: "Restarts=1" in shown(bed, making))
    assert hasten(bed, making) == "COMPLETED"
    for job_id in (running, making, job, auto):
        assert UUID.search((bed.home("mbalice") / f"slurm-{job_id}.out").read_text())

    # the first controller is back, asks for control, and gets it
    bed.restart("migbatchd")
    bed.restart("slurmctld")
    until("the first migbatchd", lambda: active(bed, 1))
    until("a second one that stands by", lambda: "mbctl1" in standby(bed, 2))
    for job_id, profile in ((running, "1g.10gb"), (making, "2g.20gb"), (job, "7g.80gb")):
        assert [slice_row["profile"] for slice_row in account(bed, job_id)["slices"]] == [profile]
    last = bed.submit("--gres=mig:3g.40gb:1", wrap="echo $CUDA_VISIBLE_DEVICES")
    assert bed.wait_job(last) == "COMPLETED"
    settled(bed)
    first, second = terms(bed)
    assert len(first) == 2 and len(second) == 1 and first[0] < second[0] < first[1], (first, second)
    sound(bed, "migbatchd", "migbatchd-2", "agent-n1")
    # slurmctld's own program (SlurmctldPrimaryOnProg) has notified it
    assert "slurmctld of this host has become the primary" in bed.daemons.log("migbatchd-2").read_text()


def test_migbatchd_that_resumes_in_the_term_of_another_does_nothing(bed):
    """The first migbatchd is stopped in the middle of its work, and slurmctld fails over without it."""
    first = bed.daemons.get("migbatchd").pid
    signal_all(first, signal.SIGSTOP)
    with suppress(TestbedError):  # scontrol may say that it got no answer
        bed.run(["scontrol", "takeover", "1"])
    until("the second migbatchd", lambda: active(bed, 2))
    job, message = sbatch(bed, "--partition=gpu", "--gres=mig:7g.80gb:1", wrap="echo $CUDA_VISIBLE_DEVICES")
    assert job, message
    until("its start", lambda: bed.job_state(job) in ("RUNNING", "COMPLETED"))
    signal_all(first, signal.SIGCONT)
    until("a first one that stands by", lambda: standby(bed, 1) != "")
    until("the end of the job", lambda: bed.job_state(job) == "COMPLETED")
    assert refusal(bed, 1)[0] == 503
    log = bed.daemons.log("migbatchd").read_text()
    assert "Slurm's counts" not in log
    first_terms, second_terms = terms(bed)
    assert len(second_terms) == 1 and max(first_terms) < second_terms[0]
    sound(bed, "migbatchd", "migbatchd-2")


def signal_all(pid, number):
    """Signal a process and its children, the youngest last."""
    import os

    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for process in (pid, *map(int, children)):
        os.kill(process, number)

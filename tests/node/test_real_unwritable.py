"""A full disk, a read-only one and a lock held too long, under a real slurmd: jobs are requeued, no node drained."""

import secrets
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.unwritable import full, locked, read_only

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def disk():
    """A small file system, mounted before the cluster starts (a chroot gets what is mounted at that time)."""
    path = Path(f"/run/migbatch-disk-{secrets.token_hex(4)}")
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m,mode=0755", "migbatch-test", path], check=True)
    yield path
    subprocess.run(["umount", "--lazy", path], check=True)
    path.rmdir()


@pytest.fixture(scope="module")
def bed(slurm_root, disk):
    from slurm_migbatch.testbed.cluster import Cluster

    conf = {"StateDir": f"{disk}/%n", "HookDeadline": "12", "EpilogDeadline": "6"}
    with Cluster(None, nodes=1, gpus=1, migbatch="hooks", node_conf=conf, slurm_root=slurm_root) as running:
        yield running


def harmed(fault, disk):
    """Return the context manager of the fault, on this node's disk."""
    return fault(SimpleNamespace(disk=disk, config=SimpleNamespace(state_dir=f"{disk}/n1")))


def owned_by(bed, name):
    dev = bed.machine("n1").dev_root / "nvidia-caps"
    return [path.name for path in dev.iterdir() if path.stat().st_uid == bed.user(name).uid] if dev.exists() else []


def scenario(bed, disk, fault):
    """While the journal cannot be written one job ends and one is to start; then the fault ends."""
    gate = bed.home("mbalice") / f"gate-{secrets.token_hex(4)}"
    ending = bed.submit("--comment=try [mig:2g.20gb:1]", wrap=f"until test -e {gate}; do sleep 0.2; done")
    bed.wait("its devices", lambda: len(owned_by(bed, "mbalice")) == 2)
    bed.wait_job(ending, "RUNNING")
    with harmed(fault, disk):
        gate.touch()
        assert bed.wait_job(ending) == "COMPLETED"
        bed.wait("the end of its devices", lambda: not owned_by(bed, "mbalice"))
        job = bed.submit(
            "--comment=try [mig:1g.10gb:1]", "--requeue", wrap="echo I RAN $CUDA_VISIBLE_DEVICES", user="mbbob"
        )
        bed.wait("the requeue", lambda: restarts(bed, job) > 0 and bed.job_state(job) == "PENDING")
        assert not drained(bed)
    time.sleep(5)  # until then slurmd may still consider the job known
    bed.run(["scontrol", "update", f"JobId={job}", "StartTime=now"])
    assert bed.wait_job(job) == "COMPLETED"
    assert bed.output(job, "mbbob").startswith("I RAN MIG-")
    bed.wait("the devices", lambda: not owned_by(bed, "mbbob"))
    assert not drained(bed)
    listing = bed.product.migbatch("node", "status", "--etc", str(bed.directory / "etc"), "--node", "n1")
    assert "PROBLEM" not in listing and " held " not in listing


def restarts(bed, job):
    shown = bed.run(["scontrol", "-o", "show", "job", str(job)]).stdout
    return int(shown.partition(" Restarts=")[2].split()[0])


def drained(bed):
    return [state for state in bed.node_states().values() if "drain" in state]


@pytest.mark.parametrize("fault", [locked, full, read_only], ids=lambda fault: fault.__name__)
def test_unwritable_journal_drains_no_node_without_the_agent(bed, disk, fault):
    scenario(bed, disk, fault)


@pytest.mark.parametrize("fault", [locked, full], ids=lambda fault: fault.__name__)
def test_unwritable_journal_drains_no_node_with_the_agent(bed, disk, fault):
    if bed.daemons.get("agent-n1") is None:
        bed.product.start_agent("n1")
        bed.wait("the agent", (bed.node_directory("n1") / "run" / "agent.sock").exists)
    scenario(bed, disk, fault)

"""When a component dies under load, jobs continue, nothing is lost, no slice is shared and no node is drained."""

from __future__ import annotations

import re
import shutil
import signal
import sqlite3
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from slurm_migbatch.testbed import proc
from slurm_migbatch.testbed.cluster import Cluster
from slurm_migbatch.testbed.errors import TestbedError
from slurm_migbatch.testbed.registry import unmount_below
from slurm_migbatch.testbed.watch import HandoffWatch
from tests.support.commands import invoke, migbatch
from tests.support.end_to_end import (
    SHOW,
    account,
    backfilled,
    cancel,
    first_step,
    gate,
    hasten,
    held,
    instances,
    journalled,
    leases,
    marked,
    more_rounds,
    on_offer,
    planned,
    refused,
    sbatch,
    settled,
    shown,
    sights,
    status,
    until,
    untroubled,
    unused,
)

NewCluster = Callable[..., Cluster]
HINTS = "--comment=migbatch: model=bert-large batch=32 slo=200ms"
IN_USE, UNKNOWN = 19, 999


@pytest.fixture(scope="module")
def shared_pair(slurm_root: str) -> Iterator[Cluster]:
    with Cluster(None, slurm_root=slurm_root, migbatch="all") as running:
        yield running


@pytest.fixture
def pair(shared_pair: Cluster) -> Iterator[Cluster]:
    """Two nodes of two GPUs; a test may restart their daemons if it leaves them in order."""
    yield shared_pair
    cancel(shared_pair)


@pytest.fixture(scope="module")
def shared_single(slurm_root: str) -> Iterator[Cluster]:
    often = {"ReconcileEvery": "1"}
    with Cluster(None, slurm_root=slurm_root, nodes=1, gpus=1, migbatch="all", node_conf=often) as running:
        yield running


@pytest.fixture
def single(shared_single: Cluster) -> Iterator[Cluster]:
    """One node of one GPU; a test may make its driver fail for a while."""
    yield shared_single
    shared_single.machine("n1").reset_faults()
    cancel(shared_single)


def slices_seen(bed: Cluster, job: int, user: str = "mbalice") -> list[str]:
    """What the batch script of a SHOW job saw; its task must have seen the same."""
    seen = sights(bed.output(job, user))
    assert seen["batch"] == seen["task 0"], seen
    return seen["batch"]


def right_again(bed: Cluster) -> None:
    """Wait until every node offers the free slots of its plan: none too few or too many.

    Slices in use are left out: after `scontrol reconfigure` Slurm may count none of them.
    """

    def free(node: str) -> Counter[str]:
        in_use = [row.slot.profile.gres_type for row in journalled(bed, node) if row.state != "idle"]
        return planned(bed, node) - Counter(in_use)

    def right() -> bool:
        return all(unused(bed, node) == free(node) for node in bed.spec.node_names)

    try:
        until("the offer", right)
    except TestbedError as error:
        offers = {node: (unused(bed, node), free(node)) for node in bed.spec.node_names}
        pytest.fail(f"{error}: {offers}")


def complete_once(bed: Cluster, job: int, seen: list[str]) -> None:
    """Wait until the record has the ended run with the slices that it saw, each once."""

    def leases_ended() -> bool:
        return [uuid for _, uuid, end in leases(bed, job) if end is not None] == seen

    until(f"the end of job {job} in the record", leases_ended)
    assert [uuid for _, uuid, _ in leases(bed, job)] == seen
    assert [slice_row["mig_uuid"] for slice_row in account(bed, job)["slices"]] == seen


# -- migbatchd ----------------------------------------------------------------------------------------------------


def test_jobs_run_without_migbatchd_and_are_recorded_later(new_cluster: NewCluster) -> None:
    bed = new_cluster(migbatch="all")
    reference, message = sbatch(bed, "--gres=mig:auto", HINTS)
    assert bed.wait_job(reference) == "COMPLETED"
    opened, waiting = gate(bed)
    across, _ = sbatch(bed, "--gres=mig:1g.10gb:1", wrap=f"{SHOW}; {waiting}")
    bed.wait_job(across, "RUNNING")
    right_again(bed)  # what is on offer now stays so
    kind = marked(bed, reference)[0].partition(":")[0]
    assert any(on_offer(bed, node)[kind] for node in bed.spec.node_names), kind
    bed.kill("migbatchd")
    opened.touch()

    alone, said_alone = sbatch(bed, "--gres=mig:auto", HINTS)
    assert said_alone.splitlines()[1:] == message.splitlines()[1:] != []
    gres, marker = marked(bed, alone)
    assert gres == marker == marked(bed, reference)[0]
    explicit, _ = sbatch(bed, "-N1", "--gres=mig:1g.10gb:2", user="mbbob")
    assert "1g.10gb" in refused(bed, "--gres=mig:1g")
    for forged in ("[mig:7g.80gb:1]", "x [mig:7g.80gb:1#abc] y"):
        assert "must not contain '[mig:'" in refused(bed, "--gres=mig:1g.10gb:1", f"--comment={forged}")
        assert "must not contain '[mig:'" in refused(bed, f"--comment={forged}")
    for job in (across, alone, explicit):
        assert bed.wait_job(job) == "COMPLETED"
    until("the ends", lambda: not held(bed))
    assert sum(status(bed, node)["spool"] for node in bed.spec.node_names) > 0
    assert leases(bed, alone) == []

    bed.restart("migbatchd")
    until("empty spools", lambda: all(status(bed, node)["spool"] == 0 for node in bed.spec.node_names))
    complete_once(bed, across, slices_seen(bed, across))
    complete_once(bed, alone, slices_seen(bed, alone))
    seen = sights(bed.output(explicit, "mbbob"))["batch"]
    assert len(seen) == 2
    complete_once(bed, explicit, seen)
    settled(bed)


@pytest.mark.sqlite
def test_migbatchd_works_after_its_record_was_restored_from_a_copy(new_cluster: NewCluster) -> None:
    """Restored from yesterday's copy, the record has less than the nodes' journals; nodes and migbatchd continue."""
    bed = new_cluster(migbatch="all")
    first, _ = sbatch(bed, "--gres=mig:2g.20gb:1")
    assert bed.wait_job(first) == "COMPLETED"
    settled(bed)
    record, copy = bed.product.state / "migbatch.db", bed.directory / "copy.db"
    with closing(sqlite3.connect(record)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)
    lost, _ = sbatch(bed, "--gres=mig:4g.40gb:1")
    assert bed.wait_job(lost) == "COMPLETED"
    opened, waiting = gate(bed)
    held_on, _ = sbatch(bed, "--gres=mig:3g.40gb:1", wrap=f"{SHOW}; {waiting}")
    bed.wait_job(held_on, "RUNNING")
    account(bed, held_on, "RUNNING")
    bed.kill("migbatchd")
    for leftover in bed.product.state.glob("migbatch.db*"):
        leftover.unlink()
    shutil.copyfile(copy, record)
    shutil.chown(record, bed.spec.daemon_user)
    with HandoffWatch(bed) as watch:
        bed.restart("migbatchd")
        later = [sbatch(bed, "--gres=mig:auto", HINTS)[0], sbatch(bed, "--gres=mig:7g.80gb:1")[0]]
        opened.touch()
        for job in (held_on, *later):
            assert bed.wait_job(job) == "COMPLETED"
    assert watch.problems == []
    for job in later:
        complete_once(bed, job, slices_seen(bed, job))
    settled(bed)


# -- node agent ---------------------------------------------------------------------------------------------------


def test_hooks_make_slices_themselves_without_agents(new_cluster: NewCluster) -> None:
    bed = new_cluster(migbatch="all")
    opened, waiting = gate(bed)
    across, _ = sbatch(bed, "--gres=mig:1g.20gb:1", wrap=f"{SHOW}; {waiting}")
    bed.wait_job(across, "RUNNING")
    right_again(bed)  # without agents the offer does not change
    for node in bed.spec.node_names:
        bed.kill(f"agent-{node}")
    alone, _ = sbatch(bed, "--gres=mig:auto", "--comment=migbatch: min=1g.20gb max=1g.20gb")
    opened.touch()
    assert [bed.wait_job(job) for job in (across, alone)] == ["COMPLETED", "COMPLETED"]
    until("the ends", lambda: not held(bed))
    assert not any(status(bed, node)["agent"] for node in bed.spec.node_names)
    assert sum(status(bed, node)["spool"] for node in bed.spec.node_names) > 0
    for node in bed.spec.node_names:
        bed.restart(f"agent-{node}")
    complete_once(bed, across, slices_seen(bed, across))
    complete_once(bed, alone, slices_seen(bed, alone))
    settled(bed)


@pytest.mark.parametrize("moment", ["creating", "live"])
def test_job_completes_when_the_agent_is_killed_while_creating_its_slice(new_cluster: NewCluster, moment: str) -> None:
    """At `creating` the driver creates the GPU instance; at `live` that exists, but not its compute instance."""
    bed = new_cluster(nodes=1, gpus=1, migbatch="all", latency=1.5)
    with HandoffWatch(bed) as watch:
        job, _ = sbatch(bed, "--gres=mig:2g.20gb:1")
        until("the half-made slice", lambda: any(found["state"] == moment for found in instances(bed, "n1")))
        assert not any(found["compute_instances"] for found in instances(bed, "n1") if moment == "creating")
        bed.kill("agent-n1")
        assert bed.wait_job(job, timeout=300.0) == "COMPLETED"
    assert watch.problems == []
    bed.restart("agent-n1")
    complete_once(bed, job, slices_seen(bed, job))
    settled(bed)


# -- Slurm's daemons ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["restart", "kill", "slurmd", "slurmd killed", "reconfigure"])
def test_running_jobs_survive_restarts_and_reconfiguration_of_slurm(pair: Cluster, how: str) -> None:
    """Each of these resets the counts to those of slurm.conf; the offer must become right again."""
    bed = pair
    opened, waiting = gate(bed)
    wrap = f"{SHOW}; {waiting}; srun sh -c 'echo late $SLURM_PROCID $CUDA_VISIBLE_DEVICES'"
    jobs = [sbatch(bed, f"--gres=mig:{kind}:1", wrap=wrap)[0] for kind in ("4g.40gb", "3g.40gb", "1g.20gb", "2g.20gb")]
    for job in jobs:
        bed.wait_job(job, "RUNNING")
    for job in jobs:
        first_step(bed, job)
    right_again(bed)
    if how == "kill":
        # slurmctld forgets what it has not saved yet, some seconds old at most; that is not tested here.
        # It saves only after a change, such as one more job.
        since, saved = time.time(), bed.directory / "state/job_state"
        bed.run(["sbatch", "--job-name=saved", "--hold", "--wrap", "true"])
        until("a saved state", lambda: saved.exists() and saved.stat().st_mtime > since)
    with HandoffWatch(bed) as watch:
        if how == "reconfigure":
            bed.run(["scontrol", "reconfigure"])
        elif how in ("restart", "kill"):
            if how == "kill":
                bed.kill("slurmctld")
            bed.restart("slurmctld")
            until("slurmctld", lambda: bed.run(["scontrol", "ping"], check=False).returncode == 0)
            bed.run(["scancel", "--name=saved"])
        else:
            for node in bed.spec.node_names:
                if how == "slurmd killed":
                    bed.kill(f"slurmd-{node}")
                bed.restart(f"slurmd-{node}")
        time.sleep(1.0)  # the reset itself may come with the next registration
        right_again(bed)
        later, _ = sbatch(bed, "--gres=mig:auto", HINTS)
        assert bed.wait_job(later) == "COMPLETED"
        untroubled(bed)
        opened.touch()
        for job in jobs:
            assert bed.wait_job(job) == "COMPLETED", bed.output(job)
    assert watch.problems == []
    for job in jobs:
        seen = sights(bed.output(job))
        assert seen["late 0"] == seen["batch"] and len(seen["batch"]) == 1
        complete_once(bed, job, seen["batch"])
    settled(bed)


def test_no_job_starts_on_slices_that_a_restarted_slurmctld_does_not_count(pair: Cluster) -> None:
    """Of a type with count 0 in slurm.conf it counts, on each node, only the slices of the first running job."""
    bed = pair
    opened, waiting = gate(bed)
    jobs = [sbatch(bed, "--gres=mig:3g.40gb:1", wrap=waiting)[0] for _ in range(2 * bed.spec.nodes * bed.spec.gpus)]
    for job in jobs:
        bed.wait_job(job, "RUNNING")
    right_again(bed)
    bed.restart("slurmctld")
    until("slurmctld", lambda: bed.run(["scontrol", "ping"], check=False).returncode == 0)
    more_rounds(bed, "supply")
    pending = []
    for _ in range(3):  # each submission makes Slurm try the earlier ones again
        pending += sbatch(bed, "--gres=mig:3g.40gb:1", wrap=waiting)[:1]
        more_rounds(bed, "supply")
    assert {bed.job_state(job) for job in pending} == {"PENDING"}
    opened.touch()
    for job in (*jobs, *pending):
        assert bed.wait_job(job) == "COMPLETED", bed.output(job)
    assert all("Restarts=0" in shown(bed, job) for job in pending)
    settled(bed)


def end_processes(bed: Cluster, job: int) -> None:
    """SIGKILL all processes of a job as a reset of its node would, slurmstepd first so that it cannot report."""
    managers, tasks = set(), set()
    for pid in proc.pids():
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"SLURM_JOB_ID=%d" % job in environ and f"SLURM_CONF={bed.slurm_conf}".encode() in environ:
            tasks.add(pid)
            # slurmstepd overwrites its environment, so it is found as the parent of its tasks.
            above = proc.parent(pid)
            if above and Path(f"/proc/{above}/cmdline").read_bytes().startswith(b"slurmstepd"):
                managers.add(above)
    assert managers, f"job {job} has no slurmstepd"
    for pid in (*managers, *tasks):
        with suppress(TestbedError):
            proc.ProcessId.of(pid).signal(signal.SIGKILL)


def reboot(bed: Cluster, node: str, jobs: list[int]) -> None:
    """Turn a node off and on."""
    bed.kill(f"slurmd-{node}")
    bed.kill(f"agent-{node}")
    for job in jobs:
        end_processes(bed, job)
    bed.run(["scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=reset"])
    unmount_below(bed.node_directory(node) / "run")
    shutil.rmtree(bed.node_directory(node) / "run")
    bed.machine(node).reboot()
    bed.product.migbatch("node", "init", "--etc", str(bed.product.etc), "--node", node)
    bed.daemons.restart(f"agent-{node}")
    bed.daemons.restart(f"slurmd-{node}")


def test_jobs_of_a_node_that_was_reset_fail_or_run_again(new_cluster: NewCluster) -> None:
    bed = new_cluster(nodes=1, migbatch="all")
    not_requeued, _ = sbatch(bed, "--gres=mig:3g.40gb:1", "--no-requeue", wrap=f"{SHOW}; sleep 600")
    rest = f"{SHOW}; sleep $((600-600*SLURM_RESTART_COUNT))"
    requeued, _ = sbatch(bed, "--gres=mig:2g.20gb:1", "--open-mode=append", wrap=rest)
    for job in (not_requeued, requeued):
        bed.wait_job(job, "RUNNING")
        account(bed, job, "RUNNING")
        first_step(bed, job)
    before = status(bed, "n1")["boot_id"]
    with HandoffWatch(bed) as watch:
        reboot(bed, "n1", [not_requeued, requeued])
        assert status(bed, "n1")["boot_id"] != before
        assert bed.wait_job(not_requeued) == "NODE_FAIL"
        assert hasten(bed, requeued) == "COMPLETED"
        later, _ = sbatch(bed, "--gres=mig:3g.40gb:1")
        assert bed.wait_job(later) == "COMPLETED"
    assert [problem for problem in watch.problems if "does not exist" not in problem] == []
    row = account(bed, not_requeued, "NODE_FAIL")
    assert row["ended_unix_s"] and len(row["slices"]) == 1 and all(s["until_unix_s"] for s in row["slices"])
    # slurmd may start it again without a Prolog; then it is requeued, and never runs without a slice.
    until("both runs", lambda: [end is not None for _, _, end in leases(bed, requeued)] == [True, True])
    (first, old, _), (last, new, _) = leases(bed, requeued)
    assert (first, last) == (0, account(bed, requeued)["restarts"])
    ran = re.findall(r"^(?:batch|task 0) ?(.*)$", bed.output(requeued), re.MULTILINE)
    assert ran == [old, old, new, new]
    complete_once(bed, later, slices_seen(bed, later))
    settled(bed)


# -- the driver ---------------------------------------------------------------------------------------------------


def zombies(bed: Cluster, node: str) -> int:
    """The number of slots that zombies occupy on the node."""
    return int(status(bed, node)["zombies"])


def test_leaked_process_blocks_only_its_own_slot(single: Cluster) -> None:
    """A context that outlives its job: the instance cannot be destroyed, everything else works."""
    bed = single
    machine = bed.machine("n1")
    small, _ = sbatch(bed, "-N1", "--gres=mig:1g.10gb:7", wrap="true")
    assert bed.wait_job(small) == "COMPLETED"
    settled(bed)
    stuck = instances(bed, "n1")[0]["compute_instances"][0]["uuid"]
    machine.start_process(stuck, 4_000_000, sticky=True)
    until("the zombie", lambda: zombies(bed, "n1") == 1)
    until("its report", lambda: "zombie" in migbatch(bed, "nodes", "-R"))
    assert "cannot destroy 1g.10gb at" in invoke(bed, "doctor").stdout
    for kind in ("2g.20gb", "3g.40gb", "1g.10gb"):
        job, _ = sbatch(bed, f"--gres=mig:{kind}:1")
        assert bed.wait_job(job) == "COMPLETED", kind
        assert slices_seen(bed, job) != [stuck]
    assert zombies(bed, "n1") == 1
    untroubled(bed)
    whole, _ = sbatch(bed, "--gres=mig:7g.80gb:1")
    more_rounds(bed, "supply")
    backfilled(bed)
    assert bed.job_state(whole) == "PENDING"
    machine.end_process(4_000_000)
    until("the end of the zombie", lambda: zombies(bed, "n1") == 0)
    assert bed.wait_job(whole) == "COMPLETED"
    until("its report", lambda: "zombie" not in migbatch(bed, "nodes", "-R"))
    assert "cannot destroy" not in invoke(bed, "doctor").stdout
    settled(bed)


def test_job_gets_its_slice_once_old_instances_can_be_destroyed_again(single: Cluster) -> None:
    bed = single
    small, _ = sbatch(bed, "-N1", "--gres=mig:1g.10gb:7", wrap="true")
    assert bed.wait_job(small) == "COMPLETED"
    settled(bed)
    bed.machine("n1").stick_destroy(None)
    job, _ = sbatch(bed, "--gres=mig:4g.40gb:1")
    until("a zombie", lambda: zombies(bed, "n1") > 0)
    untroubled(bed)
    bed.machine("n1").reset_faults()
    assert hasten(bed, job) == "COMPLETED"
    assert len(slices_seen(bed, job)) == 1
    until("the end of the zombies", lambda: zombies(bed, "n1") == 0)
    complete_once(bed, job, slices_seen(bed, job))
    settled(bed)


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("nvmlDeviceCreateGpuInstanceWithPlacement", UNKNOWN),
        ("nvmlGpuInstanceCreateComputeInstance", IN_USE),
        ("nvmlGpuInstanceGetInfo", UNKNOWN),
    ],
)
def test_job_completes_after_a_driver_call_failed_once(new_cluster: NewCluster, call: str, code: int) -> None:
    bed = new_cluster(nodes=1, gpus=1, migbatch="all", users=1)
    bed.machine("n1").fail(call, code, times=1)
    job, _ = sbatch(bed, "--gres=mig:2g.20gb:1", "--open-mode=append")
    assert bed.wait_job(job, timeout=600.0) == "COMPLETED"
    assert len(slices_seen(bed, job)) == 1
    untroubled(bed)
    settled(bed)


BY_HAND = """
import sys, time
from slurm_migbatch.mig.layout import Slot
from slurm_migbatch.mig.nvml import NvmlDriver
driver = NvmlDriver(sys.argv[1])
gpu = driver.gpus()[0]
print(gpu.create(Slot.of("7g.80gb", 0, 8)).mig_uuid)
"""


def make_by_hand(bed: Cluster, node: str) -> str:
    """As root, create a whole-GPU instance without migbatch, and run something on it."""
    library = str(bed.machine(node).library)
    uuid = bed.run_here([sys.executable, "-c", textwrap.dedent(BY_HAND), library]).strip()
    bed.machine(node).start_process(uuid, 4_000_001, sticky=True)
    return uuid


@pytest.mark.parametrize("nodes", [1, 2])
def test_job_is_requeued_if_its_slot_was_taken_by_hand(new_cluster: NewCluster, nodes: int) -> None:
    """A misfit: the job runs elsewhere, or waits until the slot is free; it never runs without a slice."""
    bed = new_cluster(nodes=nodes, gpus=1, migbatch="all", node_conf={"ReconcileEvery": "2"})
    for node in bed.spec.node_names:
        assert instances(bed, node) == []
    kind = "4g.40gb"  # on offer on every node from the start, so that Slurm takes n1
    until("the offer", lambda: all(on_offer(bed, node)[kind] for node in bed.spec.node_names))
    daemon = bed.daemons.get("migbatchd")
    assert daemon is not None
    daemon.id.signal(signal.SIGSTOP)  # it would be notified, and withdraw the offer, before or after the job came
    uuid = make_by_hand(bed, "n1")
    job, _ = sbatch(bed, f"--gres=mig:{kind}:1", "--open-mode=append")
    until("the misfit", lambda: re.search(r"\bRestarts=[1-9]", shown(bed, job)) is not None)
    daemon.id.signal(signal.SIGCONT)
    until("the news", lambda: on_offer(bed, "n1")[kind] == 0)
    if nodes == 1:
        bed.wait_job(job, "PENDING")
        more_rounds(bed, "supply")
        assert bed.job_state(job) == "PENDING"
        assert [i["compute_instances"][0]["uuid"] for i in instances(bed, "n1")] == [uuid]
        bed.machine("n1").end_process(4_000_001)
    assert bed.wait_job(job, timeout=600.0) == "COMPLETED"
    seen = slices_seen(bed, job)
    assert len(seen) == 1 and uuid not in seen
    assert bed.output(job).count("batch") == 1
    untroubled(bed)
    if nodes == 2:
        bed.machine("n1").end_process(4_000_001)
    settled(bed)

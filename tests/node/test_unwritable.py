"""A journal that cannot be written: a really full disk, a read-only disk, a lock that is really held."""

import json
import os
import sqlite3
import subprocess
import threading
import time
from contextlib import ExitStack, closing, contextmanager

import pytest

from slurm_migbatch.node import effects, ending, executor, exits, gpu_faults, handoff, plan, run_repair, unwritable
from slurm_migbatch.node.deadline import Deadline
from slurm_migbatch.node.executor import Executor
from slurm_migbatch.node.journal import JournalError
from slurm_migbatch.node.paths import PathsError
from slurm_migbatch.node.status import status
from tests.support.node_processes import agent_process, run_hook
from tests.support.nodes import ALICE, BOB
from tests.support.unwritable import full, locked, read_only


@pytest.fixture
def small(new_node, tmp_path, monkeypatch):
    """A node whose StateDir is a small file system of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=0755", "migbatch-test", disk], check=True)
    settings = {"StateDir": disk / "state", "ProgressDir": tmp_path / "progress", "ScontrolTimeout": 5}
    monkeypatch.setattr(executor, "PATIENCE", 0.02)  # a fraction of a deadline that a slow machine can meet
    node = new_node(HookDeadline=30, EpilogDeadline=30, **settings)
    node.disk = disk
    try:
        yield node
    finally:
        node.forget_executor()
        subprocess.run(["umount", "--lazy", disk], check=True)


@contextmanager
def without_agent(node):
    node.forget_executor()
    yield


@contextmanager
def with_agent(node):
    with agent_process(node):
        yield


FAULTS = pytest.mark.parametrize("fault", [full, read_only, locked], ids=lambda fault: fault.__name__)
# A file system on which the agent has its journal open cannot be remounted read-only by hand.
CASES = [(without_agent, full), (without_agent, read_only), (without_agent, locked), (with_agent, full)]
CASES += [(with_agent, locked)]
WAYS = pytest.mark.parametrize("way,fault", CASES, ids=lambda part: part.__name__)


def devices(node, uid):
    """Return how many capability devices belong to the user."""
    place = node.machine.dev_root / "nvidia-caps"
    return sum(path.stat().st_uid == uid for path in place.iterdir()) if place.exists() else 0


def faults(node):
    """Return how many hooks in a row could not write the journal."""
    run = os.open(node.config.run_dir, os.O_RDONLY)
    try:
        return unwritable.load(run).hooks
    finally:
        os.close(run)


@pytest.mark.slow
@WAYS
def test_prolog_requeues_its_job_while_the_journal_is_unwritable(small, fault, way):
    assert small.prolog(9, "[mig:1g.10gb:1]")[0] == exits.OK
    with way(small), fault(small):
        code, line = run_hook(small, "prolog", 1, "[mig:2g.20gb:1]", uid=BOB)
        assert code == exits.OK and "requeued" in line and "journal" in line, line
        assert small.scontrol_calls() == ["requeue incomplete 1"]
        assert devices(small, BOB) == 0
    assert small.handoff(1).slices == ()
    small.reconcile()
    assert [event["job"] for event in small.events("misfit")] == [1], "recorded once that could be done"
    small.check()
    assert small.prolog(1, "[mig:2g.20gb:1]", uid=BOB, restart=1)[0] == exits.OK
    small.check()


def test_epilog_closes_devices_on_a_gpu_that_was_withdrawn(small):
    small.prolog(1, "[mig:2g.20gb:1]", uid=BOB)
    (row,) = small.slices("held")
    gpu_faults.count(small.executor.paths, row.gpu, "the driver failed", 1, Deadline(1.0))
    with full(small):
        assert "devices are revoked" in run_hook(small, "epilog", 1, uid=BOB)[1]
        assert devices(small, BOB) == 0


def test_disk_that_fills_while_slices_are_created_leaves_no_device_open(small, monkeypatch):
    """No hand-off names the slices yet."""
    small.prolog(9, "[mig:1g.10gb:1]")
    made = []
    with ExitStack() as until_the_end:

        def fill(effect):
            if effect == "driver create":
                made.append(effect)
                if len(made) == 3:
                    until_the_end.enter_context(full(small))

        monkeypatch.setattr(effects, "hook", fill)
        code, line = small.prolog(1, "[mig:2g.20gb:2,1g.10gb:1]", uid=BOB)
        monkeypatch.setattr(effects, "hook", None)
        assert code == exits.OK and "requeued" in line and "journal" in line, line
        assert devices(small, BOB) == 0
    small.reconcile()
    small.check()


@pytest.mark.slow
@WAYS
def test_epilog_closes_the_devices_and_is_completed_later(small, fault, way):
    small.prolog(1, "[mig:2g.20gb:1,1g.10gb:1]")
    small.prolog(2, "[mig:1g.10gb:1]", uid=BOB)
    assert (devices(small, ALICE), devices(small, BOB)) == (4, 2)
    with way(small), fault(small):
        code, line = run_hook(small, "epilog", 1)
        assert code == exits.OK and "devices are revoked" in line, line
        assert (devices(small, ALICE), devices(small, BOB)) == (0, 2)
        assert faults(small) == 1
    assert small.scontrol_calls() == []
    code, line = run_hook(small, "prolog", 3, "[mig:1g.10gb:1]")
    assert code == exits.OK and "requeued" not in line
    assert {row.job for row in small.slices("held")} == {2, 3}
    assert [(event["job"], event["exit_code"]) for event in small.events("stop")] == [(1, 0)]
    assert not list(ending.listed(small.executor.paths.run))
    assert faults(small) == status(small.config, small.executor)["journal_faults"] == 0, "forgiven"
    small.check()


@pytest.mark.slow
def test_epilog_keeps_devices_open_for_a_job_that_shares_the_slice(small):
    small.prolog(9, "[mig:2g.20gb:1]")
    (row,) = small.slices("held")
    slot = [row.slot.profile.name, *row.slot.placement]
    raw = {"version": 7, "gpus": {row.gpu: [slot]}, "guests": {"1": [row.gpu, *slot, 9, 0]}}
    plan.store(str(small.config.state_dir), json.dumps(raw).encode())
    assert small.prolog(1, "[mig:guest:1]")[0] == exits.OK
    with locked(small):
        assert run_hook(small, "epilog", 9)[0] == exits.OK
        assert devices(small, ALICE) == 2
        assert run_hook(small, "epilog", 1)[0] == exits.OK
        assert devices(small, ALICE) == 0
    small.reconcile()
    assert not small.slices("held")
    small.check()


def test_epilog_closes_the_devices_on_the_gpus_that_answer(new_node, monkeypatch):
    monkeypatch.setattr(executor, "PATIENCE", 0.02)
    node = new_node(gpus=["h100-80gb", "h100-80gb"], HookDeadline=30, EpilogDeadline=30)
    assert node.prolog(1, "[mig:7g.80gb:2]", uid=ALICE)[0] == exits.OK
    assert devices(node, ALICE) == 4
    node.forget_executor()
    with locked(node):
        node.machine.fail("nvmlDeviceGetGpuInstances", 999)  # of the first GPU
        line = node.epilog(1)[1]
    assert devices(node, ALICE) == 2 and "not all devices are revoked" in line, line


@pytest.mark.slow
def test_journal_lock_that_is_released_in_time_only_delays_the_hook(small, monkeypatch):
    monkeypatch.setattr(executor, "PATIENCE", 0.9)
    small.prolog(9, "[mig:1g.10gb:1]")
    with locked(small):
        answers = []
        waiting = threading.Thread(target=lambda: answers.append(run_hook(small, "prolog", 1, "[mig:1g.10gb:1]")))
        waiting.start()
        time.sleep(3)
        assert not answers
    waiting.join()
    assert answers[0][0] == exits.OK and "requeued" not in answers[0][1]
    small.check()


@pytest.mark.slow
@FAULTS
def test_lasting_journal_fault_drains_the_node_with_a_reason(small, fault, monkeypatch):
    small.configure(ErrorsBeforeDrain=3)
    small.prolog(9, "[mig:1g.10gb:1]")
    small.forget_executor()
    with fault(small):
        for job in (1, 2, 3, 4):
            assert run_hook(small, "prolog", job, "[mig:1g.10gb:1]")[0] == exits.OK
        assert not [call for call in small.scontrol_calls() if call.startswith("update")], (
            "the failure may be temporary"
        )
        monkeypatch.setattr(unwritable, "LASTS_S", 0.0)
        assert run_hook(small, "prolog", 5, "[mig:1g.10gb:1]")[0] == exits.OK
        assert run_hook(small, "prolog", 6, "[mig:1g.10gb:1]")[0] == exits.OK
    (drain,) = [call for call in small.scontrol_calls() if call.startswith("update")]
    assert drain.startswith(
        "update NodeName=n1 State=DRAIN Reason=migbatch: journal not writable for 0 minutes, 5 hooks"
    )
    assert "requeue incomplete 5" in small.scontrol_calls()


@pytest.mark.slow
def test_exit_code_drains_the_node_when_journal_and_scontrol_both_fail(small, monkeypatch):
    small.prolog(9, "[mig:1g.10gb:1]")
    small.forget_executor()
    (small.root / "scontrol.code").write_text("1\n")
    with locked(small):
        code, line = run_hook(small, "prolog", 1, "[mig:1g.10gb:1]")
        assert code == exits.OK and "its tasks will fail" in line
        small.configure(OnError="drain")
        assert run_hook(small, "prolog", 2, "[mig:1g.10gb:1]")[0] == exits.JOURNAL


def test_job_without_slices_is_not_requeued(small):
    small.prolog(9, "[mig:1g.10gb:1]")
    small.forget_executor()
    small.slurm_says("1 0 gres/gpu:1")
    with locked(small):
        assert run_hook(small, "prolog", 1, "", uid=0) == (exits.OK, "-")
        assert run_hook(small, "prolog", 2, "") == (exits.OK, "-")
    assert small.asked_slurm() == [1] and small.scontrol_calls() == []


def test_rebuild_of_a_damaged_journal_is_retried_after_a_full_disk(small):
    small.prolog(9, "[mig:1g.10gb:1]")
    small.forget_executor()
    with agent_process(small, workers=1):
        assert run_hook(small, "prolog", 8, "[mig:1g.10gb:1]")[0] == exits.OK
        with full(small):
            for name in small.disk.glob("state/journal.db*"):
                if name.name.endswith("-reserve"):
                    continue
                with name.open("r+b") as file:
                    file.write(b"no database" * 100)
            for restart in (0, 1):
                code, line = run_hook(small, "prolog", 1, "[mig:1g.10gb:1]", restart=restart)
                assert code == exits.OK and "requeued" in line, line
        code, line = run_hook(small, "prolog", 1, "[mig:1g.10gb:1]", restart=2)
        assert code == exits.OK and "requeued" not in line, line
    assert {(row.job, row.restart) for row in small.slices("held")} == {(9, 0), (8, 0), (1, 2)}


def test_hooks_run_without_a_free_inode(new_node, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "nr_inodes=64,mode=0755", "migbatch-test", disk], check=True)
    node = new_node(StateDir=disk / "state", ProgressDir=tmp_path / "progress")
    try:
        node.prolog(1, "[mig:1g.10gb:1]")
        node.forget_executor()
        with pytest.raises(OSError), ExitStack() as files:
            for number in range(64):
                files.enter_context((disk / str(number)).open("x"))
        assert os.statvfs(disk).f_ffree == 0
        assert run_hook(node, "epilog", 1)[0] == exits.OK
        node.forget_executor()
        assert not node.slices("held")
    finally:
        node.forget_executor()
        subprocess.run(["umount", "--lazy", disk], check=True)


def test_full_run_directory_requeues_the_job(new_node, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=0755", "migbatch-test", disk], check=True)
    node = new_node(RunDir=disk / "run", JobMapDir=disk / "jobmap", GpustatDir=disk / "gpustat")
    node.disk = disk
    try:
        node.prolog(1, "[mig:1g.10gb:1]")
        node.forget_executor()
        with full(node):
            code, line = run_hook(node, "prolog", 2, "[mig:1g.10gb:1]", uid=BOB)
            assert code == exits.OK and "requeued" in line and node.scontrol_calls() == ["requeue incomplete 2"], line
            assert run_hook(node, "epilog", 1)[0] == exits.OK
        assert run_hook(node, "prolog", 2, "[mig:1g.10gb:1]", uid=BOB, restart=1)[0] == exits.OK
        assert {row.job for row in node.slices("held")} == {2}
        node.check()
    finally:
        node.forget_executor()
        subprocess.run(["umount", "--lazy", disk], check=True)


def test_handoff_that_fits_only_in_part_is_not_written(tmp_path):
    """The kernel reports no error for a write that has room for only some of its pages."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=0755", "migbatch-test", disk], check=True)
    directory = os.open(disk, os.O_RDONLY)
    try:
        (disk / "others").write_bytes(b"x" * (60 << 10))  # one page is left
        slices = tuple(handoff.HandoffSlice(f"MIG-{n:036d}", "1g.10gb", 9984, "GPU-" + "0" * 36) for n in range(56))
        with pytest.raises(OSError, match=f"No space left on device: '{disk}/1.0'"):
            handoff.write(directory, handoff.Handoff(1, 0, 1001, slices))
        assert not (disk / "1.0").exists()
    finally:
        os.close(directory)
        subprocess.run(["umount", "--lazy", disk], check=True)


def test_the_agent_starts_while_its_run_directory_is_full(new_node, tmp_path):
    """An interrupted release needs a hand-off, for which there is no space."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k,mode=0755", "migbatch-test", disk], check=True)
    node = new_node(RunDir=disk / "run", ProgressDir=tmp_path / "progress")
    node.disk = disk
    try:
        node.prolog(1, "[mig:2g.20gb:1]")
        with node.journal.write():
            (run,) = node.journal.runs()
            node.journal.put_run(run._replace(state="ending", owner="1.1.1"))
        node.forget_executor()
        with full(node), agent_process(node):
            code, line = run_hook(node, "prolog", 2, "[mig:1g.10gb:1]", uid=BOB)
            assert code == exits.OK and "agent" not in line.replace(str(disk), ""), line
        node.reconcile()
        assert not [row for row in node.slices("held") if row.job == 1]
    finally:
        node.forget_executor()
        subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.mark.parametrize("damage", [lambda state: state.chmod(0o777), lambda state: (state / "journal.db").mkdir()])
def test_failed_attempts_to_open_the_journal_leave_no_descriptors_open(node, damage):
    """The agent tries again as long as it runs."""
    state = node.root / "state"
    state.mkdir(mode=0o700)
    damage(state)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises((JournalError, PathsError)):
            Executor(node.config)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("hook", ["prolog", "epilog"])
def test_hook_that_finds_a_damaged_journal_while_the_driver_fails_does_not_drain_the_node(node, hook):
    """The journal cannot be rebuilt then; the next hook or the agent does that."""
    node.reconcile()
    node.forget_executor()
    path = node.root / "state" / "journal.db"
    with closing(sqlite3.connect(path)) as link:
        (page,) = link.execute("SELECT rootpage FROM sqlite_master WHERE name='runs'").fetchone()
    with path.open("r+b") as file:
        file.seek((page - 1) * 4096)
        file.write(b"garbage!" * 512)
    node.configure(NvmlLibrary="/nonexistent.so")
    code, line = run_hook(node, hook, 1, "[mig:1g.10gb:1]")
    assert code == exits.OK and "nonexistent.so" in line, line
    assert node.scontrol_calls() == (["requeue incomplete 1"] if hook == "prolog" else [])


def test_hook_records_only_some_of_the_runs_that_were_refused_without_the_journal(node, monkeypatch):
    """After hours without a journal there are tens of thousands, and an Epilog must end in time."""
    monkeypatch.setattr(run_repair, "MOST_AT_ONCE", 2)
    node.prolog(1, "[mig:1g.10gb:1]")
    for job in (13, 12, 11, 15, 14):
        handoff.write(node.executor.paths.job, handoff.Handoff(job, 0, ALICE, (), "the journal cannot be written"))
    node.epilog(1)
    assert [event["job"] for event in node.events("misfit")] == [11, 12]
    node.reconcile()
    node.reconcile()
    assert [event["job"] for event in node.events("misfit")] == [11, 12, 13, 14, 15]
    node.check()

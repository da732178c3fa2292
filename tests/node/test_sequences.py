"""Sequences of events on a node: whatever happens in between, a slice has one user and is lost to nobody for long."""

import contextlib
import os
import sqlite3
import threading
import time

import pytest

from slurm_migbatch.mig.driver import DriverError, DriverMissing
from slurm_migbatch.mig.nvml import NvmlDriver, NvmlGpu
from slurm_migbatch.node import client, ending, exits, journal, liveness, owner, progress, tmpfs
from slurm_migbatch.node.deadline import Deadline, TooLate, locked
from slurm_migbatch.node.executor import Executor
from slurm_migbatch.node.gpus import Survey
from slurm_migbatch.node.journal import NAME, Journal
from slurm_migbatch.node.repair import Repairer, gpu_lock
from slurm_migbatch.node.run_repair import run_lock
from tests.support.node_processes import agent_process, run_hook
from tests.support.nodes import ALICE, BOB, in_child


def during(monkeypatch, repair, work):
    """Let another process do something once, right before the named repair is made."""
    original = getattr(Repairer, repair)

    def with_work(*args):
        monkeypatch.setattr(Repairer, repair, original)
        work()
        return original(*args)

    monkeypatch.setattr(Repairer, repair, with_work)


def ended_elsewhere(node, job, restart=0):
    other = Executor(node.config)
    assert other.run(node.env("epilog", job, restart=restart))[0] == exits.OK
    other.close()


@pytest.mark.parametrize("gone", ["instance", "GPU"])
def test_job_that_ends_while_its_instance_is_found_missing_leaves_no_slice_behind(node, monkeypatch, gone):
    """Jobs fail when a GPU is reset, so their Epilogs run at the moment at which the agent notices the loss."""
    node.prolog(1, "[mig:7g.80gb:1]")
    if gone == "GPU":
        monkeypatch.setattr(node.executor.gpus, "survey", lambda: Survey((), (), {}, {}))
    else:
        node.destroy_by_hand()
    during(monkeypatch, "_lose", lambda: ended_elsewhere(node, 1))
    node.reconcile()
    monkeypatch.undo()
    node.reconcile()
    assert [row.state for row in node.slices()] in ([], ["idle"])
    node.check()
    assert node.prolog(2, "[mig:7g.80gb:1]", uid=BOB)[0] == exits.OK
    node.check()


def test_job_that_ends_while_its_instance_exists_again_leaves_no_slice_behind(node, monkeypatch):
    node.prolog(1, "[mig:7g.80gb:1]")
    (held,) = node.slices("held")
    with node.journal.write():
        node.journal.put(held._replace(state="lost"))
    during(monkeypatch, "_regain", lambda: ended_elsewhere(node, 1))
    node.reconcile()
    monkeypatch.undo()
    node.reconcile()
    assert [row.state for row in node.slices()] == ["idle"]
    node.check()


def test_spool_without_a_reader_is_bounded(tmp_path, monkeypatch):
    """A node without a controller, or whose controller is away for months, must not fill its disk."""
    monkeypatch.setattr(journal, "MOST_EVENTS", 1000)
    opened = Journal(str(tmp_path / NAME))
    for number in range(5000):
        with opened.write():
            opened.event("fault", {"number": number})
    assert 1000 <= opened.spool_length() <= 2000
    assert opened.spooled(10000)[-1]["number"] == 4999
    opened.close()


def test_events_after_the_journal_was_restored_are_not_taken_for_older_ones(node):
    """The controller has more events of this journal than the restored copy ever had."""
    node.prolog(1, "[mig:1g.10gb:1]")
    node.epilog(1)
    last = node.events()[-1]["seq"]
    node.journal.acknowledge(last, "d1")
    assert node.journal.recorded == ("d1", last)
    node.journal.acknowledge(last + 100, "d1")
    assert node.journal.recorded[0] == "", "the controller is asked to request everything"
    node.prolog(2, "[mig:1g.10gb:1]")
    assert min(event["seq"] for event in node.events()) > last + 100


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["driver", "lock"])
def test_gpu_that_cannot_be_repaired_keeps_no_slice_of_another_from_being_freed(new_node, monkeypatch, fault):
    """For example a GPU on which the driver hangs or fails, until the administrator resets it."""
    monkeypatch.setattr(liveness, "SETTLED_S", 0.0)
    monkeypatch.setattr(liveness, "PAUSE_S", 0.0)
    node = new_node(gpus=["h100-80gb", "h100-80gb"])
    for job in (1, 2):
        node.prolog(job, "[mig:7g.80gb:1]")
    broken, other = (gpu.uuid for gpu in node.executor.gpus.listed())
    node.slurm_says()  # no Epilog has run for either
    deadline = Deadline(2.0)
    if fault == "lock":
        with locked(node.executor.paths.lock, [gpu_lock(broken)], Deadline(1)), pytest.raises(TooLate):
            node.executor.reconcile(deadline)
    else:
        listed = NvmlGpu.instances

        def instances(gpu):
            if gpu.uuid == broken:
                raise DriverError(999, "unknown error")
            return listed(gpu)

        monkeypatch.setattr(NvmlGpu, "instances", instances)
        with pytest.raises(DriverError):
            node.executor.reconcile(deadline)
    assert not node.slices("held")
    assert sorted(event["job"] for event in node.events("stop")) == [1, 2]
    assert [row.gpu for row in node.slices("idle")] == sorted([broken, other])


def test_processes_of_an_instance_are_not_none_because_the_driver_does_not_answer(node):
    by_hand = node.make_by_hand("7g.80gb", 0, 8)
    node.machine.start_process(by_hand.mig_uuid, 4_000_000)
    driver = NvmlDriver(str(node.machine.library))
    (gpu,) = driver.gpus()
    assert gpu.processes(by_hand) == (4_000_000,)
    driver.close()
    with pytest.raises(DriverMissing):
        gpu.processes(by_hand)


def test_hook_that_opens_the_driver_again_does_not_close_it_under_housekeeping(node, monkeypatch):
    by_hand = node.make_by_hand("7g.80gb", 0, 8)
    node.machine.start_process(by_hand.mig_uuid, 4_000_000)
    listed = NvmlGpu.instances

    def instances(gpu):
        found = listed(gpu)
        node.executor.gpus.reset()  # at the end of a hook whose driver call has failed, in another thread
        return found

    monkeypatch.setattr(NvmlGpu, "instances", instances)
    done, _ = node.executor.reconcile(Deadline(5))
    assert [row.state for row in node.slices()] == ["foreign"], done


@pytest.mark.parametrize("when", ["idle", "held"])
@pytest.mark.parametrize("repaired", [True, False])
def test_instance_recreated_by_hand_with_the_same_uuid_is_created_again(node, when, repaired):
    """A driver may derive the UUID from the ids, so that only the devices, open to everyone again, tell it."""
    node.prolog(1, "[mig:7g.80gb:1]")
    if when == "idle":
        node.epilog(1)
    node.destroy_by_hand()
    by_hand = node.make_by_hand("7g.80gb", 0, 8)
    (row,) = node.slices(when)
    with node.journal.write():
        node.journal.put(row._replace(mig_uuid=by_hand.mig_uuid))
    if when == "held":
        node.epilog(1)
    if repaired:
        node.reconcile()
    assert node.prolog(2, "[mig:7g.80gb:1]")[0] == exits.OK
    (held,) = node.slices("held")
    assert (held.job, held.warm) == (2, False)
    assert held.mig_uuid != by_hand.mig_uuid
    node.check()


def test_second_prolog_that_gives_a_run_up_keeps_its_slice_from_nobody(new_node):
    """slurmd was restarted and runs the Prolog again, which waits in vain for the lock of another job's hook."""
    node = new_node()
    assert node.prolog(1, "[mig:7g.80gb:1]")[0] == exits.OK
    node.configure(HookDeadline=0.3)
    node.forget_executor()
    with locked(node.executor.paths.lock, [run_lock(1)], Deadline(1)):
        assert "requeued" in node.prolog(1, "[mig:7g.80gb:1]")[1]
    node.configure(HookDeadline=20)
    node.forget_executor()
    assert node.epilog(1)[0] == exits.OK
    assert not node.slices("held")
    assert [event["job"] for event in node.events("stop")] == [1]
    assert node.handoff(1).slices == ()
    node.check()


def test_refused_user_is_not_told_the_processes_of_others(node):
    node.prolog(1, "[mig:7g.80gb:1]", uid=BOB)
    node.epilog(1)
    (idle,) = node.slices("idle")
    node.machine.start_process(idle.mig_uuid)
    line = node.prolog(2, "[mig:7g.80gb:1]")[1]
    (misfit,) = node.events("misfit")
    for text in (line, misfit["reason"]):
        assert f"in use by {os.getpid()} (" in text, "administrators are"
    given = (node.root / "run" / "job" / "2.0").read_text()
    assert "no free placement for mig:7g.80gb:1\n" in given and str(os.getpid()) not in given


@pytest.mark.parametrize("age", ["same boot", "earlier boot"])
def test_journal_restored_from_an_older_copy_takes_no_slice_from_a_running_job(node, age):
    """Its jobs are in no hurry to use their slices, so no process says that they are taken."""
    node.prolog(1, "[mig:2g.20gb:1]")
    node.epilog(1)
    if age == "earlier boot":
        with node.journal.write():
            node.journal.set_meta("boot_id", "another")
    copies = {path.name: path.read_bytes() for path in (node.root / "state").glob("journal.db*")}
    if age == "earlier boot":
        with node.journal.write():
            node.journal.set_meta("boot_id", node.machine.boot_id_file.read_text().strip())
    node.prolog(2, "[mig:3g.40gb:1]", uid=BOB)
    node.prolog(3, "[mig:1g.10gb:2]")
    held = {row.mig_uuid: (row.job, row.uid) for row in node.slices("held")}
    node.forget_executor()
    for path in (node.root / "state").glob("journal.db*"):
        path.unlink()
    for name, content in copies.items():
        (node.root / "state" / name).write_bytes(content)
    assert node.prolog(4, "[mig:1g.10gb:1]")[0] == exits.OK
    node.reconcile()
    assert {row.mig_uuid: (row.job, row.uid) for row in node.slices("held") if row.job != 4} == held
    node.check()
    for job in (2, 3, 4):
        assert node.epilog(job)[0] == exits.OK
    assert node.prolog(5, "[mig:7g.80gb:1]")[0] == exits.OK
    assert [row.job for row in node.slices("held")] == [5]
    node.check()


def test_epilog_that_waited_until_the_next_run_had_begun_does_not_end_it(node):
    """The Epilog of the first run gets the restart count of the second, whose Prolog does its work."""
    node.prolog(1, "[mig:2g.20gb:1]")
    ending.make(node.executor.paths.run, 1, 1)
    waiting = threading.Thread(target=ended_elsewhere, args=(node, 1, 1))
    with locked(node.executor.paths.lock, [run_lock(1)], Deadline(1)), owner.working() as owner_id:
        waiting.start()
        time.sleep(0.2)
        node.executor._prolog(node.env("prolog", 1, "[mig:2g.20gb:1]", restart=1), owner_id, Deadline(5))
    waiting.join()
    assert [(row.job, row.restart) for row in node.slices("held")] == [(1, 1)]
    node.check()
    ending.make(node.executor.paths.run, 1, 1)
    assert node.epilog(1, restart=1)[0] == exits.OK
    assert not node.slices("held")
    node.check()


@pytest.mark.parametrize("left", ["starting", "ending"])
def test_note_of_an_epilog_that_was_interrupted_does_not_end_the_next_run(node, left):
    """It names the restart count of the next run, which may start before the agent has completed the earlier one."""
    assert node.prolog(1, "[mig:2g.20gb:1]")[0] == exits.OK
    (run,) = node.journal.runs()
    (row,) = node.slices("held")
    with node.journal.write():
        node.journal.put_run(run._replace(state=left, owner="1.1.1"))
        if left == "starting":
            node.journal.put(row._replace(state="intent", owner="1.1.1"))
    ending.make(node.executor.paths.run, 1, 1)
    assert node.prolog(1, "[mig:2g.20gb:1]", restart=1)[0] == exits.OK
    node.reconcile()
    assert [(row.job, row.restart) for row in node.slices("held")] == [(1, 1)]
    node.check()


@pytest.mark.slow
def test_epilog_that_the_host_delays_anywhere_still_ends_a_run_of_just_before(node, monkeypatch):
    """Its start is compared with that of the run, which may be milliseconds earlier."""
    node.prolog(1, "[mig:2g.20gb:1]")
    real = time.time

    def delayed():
        now = real()
        time.sleep(0.3)
        return now

    monkeypatch.setattr(time, "time", delayed)
    code, line = node.epilog(1)
    monkeypatch.undo()
    assert code == exits.OK and "released" in line
    assert not node.slices("held")
    node.check()


def test_epilog_of_a_job_whose_instance_is_gone_does_not_close_the_next_users_devices(node):
    """Ids of instances are reused, and with them the devices; no agent has noticed the loss in between."""
    node.prolog(1, "[mig:1g.10gb:1]")
    node.destroy_by_hand()
    assert node.prolog(2, "[mig:2g.20gb:1]", uid=BOB)[0] == exits.OK
    first, second = sorted((row for row in node.slices() if row.job), key=lambda row: row.job)
    with node.journal.write():
        node.journal.put(first._replace(gi=second.gi, cap_gi=second.cap_gi, cap_ci=second.cap_ci))
    node.epilog(1)
    assert [node.cap(minor) for minor in (second.cap_gi, second.cap_ci)] == [(BOB, 0o400)] * 2
    node.check()


@pytest.mark.slow
def test_no_device_remains_a_users_if_the_instance_vanishes_under_an_interrupted_start(node):
    """The journal does not name the devices of a start until its end."""
    ends = []
    for kill_at in range(1, 200):
        environ = node.environ("prolog", kill_at, "[mig:1g.10gb:2]", uid=ALICE)
        status, _ = in_child(lambda environ=environ: client.run("prolog", str(node.etc), environ)[0], kill_at)
        ends.append(os.waitstatus_to_exitcode(status) == exits.INTERNAL)  # its child was killed
        node.destroy_by_hand()
        node.reconcile()
        node.epilog(kill_at)
        owners = {path.stat().st_uid for path in (node.machine.dev_root / "nvidia-caps").glob("*")}
        assert owners <= {0}, f"killed before side effect {kill_at}"
        node.check()
        if not ends[-1]:
            break
    assert len(ends) > 5 and not ends[-1]


def test_agent_starts_on_a_journal_whose_damage_only_a_full_check_finds(node):
    node.prolog(1, "[mig:1g.10gb:1]")
    with node.journal.write():
        for number in range(500):
            node.journal.event("fault", {"gpu": None, "what": "x" * 200, "number": number})
    node.forget_executor()
    path = node.root / "state" / NAME
    with contextlib.closing(sqlite3.connect(path)) as link:
        size = link.execute("PRAGMA page_count").fetchone()[0] * 4096
    with open(path, "r+b") as file:
        file.seek(size - 4096)
        file.write(b"garbage!" * 512)
    with agent_process(node):
        assert run_hook(node, "prolog", 2, "[mig:1g.10gb:1]", uid=BOB)[0] == exits.OK
    assert {row.job for row in node.slices("held")} == {1, 2}
    assert list((node.root / "state").glob("*.damaged-*"))
    node.check()


@pytest.mark.parametrize("moment", ["emptied", "ended"])
def test_user_cannot_take_the_space_of_others_progress_files_by_attributes(node, moment):
    """From Linux 6.6 on a tmpfs holds users' extended attributes, in the kernel's memory."""
    node.prolog(1, "[mig:1g.10gb:1]")
    directory = node.executor.paths.progress
    kept = os.open(f"{node.config.progress_path}/1.0", os.O_RDWR | os.O_APPEND)
    if moment == "emptied":  # as if the user had won the race while the file was not append-only
        tmpfs.set_append_only(kept, False)
        os.setxattr(kept, "user.a", b"x" * 60000)
        progress.shorten(directory, 1, 0, ALICE)
    else:
        node.epilog(1)
    assert os.listxattr(kept) == []

    def fill():
        os.setresgid(ALICE, ALICE, ALICE)
        os.setresuid(ALICE, ALICE, ALICE)
        try:
            os.setxattr(kept, "user.b", b"x" * 60000)
        except OSError:
            return 0
        return 1

    assert os.WEXITSTATUS(in_child(fill)[0]) == 0
    os.close(kept)


@pytest.mark.parametrize("number", [1, 10_000])
@pytest.mark.parametrize("moment", ["made", "emptied"])
def test_user_who_adds_attributes_while_his_file_is_not_append_only_loses_it(node, monkeypatch, moment, number):
    """A thread that does nothing else wins this race within seconds. Linux lists no more names than 64 KiB."""
    directory, protect = node.executor.paths.progress, tmpfs.set_append_only
    where = f"{node.config.progress_path}/1.0"

    def late(handle, on):
        for i in range(number if on else 0):
            os.setxattr(handle, f"user.{i}", b"x" * 8)
        protect(handle, on)

    if moment == "emptied":
        node.prolog(1, "[mig:1g.10gb:1]")
        kept = os.open(where, os.O_RDWR | os.O_APPEND)
    monkeypatch.setattr(tmpfs, "set_append_only", late)
    if moment == "made":
        assert node.prolog(1, "[mig:1g.10gb:1]")[0] == exits.OK
        assert not os.path.exists(where)
    else:
        with pytest.raises(progress.ProgressError, match="attributes"):
            progress.shorten(directory, 1, 0, ALICE)
        assert os.stat(where).st_uid == 0
        if number == 1:
            assert os.listxattr(kept) == []
        os.close(kept)
    monkeypatch.undo()
    assert node.epilog(1)[0] == exits.OK
    assert os.listdir(directory) == []


def test_attributes_of_a_file_take_no_space_from_others(node):
    node.prolog(1, "[mig:1g.10gb:1]")
    kept = os.open(f"{node.config.progress_path}/1.0", os.O_RDWR | os.O_APPEND)
    tmpfs.set_append_only(kept, False)
    for i in range(1100):  # more than a limit of 65,536 files leaves for them
        os.setxattr(kept, f"user.{i}", b"x" * 65000)
    node.prolog(2, "[mig:1g.10gb:1]", uid=BOB)
    assert os.path.exists(f"{node.config.progress_path}/2.0")
    os.close(kept)

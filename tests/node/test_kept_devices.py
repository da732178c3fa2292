"""Device descriptors that outlive a job: they delay no other job, and no other user gets the same instance."""

import array
import contextlib
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from slurm_migbatch.node import exits, handoff, open_devices, tmpfs, watch
from slurm_migbatch.node.watch import Watcher
from tests.support import progress_files
from tests.support.directories import open_to_users
from tests.support.nodes import ALICE, BOB

HOLDER = """
import ctypes, os, resource, sys, time
processes, descriptors = int(sys.argv[1]), int(sys.argv[2])
os.seteuid(int(sys.argv[3]))
for path in sys.argv[6:]:
    os.open(path, os.O_RDONLY)
os.seteuid(0)
if sys.argv[5] == "apart" and ctypes.CDLL(None).unshare(0x20000):  # CLONE_NEWNS
    sys.exit("unshare")
os.setresuid(int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[4]))
handle = os.open("/dev/null", os.O_RDONLY)
for number in range(handle + 1, descriptors):
    os.dup2(handle, number)
for _ in range(processes - 1):
    if os.fork() == 0:
        break
os.write(1, b"x")
time.sleep(600)
"""


@pytest.fixture
def crowd():
    """Makes processes that hold descriptors: `crowd(processes, descriptors, uid)`; all end with the test.

    `effective` is the uid by which they act, if it is another one; `apart`: in a mount namespace of their own.
    """
    made = []

    def make(processes, descriptors, uid, *path, effective=None, apart=False):
        uids = str(uid), str(uid if effective is None else effective)
        options = (str(processes), str(descriptors), *uids, "apart" if apart else "")
        argv = [sys.executable, "-ISc", HOLDER, *options, *map(str, path)]
        group = subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True)
        made.append(group)
        ready = b""
        while len(ready) < processes:
            part = os.read(group.stdout.fileno(), processes)
            assert part
            ready += part
        return group

    yield make
    for group in made:
        os.killpg(group.pid, signal.SIGKILL)
        group.wait()
        group.stdout.close()


@pytest.fixture
def open_node(many_nodes):
    """A node whose capability devices can be opened: minor 3, that of a whole GPU's instance, is that of /dev/null."""
    node = many_nodes(HookDeadline=6)
    devices = node.machine.proc_root / "devices"
    devices.write_text(re.sub(r"(?m)^ *\d+ nvidia-caps$", "  1 nvidia-caps", devices.read_text()))
    open_to_users(node.root)
    open_to_users(node.machine.dev_root)
    return node


def device(node, row):
    path = node.machine.dev_root / "nvidia-caps" / f"nvidia-cap{row.cap_gi}"
    assert row.cap_gi == 3
    return path


def test_processes_with_many_descriptors_do_not_delay_a_prolog(open_node, crowd):
    node = open_node
    node.prolog(1, "[mig:1g.10gb:2]")
    node.epilog(1)
    crowd(200, int(os.sysconf("SC_OPEN_MAX")), ALICE)
    code, line = node.prolog(2, "[mig:1g.10gb:2]", uid=BOB)
    assert code == exits.OK and node.events("misfit") == [], line
    assert [row.job for row in node.slices("held")] == [2, 2], line
    assert node.epilog(2)[0] == exits.OK
    node.check()


def test_instance_of_another_user_is_destroyed_and_created_again(open_node):
    node = open_node
    node.prolog(1, "[mig:7g.80gb:1]")
    (before,) = node.slices("held")
    ours, theirs = socket.socketpair()
    os.seteuid(ALICE)
    handle = os.open(device(node, before), os.O_RDONLY)
    os.seteuid(0)
    ours.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [handle]))])
    os.close(handle)  # now it is only in flight in the socket, where no scan of processes finds it
    node.epilog(1)
    assert node.prolog(2, "[mig:7g.80gb:1]", uid=BOB)[0] == exits.OK
    (after,) = node.slices("held")
    assert after.mig_uuid != before.mig_uuid
    assert node.events("start")[-1]["warm"] is False
    assert [event["gi"] for event in node.events("destroy")] == [before.gi]
    node.check()
    ours.close()
    theirs.close()


def test_kept_descriptor_does_not_block_the_placement_for_others(open_node, crowd):
    node = open_node
    node.prolog(1, "[mig:7g.80gb:1]")
    crowd(1, 10, ALICE, device(node, node.slices("held")[0]))
    node.epilog(1)
    assert node.prolog(2, "[mig:7g.80gb:1]", uid=BOB)[0] == exits.OK
    assert [row.job for row in node.slices("held")] == [2]


def fault_events(node, pid):
    """Return the fault events about one process; others on this machine have /dev/null open too."""
    return [event for event in node.events("fault") if f"process {pid} " in event["what"]]


def test_time_limit_of_a_scan_applies_within_one_process(tmp_path, crowd, monkeypatch):
    """A user with thousands of mounts and descriptors once kept the agent from reading the progress of all jobs."""
    open_to_users(tmp_path)
    (tmp_path / "nvidia-cap7").touch()
    holder = crowd(1, 10, ALICE, *[tmp_path / "nvidia-cap7"] * 50)
    seen, clock, checked = [], itertools.count(), open_devices.status_of
    monkeypatch.setattr(open_devices, "status_of", lambda pid, name, end: seen.append(name) or checked(pid, name, end))
    monkeypatch.setattr(os, "listdir", lambda _: [str(holder.pid)])
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    open_devices.OpenDeviceScan().scan(1, {7: BOB}, 10.0)
    assert 0 < len(seen) <= 10


def test_time_limit_of_a_scan_applies_within_one_list_of_mounts(tmp_path, crowd, monkeypatch):
    """A user namespace may have 100,000 mounts with paths of 4,096 bytes, and reading their list takes a minute."""
    open_to_users(tmp_path)
    (tmp_path / "nvidia-cap7").touch()
    holder, clock = crowd(1, 10, ALICE, tmp_path / "nvidia-cap7"), itertools.count()

    def mounts():
        for number in range(1000):
            yield f"{number} 1 0:1 / /mnt rw - ext4 disk rw\n"
        raise AssertionError("reads on")

    def opened(path, *args, **more):
        return contextlib.nullcontext(mounts()) if path.endswith("/mountinfo") else open(path, *args, **more)

    monkeypatch.setattr(open_devices, "open", opened, raising=False)
    monkeypatch.setattr(open_devices, "facts_of", lambda _: (0, "no mount of the list"))
    monkeypatch.setattr(os, "listdir", lambda _: [str(holder.pid)])
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    assert open_devices.OpenDeviceScan().scan(1, {7: BOB}, 100.0) == []


def test_process_with_another_users_device_open_is_reported(open_node, crowd, caplog):
    node = open_node
    node.prolog(1, "[mig:7g.80gb:1]")
    kept = crowd(1, 10, ALICE, device(node, node.slices("held")[0]))
    watcher = Watcher(node.config, node.executor.gpus)
    watcher.run_round(node.journal, node.executor.paths, 1.0)
    assert not fault_events(node, kept.pid), "a user may keep her own device open"
    node.epilog(1)
    node.prolog(2, "[mig:7g.80gb:1]", uid=BOB)
    for _ in range(50):  # a scan continues where the previous one ran out of time
        watcher.run_round(node.journal, node.executor.paths, 2.0)
    (fault,) = fault_events(node, kept.pid)
    assert f"process {kept.pid} of uid {ALICE}" in fault["what"] and "nvidia-cap3" in fault["what"]
    assert fault["drain"] is False
    assert str(kept.pid) in caplog.text


@pytest.mark.parametrize("how", [{"effective": 0}, {"apart": True}], ids=["setuid program", "mount namespace"])
def test_users_device_is_reported_wherever_the_process_hides_it(open_node, crowd, how):
    node = open_node
    node.prolog(1, "[mig:7g.80gb:1]")
    kept = crowd(1, 10, ALICE, device(node, node.slices("held")[0]), **how)
    node.epilog(1)
    node.prolog(2, "[mig:7g.80gb:1]", uid=BOB)
    watcher = Watcher(node.config, node.executor.gpus)
    for _ in range(50):
        watcher.run_round(node.journal, node.executor.paths, 2.0)
    (fault,) = fault_events(node, kept.pid)
    assert f"process {kept.pid} of uid {ALICE}" in fault["what"]


@pytest.mark.parametrize("forget_s", [0.0, 3600.0])
def test_open_device_is_reported_despite_many_other_warnings(open_node, crowd, caplog, monkeypatch, forget_s):
    """A user can cause any number of warnings by tampering with the progress files of their jobs."""
    monkeypatch.setattr(watch, "REMEMBERED", 1)
    monkeypatch.setattr(watch, "FORGET_S", forget_s)
    node, kept = open_node, None
    scan = open_devices.OpenDeviceScan.scan

    def of_this_test(*args):  # other tests on this machine may have a device with the same number open
        return [found for found in scan(*args) if kept and found.pid == kept.pid]

    monkeypatch.setattr(open_devices.OpenDeviceScan, "scan", of_this_test)
    watcher = Watcher(node.config, node.executor.gpus)
    for job in (1, 2):
        node.prolog(job, "[mig:7g.80gb:1]")
        with open(progress_files.path(node, job), "rb") as file:
            tmpfs.set_append_only(file.fileno(), False)
        os.link(progress_files.path(node, job), progress_files.path(node, job).with_name(f"second name {job}"))
        watcher.run_round(node.journal, node.executor.paths, float(job))
        kept = crowd(1, 10, ALICE, device(node, node.slices("held")[0])) if job == 2 else None
        node.epilog(job)
    assert caplog.text.count("is not the one created") == (2 if not forget_s else 1)
    node.prolog(3, "[mig:7g.80gb:1]", uid=BOB)
    for _ in range(50):
        watcher.run_round(node.journal, node.executor.paths, 3.0)
    (fault,) = fault_events(node, kept.pid)
    assert f"process {kept.pid} of uid {ALICE}" in fault["what"]


def test_file_names_chosen_by_a_user_do_not_break_fdinfo_parsing():
    """A dma-buf's name is set by its user; the kernel shows it unescaped in fdinfo and in the target of the link."""
    own = "pos:\t0\nflags:\t02\nmnt_id:\t15\nino:\t7\nname:\t%b/nvidia-cap1\n"
    for name in (b"\nflags:\tx", b"\xff", b"\nmnt_id:\t1", b"\nflags:\t010000000"):
        assert open_devices.facts_of(own.encode() % name) == (2, "15")
    for text in (b"", b"pos:\t0\n", b"flags:\tx\nmnt_id:\t15\n", b"flags:\t02\n"):
        assert open_devices.facts_of(text) is None


def test_instance_of_an_undone_prolog_counts_as_used_by_its_user(node, monkeypatch):
    """Although the Prolog was undone, the user may have been able to open the instance for a moment."""
    with monkeypatch.context() as patch:
        patch.setattr(handoff, "write", lambda *_: os.open("/nowhere", os.O_RDONLY))
        code, line = node.prolog(1, "[mig:7g.80gb:1]")
        assert code == exits.OK and "requeued" in line and not node.slices("held"), line
    (idle,) = node.slices("idle")
    assert node.prolog(2, "[mig:7g.80gb:1]", uid=BOB)[0] == exits.OK
    assert node.slices("held")[0].mig_uuid != idle.mig_uuid


def test_idle_instance_with_an_unknown_last_user_is_created_again(node):
    """An instance created by hand, or found after the journal was lost."""
    node.make_by_hand("7g.80gb", 0, 8)
    node.reconcile()
    (idle,) = node.slices("idle")
    assert node.prolog(1, "[mig:7g.80gb:1]")[0] == exits.OK
    assert node.slices("held")[0].mig_uuid != idle.mig_uuid


@pytest.mark.parametrize("repaired", [True, False])
def test_idle_instance_recreated_by_hand_is_created_again(node, repaired):
    """Its devices were open to everyone meanwhile, so others than its last user may have used it."""
    node.prolog(1, "[mig:7g.80gb:1]")
    node.epilog(1)
    node.destroy_by_hand()
    by_hand = node.make_by_hand("7g.80gb", 0, 8)
    if repaired:
        node.reconcile()
    assert node.prolog(2, "[mig:7g.80gb:1]")[0] == exits.OK
    (held,) = node.slices("held")
    assert (held.job, held.warm) == (2, False)
    assert held.mig_uuid != by_hand.mig_uuid
    node.check()

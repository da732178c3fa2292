"""Who can open the devices of a slice: tested with real users and real device nodes."""

import errno
import os
import signal
import stat
import subprocess
import sys
from contextlib import suppress

import pytest

from slurm_migbatch.node import effects
from slurm_migbatch.node.caps import MODE, Caps, CapsError, helper_is_setuid
from slurm_migbatch.node.open_devices import OpenDevice, OpenDeviceScan
from tests.support.directories import open_to_users
from tests.support.hung_mount import hung_mount
from tests.support.nodes import ALICE, BOB


def as_user(uid, work):
    """Run `work` in a child with that uid; return its result, which is the exit status."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            code = work()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def open_errno(path):
    def work():
        try:
            os.close(os.open(path, os.O_RDONLY))
        except OSError as error:
            return error.errno
        return 0

    return work


@pytest.fixture
def open_node(node):
    """A node whose device directories users can enter, as they can enter /dev."""
    open_to_users(node.root)
    return node


def devices(node, minors):
    return [node.machine.dev_root / "nvidia-caps" / f"nvidia-cap{minor}" for minor in minors]


def test_only_the_jobs_user_can_open_its_slice_and_only_while_it_runs(open_node):
    node = open_node
    node.prolog(1, "[mig:1g.10gb:1]", uid=ALICE)
    node.prolog(2, "[mig:1g.10gb:1]", uid=BOB)
    alice, bob = sorted(node.slices("held"), key=lambda row: row.job)
    for path in devices(node, (alice.cap_gi, alice.cap_ci)):
        assert as_user(ALICE, open_errno(path)) == errno.ENXIO, "allowed, but no driver serves this major"
        assert as_user(BOB, open_errno(path)) == errno.EACCES
        assert as_user(65534, open_errno(path)) == errno.EACCES
    for path in devices(node, (bob.cap_gi, bob.cap_ci)):
        assert as_user(ALICE, open_errno(path)) == errno.EACCES
    node.epilog(1)
    for path in devices(node, (alice.cap_gi, alice.cap_ci)):
        assert as_user(ALICE, open_errno(path)) == errno.EACCES
    for path in devices(node, (bob.cap_gi, bob.cap_ci)):
        assert as_user(BOB, open_errno(path)) == errno.ENXIO


def test_devices_of_a_vanished_instance_return_to_root(node):
    """A later instance, possibly another user's, can get the same minor numbers."""
    node.prolog(1, "[mig:2g.20gb:1]", uid=ALICE)
    (row,) = node.slices("held")
    node.destroy_by_hand()
    node.reconcile()
    assert [path.stat().st_uid for path in devices(node, (row.cap_gi, row.cap_ci))] == [0, 0]
    node.epilog(1)
    node.check()


def test_devices_of_a_vanished_instance_stay_with_their_new_owner(node):
    node.prolog(1, "[mig:2g.20gb:1]", uid=ALICE)
    node.destroy_by_hand()
    node.prolog(2, "[mig:2g.20gb:1]", uid=BOB)
    alice, bob = sorted((row for row in node.slices() if row.job), key=lambda row: row.job)
    with node.journal.write():  # as if nobody had noticed, and any placement had the same minors
        node.journal.put(alice._replace(state="held", cap_gi=bob.cap_gi, cap_ci=bob.cap_ci))
    node.reconcile()
    assert [row.state for row in node.slices() if row.job == 1] == ["lost"]
    assert [path.stat().st_uid for path in devices(node, (bob.cap_gi, bob.cap_ci))] == [BOB, BOB]


def test_devices_the_epilog_could_not_close_are_closed_on_destroy(node):
    node.prolog(1, "[mig:2g.20gb:1]", uid=ALICE)
    (row,) = node.slices("held")
    directory = node.machine.dev_root / "nvidia-caps"
    directory.chmod(0o775)
    assert "set aside" in node.epilog(1)[1]
    directory.chmod(0o755)
    node.reconcile()
    assert not node.slices()
    assert [path.stat().st_uid for path in devices(node, (row.cap_gi, row.cap_ci))] == [0, 0]


def test_mode_changed_by_the_owner_is_reset_by_the_epilog(open_node):
    node = open_node
    node.prolog(1, "[mig:1g.10gb:1]", uid=ALICE)
    (row,) = node.slices("held")
    path = devices(node, [row.cap_gi])[0]

    def give_away():
        os.chmod(path, 0o444)  # the owner of a file may do that
        return 0

    assert as_user(ALICE, give_away) == 0
    node.epilog(1)
    assert node.cap(row.cap_gi) == (0, MODE)
    node.prolog(2, "[mig:1g.10gb:1]", uid=BOB)
    assert as_user(ALICE, open_errno(path)) == errno.EACCES


@pytest.mark.parametrize("second_name", [False, True])
def test_mode_changed_by_the_owner_during_revocation_has_no_effect(open_node, monkeypatch, second_name):
    """The owner's other jobs on the node can change the mode of a device until root owns it."""
    node = open_node
    node.prolog(1, "[mig:1g.10gb:1]", uid=ALICE)
    (row,) = node.slices("held")
    names = devices(node, (row.cap_gi, row.cap_ci))
    if second_name:
        copies = [node.root / f"second{path.name}" for path in names]
        for path, copy in zip(names, copies, strict=True):
            os.link(path, copy)
        names += copies

    def interfere(point):
        for path in names if point == "chown" else ():
            with suppress(FileNotFoundError):
                if path.stat().st_uid == ALICE:
                    path.chmod(0o444)

    monkeypatch.setattr(effects, "hook", interfere)
    node.epilog(1)
    monkeypatch.setattr(effects, "hook", None)
    for path in names:
        assert as_user(BOB, open_errno(path)) == errno.EACCES


def test_nvidia_modprobe_is_told_not_to_restore_the_default_mode(node):
    node.prolog(1, "[mig:1g.10gb:1]")
    tree = node.machine.proc_root / "driver" / "nvidia" / "capabilities" / "gpu0" / "mig"
    accesses = list(tree.glob("gi*/access")) + list(tree.glob("gi*/ci*/access"))
    assert len(accesses) == 2
    for access in accesses:
        lines = access.read_text().splitlines()
        assert "DeviceFileModify: 0" in lines and "DeviceFileMode: 292" in lines
        assert lines[0] == "DeviceFileModify: 0", "the kernel reads only the first line that is written"
        assert len(access.read_text()) < 128, "the kernel takes at most 127 bytes"
        assert sorted(line.partition(":")[0] for line in lines) == [
            "DeviceFileMinor",
            "DeviceFileMode",
            "DeviceFileModify",
        ]


def test_reconcile_restores_device_owners_and_modes_changed_by_hand(node):
    node.prolog(1, "[mig:1g.10gb:2]")
    node.epilog(1)
    node.prolog(2, "[mig:1g.10gb:1]", uid=BOB)
    for row in node.slices():
        for path in devices(node, (row.cap_gi, row.cap_ci)):
            os.chown(path, 0, 0)
            path.chmod(0o444)
    assert len(node.reconcile()) == len(node.slices()) == 3
    node.check()
    assert node.reconcile() == []


def test_devices_of_an_adopted_instance_are_closed_at_once(node):
    node.make_by_hand("1g.10gb", 0, 1)
    node.reconcile()
    (row,) = node.slices("idle")
    assert node.cap(row.cap_gi) == node.cap(row.cap_ci) == (0, MODE)


def plant_symlink(directory, name, node):
    victim = node.root / "victim"
    victim.write_text("x")
    victim.chmod(0o644)
    (directory / name).symlink_to(victim)
    return victim


def plant_hardlink(directory, name, node):
    victim = node.root / "victim"
    victim.write_text("x")
    victim.chmod(0o644)
    os.link(victim, directory / name)
    return victim


def plant_wrong_device(directory, name, node):
    os.mknod(directory / name, stat.S_IFCHR | 0o666, os.makedev(1, 3))


def plant_second_name(directory, name, node):
    """The right device, but with a second hard link."""
    major = node.machine.dump()["caps_major"]
    minor = int(name.removeprefix("nvidia-cap"))
    os.mknod(node.root / "other", stat.S_IFCHR | 0o666, os.makedev(major, minor))
    os.link(node.root / "other", directory / name)
    return node.root / "other"


@pytest.mark.parametrize("plant", [plant_symlink, plant_hardlink, plant_wrong_device, plant_second_name])
def test_file_in_place_of_a_device_is_replaced_and_not_followed(node, plant):
    node.prolog(1, "[mig:1g.10gb:1]")
    (row,) = node.slices("held")
    node.epilog(1)
    directory = node.machine.dev_root / "nvidia-caps"
    name = f"nvidia-cap{row.cap_gi}"
    (directory / name).unlink()
    victim = plant(directory, name, node)
    before = victim.stat() if victim else None
    assert node.prolog(2, "[mig:1g.10gb:1]")[0] == 0
    assert node.slices("held")[0].cap_gi == row.cap_gi
    node.check()
    if victim:
        after = victim.stat()
        if plant is plant_second_name:  # it is our device: nobody may open it by its remaining name
            assert (after.st_uid, stat.S_IMODE(after.st_mode)) == (0, 0)
        else:
            assert (after.st_uid, after.st_mode) == (before.st_uid, before.st_mode)


def test_hard_link_made_by_the_jobs_user_gives_no_access_after_the_job(node):
    node.prolog(1, "[mig:1g.10gb:1]", uid=BOB)
    (row,) = node.slices("held")
    kept = [node.root / f"kept{path.name}" for path in devices(node, (row.cap_gi, row.cap_ci))]
    for path, copy in zip(devices(node, (row.cap_gi, row.cap_ci)), kept, strict=True):
        os.link(path, copy)
    node.epilog(1)
    node.check()
    assert {(copy.stat().st_uid, stat.S_IMODE(copy.stat().st_mode)) for copy in kept} == {(0, 0)}


def test_device_directory_writable_by_others_is_refused(node):
    directory = node.machine.dev_root / "nvidia-caps"
    directory.mkdir(exist_ok=True)
    directory.chmod(0o777)
    code, line = node.prolog(1, "[mig:1g.10gb:1]")
    assert code == 0 and "writable by nobody else" in line and "requeued" in line
    directory.chmod(0o755)
    node.reconcile()
    node.check()


def test_no_devices_are_granted_without_an_nvidia_caps_major(node):
    (node.machine.proc_root / "devices").write_text("Character devices:\n 1 mem\n")
    assert "nvidia-caps" in node.prolog(1, "[mig:1g.10gb:1]")[1]


@pytest.fixture
def null_caps(tmp_path):
    """Capability devices that can really be opened: minor 7 is that of /dev/full."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "dev").mkdir()
    (tmp_path / "proc" / "devices").write_text("Character devices:\n  1 nvidia-caps\n")
    caps = Caps(str(tmp_path / "proc"), str(tmp_path / "dev"))
    open_to_users(tmp_path)
    return caps, tmp_path / "dev" / "nvidia-caps"


def test_scan_finds_processes_that_still_have_a_device_open(null_caps):
    caps, directory = null_caps
    caps.assign([7, 5], ALICE)
    code = (
        "import os, sys, time\n"
        f"os.setresuid({ALICE}, {ALICE}, {ALICE})\n"
        "flags = os.O_PATH if sys.argv[2] == 'path' else os.O_RDONLY\n"
        "os.open(sys.argv[1], flags)\nprint('open', flush=True)\ntime.sleep(60)\n"
    )
    holders = []
    for how in ("read", "path"):
        argv = [sys.executable, "-c", code, str(directory / "nvidia-cap7"), how]
        holder = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        assert holder.stdout.readline() == "open\n"
        holders.append(holder)
    caps.assign([7, 5], 0)
    ours = {holder.pid for holder in holders}

    def found(owners):
        return {opened for opened in OpenDeviceScan().scan(caps.major(), owners, 600.0) if opened.pid in ours}

    kept = found({7: BOB}), found({7: ALICE}), found({5: BOB}), found({})
    for holder in holders:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
    assert kept[0] == {OpenDevice(holders[0].pid, ALICE, 7)}, "a path handle gives no right and does not count"
    assert kept[1:] == (set(), set(), set()), "its owner may have it open, and others have another device open"
    assert found({7: BOB}) == set()


def scan_beside(mount, code, scan_code, timeout):
    """Run `scan_code`, which must succeed in time, while a user's program `code` uses a hung mount."""
    with hung_mount(mount):
        holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        holder.stdout.readline()
        scanning = subprocess.Popen([sys.executable, "-c", scan_code])
        try:
            assert scanning.wait(timeout) == 0
        finally:
            scanning.kill()
            holder.kill()
            holder.wait()
            holder.stdout.close()
    scanning.wait()


@pytest.mark.parametrize("name", ["data", "nvidia-cap7"])
def test_scan_is_not_blocked_by_a_hung_file_system(tmp_path, null_caps, name):
    """For example a user's file server that is down, or a FUSE mount of theirs with the name of a device."""
    caps, _ = null_caps
    (tmp_path / name).mkdir()
    open_to_users(tmp_path / name)
    code = (
        f"import os, time\nos.setuid({ALICE})\nos.open({str(tmp_path / name)!r}, os.O_PATH)\n"
        "print(flush=True)\ntime.sleep(600)"
    )
    scan_code = (
        "import sys\nfrom slurm_migbatch.node.open_devices import OpenDeviceScan\n"
        f"OpenDeviceScan().scan({caps.major()}, {{7: {BOB}}}, 600.0)"
    )
    scan_beside(tmp_path / name, code, scan_code, 60)


def test_scan_is_not_blocked_when_a_descriptor_moves_to_a_hung_file_system(tmp_path, null_caps):
    """A user's process keeps switching descriptors between the device and a file of a hung mount."""
    caps, directory = null_caps
    caps.assign([7], ALICE)
    hung = tmp_path / "nvidia-cap7"
    hung.mkdir()
    open_to_users(hung)
    code = (
        f"import os\nos.setresuid({ALICE}, {ALICE}, {ALICE})\n"
        f"real, other = os.open({str(directory / 'nvidia-cap7')!r}, os.O_RDONLY), os.open({str(hung)!r}, os.O_PATH)\n"
        "places = [os.dup(real) for _ in range(16)]\nprint(flush=True)\n"
        "while True:\n    for place in places:\n        os.dup2(other, place)\n        os.dup2(real, place)\n"
    )
    scan_code = (
        "import sys\nfrom slurm_migbatch.node.open_devices import OpenDeviceScan\nscan = OpenDeviceScan()\n"
        f"found = [scan.scan({caps.major()}, {{7: {BOB}}}, 600.0) for _ in range(200)]\n"
        "sys.exit(not any(found))"
    )
    scan_beside(hung, code, scan_code, 100)


def test_scan_ignores_devices_opened_by_root(null_caps):
    caps, directory = null_caps
    caps.assign([7], 0)
    with open(directory / "nvidia-cap7"):
        assert os.getpid() not in {opened.pid for opened in OpenDeviceScan().scan(caps.major(), {7: ALICE}, 600.0)}


def test_scan_that_runs_out_of_time_resumes_where_it_stopped():
    """Otherwise a user with many processes could hide those that come after them."""
    scan, scanned = OpenDeviceScan(), []
    real = os.stat

    def stat_of(path, *arguments, **options):
        if str(path).startswith("/proc/") and str(path).count("/") == 2:
            scanned.append(path)
        return real(path, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "stat", stat_of)
        for _ in range(5):
            scan.scan(1, {7: ALICE}, 0.0)
    assert len(scanned) == len(set(scanned)) == 5


def test_missing_or_malformed_access_file_raises_caps_error(tmp_path, null_caps):
    caps, _ = null_caps
    with pytest.raises(CapsError):
        caps.grant(0, 1, 0, ALICE)
    odd = tmp_path / "access"
    odd.write_text("hello\n")
    with pytest.raises(CapsError, match="form"):
        caps.read(str(odd))


def test_setuid_nvidia_modprobe_is_detected(tmp_path):
    helper = tmp_path / "nvidia-modprobe"
    helper.write_text("")
    assert helper_is_setuid([str(helper)]) == ""
    helper.chmod(0o4755)
    assert helper_is_setuid([str(tmp_path / "no"), str(helper)]) == str(helper)


def test_devices_to_configure_mig_and_of_other_gpus_are_not_listed_as_a_users(new_node):
    node = new_node(gpus=["h100-80gb", "h100-80gb"])
    node.prolog(1, "[mig:7g.80gb:1]", uid=ALICE)
    (row,) = node.slices("held")
    caps, config_minor = node.executor.caps, 1
    caps.assign([config_minor], ALICE)  # as an administrator may
    of_gpu = {gpu.uuid: caps.owned_by(ALICE, gpu.minor) for gpu in node.executor.gpus.listed()}
    assert sorted(of_gpu.pop(row.gpu)) == sorted((row.cap_gi, row.cap_ci))
    assert list(of_gpu.values()) == [[]]
    assert sorted(caps.owned_by(ALICE, None)) == sorted((row.cap_gi, row.cap_ci))

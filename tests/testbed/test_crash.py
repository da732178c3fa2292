"""However the starter of a test bed ends, nothing of the test bed stays behind."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from slurm_migbatch.testbed import process_group, registry, users
from slurm_migbatch.testbed.errors import TestbedError
from slurm_migbatch.testbed.proc import pids, start_time, wait_until

pytestmark = pytest.mark.slurm

PATIENCE_S = 180.0  # busy machines are slow
CLI = [sys.executable, "-c", "from slurm_migbatch.cli.main import main; main()", "testbed"]


def migbatch(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CLI, *args], capture_output=True, text=True, timeout=600)


def tied_to(directory: Path) -> set[int]:
    """Processes that name the test bed in their command line, environment or open files."""
    found = set()
    for pid in pids():
        try:
            texts = [Path(f"/proc/{pid}/{what}").read_bytes() for what in ("cmdline", "environ")]
            texts += [os.fsencode(os.readlink(fd)) for fd in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue
        if pid != os.getpid() and any(str(directory).encode() in text for text in texts):
            found.add(pid)
    return found


def described(pid: int) -> str:
    """Return the command line, the state and the place of a process that should not be there any more."""
    try:
        line, status, where, group = (
            Path(f"/proc/{pid}/{what}").read_text() for what in ("cmdline", "status", "wchan", "cgroup")
        )
    except OSError as error:
        return str(error)
    state = " ".join(row for row in status.splitlines() if row.startswith(("State", "PPid", "Sig")))
    return f"{line.split(chr(0))} {state} {where} {group.split()}"


def leftovers(directory: Path, record: registry.TestbedRecord | None) -> list[str]:
    left = [f"process {pid}: {described(pid)}" for pid in tied_to(directory)]
    left += [f"mount {line}" for line in Path("/proc/self/mounts").read_text().splitlines() if str(directory) in line]
    if directory.exists():
        left.append(str(directory))
    if record is not None:
        left += [path for path in (str(record.path), record.group) if path and Path(path).exists()]
        held = {name for other in registry.records() for name in other.users}
        ours = {entry.pw_name for entry in pwd.getpwall() if entry.pw_gecos == users.GECOS}
        left += [f"user {name}" for name in set(record.users) & ours - held]
    return left


def clean(directory: Path, record: registry.TestbedRecord | None) -> None:
    """Wait until nothing is left; a process forked at an interrupt takes a moment to find its group gone, and ends."""
    with suppress(TestbedError):
        wait_until(lambda: not leftovers(directory, record), PATIENCE_S, "all taken away")
    assert leftovers(directory, record) == []


@pytest.fixture
def directory() -> Iterator[Path]:
    path = registry.new_directory()
    yield path
    migbatch("down", "--dir", str(path))
    assert not path.exists()


def start(directory: Path, stage: str) -> subprocess.Popen[bytes]:
    line = [*CLI, "up", "--nodes", "1", "--dir", str(directory), *([] if stage == "migbatchd" else ["--plain"])]
    return subprocess.Popen(line, stderr=subprocess.DEVNULL)


def reached(directory: Path, stage: str) -> bool:
    return {
        "registered": registry.find(directory) is not None,
        "munged": (directory / "run/procs/munged.json").exists(),
        "slurmctld": (directory / "run/procs/slurmctld.json").exists(),
        "slurmd": (directory / "run/procs/slurmd-n1.json").exists(),
        "migbatchd": (directory / "run/procs/migbatchd.json").exists(),
    }[stage]


@pytest.mark.parametrize("stage", ["registered", "munged", "slurmctld", "slurmd", "migbatchd"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_up_leaves_nothing(directory: Path, stage: str, number: int) -> None:
    with start(directory, stage) as starter:
        wait_until(lambda: reached(directory, stage) or starter.poll() is not None, PATIENCE_S, stage, every=0.001)
        record = registry.find(directory)
        starter.send_signal(number)
    # The signal may come too late: then the cluster is up and kept, and that is not what is tested here.
    kept = registry.find(directory)
    if kept is not None and kept.owner is None:
        assert migbatch("down", "--dir", str(directory)).returncode == 0
    clean(directory, record)


@pytest.mark.parametrize("stage", ["registered", "munged", "slurmctld", "slurmd", "migbatchd"])
def test_down_removes_what_a_killed_starter_left(directory: Path, stage: str) -> None:
    with start(directory, stage) as starter:
        wait_until(lambda: reached(directory, stage) or starter.poll() is not None, PATIENCE_S, stage, every=0.001)
        starter.kill()
    record = registry.find(directory)
    assert record is not None
    assert migbatch("down", "--dir", str(directory)).returncode == 0
    assert leftovers(directory, record) == []


def test_interrupts_at_any_moment_leave_nothing_and_no_held_lock(directory: Path) -> None:
    for step in range(12):
        with start(directory, "slurmd") as starter:
            wait_until(lambda: reached(directory, "registered"), PATIENCE_S, "registered", every=0.001)
            time.sleep(0.01 * step)
            for _ in range(100):  # one of them comes between the first one and the cleanup
                starter.send_signal(signal.SIGINT)
                time.sleep(0.0002)
        kept = registry.find(directory)
        if kept is not None and kept.owner is None:
            assert migbatch("down", "--dir", str(directory)).returncode == 0
        clean(directory, kept)


def test_up_removes_what_a_killed_starter_left(directory: Path) -> None:
    with start(directory, "slurmctld") as starter:
        wait_until(lambda: reached(directory, "slurmctld"), PATIENCE_S, "slurmctld", every=0.001)
        starter.kill()
    stale = registry.find(directory)
    assert stale is not None
    assert stale.owner is not None, "the starter finished before it was killed"
    other = registry.new_directory()
    try:
        assert migbatch("up", "--plain", "--nodes", "1", "--dir", str(other)).returncode == 0
        assert leftovers(directory, stale) == []
    finally:
        migbatch("down", "--dir", str(other))


def test_second_up_in_the_same_directory_is_refused_and_harmless(directory: Path) -> None:
    assert migbatch("up", "--plain", "--nodes", "1", "--dir", str(directory)).returncode == 0
    again = migbatch("up", "--plain", "--nodes", "1", "--dir", str(directory))
    assert again.returncode == 1
    assert "already lives" in again.stderr
    listed = migbatch("exec", "--dir", str(directory), "--user", "mbbob", "--", "sinfo", "-h", "-n", "n1", "-o", "%T")
    assert listed.stdout.split() == ["idle"]
    record = registry.find(directory)
    assert migbatch("down", "--dir", str(directory)).returncode == 0
    assert leftovers(directory, record) == []


def test_processes_are_found_without_control_groups(directory: Path) -> None:
    directory.mkdir()
    scan = process_group.ScannedProcessGroup(directory)
    line = scan.enter(["sh", "-c", "(setsid sleep 300 &) ; env -i sleep 300; true"])
    child = subprocess.Popen(line)
    wait_until(lambda: len(scan.members()) >= 3, PATIENCE_S, "three members")
    found = scan.members()
    scan.destroy()
    child.wait(PATIENCE_S)
    assert scan.members() == set()
    directory.rmdir()
    assert not [pid for pid in found if start_time(pid) is not None]


def test_process_that_joins_a_control_group_during_its_removal_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that an interrupted starter has just forked may join a moment later."""
    hierarchy = process_group.CgroupProcessGroup.hierarchy()
    if hierarchy is None:
        return  # processes are found in another way here, see above
    group = process_group.CgroupProcessGroup(hierarchy / f"migbatch-test-{os.getpid()}")
    late: list[subprocess.Popen[bytes]] = []
    kill_all = process_group._kill_all

    def kill_all_but_one(what: process_group.ProcessGroup) -> None:
        kill_all(what)
        if not late:
            late.append(subprocess.Popen(group.enter(["sleep", "300"])))
            wait_until(group.members, PATIENCE_S, "the late one")

    monkeypatch.setattr(process_group, "_kill_all", kill_all_but_one)
    group.create()
    group.destroy()
    assert not group.path.exists()
    assert late[0].wait(PATIENCE_S) == -signal.SIGKILL

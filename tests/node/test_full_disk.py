"""A user who fills the disk: the node keeps working, the slice is released, reports of others are not lost."""

import errno
import os
import subprocess
from pathlib import Path

import pytest

from slurm_migbatch.node import exits, progress
from slurm_migbatch.node.executor import Executor
from slurm_migbatch.node.watch import Watcher
from tests.support.directories import open_to_users
from tests.support.environments import exported
from tests.support.nodes import ALICE, BOB

SMALL = 24 << 20
MORE = 128 << 20
"""Bytes after which a flood ends that nothing stops."""


@pytest.fixture
def small_node(many_nodes, tmp_path):
    """A node whose StateDir is on a disk of SMALL bytes that has another directory writable by all, as / has /tmp."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SMALL},mode=755", "none", disk], check=True)
    try:
        (disk / "tmp").mkdir()
        (disk / "tmp").chmod(0o1777)
        open_to_users(disk)
        node = many_nodes(StateDir=disk / "state")
        node.disk = disk
        open_to_users(node.root)
        yield node
        node.close()
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


class User:
    """Runs functions as a user; what they open stays open in this process."""

    def __init__(self, uid):
        self.uid = uid

    def run(self, work):
        """Run `work()` as the user; return its result, or the name of the error."""
        os.seteuid(self.uid)
        try:
            return work()
        except OSError as error:
            return errno.errorcode[error.errno]
        finally:
            os.seteuid(0)


def flood(handle, most=MORE):
    """Write lines until the disk is full or `most` bytes are reached; return the number of bytes written."""
    block = b"items=1 seconds=1\n" * 3640
    done = 0
    while done < most and block:
        try:
            done += os.write(handle, block)
        except OSError as error:
            assert error.errno == errno.ENOSPC, error
            block = block[: len(block) // 2]
    return done


def append(path):
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)


def reported(node, job, uid=ALICE):
    return exported(node, job, uid)["MIGBATCH_PROGRESS"]


def given_back(node):
    """Check that nothing is held, journal and driver agree, and all devices belong to root."""
    node.check()
    assert not node.slices("held")


def test_flood_of_progress_reports_leaves_disk_space_for_the_journal(small_node):
    node, alice = small_node, User(ALICE)
    assert node.prolog(1, "[mig:1g.10gb:1]")[0] == exits.OK
    handle = alice.run(lambda: append(reported(node, 1)))
    assert alice.run(lambda: flood(handle)) < 2 * progress.RESERVED_BYTES
    os.close(handle)
    code, line = node.epilog(1)
    assert code == exits.OK, line
    given_back(node)
    assert node.prolog(2, "[mig:7g.80gb:1]", uid=BOB)[0] == exits.OK
    assert node.epilog(2)[0] == exits.OK


def test_hard_links_and_kept_descriptors_do_not_evade_the_size_limit(small_node):
    node, alice = small_node, User(ALICE)
    kept = []
    for job in range(1, 40):
        assert node.prolog(job, "[mig:1g.10gb:1]")[0] == exits.OK
        where = Path(reported(node, job))
        for name in (where.with_name(f"{job}x"), node.disk / "tmp" / str(job), Path(f"/dev/shm/link{job}")):
            assert alice.run(lambda where=where, name=name: os.link(where, name)) in ("EXDEV", "EPERM", "EACCES")
        kept.append(alice.run(lambda where=where: append(where)))
        assert node.epilog(job)[0] == exits.OK
    written = sum(alice.run(lambda handle=handle: flood(handle)) for handle in kept)
    assert written < progress.RESERVED_BYTES
    assert node.prolog(50, "[mig:7g.80gb:1]", uid=BOB)[0] == exits.OK
    bob = User(BOB)
    handle = bob.run(lambda: append(reported(node, 50, BOB)))
    assert bob.run(lambda: os.write(handle, b"items=5 seconds=1\n")) == 18
    for descriptor in (*kept, handle):
        os.close(descriptor)
    assert node.epilog(50)[0] == exits.OK
    assert [event["items"] for event in node.events("progress")][-1:] == [5]
    given_back(node)


def test_flood_of_one_job_leaves_room_for_progress_reports_of_others(small_node):
    node, alice, bob = small_node, User(ALICE), User(BOB)
    node.prolog(1, "[mig:1g.10gb:1]")
    node.prolog(2, "[mig:1g.10gb:1]", uid=BOB)
    bobs_file = bob.run(lambda: append(reported(node, 2, BOB)))
    alices_file = alice.run(lambda: append(reported(node, 1)))
    alice.run(lambda: flood(alices_file))
    line = b"items=1000000 seconds=1\n"
    for _ in range(progress.RESERVED_BYTES // len(line) // 2):
        assert bob.run(lambda: os.write(bobs_file, line)) == len(line)
    node.prolog(3, "[mig:1g.10gb:1]", uid=BOB)
    third = bob.run(lambda: append(reported(node, 3, BOB)))
    assert bob.run(lambda: os.write(third, line)) == len(line)
    for handle in (bobs_file, alices_file, third):
        os.close(handle)


def test_journal_stays_writable_when_a_user_fills_the_disk(small_node):
    """However it is filled: here by a user, through a directory writable by all."""
    node, alice = small_node, User(ALICE)
    assert node.prolog(1, "[mig:1g.10gb:1]")[0] == exits.OK
    handle = alice.run(lambda: os.open(node.disk / "tmp" / "big", os.O_WRONLY | os.O_CREAT, 0o600))
    assert alice.run(lambda: flood(handle)) < SMALL
    for job in range(2, 12):  # hooks of the agent, then hooks that run on their own
        assert node.prolog(job, "[mig:1g.10gb:1]")[0] == exits.OK
        assert node.epilog(job)[0] == exits.OK
    assert node.epilog(1)[0] == exits.OK
    os.close(handle)
    given_back(node)


def test_progress_file_is_emptied_even_if_its_event_cannot_be_stored(small_node, monkeypatch):
    from slurm_migbatch.node.journal import Journal, JournalError

    node, alice = small_node, User(ALICE)
    node.prolog(1, "[mig:1g.10gb:1]")
    handle = alice.run(lambda: append(reported(node, 1)))
    alice.run(lambda: flood(handle))

    def full(*_):
        raise JournalError("disk is full")

    watcher = Watcher(node.config, node.executor.gpus)
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "event", full)
        with pytest.raises(JournalError):
            watcher.run_round(node.journal, node.executor.paths, 1.0)
    assert os.stat(reported(node, 1)).st_size == 0
    assert alice.run(lambda: os.write(handle, b"items=7 seconds=1\n")) == 18
    os.close(handle)


def test_journal_stays_writable_for_hooks_without_agent_on_a_full_disk(small_node):
    node, alice = small_node, User(ALICE)
    assert node.prolog(1, "[mig:1g.10gb:1]")[0] == exits.OK
    node.forget_executor()
    handle = alice.run(lambda: os.open(node.disk / "tmp" / "big", os.O_WRONLY | os.O_CREAT, 0o600))
    alice.run(lambda: flood(handle))
    assert Executor(node.config).run(node.env("epilog", 1))[0] == exits.OK
    os.close(handle)
    given_back(node)

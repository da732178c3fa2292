"""A checkpoint is complete or absent: kill at every disk operation, power cut, full disk, damaged and foreign files."""

import errno
import fcntl
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_migbatch import elastic
from slurm_migbatch.elastic.checkpoints import Checkpoints
from slurm_migbatch.elastic.disk import Disk
from slurm_migbatch.elastic.lock import Lock
from tests.support.disks import Deadly, Recorded, after_power_cut
from tests.support.examples import examples

FACTS = {"effective_batch": 4}


def state(steps, size=50_000):
    """A state whose every part shows to which step it belongs."""
    return {"steps": steps, "weights": [steps] * 100, "bulk": bytes([steps % 256]) * size}


def whole(found):
    return found is not None and found.state == state(found.steps, len(found.state["bulk"]))


def names(directory):
    return sorted(os.listdir(directory))


def test_written_checkpoint_is_read_back(tmp_path):
    files = Checkpoints(tmp_path)
    assert files.newest() is None
    assert files.write(3, FACTS, state(3)) >= 0
    found = files.newest()
    assert (found.steps, found.state, found.facts["effective_batch"]) == (3, state(3), 4)
    assert names(tmp_path) == ["step-000000000003.ckpt"]
    assert (tmp_path / names(tmp_path)[0]).stat().st_mode & 0o777 == 0o600


@settings(max_examples=examples(40))  # each file is written through to the disk
@given(st.integers(1, 5), st.lists(st.integers(0, 10**9), unique=True, min_size=1, max_size=12).map(sorted))
def test_newest_checkpoints_are_kept(keep, steps):
    with tempfile.TemporaryDirectory() as directory:
        files = Checkpoints(Path(directory), keep=keep)
        for number in steps:
            files.write(number, FACTS, {"steps": number})
        assert names(directory) == [f"step-{number:012d}.ckpt" for number in steps[-keep:]]
        assert files.newest().steps == steps[-1]


class Torch:
    """A stand-in for torch, which is not installed: its Tensor, and files that are zip archives like torch's."""

    class Tensor(list):
        pass

    @staticmethod
    def save(state, file):
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(state))
            archive.writestr("archive/data/0", bytes(3 << 20))

    @staticmethod
    def load(file, *, map_location, weights_only):
        assert (map_location, weights_only) == ("cpu", False)
        with zipfile.ZipFile(file) as archive:
            assert archive.read("archive/data/0") == bytes(3 << 20)
            return pickle.loads(archive.read("archive/data.pkl"))


def test_states_with_tensors_are_saved_by_torch(tmp_path, monkeypatch):
    """torch writes archives that it reads from the end, so to torch a state is a file of its own."""
    files = Checkpoints(tmp_path)
    files.write(1, FACTS, {"model": [1, 2]})
    assert files.newest().facts["form"] == "pickle"
    monkeypatch.setitem(sys.modules, "torch", Torch)
    files.write(2, FACTS, {"model": {"layers": [1, Torch.Tensor([2, 3])]}})
    found = files.newest()
    assert (found.facts["form"], found.state["model"]["layers"][1]) == ("torch", [2, 3])
    files.write(3, FACTS, {"model": [1, 2]})
    assert files.newest().facts["form"] == "pickle"


# -- SIGKILL


def in_child(work):
    """Wait status of a child process that does the work."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1]


@pytest.mark.slow
@pytest.mark.parametrize("keep", [1, 2])
def test_kill_at_any_disk_operation_leaves_a_complete_checkpoint(tmp_path, keep):
    """The number of operations is found by counting: the last child is no longer killed."""
    for kill_at in range(1, 100):
        directory = tmp_path / str(kill_at)
        directory.mkdir()
        files = Checkpoints(directory, keep=keep)
        for steps in (1, 2):
            files.write(steps, FACTS, state(steps))

        def work(directory=directory, kill_at=kill_at):
            Checkpoints(directory, keep=keep, disk=Deadly(kill_at)).write(3, FACTS, state(3, 3 << 20))

        status = in_child(work)
        found = Checkpoints(directory, keep=keep).newest()
        assert whole(found)
        assert found.steps in (2, 3)
        after = Checkpoints(directory, keep=keep)
        after.tidy()
        after.write(4, FACTS, state(4))
        assert whole(after.newest())
        assert len(names(directory)) == keep
        if status == 0:
            assert found.steps == 3
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
    assert kill_at > 8


# -- power


def recorded(directory, *, syncs):
    """Two successive checkpoints, keeping one: the disk operations, and how many of them the first took."""
    disk = Recorded(syncs=syncs)
    files = Checkpoints(directory, keep=1, disk=disk)
    files.write(1, FACTS, state(1))
    first = len(disk.effects)
    files.write(2, FACTS, state(2, 3 << 20))
    return disk.effects, first


@pytest.fixture(scope="module")
def effects(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("recorded"), syncs=True)


def found_after(files):
    with tempfile.TemporaryDirectory() as directory:
        for name, content in files.items():
            path = Path(directory, name)
            path.write_bytes(content)
            path.chmod(0o600)
        return Checkpoints(Path(directory)).newest()


@settings(max_examples=examples(150))
@given(st.data())
def test_power_cut_leaves_a_complete_checkpoint(effects, data):
    """Whichever of the unsynced writes and names have reached the disk."""
    all_effects, first = effects
    cut = data.draw(st.integers(first, len(all_effects)))
    found = found_after(
        after_power_cut(
            all_effects[:cut], lambda _: data.draw(st.booleans()), lambda count: data.draw(st.integers(0, count))
        )
    )
    assert whole(found)
    assert found.steps == 2 or cut < len(all_effects)


def test_power_cut_without_fsync_loses_the_checkpoint(tmp_path):
    """Shows that the power cuts of the test above do find a missing sync."""
    lazy, _ = recorded(tmp_path, syncs=False)
    with pytest.raises(elastic.ElasticError, match="none of the 1 checkpoints"):
        found_after(after_power_cut(lazy, lambda _: False, lambda count: count))


# -- a full disk


@contextmanager
def small_disk(path, size):
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_full_disk_removes_old_checkpoints_and_never_the_newest(tmp_path):
    with small_disk(tmp_path / "disk", "80k") as disk:
        files = Checkpoints(disk, keep=3)
        files.write(1, FACTS, state(1, 30_000))
        files.write(2, FACTS, state(2, 30_000))
        files.write(3, FACTS, state(3, 30_000))
        assert names(disk) == ["step-000000000002.ckpt", "step-000000000003.ckpt"]
        for _ in range(3):
            with pytest.raises(OSError, match="No space left"):
                files.write(4, FACTS, state(4, 90_000))
            assert whole(files.newest()) and files.newest().steps == 3
            assert names(disk) == ["step-000000000003.ckpt"]


class TorchOfBytes:
    """Raises as torch.save does when a write fails: it then closes its archive, whose length is not as expected."""

    class Tensor(bytes):
        pass

    @staticmethod
    def save(state, file):
        try:
            file.write(bytes(state))
        except OSError as error:
            raise RuntimeError("[enforce fail at inline_container.cc:298] . unexpected pos 64 vs 0") from error


def test_full_disk_is_noticed_when_torch_raises_another_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", TorchOfBytes)
    with small_disk(tmp_path / "disk", "6m") as disk:
        files = Checkpoints(disk, keep=2)
        for step, size in ((1, 2 << 20), (2, 2 << 20), (3, 3 << 20)):
            files.write(step, FACTS, TorchOfBytes.Tensor(size))
        assert names(disk) == ["step-000000000002.ckpt", "step-000000000003.ckpt"]
        with pytest.raises(OSError, match="No space left"):
            files.write(4, FACTS, TorchOfBytes.Tensor(5 << 20))
        assert names(disk) == ["step-000000000003.ckpt"]


def test_training_continues_when_no_checkpoint_can_be_written(tmp_path, caplog):
    with small_disk(tmp_path / "disk", "32k") as disk:
        bulk = {"now": 1000}
        values = {"effective_batch": 4, "items": 16, "environ": {}, "care": elastic.Care(every_s=0, keep=1)}
        with elastic.Trainer(disk, **values) as run:
            run.restore()
            for step in run.steps(60, save=lambda: b"x" * bulk["now"]):  # on a busy machine few steps are saved
                bulk["now"] = 60_000 if step.number >= 3 and "could be written" not in caplog.text else 1000
                time.sleep(0.02)
                run._tried_at = 0.0  # retry at once instead of after five seconds
        with elastic.Trainer(disk, **values) as run:
            assert run.restore() == b"x" * 1000
            assert run.done == 60
        assert names(disk) == ["lock", "step-000000000060.ckpt"]
    messages = [record.getMessage() for record in caplog.records]
    failed = [line for line in messages if "could be written" in line]
    assert len(failed) == 1
    assert re.search(r"no checkpoint of step \d+ .*No space left on device; step \d+ is still saved", failed[0])
    assert len([line for line in messages if "can be written again" in line]) == 1


def test_training_continues_after_a_restart_on_a_full_disk(tmp_path, monkeypatch):
    """Others take every block that becomes free, so the run must not need a new one for its lock file."""
    with small_disk(tmp_path / "disk", "64k") as disk:

        def train(total, restart):
            environ = {"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": restart}
            care = elastic.Care(every_s=0)
            with elastic.Trainer(disk, effective_batch=4, items=16, environ=environ, care=care) as run:
                assert run.restore() == (run.done or None)
                assert f"job 17 restart {restart} " in (disk / "lock").read_text()
                for _ in run.steps(total, save=lambda: run.done):
                    pass
            return run.done

        def fill():
            with suppress(OSError), (disk / "others").open("ab", 0) as others:
                while True:
                    others.write(b"x" * 4096)

        train(3, "1000")
        fill()
        truncate = os.ftruncate
        monkeypatch.setattr(os, "ftruncate", lambda handle, length: [truncate(handle, length), fill()])
        assert train(6, "2") == 6
        assert (disk / "lock").read_bytes().count(b"job 17") == 1


def test_training_fails_when_its_last_checkpoint_cannot_be_written(tmp_path, caplog):
    with small_disk(tmp_path / "disk", "32k") as disk:
        values = {"effective_batch": 4, "items": 16, "care": elastic.Care(every_s=0, keep=1)}
        values["environ"] = {"MIGBATCH_PROGRESS": str(tmp_path / "progress")}
        (tmp_path / "progress").touch()
        bulk, after = {"now": 1000}, []

        def train(total):
            with elastic.Trainer(disk, **values) as run:
                run.restore()
                for step in run.steps(total, save=lambda: b"x" * bulk["now"]):
                    bulk["now"] = 1000 if step.number < total - 1 else bulk["last"]
                    run._saved_at = 0.0  # save each step, however long a checkpoint takes
                after.append(run.done)

        bulk["last"] = 60_000
        with pytest.raises(elastic.ElasticError, match=r"checkpoint of step 5 .*No space.*; step 4 is still saved"):
            train(5)
        assert after == [5]  # what the program does with its result is done
        assert "training continues" not in caplog.text
        assert "done=1" not in (tmp_path / "progress").read_text()
        bulk["last"] = 1000
        train(5)
        assert after == [5, 5]
        assert "done=1" in (tmp_path / "progress").read_text()
        assert names(disk) == ["lock", "step-000000000005.ckpt"]


def test_run_that_is_told_to_end_says_that_its_last_steps_are_lost(tmp_path, caplog):
    with small_disk(tmp_path / "disk", "32k") as disk:
        bulk = {"now": 1000}
        care = elastic.Care(every_s=0, keep=1)
        with (
            pytest.raises(elastic.Leave) as left,
            elastic.Trainer(disk, effective_batch=4, items=16, environ={}, care=care) as run,
        ):
            run.restore()
            for step in run.steps(60, save=lambda: b"x" * bulk["now"]):
                bulk["now"] = 60_000 if step.number >= 3 else 1000
                run._saved_at = 0.0
                if step.number == 4:  # step 4 has failed for the same reason before
                    os.kill(os.getpid(), signal.SIGTERM)
    assert left.value.code == 143
    assert "training continues" in caplog.records[0].getMessage()
    last = caplog.records[-1]
    assert last.levelname == "WARNING"
    assert "step 5, which is not saved: No space left on device; step 3 is still saved" in last.getMessage()


# -- invalid files


def damage_middle(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def alien(path):
    path.write_bytes(b"PK\x03\x04" + b"\0" * 200)


def newer(path):
    path.write_bytes(path.read_bytes().replace(b"checkpoint 1 ", b"checkpoint 2 ", 1))


def symlink(path):
    path.rename(path.with_suffix(".real"))
    path.symlink_to(path.with_suffix(".real"))


def fifo(path):
    path.unlink()
    os.mkfifo(path, 0o600)


def directory(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: os.truncate(path, 5000), "has 5000 bytes and should have"),
        (lambda path: os.truncate(path, 10), "incomplete"),
        (lambda path: path.write_bytes(b""), "incomplete"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "should have"),
        (damage_middle, "checksum is wrong"),
        (alien, "not a checkpoint of this library"),
        (newer, "newer format"),
        (lambda path: os.chown(path, 12345, -1), "belongs to another user"),
        (lambda path: path.chmod(0o666), "writable by others"),
        (symlink, "symbolic links"),
        (fifo, "not a file"),
        (directory, "not a file|directory"),
    ],
)
def test_damaged_or_foreign_checkpoint_is_ignored(tmp_path, caplog, damage, reason):
    with elastic.Trainer(tmp_path, effective_batch=4, environ={}) as run:
        run.restore()
        for step in run.steps(9, save=lambda: {"done": run.done}):
            if step.number == 7:
                run._checkpoint(lambda: {"done": run.done})
    damage(tmp_path / "step-000000000009.ckpt")
    caplog.clear()
    with elastic.Trainer(tmp_path, effective_batch=4, environ={}) as run:
        assert run.restore() == {"done": run.done}
        assert run.done == 7
        (message,) = [record.getMessage() for record in caplog.records if "is ignored" in record.getMessage()]
        assert re.search(rf"step-000000000009.ckpt is ignored: .*({reason})", message)


def test_training_does_not_restart_when_no_checkpoint_is_usable(tmp_path):
    files = Checkpoints(tmp_path)
    for steps in (1, 2):
        files.write(steps, FACTS, state(steps))
    for path in tmp_path.iterdir():
        os.truncate(path, 7)
    with pytest.raises(elastic.ElasticError, match=r"none of the 2 checkpoints .* training does not restart"):
        files.newest()
    files.write(3, FACTS, state(3))
    assert files.newest().steps == 3
    assert len(names(tmp_path)) == 3  # unusable files are kept for the user to inspect


class Gone:
    """A class that the program no longer has when it resumes."""


def test_state_that_cannot_be_unpickled_is_an_error(tmp_path, monkeypatch):
    Checkpoints(tmp_path).write(1, FACTS, Gone())
    monkeypatch.delitem(globals(), "Gone")
    with pytest.raises(elastic.ElasticError, match="is valid, but its state cannot be restored: AttributeError"):
        Checkpoints(tmp_path).newest()


def test_state_that_cannot_be_pickled_is_an_error_at_the_first_step(tmp_path):
    with elastic.Trainer(tmp_path, effective_batch=4, environ={}) as run:
        run.restore()
        with pytest.raises((AttributeError, TypeError), match="pickle"):
            for _ in run.steps(5, save=lambda: lambda: None):
                pass
        assert run.done == 1  # reported at once, and not when the first slice is reclaimed
    assert names(tmp_path) == ["lock"]


@pytest.mark.parametrize(
    ("change", "message"),
    [({"effective_batch": 8}, r"effective_batch=4 \(now 8\)"), ({"items": 99}, r"items=50 \(now 99\)"),
     ({"seed": 2}, r"seed=0 \(now 2\)"), ({"drop_last": True}, "drop_last"), ({"micro": 2}, "micro=None")],
)  # fmt: skip
def test_checkpoint_of_a_different_training_is_refused(tmp_path, change, message):
    values = {"effective_batch": 4, "items": 50, "environ": {}}
    with elastic.Trainer(tmp_path, **values) as run:
        run.restore()
        list(run.steps(3, save=dict))
    with elastic.Trainer(tmp_path, **{**values, **change}) as run, pytest.raises(elastic.ElasticError, match=message):
        run.restore()
    with elastic.Trainer(tmp_path, **values, fits=1) as run:  # another slice is not another training
        run.restore()


def test_steps_before_restore_are_refused(tmp_path):
    run = elastic.Trainer(tmp_path, effective_batch=4, environ={})
    with pytest.raises(elastic.ElasticError, match="as a context"):
        run.restore()
    with run, pytest.raises(elastic.ElasticError, match="call restore"):
        next(run.steps(1, save=dict))


# -- the lock

HOLD = """
import sys, time
from slurm_migbatch import elastic
with elastic.Trainer(sys.argv[1], effective_batch=4, environ={"SLURM_JOB_ID": "17"}):
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


@contextmanager
def holder(directory, seconds):
    child = subprocess.Popen([sys.executable, "-c", HOLD, str(directory), str(seconds)], stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"held\n"
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def waiting(directory, seconds):
    return elastic.Trainer(directory, effective_batch=4, environ={}, care=elastic.Care(lock_s=seconds))


def test_second_run_in_the_same_directory_is_refused(tmp_path):
    with holder(tmp_path, 600) as other:
        message = rf"in use by job 17 restart 0 process {other.pid} on .*two runs cannot train in one directory"
        with pytest.raises(elastic.ElasticError, match=message):
            waiting(tmp_path, 0.3).__enter__()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_new_run_waits_for_the_previous_run_to_end(tmp_path):
    with holder(tmp_path, 1.0), waiting(tmp_path, 600):
        assert b"job none" in (tmp_path / "lock").read_bytes()


def test_killed_run_does_not_keep_the_lock(tmp_path):
    with holder(tmp_path, 600) as other:
        other.kill()
        with waiting(tmp_path, 600):
            pass


def test_workers_that_outlive_a_run_do_not_keep_the_lock(tmp_path):
    with waiting(tmp_path, 1):
        pid = os.fork()
        if pid == 0:
            time.sleep(600)
            os._exit(0)
    try:
        with waiting(tmp_path, 0.0):
            pass
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_unfinished_files_of_a_killed_run_are_removed(tmp_path):
    left = tmp_path / ".step-000000000005.host.77.abc.tmp"
    left.write_bytes(b"x" * 1000)
    (tmp_path / ".mine.tmp").write_text("not ours to remove")
    with waiting(tmp_path, 1) as run:
        run.restore()
    assert names(tmp_path) == [".mine.tmp", "lock"]


def test_without_file_locks_the_later_run_continues_and_the_earlier_stops(tmp_path, monkeypatch, caplog):
    """And the checkpoint that the earlier run was writing is not put into place."""

    def none(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    first, second = (Lock(tmp_path, {"SLURM_JOB_ID": "5", "SLURM_RESTART_COUNT": str(n)}) for n in range(2))
    first.take(1, time.sleep)
    Checkpoints(tmp_path, mark=first.mark, ready=first.check).write(1, FACTS, state(1))
    second.take(1, time.sleep)
    assert "no locks on this file system" in caplog.text
    with pytest.raises(elastic.Superseded, match="taken over by job 5 restart 1"):
        Checkpoints(tmp_path, mark=first.mark, ready=first.check).write(2, FACTS, state(2))
    Checkpoints(tmp_path, mark=second.mark, ready=second.check).write(3, FACTS, state(3))
    assert names(tmp_path) == ["lock", "step-000000000001.ckpt", "step-000000000003.ckpt"]
    first.give()
    second.give()


def test_short_writes_are_continued(tmp_path):
    class Stingy(Disk):
        def write(self, handle, data, offset):
            return super().write(handle, bytes(data)[:999], offset)

    files = Checkpoints(tmp_path, disk=Stingy())
    files.write(1, FACTS, state(1))
    assert whole(files.newest())
    shutil.copy(tmp_path / "step-000000000001.ckpt", tmp_path / "step-000000000002.ckpt")
    assert files.newest().steps == 1  # the file name is not used


def test_file_systems_that_cannot_sync_a_directory_are_no_failure(tmp_path):
    """The kernel refuses it with EINVAL where a file system does not implement it, as /proc does not."""

    class Foreign(Disk):
        def sync_directory(self, path):
            super().sync_directory(Path("/proc"))

    with pytest.raises(OSError, match="Invalid argument"):
        os.fsync(handle := os.open("/proc", os.O_RDONLY | os.O_DIRECTORY))
    os.close(handle)
    with elastic.Trainer(tmp_path, effective_batch=1, environ={}, disk=Foreign()) as run:
        run.restore()
        assert len(list(run.steps(2, save=dict))) == 2

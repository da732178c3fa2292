"""Progress reports of jobs become events, and nothing else does."""

import ctypes
import errno
import fcntl
import json
import os
import re
import signal
import stat
import struct
import subprocess
from contextlib import ExitStack, contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.daemon.messages import read_events
from slurm_migbatch.node import exits, progress, tmpfs
from slurm_migbatch.node.executor import Executor
from slurm_migbatch.node.install import unit
from slurm_migbatch.node.journal_rows import JournalRun
from slurm_migbatch.node.progress import Content, ProgressError
from slurm_migbatch.node.progressreport import ProgressLine, parse, understand
from slurm_migbatch.node.usage import progress_event
from tests.support.directories import open_to_users
from tests.support.environments import exported
from tests.support.nodes import ALICE, BOB, in_child
from tests.support.progress_files import path, write


def content(text, changed=1000.0, size=None):
    raw = text.encode() if isinstance(text, str) else text
    return Content(b"", raw, len(raw) if size is None else size, changed)


def report_of(text, started=0.0, ended=True, changed=100.0):
    return understand(content(text, changed), started, ended=ended)


# -- lines


def test_line_with_all_performance_keys_is_parsed():
    line = parse(b"items=2400 seconds=9.1 batch=32 latency_ms=26 p99_ms=3.1e1 task=0 at=1790000000.5 done=1")
    assert line == ProgressLine(2400, 9.1, 32, 26.0, 31.0, 0, 1790000000.5, 1)


@pytest.mark.parametrize(
    "row",
    [
        "items", "items=", "items=-1", "items=+1", "items=nan", "items=inf", "items=1e99", "items=1.5", "items=0x10",
        "items=1_000", "items=1 items=2", "items=1 color=red", "batch=32", "seconds=4", "at=5", "items=1 seconds=0",
        "items=1 latency_ms=-2", "items=9999999999999999", "items=1;rm", "items=1 done=2", "items=\u0661", "x" * 500,
        "items=1 " * 60, "items = 1", "{'items': 1}",
    ],
)  # fmt: skip
def test_malformed_lines_are_refused(row):
    assert parse(row.encode()) is None
    assert report_of(row + "\nitems=7 seconds=1\n").items == 7
    assert report_of(row + "\nitems=7 seconds=1\n").refused == 1


@given(st.binary(max_size=3000), st.booleans(), st.integers(0, 5000))
def test_any_file_content_is_read_without_an_error(raw, ended, more):
    report = understand(content(raw, size=len(raw) + more), 0.0, ended=ended)
    if report is not None:
        assert report.items is None or report.items >= 0
        assert report.throughput_per_s is None or report.throughput_per_s >= 0


words = st.builds(
    lambda items, seconds, task: f"items={items}" + f" seconds={seconds}" * bool(seconds) + task,
    st.integers(0, 10**9),
    st.one_of(st.none(), st.floats(0.001, 1e6)),
    st.sampled_from(["", " task=0", " task=1", " task=7"]),
)


@given(st.lists(words, min_size=1, max_size=40))
def test_only_the_last_report_of_each_task_counts(lines):
    report = report_of("\n".join(lines) + "\n")
    parsed = [parse(line.encode()) for line in lines]
    together = parsed[-1].task is not None
    last = {line.task: line for line in parsed if (line.task is not None) == together}
    assert report.items == sum(line.items for line in last.values())
    assert report.tasks == len(last)
    assert report.refused == 0


# -- speed


def test_speed_uses_the_seconds_that_the_job_reports():
    assert report_of("items=100 seconds=4\nitems=300 seconds=10\n").throughput_per_s == 30


def test_speed_without_seconds_uses_time_between_first_and_last_report():
    """The time before the first report (to load a model, for example) does not count."""
    assert report_of("items=0 at=40\nitems=50 at=50\nitems=200 at=60\n").throughput_per_s == 10


def test_speed_of_a_single_report_uses_the_time_since_the_start():
    assert report_of("items=200\n", started=80.0, changed=100.0).throughput_per_s == 10
    assert report_of("items=200 at=90\n", started=80.0, changed=100.0).throughput_per_s == 20
    assert report_of("items=200\n", started=99.9, changed=100.0).throughput_per_s is None


def test_report_times_outside_the_run_are_ignored():
    assert report_of("items=0 at=1\nitems=200 at=99999\n", started=80.0 + 900, changed=1000.0).throughput_per_s == 10


def test_items_and_speeds_of_tasks_are_added_up():
    report = report_of(
        "items=100 seconds=10 task=0 latency_ms=10 p99_ms=20\nitems=50 seconds=10 task=1 latency_ms=30\n"
    )
    assert (report.items, report.throughput_per_s, report.tasks) == (150, 15, 2)
    assert (report.latency_ms, report.latency_p99_ms) == (20, 20)


def test_controller_accepts_the_sum_of_very_large_task_reports():
    """It refuses numbers that JSON cannot hold exactly, as an error of the node."""
    report = report_of("".join(f"items=1e15 seconds=1e-6 task={n} steps=1e15\n" for n in range(100)))
    event = progress_event(JournalRun(7, 0, 1001, "", "", "", "", "running"), report, final=True)
    message = {"node": "n1", "journal": "ab", "boot_id": "b1"}
    events = [{"seq": 1, "ts": 1.0, "kind": "progress", **event}]
    assert not read_events("n1", json.dumps({**message, "events": events}).encode()).refused


def test_last_report_of_the_batch_script_replaces_those_of_tasks():
    report = report_of("items=100 seconds=10 task=0\nitems=50 seconds=10 task=1\nitems=160 seconds=16 done=1\n")
    assert (report.items, report.throughput_per_s, report.tasks, report.done) == (160, 10, 1, True)


def test_values_reported_once_are_kept():
    report = report_of("items=100 seconds=10 batch=32 latency_ms=12\nitems=200 seconds=20\ndone=1\n")
    assert (report.items, report.throughput_per_s, report.batch, report.latency_ms) == (200, 10, 32, 12)
    assert report.done


def test_unfinished_last_line_is_ignored_until_the_run_has_ended():
    assert report_of("items=100 seconds=10\nitems=2", ended=False).items == 100
    assert report_of("items=100 seconds=10\nitems=200 seconds=10", ended=True).items == 200


def test_only_head_and_tail_of_a_long_file_are_read(node):
    node.prolog(1, "[mig:1g.10gb:1]")
    start = node.slices("held")[0].since
    lines = [f"items={10 * i} at={start + i:.0f}" for i in range(4000)]
    write(node, "\n".join(lines) + "\n")
    found = progress.read(node.executor.paths.progress, 1, 0, ALICE)._replace(changed=start + 4000)
    assert found.size > progress.TAIL
    assert (len(found.head), len(found.tail)) == (progress.HEAD, progress.TAIL)
    report = understand(found, start, ended=True)
    assert (report.items, report.refused) == (39990, 0)
    assert report.throughput_per_s == pytest.approx(10)


# -- checkpoints: which work is safe


def test_line_with_training_keys_is_parsed():
    line = parse(b"steps=1200 checkpoint=1790000000.4 ckpt_s=2.5 restored=800")
    assert (line.steps, line.checkpoint, line.ckpt_s, line.restored) == (1200, 1790000000.4, 2.5, 800)


@pytest.mark.parametrize(
    "row",
    ["steps=1.5", "steps=-1", "restored=0.5", "checkpoint=now", "checkpoint=1e12", "checkpoint=-5", "ckpt_s=3",
     "steps=1 ckpt_s=1e7", "steps=1 ckpt_s=nan", "steps=1 steps=2", "steps=9999999999999999"],
)  # fmt: skip
def test_malformed_training_lines_are_refused(row):
    assert parse(row.encode()) is None


def safe(text, **values):
    report = report_of(text, **{"started": 1000.0, "changed": 2000.0, **values})
    return report.steps, report.checkpoint, report.ckpt_s, report.restored


def test_last_value_of_each_training_key_counts():
    assert safe("restored=5 steps=5\nsteps=9 checkpoint=1500 ckpt_s=2\nsteps=12\n") == (12, 1500, 2, 5)
    assert safe("items=5 seconds=1\n") == (None, None, None, None)
    assert safe("steps=0 restored=0\n") == (0, None, None, 0)


def test_checkpoint_time_outside_the_run_is_ignored():
    """With a checkpoint of an earlier run, or one in the future, nothing would wait for the job to write its own."""
    for moment in (0, 939, 2061, 99999):
        assert safe(f"steps=3 checkpoint={moment}\n") == (3, None, None, None)
    assert safe("steps=3 checkpoint=940\n")[1] == 940
    assert safe("steps=3 checkpoint=2060\n")[1] == 2060
    assert safe("steps=3 checkpoint=1500\nsteps=4 checkpoint=5\n")[1] == 1500


def test_checkpoint_counts_when_all_tasks_have_written_theirs():
    assert safe("task=0 steps=9 checkpoint=1500 ckpt_s=1\ntask=1 steps=8 checkpoint=1400 ckpt_s=3\n") == (
        8,
        1400,
        3,
        None,
    )


def test_checkpoints_and_item_counts_may_come_from_different_writers():
    """The batch script traps USR1 while tasks count items; neither replaces the other's reports, in any order."""
    counts = ["items=100 seconds=10 task=0", "items=50 seconds=10 task=1"]
    for lines in (["steps=7 checkpoint=1500", *counts], [*counts, "steps=7 checkpoint=1500"]):
        report = report_of("\n".join(lines) + "\n", started=1000.0, changed=2000.0)
        assert (report.items, report.throughput_per_s, report.tasks, report.whole) == (150, 15, 2, False)
        assert (report.steps, report.checkpoint) == (7, 1500)


def test_training_that_counts_no_items_has_no_speed():
    report = report_of("steps=7 checkpoint=1500\n", started=1000.0, changed=2000.0)
    assert (report.items, report.throughput_per_s, report.tasks, report.done) == (None, None, 0, False)


def test_final_progress_event_of_a_run_has_its_checkpoint(node):
    node.prolog(1, "[mig:1g.10gb:1]")
    since = node.slices("held")[0].since
    write(node, f"steps=7 checkpoint={since + 0.5} ckpt_s=0.25 restored=2\n")
    node.epilog(1)
    (event,) = node.events("progress")
    assert {key: event[key] for key in ("steps", "checkpoint", "ckpt_s", "restored", "final")} == {
        "steps": 7, "checkpoint": since + 0.5, "ckpt_s": 0.25, "restored": 2, "final": True,
    }  # fmt: skip


# -- the file


def as_user(uid, work):
    """Run `work` in a child with the user's uid; return the name of its exception, or "done"."""
    read, out = os.pipe()
    pid = os.fork()
    if pid == 0:
        result = "done"
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            work()
        except BaseException as error:
            result = type(error).__name__
        os.write(out, result.encode())
        os._exit(0)
    os.close(out)
    with os.fdopen(read) as pipe:
        result = pipe.read()
    os.waitpid(pid, 0)
    return result


@pytest.fixture
def open_node(many_nodes):
    """A node in a directory that users can enter."""
    made = many_nodes()
    open_to_users(made.root)
    return made


def test_task_gets_its_progress_file_and_its_report_becomes_an_event(open_node):
    node = open_node
    assert node.prolog(1, "[mig:1g.10gb:1]")[0] == exits.OK
    where = exported(node, 1)["MIGBATCH_PROGRESS"]
    assert where == str(path(node))
    status = os.stat(where)
    assert (status.st_uid, stat.S_IMODE(status.st_mode), status.st_size) == (ALICE, 0o600, 0)
    assert node.handoff(1).progress == where

    def report():
        with open(where, "a") as file:
            file.write("items=123 seconds=4.5\n")

    assert as_user(BOB, report) == "PermissionError"
    assert as_user(ALICE, report) == "done"
    node.epilog(1)
    assert not path(node).exists()
    event, stop = node.events()[-2:]
    assert stop["kind"] == "stop"
    assert {k: event[k] for k in ("kind", "job", "restart", "items", "final")} == {
        "kind": "progress", "job": 1, "restart": 0, "items": 123, "final": True,
    }  # fmt: skip
    assert event["throughput_per_s"] == pytest.approx(123 / 4.5)
    node.check()


def test_run_without_reports_has_no_progress_event_and_leaves_no_file(node):
    node.prolog(1, "[mig:1g.10gb:1]")
    node.epilog(1)
    assert node.events("progress") == []
    assert node.events("stop")[0]["memory_mib"] is None
    assert list((node.root / "run" / "progress").iterdir()) == []


def test_next_run_has_its_own_progress_file(node):
    node.prolog(1, "[mig:1g.10gb:1]")
    write(node, "items=5 seconds=1\n")
    node.prolog(1, "[mig:1g.10gb:1]", restart=1)
    assert [(e["restart"], e["items"]) for e in node.events("progress")] == [(0, 5)]
    assert path(node, 1, 1).read_text() == ""
    assert not path(node).exists()


def test_owner_cannot_replace_the_progress_file(open_node):
    """Not by symbolic links, FIFOs or other names: the directory belongs to root."""
    node = open_node
    node.prolog(1, "[mig:1g.10gb:1]")
    where = path(node)
    attempts = [
        lambda: os.unlink(where),
        lambda: os.rename(where, f"{where}x"),
        lambda: os.symlink("/etc/shadow", where),
        lambda: os.symlink("/etc/shadow", f"{where}x"),
        lambda: os.mkfifo(f"{where.parent}/2.0"),
        lambda: os.mkdir(f"{where.parent}/2.0"),
        lambda: os.link(where, f"{where.parent}/2.0"),
        lambda: os.chown(where, BOB, -1),
        lambda: os.chmod(where.parent, 0o777),
    ]
    assert {as_user(ALICE, work) for work in attempts} <= {"PermissionError", "FileExistsError"}
    assert {as_user(BOB, work) for work in attempts} <= {"PermissionError", "FileExistsError"}
    assert [p.name for p in where.parent.iterdir()] == ["1.0"]


def other_things(where):
    """What could be in place of the file if the directory did not belong to root."""

    def symlink():
        target = where.parent.parent / "secret"
        target.write_text("items=666 seconds=1\n")
        os.chown(target, ALICE, ALICE)
        where.symlink_to(target)

    def fifo():
        os.mkfifo(where)
        os.chown(where, ALICE, ALICE)

    def device():
        os.mknod(where, stat.S_IFCHR | 0o600, os.makedev(5, 0))
        os.chown(where, ALICE, ALICE)

    def directory():
        where.mkdir()
        os.chown(where, ALICE, ALICE)

    def others():
        where.write_text("items=666 seconds=1\n")
        os.chown(where, BOB, BOB)

    def roots():
        where.write_text("items=666 seconds=1\n")

    def two_names():
        where.write_text("items=666 seconds=1\n")
        os.chown(where, ALICE, ALICE)
        os.link(where, where.parent / "other name")

    return [symlink, fifo, device, directory, others, roots, two_names]


@pytest.mark.parametrize("number", range(7))
def test_root_reads_only_the_file_that_it_made(node, number):
    node.prolog(1, "[mig:1g.10gb:1]")
    where = path(node)
    progress.remove(node.executor.paths.progress, 1, 0)
    other_things(where)[number]()
    alarm(5)
    with pytest.raises(ProgressError):
        progress.read(node.executor.paths.progress, 1, 0, ALICE)
    with pytest.raises(ProgressError):
        progress.shorten(node.executor.paths.progress, 1, 0, ALICE)
    assert node.epilog(1)[0] == exits.OK
    signal.alarm(0)
    assert node.events("progress") == []
    assert node.events("stop")


def alarm(seconds):
    """End a test that is blocked by something of a user."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(seconds)


def test_mount_over_the_progress_file_is_not_read(node, tmp_path):
    """fusermount lets users mount over their own files; the program behind such a mount could block root."""
    node.prolog(1, "[mig:1g.10gb:1]")
    write(node, "items=5 seconds=1\n")
    other = tmp_path / "other"
    other.write_text("items=666 seconds=1\n")
    os.chown(other, ALICE, ALICE)
    subprocess.run(["mount", "--bind", str(other), str(path(node))], check=True)
    with pytest.raises(ProgressError, match="mounted over"):
        progress.read(node.executor.paths.progress, 1, 0, ALICE)
    assert node.epilog(1)[0] == exits.OK
    assert node.events("progress") == []
    node.check()


def test_mounts_over_files_of_ended_jobs_take_no_space_from_others(node, tmp_path, monkeypatch):
    """Such mounts outlive the job and the program behind them."""
    monkeypatch.setattr(tmpfs, "MAX_BYTES", 2 * progress.RESERVED_BYTES)
    other = tmp_path / "other"
    other.touch()
    for job in range(1, 4):
        node.prolog(job, "[mig:1g.10gb:1]")
        assert path(node, job).exists()
        for _ in range(2):
            subprocess.run(["mount", "--bind", str(other), str(path(node, job))], check=True)
        node.epilog(job)
        assert not path(node, job).exists()


@contextmanager
def leased(file):
    """While in the block, a process of ALICE holds a lease on her file."""
    ready, go = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(go[1])
            signal.signal(signal.SIGIO, signal.SIG_IGN)
            handle = os.open(file, os.O_WRONLY | os.O_APPEND)
            os.setresuid(ALICE, ALICE, ALICE)
            fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            os.write(ready[1], b"1")
            os.read(go[0], 1)
        finally:
            os._exit(0)
    os.close(go[0])
    os.read(ready[0], 1)
    try:
        yield
    finally:
        os.close(go[1])
        os.waitpid(pid, 0)


def test_lease_on_the_progress_file_does_not_block_root(node):
    """Users can hold a lease on their own file, which makes any other process that opens it wait for 45 seconds."""
    node.prolog(1, "[mig:1g.10gb:1]")
    write(node, "items=5 seconds=1\n")
    with leased(path(node)):
        alarm(20)
        with pytest.raises(ProgressError, match="unavailable"):
            progress.read(node.executor.paths.progress, 1, 0, ALICE)
    assert progress.read(node.executor.paths.progress, 1, 0, ALICE).tail == b"items=5 seconds=1\n"
    signal.alarm(0)


def test_lease_on_an_ended_jobs_progress_file_does_not_fill_the_log(node):
    """A process of the user's next job holds the lease, so the file of the last job cannot be emptied yet."""
    node.prolog(1, "[mig:1g.10gb:1]")
    with leased(path(node)):
        node.epilog(1)
        assert node.reconcile() == []
    node.reconcile()
    assert not path(node).exists()


@pytest.mark.parametrize("append_only", [True, False])
def test_leases_on_files_of_ended_jobs_take_no_space_from_others(node, tmp_path, monkeypatch, append_only):
    """A process that outlives the jobs can hold such leases as long as its user likes, anew after each break."""
    if not append_only:  # as on kernels before 6.6
        monkeypatch.setattr(tmpfs, "set_append_only", refused)
    monkeypatch.setattr(tmpfs, "MAX_BYTES", 4 * progress.RESERVED_BYTES)
    with ExitStack() as leases:
        for job in range(1, 5):
            node.prolog(job, "[mig:1g.10gb:1]")
            if path(node, job).exists():
                leases.enter_context(leased(path(node, job)))
            node.epilog(job)
            assert node.reconcile() == []
        (tmp_path / "other").touch()
        subprocess.run(["mount", "--bind", str(tmp_path / "other"), str(path(node, 1))], check=True)
        node.prolog(5, "[mig:1g.10gb:1]", uid=BOB)
        assert path(node, 5).exists()
        node.epilog(5)
    node.reconcile()
    node.prolog(6, "[mig:1g.10gb:1]")
    assert list(path(node).parent.iterdir()) == [path(node, 6)]


def refused(*_):
    raise OSError(errno.EOPNOTSUPP, "Operation not supported")


def test_very_long_progress_file_is_read_only_in_part(node):
    """Kernels without append-only files on tmpfs let a user make the file as long as they like, with holes."""
    node.prolog(1, "[mig:1g.10gb:1]")
    write(node, "items=9 seconds=1\n" * (progress.MAX_BYTES // 10))
    with open(path(node), "rb") as file:
        tmpfs.set_append_only(file.fileno(), False)
    found = progress.read(node.executor.paths.progress, 1, 0, ALICE)
    assert len(found.head) + len(found.tail) == progress.HEAD + progress.TAIL
    assert understand(found, 0.0).items == 9
    with open(path(node), "r+b") as file:
        file.truncate(1 << 40)
    found = progress.read(node.executor.paths.progress, 1, 0, ALICE)
    assert len(found.head) + len(found.tail) == progress.HEAD + progress.TAIL
    progress.shorten(node.executor.paths.progress, 1, 0, ALICE)
    assert path(node).stat().st_size == 0
    with open(path(node), "rb") as file:
        tmpfs.set_append_only(file.fileno(), False)
    with open(path(node), "r+b") as file:
        file.truncate(1 << 40)
    assert node.epilog(1)[0] == exits.OK
    assert not path(node).exists()


def test_no_progress_file_is_created_where_mounting_is_not_permitted(new_node, monkeypatch):
    """A file on a disk that others need too would have no size limit."""

    def refused(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(tmpfs, "mount", refused)
    node = new_node()
    assert node.prolog(1, "[mig:1g.10gb:1]")[0] == exits.OK
    assert "MIGBATCH_PROGRESS" not in exported(node, 1)
    assert list(path(node).parent.iterdir()) == []
    assert node.epilog(1)[0] == exits.OK
    node.check()


def test_progress_file_system_grows_and_shrinks_with_the_jobs(node):
    def size():
        return os.statvfs(path(node).parent).f_blocks * os.statvfs(path(node).parent).f_frsize

    node.prolog(1, "[mig:1g.10gb:1]")
    node.prolog(2, "[mig:1g.10gb:1]")
    assert size() == 2 * progress.RESERVED_BYTES
    for job in (1, 2):
        node.epilog(job)
    assert size() <= os.sysconf("SC_PAGESIZE")


def test_job_starts_and_ends_while_a_stopped_process_keeps_the_progress_files_locked(node, monkeypatch):
    monkeypatch.setattr(tmpfs, "ALONE_S", 0.1)
    node.prolog(9, "[mig:1g.10gb:1]")
    locked = os.open(node.config.progress_path, os.O_RDONLY)
    try:
        fcntl.flock(locked, fcntl.LOCK_EX)
        assert node.prolog(1, "[mig:1g.10gb:1]")[0] == exits.OK
        content = node.handoff(1)
        assert content is not None and content.slices and not content.progress
        assert node.epilog(9)[0] == exits.OK
    finally:
        os.close(locked)
    assert node.epilog(1)[0] == exits.OK
    node.check()


def test_job_starts_when_its_progress_file_cannot_be_created(node, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(progress, "make", full)
    assert node.prolog(1, "[mig:1g.10gb:1]")[0] == exits.OK
    assert "MIGBATCH_PROGRESS" not in exported(node, 1)
    assert node.epilog(1)[0] == exits.OK


def test_progress_files_left_by_a_crash_are_removed(node):
    node.prolog(1, "[mig:1g.10gb:1]")
    stray = path(node, 77)
    stray.touch()
    (node.root / "run" / "progress" / "notes").touch()  # not ours to remove
    assert node.reconcile() == ["job 77 run 0: old progress file removed"]
    assert node.reconcile() == []
    assert path(node).exists()
    assert not stray.exists()


def test_reboot_removes_progress_files(node):
    node.prolog(1, "[mig:1g.10gb:1]")
    node.forget_executor()
    node.machine.reboot()
    node.reconcile()
    assert list((node.root / "run" / "progress").iterdir()) == []


def test_progress_directory_writable_by_others_is_refused(node):
    node.executor.journal.check()
    node.forget_executor()
    (node.root / "run" / "progress").chmod(0o777)
    from slurm_migbatch.node.paths import Paths, PathsError

    with pytest.raises(PathsError, match="711"):
        Paths.open(node.config)


def test_progress_is_reported_once_if_the_release_is_killed_at_any_point(many_nodes):
    """And no progress file remains."""
    node = many_nodes(name="count")
    node.prolog(1, "[mig:1g.10gb:1]")
    node.forget_executor()
    _, count = in_child(lambda: Executor(node.config).run(node.env("epilog", 1))[0])
    assert count > 5
    for k in range(1, count + 1):
        node = many_nodes(name=f"k{k}")
        node.prolog(1, "[mig:1g.10gb:1]")
        write(node, "items=5 seconds=1\n")
        node.forget_executor()
        status, _ = in_child(lambda node=node: Executor(node.config).run(node.env("epilog", 1))[0], kill_at=k)
        assert os.WIFSIGNALED(status)
        node.epilog(1)
        assert [event["items"] for event in node.events("progress")] == [5]
        assert list((node.root / "run" / "progress").iterdir()) == []
        node.close()


# -- under systemd ---------------------------------------------------------------------------------------------------


def with_capabilities_of_the_unit():
    """Keep only the capabilities of migbatch-node.service, also for programs that this process starts."""
    names = {"CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "KILL": 5, "LINUX_IMMUTABLE": 9, "SYS_MODULE": 16}
    names |= {"SYS_RAWIO": 17, "SYS_PTRACE": 19, "SYS_ADMIN": 21, "MKNOD": 27}
    lines = re.findall(r"^CapabilityBoundingSet=(.*)$", unit(), re.MULTILINE)
    mask = sum(1 << names[name.removeprefix("CAP_")] for line in lines for name in line.split())
    libc = ctypes.CDLL(None, use_errno=True)
    header = struct.pack("=Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3
    sets = struct.pack("=6I", mask & 0xFFFFFFFF, mask & 0xFFFFFFFF, 0, mask >> 32, mask >> 32, 0)
    assert libc.capset(header, sets) == 0, os.strerror(ctypes.get_errno())


@pytest.mark.parametrize("made_by", ["agent", "hook"])
def test_agent_protects_and_removes_progress_files_under_systemd(node, made_by):
    """A hook without the agent has all of slurmd's capabilities."""
    if made_by == "hook":
        node.prolog(1, "[mig:1g.10gb:1]")
        node.forget_executor()

    def work():
        with_capabilities_of_the_unit()
        if made_by == "agent":
            node.prolog(1, "[mig:1g.10gb:1]")
        write(node, "items=5 seconds=1\n")
        with pytest.raises(PermissionError):
            os.truncate(path(node), 0)
        progress.shorten(node.executor.paths.progress, 1, 0, ALICE)
        assert path(node).stat().st_size == 0
        node.epilog(1)
        assert not path(node).exists()
        return 0

    assert in_child(work)[0] == 0

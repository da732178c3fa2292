"""Runs that are over although no Epilog has released them, and runs that must never be taken for over."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from contextlib import ExitStack, contextmanager

import pytest

from slurm_migbatch.node import client, ending, exits, liveness, unix_sockets
from slurm_migbatch.node.deadline import Deadline, locked
from slurm_migbatch.node.executor import Executor
from slurm_migbatch.node.hookenv import HookEnv, HookEnvError
from slurm_migbatch.node.liveness import JobRecord, LivenessError, is_over
from slurm_migbatch.node.run_repair import run_lock
from slurm_migbatch.node.status import status
from tests.support.hung_mount import hung_mount
from tests.support.node_processes import agent_process, run_hook
from tests.support.nodes import ALICE, BOB, in_child


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Runs can be checked as soon as they have begun, and the two queries follow each other without a pause."""
    monkeypatch.setattr(liveness, "SETTLED_S", 0.0)
    monkeypatch.setattr(liveness, "PAUSE_S", 0.0)


BIND = """
import os, socket, sys, time
os.seteuid(int(sys.argv[1]))
links = [socket.socket(socket.AF_UNIX) for _ in sys.argv[3:]]
os.seteuid(0)
for link, path in zip(links, sys.argv[3:]):
    link.bind(path)
    link.listen(1)
os.setresuid(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[2]))
os.write(1, b"x")
time.sleep(600)
"""


@contextmanager
def sockets_of(uid, *paths, effective=None):
    """Listening sockets that a user's process has bound to paths; `effective`: the uid by which it acts."""
    argv = [sys.executable, "-ISc", BIND, str(uid), str(uid if effective is None else effective), *map(str, paths)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as made:
        try:
            assert made.stdout.read(1) == b"x"
            yield
        finally:
            made.kill()


@contextmanager
def socket_at(path, uid=0, effective=None):
    """A listening socket that a user's process has bound to a path, as slurmstepd does; see `sockets_of`."""
    with ExitStack() as open_here:
        if uid:
            open_here.enter_context(sockets_of(uid, path, effective=effective))
        else:
            made = open_here.enter_context(socket.socket(socket.AF_UNIX))
            made.bind(str(path))
            made.listen(1)
        yield
    path.unlink(missing_ok=True)


@contextmanager
def step(node, job, name="4294967291", uid=0):
    """A socket at the path at which slurmstepd binds its own."""
    spool = node.root / "spool"
    spool.mkdir(exist_ok=True)
    with socket_at(spool / f"{node.name}_{job}.{name}", uid):
        yield


def by_reconcile(node):
    assert node.executor.reconcile(Deadline(30))[1] == ""


def by_hook(node):
    """Without the agent."""
    code, line = run_hook(node, "prolog", 70, "[mig:1g.10gb:1]", uid=BOB)
    assert code == exits.OK, line
    assert run_hook(node, "epilog", 70)[0] == exits.OK


def by_agent(node):
    node.configure(ReconcileEvery=0.2)
    with agent_process(node):
        end = time.monotonic() + 60
        while node.slices("held") and time.monotonic() < end:
            time.sleep(0.1)


def by_allocation(node):
    node.configure(ReconcileEvery=600)
    with agent_process(node):
        code, line = run_hook(node, "prolog", 71, "[mig:7g.80gb:1]", uid=BOB)
        assert code == exits.OK and "requeued" not in line, line
        assert run_hook(node, "epilog", 71)[0] == exits.OK


@pytest.mark.slow
@pytest.mark.parametrize(
    "ended_by", [by_reconcile, by_hook, by_agent, by_allocation], ids=lambda trigger: trigger.__name__
)
@pytest.mark.parametrize("squeue_row", ["", "1 0 COMPLETED n1", "1 1 PENDING", "1 0 RUNNING n2,n3", "1 1 RUNNING n1"])
def test_run_whose_epilog_never_ran_is_ended(node, ended_by, squeue_row):
    assert node.prolog(1, "[mig:2g.20gb:1]")[0] == exits.OK
    node.slurm_says(*([squeue_row] if squeue_row else []))
    (node.root / "scontrol.answer").write_text("n2\nn3\n")
    node.forget_executor()
    ended_by(node)
    assert not node.slices("held")
    assert [(event["job"], event["exit_code"]) for event in node.events("stop") if event["job"] == 1] == [(1, None)]
    node.check()


@pytest.mark.parametrize(
    "squeue_row",
    [
        "1 0 RUNNING n1",
        "1 0 SUSPENDED n1",
        "1 0 CONFIGURING n1",
        "1 0 COMPLETING n1",
        "1 1 COMPLETING n1",  # requeued; the first run's Epilog has not run yet
        "1 0 STOPPED n1",
        "1 0 SOMETHING_NEW n1",
        "1 0 RESIZING",
        "2 0 COMPLETED n1",
        "garbage",
        "1 x COMPLETED n1",
    ],
)
def test_run_that_may_still_be_active_is_left_alone(node, squeue_row):
    node.prolog(1, "[mig:2g.20gb:1]")
    node.slurm_says()
    (node.root / "squeue" / "1").write_text(f"{squeue_row}\n")
    node.executor.reconcile(Deadline(30))
    assert node.asked_slurm() == [1]
    assert [row.job for row in node.slices("held")] == [1]
    node.check()


PADDING = """#!/usr/bin/python3 -IS
import re, sys
(columns,) = (word.partition("=")[2].split(",") for word in sys.argv if word.startswith("--Format="))
forms = [re.fullmatch(r"[A-Za-z]+:[.]?([0-9]*)(.*)", column).groups() for column in columns]
for job in range(300):
    row = zip((str(job), "0", "RUNNING", "n1"), forms)
    print("".join(f"{text:>{width or 20}}{mark}" for text, (width, mark) in row))
"""


def test_query_of_a_large_array_takes_little_memory(node):
    """squeue prints all tasks if it is queried for the last one, which has the array's own id."""
    node.prolog(1, "[mig:2g.20gb:1]")
    (node.root / "bin" / "squeue").write_text(PADDING)
    tracemalloc.start()
    try:
        assert node.executor.liveness.once(node.executor.journal.runs(), Deadline(30)) == []
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


def test_completing_job_is_over_on_a_node_that_it_no_longer_uses():
    assert is_over(run(1), "n1", JobRecord(0, "COMPLETING", ("n2",)))
    assert not is_over(run(1), "n1", JobRecord(0, "COMPLETING", ("n1", "n2")))
    assert not is_over(run(1), "n1", JobRecord(0, "COMPLETING", ()))


def run(job, restart=0):
    from slurm_migbatch.node.journal_rows import JournalRun

    return JournalRun(job, restart, ALICE, "", "", "", "", "running")


def test_no_run_is_ended_when_slurmctld_does_not_answer(node):
    node.prolog(1, "[mig:2g.20gb:1]")
    (node.root / "squeue.down").touch()
    done, unknown = node.executor.reconcile(Deadline(30))
    assert done == [] and "cannot query slurmctld about job 1" in unknown
    assert "cannot query" in status(node.config, node.executor)["unknown"]
    assert run_hook(node, "prolog", 2, "[mig:1g.10gb:1]")[0] == exits.OK
    assert {row.job for row in node.slices("held")} == {1, 2}
    node.check()


def test_run_is_kept_when_slurmctld_has_the_job_at_the_second_query(node, monkeypatch):
    """slurmctld has the job again at the second query, as after a failover."""
    node.prolog(1, "[mig:2g.20gb:1]")
    node.slurm_says()
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda s: (sleep(s), node.slurm_says("1 0 RUNNING n1")))
    node.executor.reconcile(Deadline(30))
    assert node.asked_slurm() == [1, 1]
    assert node.slices("held")


def test_run_with_a_live_step_is_kept_whatever_slurmctld_says(node):
    node.prolog(1, "[mig:2g.20gb:1]")
    node.slurm_says()
    with step(node, 1):
        assert node.executor.reconcile(Deadline(30)) == ([], "")
        assert node.asked_slurm() == [], "no query is needed"
    with step(node, 1, uid=BOB):  # a user can bind a socket of that name, but not as root
        assert len(node.executor.reconcile(Deadline(30))[0]) == 1
    node.check()


LOOK = """
from slurm_migbatch.node.deadline import Deadline
from slurm_migbatch.node.liveness import steps
steps("n1", "", Deadline(60))
"""
WITHOUT_OWNER = "from slurm_migbatch.node import unix_sockets\nunix_sockets._SHOW_UID = 0"


def steps(node, spool=""):
    return liveness.steps(node, str(spool), Deadline(60))


@pytest.mark.parametrize("name", ["n1_1.0", "n1_1.4294967291", "n1_1.0.1", "n1_1.4294967290"])
def test_steps_are_found_in_the_kernels_list_of_sockets(tmp_path, name):
    with socket_at(tmp_path / name):
        assert 1 in steps("n1", tmp_path)
        assert steps("n2", tmp_path) == set()
        assert steps("n1", "/elsewhere") == set()
        os.chown(tmp_path / name, BOB, -1)
        assert steps("n1", tmp_path) == {1}, "the creator of the socket counts"
    with socket_at(tmp_path / name, uid=BOB):
        os.chown(tmp_path / name, 0, -1)
        assert steps("n1", tmp_path) == set()


def test_all_of_several_thousand_step_sockets_are_found(tmp_path):
    with ExitStack() as open_sockets:
        for job in range(3000):
            open_sockets.enter_context(socket_at(tmp_path / f"n1_{job}.0"))
        assert steps("n1", tmp_path) == set(range(3000))


def test_step_that_is_missing_in_one_list_of_sockets_is_found(tmp_path, monkeypatch):
    """The kernel omits some while a user opens and closes many."""
    lists = iter([lambda found: found[:0], lambda found: found])
    real = unix_sockets.listening
    monkeypatch.setattr(unix_sockets, "listening", lambda *args: next(lists)(real(*args)))
    with socket_at(tmp_path / "n1_7.0"):
        assert steps("n1", tmp_path) == {7}


@pytest.mark.parametrize("owner_shown", [True, False], ids=["owner shown", "kernel before 5.3"])
def test_only_sockets_of_root_count_as_steps(tmp_path, monkeypatch, owner_shown):
    path = tmp_path / "n1_7.0"
    if not owner_shown:
        monkeypatch.setattr(unix_sockets, "_SHOW_UID", 0)
    with socket_at(path):
        assert steps("n1", tmp_path) == {7}
    with socket_at(path, uid=BOB):
        os.chown(path, BOB if owner_shown else 0, -1)
        assert steps("n1", tmp_path) == set()
    with socket_at(path, uid=BOB, effective=0):  # a setuid program has inherited it
        os.chown(path, BOB if owner_shown else 0, -1)
        assert steps("n1", tmp_path) == set()


@pytest.mark.parametrize("owner_shown", [True, False], ids=["owner shown", "kernel before 5.3"])
def test_search_for_steps_is_not_blocked_by_a_hung_mount(tmp_path, owner_shown):
    """A user binds a socket and replaces its directory by a link to a FUSE mount of their own."""
    hung, place = tmp_path / "hung", tmp_path / "place"
    hung.mkdir()
    place.mkdir()
    with socket_at(place / "n1_7.0", uid=BOB):
        place.rename(tmp_path / "moved")
        place.symlink_to(hung)
        with hung_mount(hung):
            looking = subprocess.Popen([sys.executable, "-c", LOOK if owner_shown else f"{WITHOUT_OWNER}\n{LOOK}"])
            try:
                assert looking.wait(60) == 0
            finally:
                looking.kill()
        place.unlink()
    looking.wait()


@pytest.fixture
def parsed(monkeypatch):
    """The paths that were read from the kernel's messages."""
    paths = []
    real = unix_sockets._attributes

    def attributes(data):
        found = dict(real(data))
        paths.append(found.get(unix_sockets._NAME, b"").rstrip(b"\0").decode(errors="replace"))
        return iter(found.items())

    monkeypatch.setattr(unix_sockets, "_attributes", attributes)
    return paths


def test_thousands_of_sockets_that_a_user_names_like_steps_are_not_read(tmp_path, parsed):
    """They cost root's hooks time, which the user could choose."""
    by_bob = [tmp_path / f"bobs_{job}.0" for job in range(3000, 6000)]
    with sockets_of(BOB, *by_bob), socket_at(tmp_path / "bobs_7.0"):
        assert steps("bobs", tmp_path) == steps("bobs") == {7}
    assert parsed.count(str(tmp_path / "bobs_7.0")) == 4, "each of two lists of both calls has it"
    assert set(parsed).isdisjoint(map(str, by_bob))


def test_sockets_that_do_not_listen_are_not_read(tmp_path, parsed):
    with ExitStack() as open_sockets:
        for job in range(400):
            open_sockets.enter_context(socket.socket(socket.AF_UNIX)).bind(str(tmp_path / f"n1_{job}.0"))
        assert steps("n1", tmp_path) == set()
    assert not [path for path in parsed if path.startswith(str(tmp_path))]


def test_abstract_name_that_looks_like_root_as_owner_is_no_step(tmp_path):
    """Names of this kind may have any bytes; no cluster of another test has a node `bobs`."""
    made = "import os, socket, sys, time\nos.setuid(int(sys.argv[1]))\nlink = socket.socket(socket.AF_UNIX)\n"
    name = b"\0" + bytes(3) + unix_sockets._ROOT + os.fsencode(tmp_path) + b"/bobs_7.0"
    code = f"{made}link.bind({name!r})\nlink.listen(1)\nos.write(1, b'x')\ntime.sleep(600)"
    with subprocess.Popen([sys.executable, "-ISc", code, str(BOB)], stdout=subprocess.PIPE) as bob:
        try:
            assert bob.stdout.read(1) == b"x"
            assert steps("bobs") == set()
        finally:
            bob.kill()


class Expires(Deadline):
    """Expires at the nth check."""

    def __init__(self, checks):
        super().__init__(60)
        self.checks = checks

    @property
    def remaining(self):
        self.checks -= 1
        return float(self.checks > 0)


@pytest.mark.parametrize("owner_shown", [True, False], ids=["owner shown", "kernel before 5.3"])
def test_search_for_steps_ends_by_its_deadline(tmp_path, monkeypatch, owner_shown):
    if not owner_shown:
        monkeypatch.setattr(unix_sockets, "_SHOW_UID", 0)
    with ExitStack() as open_sockets:
        for job in range(400):
            open_sockets.enter_context(socket_at(tmp_path / f"n1_{job}.0"))
        checks, given = 1, None
        while given is None:
            try:
                given = liveness.steps("n1", str(tmp_path), Expires(checks))
            except LivenessError as error:
                assert "no time left" in str(error)
                checks += 1
        assert given == set(range(400)) and checks > 5, "a partial list is never returned"


def test_run_is_kept_when_there_is_no_time_to_search_for_its_steps(node):
    node.prolog(1, "[mig:2g.20gb:1]")
    node.slurm_says()
    done, unknown = node.executor.reconcile(Deadline(0.0))
    assert done == [] and "no time left" in unknown
    assert [row.job for row in node.slices("held")] == [1]
    node.check()


def test_kernel_without_unix_diag_raises_liveness_error(monkeypatch):
    monkeypatch.setattr(unix_sockets, "_SOCK_DIAG", 1 << 5)
    with pytest.raises(LivenessError, match="unix_diag"):
        steps("n1")


def test_run_that_has_just_started_is_not_checked(node, monkeypatch):
    monkeypatch.setattr(liveness, "SETTLED_S", 10.0)
    node.prolog(1, "[mig:2g.20gb:1]")
    node.slurm_says()
    assert node.executor.reconcile(Deadline(30)) == ([], "")
    assert node.asked_slurm() == []


def test_status_lists_a_run_that_is_over(node):
    node.prolog(1, "[mig:2g.20gb:1]")
    node.slurm_says()
    (line,) = status(node.config, node.executor)["over"]
    assert "job 1 run 0" in line and node.slices("held")


# -- the note that an Epilog writes first ---------------------------------------------------------------------------


def killed_at_first_sight_of(node, call):
    """The Epilog of job 1 as its own process, killed right before it does `call` (a function of `client`)."""
    environ = node.environ("epilog", 1, SLURM_JOB_EXIT_CODE2="3:0")

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    def work():
        setattr(client, call, die)
        return client.run("epilog", str(node.etc), environ)[0]

    assert os.WIFSIGNALED(in_child(work)[0])


@pytest.mark.parametrize("ended_by", [by_reconcile, by_hook, by_agent], ids=lambda trigger: trigger.__name__)
def test_release_is_completed_without_slurm_after_the_epilog_was_killed(node, ended_by):
    node.prolog(1, "[mig:2g.20gb:1]")
    (node.root / "squeue.down").touch()
    node.forget_executor()
    killed_at_first_sight_of(node, "ask")
    assert [note.job for note in ending.listed(node.executor.paths.run)] == [1]
    node.forget_executor()
    ended_by(node)
    assert not node.slices("held")
    assert [event["exit_code"] for event in node.events("stop") if event["job"] == 1] == [3]
    assert not list(ending.listed(node.executor.paths.run))
    node.check()


def test_release_is_completed_after_an_epilog_that_got_no_lock(node):
    node.prolog(1, "[mig:2g.20gb:1]")
    node.configure(EpilogDeadline=0.3)
    (node.root / "squeue.down").touch()
    with locked(node.executor.paths.lock, [run_lock(1)], Deadline(1)):
        code, line = run_hook(node, "epilog", 1)
        assert code == exits.OK and "the agent or the next hook completes" in line
        node.reconcile()
        assert node.slices("held"), "the owner of the lock completes it"
    node.reconcile()
    assert not node.slices("held")
    assert [event["exit_code"] for event in node.events("stop")] == [0]
    node.check()


def test_interrupted_release_is_completed_by_one_process_only(node):
    """With two there would be a race: the slower one could close the devices of the slices' next user."""
    node.prolog(1, "[mig:2g.20gb:1]")
    node.forget_executor()
    killed = 0
    while not node.executor.journal.runs("state='ending'"):
        killed += 1
        node.forget_executor()
        in_child(lambda: Executor(node.config).run(node.env("epilog", 1))[0], kill_at=killed)
    with locked(node.executor.paths.lock, [run_lock(1)], Deadline(1)):
        assert not any("interrupted release" in line for line in node.reconcile())
        assert node.executor.journal.runs("state='ending'"), "the owner of the lock completes it"
        assert node.prolog(2, "[mig:1g.10gb:1]", uid=BOB)[0] == exits.OK  # nor does another job's hook complete it
        assert node.executor.journal.runs("state='ending'")
    assert any("interrupted release is completed" in line for line in node.reconcile())
    assert [row.job for row in node.slices("held")] == [2]
    assert [event["job"] for event in node.events("stop")] == [1]
    node.check()


def test_note_of_an_earlier_runs_epilog_does_not_end_the_next_run(node):
    """The Epilog of the first run gets the restart count of the second."""
    node.prolog(1, "[mig:2g.20gb:1]")
    ending.make(node.executor.paths.run, 1, 1)
    assert node.prolog(1, "[mig:2g.20gb:1]", restart=1)[0] == exits.OK
    node.reconcile()
    assert [(row.job, row.restart) for row in node.slices("held")] == [(1, 1)]
    assert not list(ending.listed(node.executor.paths.run))
    node.check()


def test_reconcile_leaves_the_run_of_a_live_epilog_alone(node):
    node.prolog(1, "[mig:2g.20gb:1]")
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        client.note_end(str(node.config.run_dir), node.environ("epilog", 1))
        os.write(write, b"x")
        signal.pause()
    os.read(read, 1)
    try:
        node.reconcile()
        assert node.slices("held")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    node.reconcile()
    assert not node.slices("held")
    node.check()


def test_parallel_hooks_release_every_run_once_and_leave_no_note(node):
    """Many jobs start and end in parallel with the agent: every run is released once, and no note remains."""
    with agent_process(node):

        def run_hooks(number):
            for i in range(3):
                job = 100 + number * 10 + i
                environ = {k.decode(): v.decode() for k, v in node.environ("prolog", job, "[mig:1g.10gb:1]").items()}
                hook = "import sys; from slurm_migbatch.node.client import main; main(sys.argv[1], sys.argv[2])"
                for name in ("prolog", "epilog"):
                    environ["SLURM_SCRIPT_CONTEXT"] = f"{name}_slurmd"
                    line = [sys.executable, "-c", hook, name, str(node.etc)]
                    assert subprocess.run(line, env=environ, check=False, capture_output=True).returncode == 0

        threads = [threading.Thread(target=run_hooks, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not node.slices("held")
    assert not list(ending.listed(node.executor.paths.run))
    assert len(node.events("stop")) == len(node.events("start")) == 18
    node.check()


@pytest.mark.parametrize(
    ("job", "restart"),
    [(job, 0) for job in ("", "x", "1/../../2", "-1", "0", 1 << 32, "99999999999")]
    + [(1, restart) for restart in ("", "x", "-1", "../2", 1 << 16, 99999, 100000)],
)
def test_invalid_job_or_restart_count_creates_no_epilog_note(node, job, restart):
    run = node.executor.paths.run
    environ = node.environ("epilog", job, restart=restart)
    client.note_end(str(node.config.run_dir), environ)
    with pytest.raises(HookEnvError):
        HookEnv.read("epilog", environ)
    assert not list(ending.listed(run))

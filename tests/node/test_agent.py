"""The resident agent: requests through its socket, as hooks make them, and its failures."""

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import threading
import time

import pytest

from slurm_migbatch.node import client, exits
from slurm_migbatch.node.agent import Agent, AgentError
from slurm_migbatch.node.deadline import Deadline, locked
from slurm_migbatch.node.hookenv import HookEnv
from slurm_migbatch.node.inventory import inventory
from slurm_migbatch.node.run_repair import run_lock
from tests.support.directories import open_to_users
from tests.support.examples import thinned
from tests.support.node_processes import agent_process, run_hook
from tests.support.nodes import ALICE, BOB, in_child
from tests.support.waiting import eventually


def test_hooks_run_through_the_agent(node):
    with agent_process(node) as child:
        code, line = run_hook(node, "prolog", 1, "[mig:1g.10gb:2]")
        assert code == exits.OK and "agent" not in line, line
        assert run_hook(node, "epilog", 1) == (exits.OK, "job 1 run 0: released")
        assert child.stop() > 5
        assert os.waitstatus_to_exitcode(child.status) == 0
    assert not (node.root / "run" / "agent.sock").exists()
    node.check()
    assert [event["kind"] for event in node.events() if event["kind"] in ("start", "stop")] == ["start", "stop"]


def test_sigterm_delivered_to_another_thread_stops_the_agent(node):
    with agent_process(node) as child:
        other = min({int(name) for name in os.listdir(f"/proc/{child.pid}/task")} - {child.pid})
        tgkill = {"x86_64": 234, "aarch64": 131}[os.uname().machine]
        assert ctypes.CDLL(None).syscall(tgkill, child.pid, other, signal.SIGTERM) == 0
        child.wait(seconds=60)
        assert child.status == 0


def test_agent_socket_is_accessible_to_root_only(node):
    with agent_process(node):
        status = (node.root / "run" / "agent.sock").stat()
        assert (status.st_uid, status.st_mode & 0o777) == (0, 0o600)


def test_agent_does_not_answer_users_other_than_root(node):
    open_to_users(node.root)
    with agent_process(node):
        path = node.root / "run" / "agent.sock"
        path.chmod(0o777)  # even if the socket is accessible to all

        def ask():
            os.setresuid(ALICE, ALICE, ALICE)
            try:
                client.ask(str(path), "prolog", node.environ("prolog", 1, "[mig:7g.80gb:1]"), 5.0)
            except (OSError, ValueError):
                return 0
            return 1

        status, _ = in_child(ask)
        assert os.WEXITSTATUS(status) == 0
    assert node.slices() == []


@pytest.mark.slow
@pytest.mark.parametrize("raw", [b"", b"\0\0", b"hello", b"prolog\0SLURM_JOB_ID=1", b"x" * 100000, b"\xff\0\0"])
def test_agent_survives_malformed_requests(node, raw):
    with agent_process(node):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as link:
            link.connect(str(node.root / "run" / "agent.sock"))
            link.sendall(raw)
            link.shutdown(socket.SHUT_WR)
            link.recv(1000)
        assert run_hook(node, "prolog", 1, "[mig:1g.10gb:1]")[0] == exits.OK
    assert node.slices("held")


def test_second_agent_refuses_to_start(node):
    with agent_process(node), pytest.raises(AgentError, match="another agent"):
        Agent(node.config).run()
    Agent(node.config).stop()


def test_agent_refuses_a_hook_of_another_node(node):
    with agent_process(node):
        code, line = run_hook(node, "prolog", 1, "[mig:1g.10gb:1]", SLURMD_NODENAME="n2")
    assert code == exits.CONTEXT and "not of n2" in line


def test_hook_of_a_later_release_does_the_work_itself(node, monkeypatch):
    """Between the update of the package and the restart of the agent no node may be drained."""
    with agent_process(node):
        monkeypatch.setattr(client, "ALLOWED", (*client.ALLOWED, b"SLURM_JOB_NEW"))
        code, line = run_hook(node, "prolog", 1, "[mig:1g.10gb:1]", SLURM_JOB_NEW="x")
    assert code == exits.OK and "(agent: the answer is truncated)" in line
    assert node.slices("held")


def test_stale_agent_socket_blocks_neither_hook_nor_new_agent(node):
    with agent_process(node) as child:
        os.kill(child.pid, signal.SIGKILL)
        child.stop()
    assert (node.root / "run" / "agent.sock").exists()
    code, line = run_hook(node, "prolog", 1, "[mig:1g.10gb:1]")
    assert code == exits.OK and "agent: " in line
    with agent_process(node):
        assert "agent" not in run_hook(node, "epilog", 1)[1]
    node.check()


def test_hook_does_the_work_itself_when_the_agent_does_not_answer(node):
    node.configure(AgentWait=0.2)
    assert node.executor
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(node.root / "run" / "agent.sock"))
        listener.listen()
        code, line = run_hook(node, "prolog", 1, "[mig:1g.10gb:1]")
    assert code == exits.OK and "timed out" in line
    node.check()


def test_hook_and_slow_agent_start_the_job_only_once(new_node):
    node = new_node(AgentWait=0.1, latency=0.3)
    with agent_process(node):
        code, line = run_hook(node, "prolog", 1, "[mig:1g.10gb:1]")
        assert code == exits.OK and "already" in line, line
    assert len(node.events("start")) == 1
    node.check()


@pytest.mark.parametrize("hook", ["prolog", "epilog"])
@pytest.mark.parametrize("value", ["20s", "inf"])
def test_hook_names_the_line_of_an_invalid_agent_wait(node, hook, value):
    with (node.etc / "node.conf").open("a") as file:
        file.write(f"AgentWait={value}\n")
    code, line = run_hook(node, hook, 1, "[mig:1g.10gb:1]")
    number = len((node.etc / "node.conf").read_text().splitlines())
    assert code == exits.INSTALLATION and f"node.conf line {number}: AgentWait={value}: " in line


def test_agent_does_not_run_a_hook_that_has_given_up_waiting(node):
    """The hook does the work itself then; later the job may have ended, or have its next run."""
    path = str(node.root / "run" / "agent.sock")
    node.prolog(9, "[mig:1g.10gb:1]")
    gpu, locks = node.slices("held")[0].gpu, os.open(node.root / "run" / "lock", os.O_RDONLY)

    def request(job):
        link = socket.socket(socket.AF_UNIX)
        link.connect(path)
        link.sendall(client.encode("prolog", node.environ("prolog", job, "[mig:1g.10gb:1]")))
        return link

    with agent_process(node, workers=1):
        with locked(locks, [f"gpu-{gpu}"], Deadline(5)):
            first = request(1)  # keeps the worker busy
            request(2).close()
        with first:
            assert client.decode(first.recv(1000))[0] == exits.OK
        assert run_hook(node, "epilog", 404)[0] == exits.OK  # after all requests before it
    os.close(locks)
    assert sorted(row.job for row in node.slices("held")) == [1, 9]
    node.check()


@pytest.mark.slow
@pytest.mark.parametrize("hook", ["prolog", "epilog"])
@pytest.mark.parametrize("deadline", [20, 1])
def test_agent_leaves_a_run_whose_lock_it_gets_too_late_to_the_hook(new_node, hook, deadline):
    """The hook has given up and done the work itself; by now the job may have ended, or have its next run."""
    node = new_node(HookDeadline=deadline, EpilogDeadline=deadline)
    if hook == "epilog":
        node.prolog(1, "[mig:1g.10gb:1]")
    before = node.slices()
    locks = os.open(node.root / "run" / "lock", os.O_RDONLY) if node.executor else -1
    with agent_process(node, workers=1):
        with locked(locks, [run_lock(1)], Deadline(5)), socket.socket(socket.AF_UNIX) as link:
            link.connect(str(node.root / "run" / "agent.sock"))
            link.sendall(client.encode(hook, node.environ(hook, 1, "[mig:1g.10gb:1]")))
            time.sleep(0.3)  # the worker waits for the lock
            link.close()
            time.sleep(deadline % 20 * 1.5)  # until there is no time left, if it is 1
        assert run_hook(node, "epilog", 404)[0] == exits.OK  # after the request before it
    os.close(locks)
    assert node.slices() == before and node.scontrol_calls() == []
    node.check()


SCENES = {
    "prolog": ("prolog", "[mig:2g.20gb:1,1g.10gb:1]"),
    "epilog": ("epilog", ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("scene", SCENES)
def test_hook_succeeds_when_the_agent_is_killed_at_any_side_effect(many_nodes, scene):
    """The hook notices it and does the work itself: the job starts (or ends) nevertheless."""
    hook, marker = SCENES[scene]

    def arrange(node):
        if hook == "epilog":
            node.prolog(1, SCENES["prolog"][1])
        node.forget_executor()

    counted = many_nodes(name="count")
    arrange(counted)
    with agent_process(counted) as child:
        assert run_hook(counted, hook, 1, marker)[0] == exits.OK
        count = child.stop()
    assert count > 3
    for k in thinned(range(1, count + 1), list(SCENES).index(scene)):
        node = many_nodes(name=f"k{k}")
        arrange(node)
        with agent_process(node, kill_at=k) as child:
            code, line = run_hook(node, hook, 1, marker)
            assert code == exits.OK, line
            child.stop()
            assert os.WIFSIGNALED(child.status)
        node.check()
        assert len(node.slices("held")) == (2 if hook == "prolog" else 0)
        assert len(node.events("start")) == 1
        assert len(node.events("stop")) == (0 if hook == "prolog" else 1)
        node.close()


@pytest.mark.parametrize("number", [0, 3, 5])
def test_agent_that_cannot_start_its_threads_ends(node, monkeypatch, number):
    """Users may have all processes of the node. An agent that goes on with some of its threads is not restarted."""
    start, started = threading.Thread.start, []

    def limited(thread):
        if len(started) == number:
            raise RuntimeError("can't start new thread")
        start(thread)
        started.append(thread)

    def run():
        monkeypatch.setattr(threading.Thread, "start", limited)
        with pytest.raises(RuntimeError, match="new thread"):
            Agent(node.config, workers=4).run()
        return any(thread.is_alive() for thread in started)

    assert in_child(run)[0] == 0 and not (node.root / "run" / "agent.sock").exists()


def test_a_running_agent_survives_a_damaged_journal(node):
    with agent_process(node) as child:
        assert run_hook(node, "prolog", 1, "[mig:1g.10gb:1]")[0] == exits.OK
        with open(node.root / "state" / "journal.db", "r+b") as file:
            file.write(b"garbage!" * 4096)
        for suffix in ("-wal", "-shm"):
            (node.root / "state" / f"journal.db{suffix}").write_bytes(b"x" * 100)
        for job in (2, 3, 4, 5, 6):
            assert run_hook(node, "prolog", job, "[mig:1g.10gb:1]", uid=BOB)[0] == exits.OK
        child.stop()
    assert {row.job for row in node.slices("held")} >= {1, 2, 3, 4, 5, 6}
    node.check()


@pytest.mark.slow
def test_housekeeping_takes_nothing_from_jobs_that_started_after_the_journal_was_deleted(new_node):
    node = new_node(ReconcileEvery=0.1)
    with agent_process(node):
        assert run_hook(node, "prolog", 1, "[mig:1g.10gb:1]")[0] == exits.OK
        time.sleep(0.5)  # housekeeping has the journal open
        for path in (node.root / "state").glob("journal.db*"):
            path.unlink()
        assert run_hook(node, "prolog", 2, "[mig:1g.10gb:1]", uid=BOB)[0] == exits.OK
        time.sleep(1.0)
    assert {row.job for row in node.slices("held")} == {1, 2}
    node.check()


def test_housekeeping_restores_device_modes_without_any_hook(new_node):
    node = new_node(ReconcileEvery=0.1)
    node.prolog(1, "[mig:1g.10gb:1]")
    node.epilog(1)
    (idle,) = node.slices("idle")
    with agent_process(node):
        for path in (node.machine.dev_root / "nvidia-caps").iterdir():
            path.chmod(0o444)
        deadline = time.monotonic() + 120
        while node.cap(idle.cap_gi) != (0, 0o400) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert node.cap(idle.cap_gi) == (0, 0o400)


def test_housekeeping_opens_the_driver_again_after_it_was_replaced(new_node):
    """Without the slices of the node no hook would do it."""
    node = new_node(gpus=["a100-80gb"], ReconcileEvery=0.01)  # keeps its MIG mode
    agent = Agent(node.config)
    assert agent._gpus.managed()
    node.machine.reboot()
    assert agent._gpus.listed()
    housekeeping = threading.Thread(target=agent._housekeeping)
    housekeeping.start()
    try:
        eventually(lambda: [entry.get("problem", "") for entry in inventory(agent._gpus)] == [""])
        assert len(agent._gpus.managed()) == 1
    finally:
        agent._stopping.set()
        housekeeping.join()
        agent._gpus.reset()  # the library is loaded once: other tests open it for other machines


def test_housekeeping_continues_after_an_unexpected_error(new_node, monkeypatch, caplog):
    node = new_node(ReconcileEvery=0.01)
    agent, seen = Agent(node.config), []

    def reconcile(*_):
        seen.append(len(seen))
        if len(seen) > 2:
            agent._stopping.set()
        raise KeyError("odd")

    monkeypatch.setattr("slurm_migbatch.node.executor.Executor.reconcile", reconcile)
    agent._housekeeping()
    assert len(seen) > 2 and "KeyError: 'odd'" in caplog.text


def test_client_sends_only_the_allowed_environment_variables(node, monkeypatch):
    asked = {}

    def ask(path, hook, environ, wait):
        asked.update(environ)
        return 0, ""

    monkeypatch.setattr(client, "ask", ask)
    monkeypatch.setattr("posix.chdir", lambda path: None)
    environ = node.environ("prolog", 1, "[mig:1g.10gb:1]", LD_PRELOAD="/x", TMPDIR="/x", SLURM_JOB_WORK_DIR="/x")
    assert client.run("prolog", str(node.etc), environ) == (0, "")
    assert set(asked) <= set(client.ALLOWED)
    assert HookEnv.read("prolog", asked).comment.endswith(b"[mig:1g.10gb:1]")
    assert client.run("prolog", "/nonexistent", node.environ("prolog", 2)) == (0, ""), (
        "without a marker there is no query"
    )
    code, line = client.run("prolog", "/nonexistent", environ)
    assert code == exits.INSTALLATION and "run `migbatch install --role node --apply`" in line


def test_hooks_need_root(node):
    def work():
        os.setresuid(ALICE, ALICE, ALICE)
        return client.run("prolog", str(node.etc), node.environ("prolog", 1, "[mig:1g.10gb:1]"))[0]

    status, _ = in_child(work)
    assert os.WEXITSTATUS(status) == exits.CONTEXT


def test_agent_ends_if_its_run_directory_was_deleted(new_node):
    """Hooks make a new one, with other lock files; systemd starts the agent again, in that."""
    node = new_node(ReconcileEvery=0.1)
    with agent_process(node) as child:
        shutil.rmtree(node.root / "run" / "lock")
        (node.root / "run" / client.SOCKET).unlink()
        child.wait(seconds=60)
    assert os.WIFEXITED(child.status) and os.WEXITSTATUS(child.status) == 0
    node.prolog(1, "[mig:1g.10gb:1]")
    with agent_process(node):
        assert run_hook(node, "epilog", 1)[0] == exits.OK
    node.check()

"""The submit socket: answers at once, keeps slurmctld's connection, is not delayed by silent clients, cleans up."""

import os
import socket
import threading
import time

import pytest

from slurm_migbatch.submit import server as submit_server
from slurm_migbatch.submit.server import SubmitServer
from slurm_migbatch.submit.service import PER_USER
from tests.support.submit_clients import Echo, connect
from tests.support.waiting import eventually


@pytest.fixture
def path(tmp_path):
    return tmp_path / "submit.sock"


@pytest.fixture
def echo():
    return Echo()


@pytest.fixture
def server(path, echo):
    server = SubmitServer(path, echo)
    server.start()
    yield server
    server.stop()


def ask(path, text):
    with connect(path) as client:
        client.send(text)
        return client.recv(100)


def test_requests_are_answered_in_turn(server, path):
    assert [ask(path, b"%d" % n) for n in range(50)] == [b"%d:%d" % (os.getuid(), n) for n in range(50)]


def test_silent_clients_do_not_delay_others(server, path):
    silent = [connect(path) for _ in range(20)]
    assert ask(path, b"quick") == b"%d:quick" % os.getuid()
    silent[3].send(b"late")
    assert silent[3].recv(100) == b"%d:late" % os.getuid()
    for client in silent:
        client.close()
    eventually(lambda: not server._clients)


def test_silent_clients_are_disconnected(server, path, monkeypatch):
    monkeypatch.setattr(submit_server, "IDLE_S", 0.05)
    with connect(path) as client:
        assert client.recv(100) == b""


def test_a_user_cannot_keep_many_connections(server, path, monkeypatch):
    monkeypatch.setattr(submit_server, "peer_uid", lambda client: 1000)
    silent = [connect(path) for _ in range(PER_USER)]
    eventually(lambda: len(server._clients) == PER_USER)
    with connect(path) as client:
        assert client.recv(100) == b""
    silent[0].close()
    eventually(lambda: len(server._clients) < PER_USER)
    assert ask(path, b"again") == b"1000:again"
    for client in silent:
        client.close()


def test_connection_of_root_is_kept_open(server, path):
    with connect(path) as client:
        for n in range(100):
            client.send(b"%d" % n)
            assert client.recv(100) == b"0:%d" % n
        assert ask(path, b"another") == b"0:another"
    eventually(lambda: not server._clients)


def test_connection_of_another_user_is_closed_after_one_answer(server, path, monkeypatch):
    monkeypatch.setattr(submit_server, "peer_uid", lambda client: 1000)
    with connect(path) as client:
        client.send(b"advice")
        assert client.recv(100) == b"1000:advice"
        assert client.recv(100) == b""


def test_kept_connection_may_be_silent_longer_than_the_idle_limit(server, path, monkeypatch):
    with connect(path) as client:
        client.send(b"first")
        assert client.recv(100) == b"0:first"
        monkeypatch.setattr(submit_server, "IDLE_S", 0.05)
        with connect(path) as silent:
            assert silent.recv(100) == b""
        client.send(b"second")
        assert client.recv(100) == b"0:second"


def test_number_of_kept_connections_is_limited(server, path, monkeypatch):
    monkeypatch.setattr(submit_server, "KEPT", 2)
    clients = [connect(path) for _ in range(3)]
    for client in clients:
        client.send(b"x")
        assert client.recv(100) == b"0:x"
    assert clients[2].recv(100) == b""
    for client in clients:
        client.close()
    assert ask(path, b"x") == b"0:x"


def test_decisions_are_recorded_when_no_client_waits(server, path, echo):
    for n in range(20):
        ask(path, b"%d" % n)
    eventually(lambda: echo.recorded >= 20)


def test_idle_task_returns_the_delay_until_its_next_call(path, echo):
    calls, done = [], threading.Event()

    def idle_task():
        calls.append(time.monotonic())
        if len(calls) < 3:
            return 0.05
        done.set()
        return None

    server = SubmitServer(path, echo, idle_task)
    server.start()
    assert not done.wait(0.3) and not calls  # nothing was answered yet
    ask(path, b"x")
    assert done.wait(120)
    server.stop()
    assert len(calls) == 3 and calls[2] - calls[0] >= 0.1


def test_clients_that_leave_early_do_not_stop_the_server(server, path):
    for _ in range(20):
        client = connect(path)
        client.send(b"never mind")
        client.close()
    assert ask(path, b"still there") == b"%d:still there" % os.getuid()


def test_stop_leaves_no_socket_and_no_thread(path):
    server = SubmitServer(path, Echo())
    server.start()
    waiting = connect(path)
    eventually(lambda: server._clients)
    server.stop()
    assert not path.exists()
    assert waiting.recv(100) == b""
    waiting.close()
    assert not any(thread.name == "submit-socket" for thread in threading.enumerate())


def test_socket_left_behind_by_a_dead_process_is_replaced(path):
    left = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    left.bind(str(path))
    left.close()
    server = SubmitServer(path, Echo())
    server.start()
    assert ask(path, b"x").endswith(b":x")
    server.stop()


def test_many_simultaneous_requests_are_answered(server, path):
    results = []
    threads = [threading.Thread(target=lambda n=n: results.append(ask(path, b"%d" % n))) for n in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(results) == 40

"""The submit socket: answers at once, keeps slurmctld's connection, is not held up by the silent, leaves nothing."""

import os
import socket
import threading
import time

import pytest

from slurm_migbatch.submit import doorman as doormen
from slurm_migbatch.submit.doorman import Doorman
from slurm_migbatch.submit.service import PER_USER
from tests.support.doorman_clients import Echo, connect
from tests.support.waiting import eventually


@pytest.fixture
def path(tmp_path):
    return tmp_path / "submit.sock"


@pytest.fixture
def echo():
    return Echo()


@pytest.fixture
def doorman(path, echo):
    doorman = Doorman(path, echo)
    doorman.start()
    yield doorman
    doorman.stop()


def ask(path, text):
    with connect(path) as client:
        client.send(text)
        return client.recv(100)


def test_requests_are_answered_in_turn(doorman, path):
    assert [ask(path, b"%d" % n) for n in range(50)] == [b"%d:%d" % (os.getuid(), n) for n in range(50)]


def test_the_silent_hold_up_nobody(doorman, path):
    silent = [connect(path) for _ in range(20)]
    assert ask(path, b"quick") == b"%d:quick" % os.getuid()
    silent[3].send(b"late")
    assert silent[3].recv(100) == b"%d:late" % os.getuid()
    for client in silent:
        client.close()
    eventually(lambda: not doorman._clients)


def test_the_silent_are_sent_away(doorman, path, monkeypatch):
    monkeypatch.setattr(doormen, "IDLE_S", 0.05)
    with connect(path) as client:
        assert client.recv(100) == b""


def test_a_user_cannot_keep_many_connections(doorman, path, monkeypatch):
    monkeypatch.setattr(doormen, "peer_uid", lambda client: 1000)
    silent = [connect(path) for _ in range(PER_USER)]
    eventually(lambda: len(doorman._clients) == PER_USER)
    with connect(path) as client:
        assert client.recv(100) == b""
    silent[0].close()
    eventually(lambda: len(doorman._clients) < PER_USER)
    assert ask(path, b"again") == b"1000:again"
    for client in silent:
        client.close()


def test_root_keeps_its_connection(doorman, path):
    with connect(path) as client:
        for n in range(100):
            client.send(b"%d" % n)
            assert client.recv(100) == b"0:%d" % n
        assert ask(path, b"another") == b"0:another"
    eventually(lambda: not doorman._clients)


def test_others_are_answered_once(doorman, path, monkeypatch):
    monkeypatch.setattr(doormen, "peer_uid", lambda client: 1000)
    with connect(path) as client:
        client.send(b"advice")
        assert client.recv(100) == b"1000:advice"
        assert client.recv(100) == b""


def test_a_kept_connection_may_be_silent_for_long(doorman, path, monkeypatch):
    with connect(path) as client:
        client.send(b"first")
        assert client.recv(100) == b"0:first"
        monkeypatch.setattr(doormen, "IDLE_S", 0.05)
        with connect(path) as silent:
            assert silent.recv(100) == b""
        client.send(b"second")
        assert client.recv(100) == b"0:second"


def test_not_too_many_connections_are_kept(doorman, path, monkeypatch):
    monkeypatch.setattr(doormen, "KEPT", 2)
    clients = [connect(path) for _ in range(3)]
    for client in clients:
        client.send(b"x")
        assert client.recv(100) == b"0:x"
    assert clients[2].recv(100) == b""
    for client in clients:
        client.close()
    assert ask(path, b"x") == b"0:x"


def test_what_answers_leave_is_done_when_nobody_waits(doorman, path, echo):
    for n in range(20):
        ask(path, b"%d" % n)
    eventually(lambda: echo.recorded >= 20)


def test_chores_set_their_own_pace(path, echo):
    calls, done = [], threading.Event()

    def chore():
        calls.append(time.monotonic())
        if len(calls) < 3:
            return 0.05
        done.set()
        return None

    doorman = Doorman(path, echo, chore)
    doorman.start()
    assert not done.wait(0.3) and not calls  # nothing was answered yet
    ask(path, b"x")
    assert done.wait(120)
    doorman.stop()
    assert len(calls) == 3 and calls[2] - calls[0] >= 0.1


def test_clients_that_leave_early(doorman, path):
    for _ in range(20):
        client = connect(path)
        client.send(b"never mind")
        client.close()
    assert ask(path, b"still there") == b"%d:still there" % os.getuid()


def test_stop_leaves_no_socket_and_no_thread(path):
    doorman = Doorman(path, Echo())
    doorman.start()
    waiting = connect(path)
    eventually(lambda: doorman._clients)
    doorman.stop()
    assert not path.exists()
    assert waiting.recv(100) == b""
    waiting.close()
    assert not any(thread.name == "submit-socket" for thread in threading.enumerate())


def test_a_dead_socket_is_replaced(path):
    left = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    left.bind(str(path))
    left.close()
    doorman = Doorman(path, Echo())
    doorman.start()
    assert ask(path, b"x").endswith(b":x")
    doorman.stop()


def test_many_at_once(doorman, path):
    results = []
    threads = [threading.Thread(target=lambda n=n: results.append(ask(path, b"%d" % n))) for n in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(results) == 40

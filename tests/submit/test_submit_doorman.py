"""The submit socket: answers at once, is not held up by the silent, and leaves nothing behind."""

import os
import socket
import threading
import time

import pytest

from slurm_migbatch.submit.doorman import Doorman
from slurm_migbatch.submit.service import PER_USER


def eventually(check, timeout=120.0):
    end = time.monotonic() + timeout
    while not (result := check()):
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.01)
    return result


class Echo:
    """Stands in for the service: says who asked what."""

    def __init__(self):
        self.gate = threading.Event()
        self.gate.set()

    def handle(self, request, peer_uid=0):
        self.gate.wait(120)
        return b"%d:%s" % (peer_uid, request)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "submit.sock"


@pytest.fixture
def doorman(path):
    doorman = Doorman(path, Echo())
    doorman.start()
    yield doorman
    doorman.stop()


def connect(path):
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client.settimeout(120)
    client.connect(str(path))
    return client


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
    eventually(lambda: not doorman._waiting)


def test_the_silent_are_sent_away(doorman, path, monkeypatch):
    monkeypatch.setattr("slurm_migbatch.submit.doorman.IDLE_S", 0.05)
    with connect(path) as client:
        assert client.recv(100) == b""


def test_a_user_cannot_keep_many_connections(doorman, path, monkeypatch):
    monkeypatch.setattr("slurm_migbatch.submit.doorman.peer_uid", lambda client: 1000)
    silent = [connect(path) for _ in range(PER_USER)]
    eventually(lambda: len(doorman._waiting) == PER_USER)
    with connect(path) as client:
        assert client.recv(100) == b""
    silent[0].close()
    eventually(lambda: len(doorman._waiting) < PER_USER)
    assert ask(path, b"again") == b"1000:again"
    for client in silent:
        client.close()


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
    eventually(lambda: doorman._waiting)
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

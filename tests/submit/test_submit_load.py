"""The submit socket under load: processes of several users that send too much, and slurmctld among them."""

from __future__ import annotations

import errno
import os
import socket
import stat
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from slurm_migbatch.predict.selection import Chooser
from slurm_migbatch.submit import protocol
from slurm_migbatch.submit import server as submit_server
from slurm_migbatch.submit.request import JobRequest
from slurm_migbatch.submit.server import SubmitServer
from slurm_migbatch.submit.service import PER_USER, SubmitService, reserved
from tests.support.gpu_kinds import SITE
from tests.support.submit_clients import Echo, connect
from tests.support.waiting import eventually

GREEDY, POLITE, SLURM = 2001, 2002, 2003
PATIENCE_S = 120

#: PATH COUNT: opens connections and sends a request on each, says so, and prints the answers
ASK_MANY = """
import socket, sys
links = []
for number in range(int(sys.argv[2])):
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.connect(sys.argv[1])
    try:
        link.send(b"request")
    except OSError:
        pass
    links.append(link)
print("asked", flush=True)
for link in links:
    try:
        print(link.recv(100).decode() or "closed")
    except OSError:
        print("closed")
"""
#: PATH REQUEST: connects and sends the request for ever, and waits for no answer
FLOOD = """
import os, socket, sys
request = os.fsencode(sys.argv[2])
print("asked", flush=True)
while True:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        link.connect(sys.argv[1])
        link.send(request)
    except OSError:
        pass
    link.close()
"""
#: PATH COUNT: opens connections and sends nothing
HOLD = """
import socket, sys, time
links = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(int(sys.argv[2]))]
for link in links:
    link.connect(sys.argv[1])
print("asked", flush=True)
time.sleep(600)
"""
#: PATH COUNT REQUEST: sends the request COUNT times, one after the other, and prints how often it was accepted
ASK_ONE_BY_ONE = """
import os, socket, sys
answered = 0
for _ in range(int(sys.argv[2])):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        link.connect(sys.argv[1])
        link.send(os.fsencode(sys.argv[3]))
        answered += link.recv(65536).startswith(b"verdict=accept")
print("asked", flush=True)
print(answered)
"""


class Crowd:
    """Processes of users, and the socket that they can reach."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.path, self._stack = path, stack

    def start(self, uid: int, code: str, *arguments: object, path: Path | None = None) -> subprocess.Popen[str]:
        """Start a program of a user; return once it has begun to send requests."""
        argv = ["/usr/bin/python3", "-I", "-c", code, str(path or self.path), *map(str, arguments)]
        child = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, user=uid, group=uid, extra_groups=[])
        self._stack.callback(self._end, child)
        assert child.stdout is not None and child.stdout.readline() == "asked\n"
        return child

    @staticmethod
    def _end(child: subprocess.Popen[str]) -> None:
        child.kill()
        child.communicate()

    @staticmethod
    def output_of(child: subprocess.Popen[str]) -> list[str]:
        """What a program printed after that, once it has ended."""
        assert child.stdout is not None
        return child.stdout.read().split()


@pytest.fixture
def crowd(tmp_path: Path) -> Iterator[Crowd]:
    for folder in (tmp_path, *tmp_path.parents):
        if stat.S_IMODE(folder.stat().st_mode) & 0o5 != 0o5:
            folder.chmod(folder.stat().st_mode | 0o5)
    with ExitStack() as stack:
        yield Crowd(tmp_path / "submit.sock", stack)


@pytest.fixture
def serve(crowd: Crowd) -> Iterator[Callable[..., SubmitServer]]:
    with ExitStack() as stack:

        def make(service: object) -> SubmitServer:
            server = SubmitServer(crowd.path, service)
            server.start()
            stack.callback(server.stop)
            return server

        yield make


class Gate(Echo):
    """A service that answers users once `opened` is set, and records the order of requests."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[int] = []
        self.opened = threading.Event()

    def handle(self, request: bytes, peer_uid: int = 0) -> bytes:
        self.order.append(peer_uid)
        if peer_uid:
            self.opened.wait(PATIENCE_S)
        return super().handle(request, peer_uid)


def asked(link: socket.socket, text: bytes = b"x") -> bytes:
    link.send(text)
    return link.recv(65536)


@pytest.mark.parametrize("socket_path", [reserved, lambda path: path], ids=["its own socket", "the socket of all"])
def test_slurmctld_is_answered_before_users_who_asked_earlier(
    crowd: Crowd, serve: Callable[..., SubmitServer], socket_path: Callable[[Path], Path]
) -> None:
    gate = Gate()
    serve(gate)
    with connect(socket_path(crowd.path)) as kept:
        assert asked(kept) == b"0:x"
        greedy = crowd.start(GREEDY, ASK_MANY, PER_USER)
        eventually(lambda: gate.order == [0, GREEDY])  # the first of its requests takes long
        polite = crowd.start(POLITE, ASK_MANY, 1)
        kept.send(b"y")
        with connect(socket_path(crowd.path)) as another:
            another.send(b"z")
            gate.opened.set()
            assert kept.recv(100) == b"0:y" and another.recv(100) == b"0:z"
        assert crowd.output_of(greedy) == [f"{GREEDY}:request"] * PER_USER
        assert crowd.output_of(polite) == [f"{POLITE}:request"]
    after = gate.order[2:]
    assert after[:2] == [0, 0]
    assert after.index(POLITE) <= 4  # users take turns, however many requests one of them has waiting


@pytest.mark.slow
def test_flood_of_one_user_does_not_keep_others_from_an_answer(
    crowd: Crowd, serve: Callable[..., SubmitServer], chooser: Chooser
) -> None:
    """Six processes connect and send requests without a pause; slurmctld and another user get every answer."""
    service = SubmitService(SITE, chooser)
    serve(service)

    def request(uid: int, gres: str) -> str:
        job = JobRequest(uid, partition="gpu", tres_per_node=gres, comment="migbatch: model=bert-large batch=32")
        return protocol.encode(job.to_fields()).decode()

    for _ in range(6):
        crowd.start(GREEDY, FLOOD, request(GREEDY, ",".join(["mig:1g.10gb:1"] * 64)))
    ours = request(GREEDY, "gres/mig:auto").encode()
    with connect(reserved(crowd.path)) as kept:
        for _ in range(300):
            assert asked(kept, ours).startswith(b"verdict=accept")
    for _ in range(20):  # slurmctld starts again
        with connect(reserved(crowd.path)) as new:
            assert asked(new, ours).startswith(b"verdict=accept")
    polite = crowd.start(POLITE, ASK_ONE_BY_ONE, 20, request(POLITE, "gres/mig:auto"))
    assert crowd.output_of(polite) == ["20"]


def test_a_user_who_asks_too_often_is_not_answered(
    crowd: Crowd, serve: Callable[..., SubmitServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit_server, "BURST", 5)
    monkeypatch.setattr(submit_server, "PER_SECOND", 0.0)
    serve(Echo())
    first = crowd.output_of(crowd.start(GREEDY, ASK_MANY, 4))
    again = crowd.output_of(crowd.start(GREEDY, ASK_MANY, 4))
    assert Counter(first + again) == {f"{GREEDY}:request": 5, "closed": 3}
    assert crowd.output_of(crowd.start(POLITE, ASK_MANY, 4)) == [f"{POLITE}:request"] * 4
    with connect(reserved(crowd.path)) as kept:
        assert [asked(kept) for _ in range(20)] == [b"0:x"] * 20


def test_a_user_may_ask_again_after_a_while(
    crowd: Crowd, serve: Callable[..., SubmitServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit_server, "BURST", 1)
    monkeypatch.setattr(submit_server, "PER_SECOND", 2.0)
    serve(Echo())
    assert crowd.output_of(crowd.start(GREEDY, ASK_MANY, 8))[0] == f"{GREEDY}:request"
    eventually(lambda: crowd.output_of(crowd.start(GREEDY, ASK_MANY, 1)) == [f"{GREEDY}:request"])


def test_connections_of_all_users_together_are_limited(
    crowd: Crowd, serve: Callable[..., SubmitServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user may have many uids by way of a user namespace."""
    monkeypatch.setattr(submit_server, "USERS", 20)
    serve(Echo())
    children = [crowd.start(uid, HOLD, PER_USER) for uid in range(3001, 3005)]
    assert crowd.output_of(crowd.start(POLITE, ASK_MANY, 1)) == ["closed"]
    for socket_path in (crowd.path, reserved(crowd.path)):
        with connect(socket_path) as kept:
            assert asked(kept) == b"0:x"
    for child in children:
        child.kill()
    eventually(lambda: crowd.output_of(crowd.start(POLITE, ASK_MANY, 1)) == [f"{POLITE}:request"])


def test_slurmctld_has_a_socket_that_users_cannot_reach(
    crowd: Crowd, serve: Callable[..., SubmitServer], chooser: Chooser
) -> None:
    service = SubmitService(SITE, chooser, slurm_uids=[SLURM])
    serve(service)
    socket_path = reserved(crowd.path)
    assert stat.S_IMODE(socket_path.stat().st_mode) == 0o600 and socket_path.stat().st_uid == SLURM
    job = protocol.encode(JobRequest(POLITE, partition="gpu", tres_per_node="gres/mig:auto").to_fields()).decode()
    assert crowd.output_of(crowd.start(SLURM, ASK_ONE_BY_ONE, 3, job, path=socket_path)) == ["3"]
    code = "import socket, sys\nprint('asked')\n"
    code += "print(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect_ex(sys.argv[1]))"
    assert crowd.output_of(crowd.start(POLITE, code, path=socket_path)) == [str(errno.EACCES)]
    assert crowd.output_of(crowd.start(POLITE, code)) == ["0"]


def test_users_are_rejected_if_the_reserved_socket_cannot_be_chowned(
    crowd: Crowd, serve: Callable[..., SubmitServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """migbatchd running as its own user may not chown a file to SlurmUser."""

    def chown(*_: object) -> None:
        raise PermissionError(errno.EPERM, "not permitted")

    class Service(Echo):
        proxy_uids = frozenset({0, SLURM})

    monkeypatch.setattr(os, "chown", chown)
    serve(Service())
    socket_path = reserved(crowd.path)
    assert crowd.output_of(crowd.start(POLITE, ASK_MANY, 2, path=socket_path)) == ["closed"] * 2
    assert crowd.output_of(crowd.start(SLURM, ASK_MANY, 2, path=socket_path)) == [f"{SLURM}:request"] * 2


def test_both_sockets_are_removed_at_stop(crowd: Crowd) -> None:
    server = SubmitServer(crowd.path, Echo())
    server.start()
    assert crowd.path.is_socket() and reserved(crowd.path).is_socket()
    server.stop()
    assert not crowd.path.exists() and not reserved(crowd.path).exists()

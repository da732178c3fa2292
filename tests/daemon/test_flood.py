"""Unauthenticated clients at the node API of a real migbatchd: they cost little, and nodes are served meanwhile."""

from __future__ import annotations

import asyncio
import re
import resource
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from slurm_migbatch.config import Config
from slurm_migbatch.daemon import server
from slurm_migbatch.daemon.gate import ApiLimits
from slurm_migbatch.daemon.service import Service
from tests.support.daemon_fakes import FakeSigner, FakeSlurm, FakeStore, Node, gpu, inventory
from tests.support.daemon_process import Daemon
from tests.support.daemon_running import Running
from tests.support.waiting import PATIENCE_S, eventually

MIB = 1 << 20


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path) as running:
        yield running


def peak_mib(process: subprocess.Popen[bytes]) -> int:
    """The most memory that a process has had."""
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())[1]) // 1024


def descriptors(process: subprocess.Popen[bytes]) -> int:
    return len(list(Path(f"/proc/{process.pid}/fd").iterdir()))


def connected(port: int, source: str = "127.0.0.1") -> socket.socket:
    link = socket.socket()
    link.settimeout(PATIENCE_S)
    link.bind((source, 0))
    link.connect(("127.0.0.1", port))
    return link


def is_served(daemon: Daemon, node: Node, seq: int) -> None:
    """Wait until an authenticated node is served; its connection may be closed now and then."""

    def event_stored() -> bool:
        with suppress(OSError):
            return node.events(inventory(gpu(0), seq=seq)) == (200, {"acked": seq})
        return False

    eventually(event_stored)


@pytest.mark.slow
@pytest.mark.parametrize("credential", ["", "Authorization: MigBatch token x\r\n"])
def test_bodies_of_unauthenticated_requests_are_not_read(daemon: Daemon, credential: str) -> None:
    """Without this, 150 connections that send 4 MiB each took 860 MB."""
    process = daemon.start()
    daemon.serving()
    node = daemon.node()
    is_served(daemon, node, 1)
    before = peak_mib(process)
    head = f"POST /node/v1/events HTTP/1.1\r\nHost: x\r\nContent-Length: {4 * MIB}\r\n{credential}"
    head += f"X-Migbatch-Node: n1\r\nX-Migbatch-Digest: {'0' * 64}\r\n\r\n"
    body = secrets.token_bytes(64 * 1024)
    begun = threading.Barrier(151)

    def stranger() -> None:
        with suppress(OSError), closing(connected(daemon.port)) as link:
            link.sendall(head.encode())
            with suppress(threading.BrokenBarrierError):
                begun.wait(PATIENCE_S)
            for _ in range(4 * MIB // len(body) - 1):
                link.sendall(body)
            link.settimeout(30)
            link.recv(1024)

    threads = [threading.Thread(target=stranger) for _ in range(150)]
    for thread in threads:
        thread.start()
    with suppress(threading.BrokenBarrierError):
        begun.wait(5)  # those whose connection was closed will not come
    begun.abort()
    is_served(daemon, node, 2)
    for thread in threads:
        thread.join(PATIENCE_S)
    grown = peak_mib(process) - before
    print(f"grown by {grown} MiB, log of {len(daemon.log)} bytes")
    assert grown < 64
    assert len(daemon.log) < 20_000
    assert "Traceback" not in daemon.log


@pytest.mark.slow
def test_silent_connections_are_closed_and_nodes_are_still_served(daemon: Daemon) -> None:
    """Without this, 600 silent connections stopped the service, with 1,024 descriptors, and wrote 77 MB of log."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    process = daemon.start(descriptors=500)
    daemon.serving()
    node = daemon.node()
    is_served(daemon, node, 1)
    with ExitStack() as stack:
        silent = []
        for number in range(600):
            with suppress(OSError):
                silent.append(stack.enter_context(closing(connected(daemon.port, f"127.0.0.{2 + number % 50}"))))
                if number % 2:
                    silent[-1].sendall(b"POST /node/v1/plan HTTP/1.1\r\nX-Slow: ")
        is_served(daemon, node, 2)
        for link in silent:
            link.settimeout(PATIENCE_S)
            with suppress(ConnectionError):
                assert link.recv(1024) == b"", "closed, not answered"
        is_served(daemon, node, 3)
        eventually(lambda: descriptors(process) < 100)
    assert daemon.health() is not None
    print(f"log of {len(daemon.log)} bytes")
    assert len(daemon.log) < 20_000
    assert "Traceback" not in daemon.log


def test_body_that_a_node_does_not_finish_is_answered_with_408(
    config: Config, slurm: FakeSlurm, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that stops in the middle of its body is answered, and its connection closed."""
    monkeypatch.setattr("slurm_migbatch.daemon.service.ApiLimits", partial(ApiLimits, body_s=0.5))
    raw = b" " * 1000
    service = Service(config, client=slurm, open_store=lambda: store, signer=FakeSigner())
    with Running(service) as running, closing(connected(running.port)) as link:
        headers = Node(running.port, FakeSigner()).headers("/node/v1/plan", raw)
        lines = [f"{name}: {value}" for name, value in {**headers, "Host": "x", "Content-Length": "1000"}.items()]
        link.sendall("\r\n".join(["POST /node/v1/plan HTTP/1.1", *lines, "", ""]).encode() + raw[:10])
        answer = link.makefile("rb").read()
    assert b"408" in answer.splitlines()[0]
    assert b"did not arrive within 0.5 s" in answer


def test_clients_that_disconnect_do_not_fill_the_log(daemon: Daemon) -> None:
    daemon.start()
    daemon.serving()
    node = daemon.node()
    raw = b" " * 1000
    for end in (b"", b"half a body", b"\xff\xfe garbage", None):
        for _ in range(20):
            with closing(connected(daemon.port)) as link:
                if end is None:
                    link.sendall(b"\x16\x03\x01 no HTTP at all\r\n\r\n")
                else:
                    headers = {**node.headers("/node/v1/events", raw), "Host": "x", "Content-Length": "1000"}
                    lines = [f"{name}: {value}" for name, value in headers.items()]
                    link.sendall("\r\n".join(["POST /node/v1/events HTTP/1.1", *lines, "", ""]).encode() + end)
                link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset, not a FIN
    is_served(daemon, node, 1)
    assert "Traceback" not in daemon.log
    assert len(daemon.log.splitlines()) < 40


OUT_OF_DESCRIPTORS = """
import asyncio, logging, os, resource, socket, sys
from slurm_migbatch.daemon.server import ApiServer, ConnectionBounds
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

logging.basicConfig(stream=sys.stderr)

async def main():
    server = ApiServer(Starlette(routes=[Route("/", lambda request: PlainTextResponse("here"))]), 0)
    server.listen("127.0.0.1")
    clients = [socket.socket() for _ in range(40)]
    most = max(map(int, os.listdir("/proc/self/fd"))) + 6
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    for client in clients:
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", server.port))
    await asyncio.sleep(3)
    for client in clients:
        client.close()
    while True:  # some may still wait to be accepted, and to be found closed
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"GET / HTTP/1.0\\r\\n\\r\\n")
            if (await reader.read()).endswith(b"here"):
                break
        except OSError:
            await asyncio.sleep(0.1)
    await server.stop()
    print("served again")

asyncio.run(main())
"""


@pytest.mark.slow
def test_server_without_free_descriptors_logs_it_once_and_recovers() -> None:
    done = subprocess.run(
        [sys.executable, "-c", OUT_OF_DESCRIPTORS], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.stdout == "served again\n", done.stderr
    assert done.stderr.count("cannot accept connections") == 1, done.stderr
    assert len(done.stderr.splitlines()) < 5, done.stderr


def test_request_that_a_stopping_server_does_not_finish_is_answered_with_503(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents and commands take 503 for a service that is restarted, and try again."""
    monkeypatch.setattr(server, "_STOP_S", 0.0)

    async def stopped_before_the_answer() -> bytes:
        arrived = asyncio.Event()

        async def never(_: Request) -> Response:
            arrived.set()
            await asyncio.Event().wait()
            raise AssertionError

        api = server.ApiServer(Starlette(routes=[Route("/", never)]), 0)
        api.listen("127.0.0.1")
        reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
        await arrived.wait()
        await api.stop()
        answer = await reader.read()
        writer.close()
        return answer

    answer = asyncio.run(stopped_before_the_answer())
    assert answer.startswith(b"HTTP/1.1 503 ") and b"send again later" in answer

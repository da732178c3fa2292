"""Credentials of strangers are checked one at a time, not after they have gone, and delay nobody else's."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress

import pytest
from starlette.requests import ClientDisconnect

from slurm_migbatch.daemon.credentials import CredentialThreads
from slurm_migbatch.daemon.service import Service
from slurm_migbatch.node.auth import PeerIdentity
from tests.support.daemon_fakes import FakeSigner, Node, gpu, inventory
from tests.support.daemon_running import Running
from tests.support.waiting import PATIENCE_S, eventually


class FakePeer:
    """A connection that a test closes."""

    def __init__(self, source: str) -> None:
        self.source, self.is_open = source, True
        self.callbacks: dict[Callable[[], None], None] = {}

    def when_closed(self, then: Callable[[], None]) -> Callable[[], None]:
        if self.is_open:
            self.callbacks[then] = None
        else:
            then()
        return lambda: self.callbacks.pop(then, None)

    def close(self) -> None:
        self.is_open = False
        for then in list(self.callbacks):
            then()


@pytest.fixture
def threads() -> Iterator[CredentialThreads]:
    threads = CredentialThreads("test")
    yield threads
    threads.close()


class Blocking:
    """Work that notes its name; the first waits until the test lets it go on."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.begun, self.go_on = threading.Event(), threading.Event()

    def named(self, name: str) -> Callable[[], str]:
        def work() -> str:
            self.begun.set()
            assert self.go_on.wait(PATIENCE_S)
            self.done.append(name)
            return name

        return work


async def begun(work: Blocking) -> None:
    await asyncio.get_running_loop().run_in_executor(None, work.begun.wait, PATIENCE_S)


def test_credentials_of_closed_connections_are_not_checked(threads: CredentialThreads) -> None:
    work = Blocking()

    async def main() -> None:
        strangers = [FakePeer("10.0.0.1") for _ in range(100)]
        checks = [
            asyncio.create_task(threads.check(peer, work.named(f"{number}"))) for number, peer in enumerate(strangers)
        ]
        await begun(work)
        for peer in strangers:
            peer.close()
        honest = asyncio.create_task(threads.check(FakePeer("10.0.0.1"), work.named("honest")))
        await asyncio.wait(checks[1:], timeout=PATIENCE_S)  # while the first is still being checked
        work.go_on.set()
        assert await honest == "honest"
        ends = await asyncio.gather(*checks, return_exceptions=True)
        assert ends[0] == "0" and all(isinstance(end, ClientDisconnect) for end in ends[1:])

    asyncio.run(main())
    assert work.done == ["0", "honest"]
    assert not threads._waiting


def test_connection_that_closes_before_its_turn_in_the_threads_is_not_checked(threads: CredentialThreads) -> None:
    work = Blocking()

    async def main() -> None:
        first = asyncio.create_task(threads.check(FakePeer("10.0.0.1"), work.named("first")))
        await begun(work)
        gone = FakePeer("10.0.0.2")
        second = asyncio.create_task(threads.check(gone, work.named("gone")))
        await asyncio.sleep(0)
        gone.close()
        work.go_on.set()
        assert await first == "first"
        with pytest.raises(ClientDisconnect):
            await second

    asyncio.run(main())
    assert work.done == ["first"]


def test_many_credentials_of_one_source_delay_another_by_one(threads: CredentialThreads) -> None:
    work = Blocking()

    async def main() -> None:
        flood = [asyncio.create_task(threads.check(FakePeer("10.0.0.1"), work.named("flood"))) for _ in range(100)]
        await begun(work)
        node = asyncio.create_task(threads.check(FakePeer("10.0.0.2"), work.named("node")))
        await asyncio.sleep(0)
        work.go_on.set()
        await asyncio.gather(node, *flood)

    asyncio.run(main())
    assert work.done.index("node") <= 1 and len(work.done) == 101


def test_next_credential_waits_for_the_check_of_a_cancelled_request(threads: CredentialThreads) -> None:
    work = Blocking()

    async def main() -> None:
        first = asyncio.create_task(threads.check(FakePeer("10.0.0.1"), work.named("first")))
        await begun(work)
        waiting = asyncio.create_task(threads.check(FakePeer("10.0.0.1"), work.named("waiting")))
        last = asyncio.create_task(threads.check(FakePeer("10.0.0.1"), work.named("last")))
        await asyncio.sleep(0)
        first.cancel()
        waiting.cancel()
        await asyncio.wait([first, waiting])
        assert threads._checking._work_queue.empty()
        work.go_on.set()
        assert await last == "last"

    asyncio.run(main())
    assert work.done == ["first", "last"]


class SlowSigner(FakeSigner):
    """Checks credentials when the test lets it, and counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.checked: list[str] = []

    def verify(self, credential: str, payload: bytes, node: str) -> PeerIdentity:
        self.begun.set()
        assert self.go_on.wait(PATIENCE_S)
        self.checked.append(credential)
        return super().verify(credential, payload, node)


def test_clients_who_disconnect_leave_no_work_behind(config, slurm, store) -> None:  # type: ignore[no-untyped-def]
    signer = SlowSigner()
    head = "POST /node/v1/events HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nAuthorization: MigBatch test {}\r\n"
    head += f"X-Migbatch-Node: n1\r\nX-Migbatch-Digest: {'0' * 64}\r\n\r\n"
    with Running(Service(config, client=slurm, open_store=lambda: store, signer=signer)) as running:
        for number in range(200):
            with suppress(OSError), closing(socket.create_connection(("127.0.0.1", running.port))) as link:
                link.sendall(head.format(f"0.{number}.x").encode())
            if not number:
                eventually(signer.begun.is_set)
        signer.go_on.set()
        assert Node(running.port, FakeSigner(), source="127.0.0.2").events(inventory(gpu(0))) == (200, {"acked": 1})
    assert len(signer.checked) < 10, "one of the first client, one of the node, and what was not closed yet"

"""Uids without an account, of which a user namespace has thousands: looking them up delays no user elsewhere."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from slurm_migbatch.config import Config
from slurm_migbatch.node.auth import DIGEST_HEADER, NODE_HEADER, SCHEME, PeerIdentity, digest_of
from slurm_migbatch.query import server
from slurm_migbatch.query.protocol import PATH
from tests.support.waiting import PATIENCE_S

USER = 1
STRANGER = 3_000_000_000
STRANGERS = 24
BODY = b"{}"


class UidSigner:
    """Credentials that are the user's number."""

    scheme = "munge"

    def sign(self, _payload: bytes, _node: str) -> str:
        return "0"

    def verify(self, credential: str, _payload: bytes, _node: str) -> PeerIdentity:
        return PeerIdentity(int(credential), "")


async def status(port: int, source: str, uid: int) -> int:
    """Send a query that has no content, and return the status of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0))
    fields = {"Host": "x", "Authorization": f"{SCHEME} munge {uid}", NODE_HEADER: "login"}
    fields |= {DIGEST_HEADER: digest_of(BODY), "Content-Length": str(len(BODY))}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    writer.write(f"POST {PATH} HTTP/1.1\r\n{head}\r\n".encode() + BODY)
    answer = await reader.read()
    writer.close()
    return int(answer.split()[1])


def test_directory_service_that_is_slow_for_unknown_uids_delays_no_user(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up: list[int] = []
    answers = threading.Event()

    def has_account(uid: int) -> bool:
        if uid >= STRANGER:
            looked_up.append(uid)
            assert answers.wait(PATIENCE_S)
        return uid < STRANGER

    monkeypatch.setattr(server, "_has_account", has_account)

    async def main() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(4))
        config = Config()
        service = server.QueryService(replace(config, query=replace(config.query, port=0)), b"\n", UidSigner())
        service.api.listen("127.0.0.1")
        port = service.api.port
        try:
            strangers = [asyncio.create_task(status(port, "127.0.0.1", STRANGER + n)) for n in range(STRANGERS)]
            while not looked_up or service.api.connections is None or len(service.api.connections) < STRANGERS:
                await asyncio.sleep(0.01)
            assert await asyncio.wait_for(status(port, "127.0.0.2", USER), PATIENCE_S) == 400, "of the query itself"
            assert len(looked_up) == 1
            answers.set()
            assert set(await asyncio.gather(*strangers)) == {403}
        finally:
            answers.set()
            await service.stop()

    asyncio.run(main())

"""A whole migbatchd in a thread of the test process, with fakes around it."""

import asyncio
import dataclasses
import logging
import threading
import time

import pytest
from daemon_fakes import FakeSigner, FakeSlurm, FakeStore, Node

from slurm_migbatch.config import Config
from slurm_migbatch.daemon.service import Service


class Running:
    """One service in its own thread and loop."""

    def __init__(self, service):
        self.service = service
        self._loop = None
        self._stop = None
        self._ready = threading.Event()
        self._error = None
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        async def main():
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            await self.service.run(self._stop, self._ready.set)

        try:
            asyncio.run(main())
        except Exception as error:
            self._error = error
        self._ready.set()

    def __enter__(self):
        self._thread.start()
        assert self._ready.wait(30)
        if self._error:
            raise self._error
        return self

    def __exit__(self, *exc):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        assert not self._thread.is_alive()

    @property
    def port(self):
        return self.service.api.port


def eventually(check, timeout=20.0):
    """Wait until `check()` is true; tests never sleep for a guessed time."""
    end = time.monotonic() + timeout
    while not (result := check()):
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.01)
    return result


@pytest.fixture(autouse=True)
def _everything_is_logged(caplog):
    """A record that cannot be made is an error, also where nobody reads it."""
    caplog.set_level(logging.DEBUG, "slurm_migbatch")


@pytest.fixture
def slurm():
    return FakeSlurm()


@pytest.fixture
def store():
    return FakeStore()


@pytest.fixture
def config(tmp_path):
    base = Config()
    return dataclasses.replace(
        base,
        cluster=dataclasses.replace(base.cluster, poll_s=0.05),
        submit=dataclasses.replace(
            base.submit,
            socket=str(tmp_path / "submit.sock"),
            table=str(tmp_path / "table.lua"),
            catalog=str(tmp_path / "catalog.json"),
        ),
        node_api=dataclasses.replace(base.node_api, listen="127.0.0.1", port=0, max_body_kb=16),
        daemon=dataclasses.replace(base.daemon, run_dir=str(tmp_path / "run"), queue=20),
    )


@pytest.fixture
def signer():
    return FakeSigner()


@pytest.fixture
def running(config, slurm, store, signer):
    with Running(Service(config, client=slurm, open_store=lambda: store, signer=signer)) as running:
        yield running


@pytest.fixture
def node(running):
    return Node(running.port, FakeSigner())

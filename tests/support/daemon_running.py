"""A service that runs in a thread of the test's process."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from slurm_migbatch.daemon.service import Service
from slurm_migbatch.slurm.client import JobRow
from tests.support.waiting import PATIENCE_S


class Running:
    """One service in its own thread and event loop."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._ready = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        async def main() -> None:
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            await self.service.run(self._stop, self._ready.set)

        try:
            asyncio.run(main())
        except Exception as error:
            self._error = error
        self._ready.set()

    def __enter__(self) -> Running:
        self._thread.start()
        assert self._ready.wait(PATIENCE_S)
        if self._error:
            raise self._error
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._loop is not None and self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    @property
    def port(self) -> int:
        return self.service.api.port


def pending(job: int, gres: str, **more: Any) -> JobRow:
    return JobRow(job, uid=1000, user="ann", partition="gpu", state="PENDING", reason="Resources", gres=gres, **more)

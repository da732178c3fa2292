"""A service that runs beside the test, and waiting for what it does."""

import asyncio
import threading
import time

from slurm_migbatch.slurm.client import JobRow

PATIENCE_S = 120.0  # machines that do much else at the same time are slow


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
        assert self._ready.wait(PATIENCE_S)
        if self._error:
            raise self._error
        return self

    def __exit__(self, *exc):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    @property
    def port(self):
        return self.service.api.port


def eventually(check, timeout=PATIENCE_S):
    """Wait until `check()` is true; tests never sleep for a guessed time."""
    end = time.monotonic() + timeout
    while not (result := check()):
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.01)
    return result


def pending(job, gres, **more):
    return JobRow(job, uid=1000, user="ann", partition="gpu", state="PENDING", reason="Resources", gres=gres, **more)

"""Run loops, wait in them, and end tasks."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

from slurm_migbatch.daemon.log import FaultReporter

log = logging.getLogger(__name__)
T = TypeVar("T")

_LONGEST_S: Final = 60.0
"""Longest pause before a loop starts again; a loop that ran longer had recovered from its earlier errors."""
_ENDED: Final = "it is started again; if it was not killed (-9: perhaps for lack of memory), its last lines say why"


class ProcessEnded(Exception):
    """A process that a loop needs has ended by itself, as when it was killed."""


async def run_forever(name: str, loop: Callable[[], Awaitable[None]]) -> None:
    """Run a loop until it returns; errors are logged, unexpected ones with their traceback, and it starts again."""

    def reporter(error: Exception) -> FaultReporter:
        if isinstance(error, ProcessEnded):
            return FaultReporter(name, _ENDED, log, longest=_LONGEST_S)
        return FaultReporter(f"internal error in {name}", "please report it with the log", log, longest=_LONGEST_S)

    fault: FaultReporter | None = None
    while True:
        began = time.monotonic()
        try:
            return await loop()
        except Exception as error:
            if fault is None or time.monotonic() - began > _LONGEST_S:
                fault = reporter(error)
            if not (fault.open or isinstance(error, ProcessEnded)):
                log.exception("internal error in %s", name)
            await asyncio.sleep(fault.failed(error))


async def attempt(fault: FaultReporter, work: Awaitable[object], pause: float) -> float:
    """Await work and report whether it failed; return the seconds until the next attempt, `pause` after a success."""
    try:
        await work
    except Exception as error:
        return fault.failed(error)
    fault.succeeded()
    return pause


async def with_timeout(work: Coroutine[Any, Any, T], timeout: float) -> T:
    """Return what `work` returns if it takes no longer than `timeout` seconds; raises asyncio.TimeoutError otherwise.

    `asyncio.wait_for` before Python 3.12 drops a cancellation that arrives when the work has just ended: a loop that
    waits with it may then never end.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=timeout)
        if not task.done():
            raise asyncio.TimeoutError
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


class BackgroundTasks:
    """Tasks of which nobody awaits the result."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin work."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)  # the event loop itself has only weak references to tasks
        task.add_done_callback(self._tasks.discard)

    async def finish(self, timeout: float) -> None:
        """Wait until all work is done, `timeout` seconds at most."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout)


async def cancel(*tasks: asyncio.Task[None]) -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

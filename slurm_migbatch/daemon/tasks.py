"""Run loops that never end, and end tasks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from slurm_migbatch.daemon.log import FaultReporter

log = logging.getLogger(__name__)


async def keep(name: str, loop: Callable[[], Awaitable[None]]) -> None:
    """Run a loop forever; unexpected errors are logged with their traceback, and it starts again."""
    fault = FaultReporter(f"internal error in {name}", "please report it with the log", log, longest=60.0)
    while True:
        try:
            await loop()
        except Exception as error:
            if not fault.open:
                log.exception("internal error in %s", name)
            await asyncio.sleep(fault.failed(error))


async def cancel(*tasks: asyncio.Task[None]) -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

"""Child processes of migbatchd: programs of this package that read lines of JSON from stdin and write some to stdout.

A child ends at the end of its stdin, so it does not outlive migbatchd.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

from slurm_migbatch.config import Config, text_of

log = logging.getLogger(__name__)

ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Environment of processes that compute: several threads for small matrices take longer on busy processors, and each
has its own memory.
"""
_FIRST: Final = "1000"
_LINE_BYTES: Final = 1 << 26
_STOP_S: Final = 5.0


def be_killed_first() -> None:
    """Have the kernel kill this process before others when memory is short, not slurmctld, which may be larger."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_FIRST)


class Child:
    """One child process. `name`: for the log, such as "the query service"."""

    def __init__(self, name: str, process: Process) -> None:
        self._name, self.process = name, process

    @classmethod
    async def start(
        cls,
        name: str,
        module: str,
        environment: Mapping[str, str],
        *,
        own_session: bool = False,
    ) -> Child:
        """Start a module as a program, with further variables of its environment; it then waits for its first line."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module),
            stdin=PIPE,
            stdout=PIPE,
            limit=_LINE_BYTES,
            cwd="/",  # from which Python imports first
            env={**os.environ, **environment},
            start_new_session=own_session,
        )
        return cls(name, process)

    def configure(self, config: Config, **fields: Any) -> None:
        """Write the first line: the configuration and these fields."""
        self.send({"config": text_of(config), "level": config.daemon.log_level, **fields})

    def send(self, message: Mapping[str, Any]) -> None:
        """Write one line; nothing if the child has ended."""
        assert self.process.stdin is not None
        with contextlib.suppress(ConnectionError):
            self.process.stdin.write(json.dumps(message).encode() + b"\n")

    async def messages(self) -> AsyncIterator[dict[str, Any]]:
        """Yield what the child writes, until the end of its output."""
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            yield json.loads(line)

    async def end(self, listen: Callable[[Child], Awaitable[None]] | None = None) -> None:
        """Close its stdin, which ends it; kill it if that takes too long. `listen` reads its remaining output."""
        if self.process.returncode is not None:
            return
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            if listen is not None:
                await asyncio.wait_for(listen(self), _STOP_S)
            await asyncio.wait_for(self.process.wait(), _STOP_S)
        except asyncio.TimeoutError:
            log.warning("%s does not exit and is killed", self._name)
            with contextlib.suppress(ProcessLookupError):  # it has ended just now
                self.process.kill()
            await self.process.wait()

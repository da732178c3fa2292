"""Supervise the query service (`slurm_migbatch.query.server`)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping

from slurm_migbatch.config import Config, text_of
from slurm_migbatch.daemon.metrics import Metrics

log = logging.getLogger(__name__)
_STOP_S = 5.0
#: started by name, because the daemon does not import modules of this higher layer
_PROGRAM = "slurm_migbatch.query.server"


class QuerySupervisor:
    """Runs the query service; `run` starts the process, and is called again whenever it has ended."""

    def __init__(self, config: Config, metrics: Metrics) -> None:
        self._config = config
        self._answers: Mapping[str, int] = {}
        metrics.gauge(
            "migbatch_query_answers",
            "User queries answered since the last start, by status.",
            lambda: self._answers,
            "status",
        )

    async def run(self) -> None:
        """Serve until cancelled; do nothing forever if the service is disabled.

        Raises:
            RuntimeError: the child ended by itself.
        """
        if not self._config.query.enabled:
            await asyncio.Event().wait()
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", _PROGRAM),
            stdin=PIPE,
            stdout=PIPE,
            cwd="/",  # from which Python imports first
        )
        try:
            assert child.stdin is not None
            start = {"config": text_of(self._config), "level": self._config.daemon.log_level}
            child.stdin.write(json.dumps(start).encode() + b"\n")
            await self._listen(child)
            raise RuntimeError(f"the query service exited with {await child.wait()}")
        finally:
            await asyncio.shield(self._end(child))

    async def _listen(self, child: Process) -> None:
        assert child.stdout is not None
        while line := await child.stdout.readline():
            self._answers = json.loads(line).get("answers", self._answers)

    async def _end(self, child: Process) -> None:
        """Close the child's stdin, which ends it."""
        if child.returncode is not None:
            return
        assert child.stdin is not None
        child.stdin.close()
        try:
            await asyncio.wait_for(child.wait(), _STOP_S)
        except asyncio.TimeoutError:
            log.warning("the query service does not exit and is killed")
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()

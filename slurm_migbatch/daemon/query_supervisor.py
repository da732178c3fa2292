"""Supervise the query service (`slurm_migbatch.query.server`)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from slurm_migbatch.config import Config
from slurm_migbatch.daemon.children import Child
from slurm_migbatch.daemon.metrics import Metrics
from slurm_migbatch.daemon.tasks import ProcessEnded

#: started by name, because the daemon does not import modules of this higher layer
_PROGRAM = "slurm_migbatch.query.server"


class QuerySupervisor:
    """Runs the query service; `run` starts the process, and is called again whenever it has ended.

    Attributes:
        error: why the last process ended, until the next one serves; empty if none has ended.
    """

    def __init__(self, config: Config, metrics: Metrics) -> None:
        self._config = config
        self.error = ""
        self._answers: Mapping[str, int] = {}
        metrics.gauge(
            "migbatch_query_answers",
            "User queries answered since the last start, by status.",
            lambda: self._answers,
            "status",
        )

    async def run(self) -> None:
        """Serve until cancelled.

        Raises:
            Ended: the child ended by itself.
        """
        try:
            await self._serve()
        except Exception as error:
            self.error = str(error)
            raise

    async def _serve(self) -> None:
        child = await Child.start("the query service", _PROGRAM, {})
        try:
            child.configure(self._config)
            async for message in child.messages():
                if "serving" in message:
                    self.error = ""
                self._answers = message.get("answers", self._answers)
            raise ProcessEnded(f"the query service exited with {await child.process.wait()}")
        finally:
            await asyncio.shield(child.end())

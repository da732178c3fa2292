"""Run migbatchd on standby: it answers nodes and users with the address of the active one, and does nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from slurm_migbatch.config import Config
from slurm_migbatch.daemon.api import REFUSALS, primary_route
from slurm_migbatch.daemon.facts import slurm_uids
from slurm_migbatch.daemon.gate import as_json
from slurm_migbatch.daemon.listening import Listening
from slurm_migbatch.daemon.server import ApiServer, ConnectionBounds
from slurm_migbatch.daemon.tasks import cancel, run_forever
from slurm_migbatch.daemon.term import ActiveRole


class Standby:
    """Serves in place of the service, until `stop` is set."""

    def __init__(
        self,
        config: Config,
        activity: ActiveRole,
        settings: Callable[[], Mapping[str, str]],
        marks: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Set up. `settings` are slurmctld's, and may raise SlurmError; `marks`: of the configuration."""
        self._marks = marks
        self._config, self._activity = config, activity
        app = Starlette(
            routes=[
                Route("/healthz", self._healthz, methods=["GET"]),
                primary_route(activity, slurm_uids(config)),
                Route("/{path:path}", self._refuse, methods=["GET", "POST"]),
            ],
            exception_handlers=REFUSALS,
        )
        nodes, users = config.node_api, config.query
        self.api = ApiServer(app, nodes.port, ConnectionBounds(connections=nodes.max_connections))
        self._listening = [Listening(self.api, nodes.listen, settings, "nodes", "node_api")]
        self._apis = [self.api]
        if users.enabled:
            self._apis.append(ApiServer(app, users.port, ConnectionBounds(connections=users.max_connections), "query"))
            self._listening.append(Listening(self._apis[1], users.listen, settings, "users", "query"))

    async def run(self, stop: asyncio.Event, ready: Callable[[], None] = lambda: None) -> None:
        """Serve until `stop` is set; `ready` is called when everything listens.

        Raises:
            OSError: a socket is not available.
        """
        tasks = []
        try:
            self.api.listen_unix(Path(self._config.daemon.api_socket))
            for listening in self._listening:
                listening.begin()
            tasks = [asyncio.create_task(run_forever("addresses", listening.follow)) for listening in self._listening]
            ready()
            await stop.wait()
        finally:
            await cancel(*tasks)
            for api in self._apis:
                await api.stop()

    @property
    def _why(self) -> str:
        return self._activity.why or "it has just become active, its service is starting"

    async def _healthz(self, _: Request) -> Response:
        return as_json({"ok": True, "checks": {}, "standby": self._why, "marks": dict(self._marks)})

    async def _refuse(self, _: Request) -> Response:
        response = as_json({"error": f"this migbatchd is on standby: {self._why}"}, 503)
        response.headers["Connection"] = "close"
        return response

"""Serves the node API inside the service's own event loop; signals stay with the service."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave SIGTERM and SIGINT to the service."""
        yield


class ApiServer:
    """One listening socket and the HTTP server on it."""

    def __init__(self, app: Starlette, host: str, port: int) -> None:
        self._app, self._host, self._port = app, host, port
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The port that is listened on (of interest where port 0 was asked for)."""
        return self._port

    async def start(self) -> None:
        """Listen and serve.

        Raises:
            OSError: the address or port cannot be had.
        """
        info = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        try:
            listener = socket.create_server(info[0][4][:2], family=info[0][0], backlog=1024)
        except OSError as error:
            raise OSError(
                error.errno, f"cannot listen on {self._host} port {self._port}: {error.strerror}; see [node_api]"
            ) from None
        self._port = listener.getsockname()[1]
        config = uvicorn.Config(
            self._app,
            log_config=None,
            access_log=False,
            http="h11",
            ws="none",
            lifespan="off",
            timeout_keep_alive=75,
            timeout_graceful_shutdown=2,
            server_header=False,
        )
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]), name="node-api")
        while not self._server.started:
            await asyncio.sleep(0.005)
            if self._task.done():
                await self._task

    async def stop(self) -> None:
        """Answer what is in flight, for two seconds at most, then close."""
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await self._task

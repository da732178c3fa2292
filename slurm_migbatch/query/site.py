"""Sources of answers: the record, Slurm, and the running migbatchd of one configuration."""

from __future__ import annotations

import time

from slurm_migbatch.values import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    from slurm_migbatch.config import Config
    from slurm_migbatch.daemon.ended import HistoryClient
    from slurm_migbatch.store.db import Store

    _T = TypeVar("_T")

_MOST = 16 << 20
_PATIENCE_S = 5.0
#: number of cached items
_KEPT = 200
_REST = 4.0


class QuerySite:
    """Where to query, according to the controller's configuration.

    Attributes:
        catalog: catalog file instead of the configured one; only set by a command on this host.
        submit_socket: socket of the submit service for `explain`; likewise.
        quiet: hide paths and errors of this host from the user; they are logged.
    """

    def __init__(
        self, config: Config | None, catalog: str = "", submit_socket: str = "", quiet: bool = False, *, url: str = ""
    ) -> None:
        """Use a configuration, or the defaults and the record at `url`."""
        self._config, self._url = config, url
        self.catalog, self.submit_socket, self.quiet = catalog, submit_socket, quiet
        self._kept: dict[str, tuple[float, Any]] = {}

    @property
    def config(self) -> Config:
        """The controller's configuration."""
        if self._config is None:
            from dataclasses import replace

            from slurm_migbatch.config import Config, StoreConfig

            self._config = replace(Config(), store=StoreConfig(self._url))
        return self._config

    @property
    def url(self) -> str:
        """The record's URL."""
        return self._url or self.config.store.url

    def kept(self, name: str, seconds: float, find: Callable[[], _T]) -> _T:
        """Return the cached result of `find` if it is recent enough, so that many queries share one look-up.

        Slow results are cached longer, for `_REST` times their duration.
        """
        now = time.monotonic()
        until, value = self._kept.get(name, (0.0, None))
        if now >= until:
            value = find()
            for expired in [key for key, (due, _) in self._kept.items() if now >= due or len(self._kept) >= _KEPT]:
                del self._kept[expired]
            end = time.monotonic()
            self._kept[name] = (end + max(seconds, _REST * (end - now)), value)
        return value  # type: ignore[no-any-return]

    def detail(self, error: object) -> str:
        """Return what to append to a sentence: the error text, but nothing for remote users."""
        return "" if self.quiet else f": {error}"

    def record(self) -> Store:
        """Open the record for reading; works while migbatchd is down. Raises StoreError."""
        from slurm_migbatch.store.db import open_store

        return open_store(self.url, readonly=True)

    def slurm(self) -> HistoryClient:
        """Return the client of Slurm's commands, as configured."""
        from slurm_migbatch.daemon.ended import HistoryClient

        return HistoryClient(*self.config.cluster.commands)

    def daemon(self, path: str) -> bytes:
        """Ask migbatchd at `path` ("/v1/why/7") on its unix socket, as this process's user.

        Raises:
            OSError: it does not answer, or refuses.
        """
        import http.client  # with ssl this import takes a good part of the time of a query about runs
        import socket

        connection = http.client.HTTPConnection("localhost", timeout=_PATIENCE_S)
        connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.sock.settimeout(_PATIENCE_S)
            connection.sock.connect(self.config.daemon.api_socket)
            connection.request("GET", path)
            answer = connection.getresponse()
            body = answer.read(_MOST)
        except http.client.HTTPException as error:
            raise OSError(str(error) or type(error).__name__) from error
        finally:
            connection.close()
        if answer.status != 200:
            raise OSError(f"it answers {answer.status}: {body[:200].decode(errors='replace')}")
        return body

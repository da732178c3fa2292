"""What answers rest on: the record, Slurm, and the running migbatchd of one configuration."""

from __future__ import annotations

import time

from slurm_migbatch.values import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    from slurm_migbatch.config import Config
    from slurm_migbatch.daemon.ended import HistoryClient
    from slurm_migbatch.daemon.history import HistoryStore

    _T = TypeVar("_T")

_MOST = 16 << 20
_PATIENCE_S = 5.0
#: things that are kept at once
_KEPT = 200
_REST = 4.0


class QuerySite:
    """Where to look, by the configuration of the controller.

    Attributes:
        catalog: catalog file instead of the configured one; only a command on this host names one.
        submit_socket: where `explain` asks the submit service too; likewise.
        quiet: whether who asks is told nothing of paths and errors on this host; they are logged.
    """

    def __init__(
        self, config: Config | None, catalog: str = "", submit_socket: str = "", quiet: bool = False, *, url: str = ""
    ) -> None:
        """Look by a configuration, or by the defaults and the record at `url`."""
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
        """The record's."""
        return self._url or self.config.store.url

    def kept(self, name: str, seconds: float, find: Callable[[], _T]) -> _T:
        """Return what `find` found so many seconds ago at most, so that many questions are one look.

        What takes long is kept longer, for `_REST` times what it took.
        """
        now = time.monotonic()
        until, value = self._kept.get(name, (0.0, None))
        if now >= until:
            value = find()
            for old in [key for key, (due, _) in self._kept.items() if now >= due or len(self._kept) >= _KEPT]:
                del self._kept[old]
            end = time.monotonic()
            self._kept[name] = (end + max(seconds, _REST * (end - now)), value)
        return value  # type: ignore[no-any-return]

    def detail(self, error: object) -> str:
        """Return what follows a sentence: the words of the error, but nothing where who asks is elsewhere."""
        return "" if self.quiet else f": {error}"

    def record(self) -> HistoryStore:
        """Open the record for reading; works while migbatchd is down. Raises StoreError."""
        from slurm_migbatch.daemon.history import open_history

        return open_history(self.url, readonly=True)

    def slurm(self) -> HistoryClient:
        """Return the client of Slurm's commands, as the configuration finds them."""
        from slurm_migbatch.daemon.ended import HistoryClient

        cluster = self.config.cluster
        return HistoryClient(cluster.slurm_bin or None, cluster.slurm_conf or None, cluster.timeout_s)

    def daemon(self, path: str) -> bytes:
        """Ask migbatchd at `path` ("/v1/why/7") on its unix socket, as this process's user.

        Raises:
            OSError: it does not answer, or refuses.
        """
        import http.client  # with ssl a good part of the time that a question about runs takes
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

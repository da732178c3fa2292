"""Who may read /metrics: whoever is on this host, and from elsewhere who has the token for it."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass

from slurm_migbatch.config import Config
from slurm_migbatch.daemon.addresses import is_loopback
from slurm_migbatch.daemon.gate import Refused
from slurm_migbatch.node.auth import read_private

_SCHEME = "bearer"


@dataclass(frozen=True)
class Scraping:
    """The rule of one configuration; `token`: what Prometheus sends, empty where it may not ask from elsewhere."""

    token: bytes = b""

    @classmethod
    def of(cls, config: Config) -> Scraping:
        """Read the token that a configuration names. Raises AuthError where that is missing or not safe."""
        path = config.node_api.metrics_token_file
        return cls(read_private(path) if path else b"")

    def check(self, address: str | None, headers: Mapping[str, str]) -> None:
        """Refuse who may not read.

        Args:
            address: from where the request came by TCP; None: by the unix socket.
            headers: of the request, names in lower case.

        Raises:
            Refused: with a sentence for whoever set the scraper up.
        """
        if address is None or is_loopback(address):
            return
        if not self.token:
            raise Refused(403, "metrics are read on this host; elsewhere with a token: [node_api] metrics_token_file")
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != _SCHEME or not hmac.compare_digest(given.strip().encode(), self.token):
            raise Refused(401, "send the token of [node_api] metrics_token_file: Authorization: Bearer TOKEN")

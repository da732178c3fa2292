"""Who may read metrics and pictures: whoever is on this host, and from elsewhere who has the token for it."""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Mapping
from dataclasses import dataclass

from slurm_migbatch.config import Config
from slurm_migbatch.daemon.addresses import is_loopback
from slurm_migbatch.daemon.gate import Refused
from slurm_migbatch.node.auth import read_private


@dataclass(frozen=True)
class Scraping:
    """The rule of one configuration.

    Attributes:
        token: what Prometheus or a browser sends, empty where nobody may ask from elsewhere.
        what, key: what is read, and the key of the configuration that names the token's file, for sentences.
    """

    token: bytes = b""
    what: str = "metrics are"
    key: str = "[node_api] metrics_token_file"

    @classmethod
    def of(cls, config: Config) -> Scraping:
        """Read the token that a configuration names. Raises AuthError where that is missing or not safe."""
        path = config.node_api.metrics_token_file
        return cls(read_private(path) if path else b"")

    def given(self, headers: Mapping[str, str]) -> bool:
        """Return whether a request brings the token: as a bearer's, or as the password that a browser asks for.

        Args:
            headers: of the request, names in lower case.
        """
        scheme, _, text = headers.get("authorization", "").partition(" ")
        found = text.strip().encode()
        if scheme.lower() == "basic":
            try:
                found = base64.b64decode(found, validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        elif scheme.lower() != "bearer":
            return False
        return bool(self.token) and hmac.compare_digest(found, self.token)

    def check(self, address: str | None, headers: Mapping[str, str]) -> None:
        """Refuse who may not read.

        Args:
            address: from where the request came by TCP; None: by the unix socket.
            headers: of the request, names in lower case.

        Raises:
            Refused: with a sentence for whoever set the reader up.
        """
        if address is None or is_loopback(address) or self.given(headers):
            return
        if not self.token:
            raise Refused(403, f"{self.what} can be read on this host, or elsewhere with a token: {self.key}")
        raise Refused(401, f"send the token of {self.key}: Authorization: Bearer TOKEN")

"""Control access to metrics and charts: from this host, and from other hosts with the token."""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Mapping
from dataclasses import dataclass

from slurm_migbatch.config import Config
from slurm_migbatch.daemon.addresses import is_loopback
from slurm_migbatch.daemon.gate import Refused
from slurm_migbatch.node.auth import AuthError, read_private


@dataclass(frozen=True)
class Scraping:
    """Access according to one configuration.

    Attributes:
        token: sent by Prometheus or a browser, empty if access from other hosts is disabled.
        subject, key: what is read, and the configuration key of the token's file, for messages.
    """

    token: bytes = b""
    subject: str = "metrics are"
    key: str = "[node_api] metrics_token_file"

    @classmethod
    def of(cls, config: Config) -> Scraping:
        """Read the configured token. Raises AuthError if it is missing or not safe."""
        path = config.node_api.metrics_token_file
        try:
            return cls(read_private(path) if path else b"")
        except AuthError as error:
            raise AuthError(f"{cls.key}: {error}") from None

    def has_token(self, headers: Mapping[str, str]) -> bool:
        """Return whether a request has the token: as a bearer token, or as the password in a browser.

        Args:
            headers: of the request, names in lower case.
        """
        scheme, _, text = headers.get("authorization", "").partition(" ")
        token = text.strip().encode()
        if scheme.lower() == "basic":
            try:
                token = base64.b64decode(token, validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        elif scheme.lower() != "bearer":
            return False
        return bool(self.token) and hmac.compare_digest(token, self.token)

    def check(self, address: str | None, headers: Mapping[str, str]) -> None:
        """Refuse callers without access.

        Args:
            address: of the caller, by TCP; None: by the unix socket.
            headers: of the request, names in lower case.

        Raises:
            Refused: with a sentence for the administrator of the reader.
        """
        if address is None or is_loopback(address) or self.has_token(headers):
            return
        if not self.token:
            raise Refused(403, f"{self.subject} can be read on this host, or elsewhere with a token: {self.key}")
        raise Refused(401, f"send the token of {self.key}: Authorization: Bearer TOKEN")

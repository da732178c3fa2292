"""Call Slurm's REST API: requests to slurmrestd over a unix socket or HTTP, with version selection.

slurmrestd offers several versions of its API at once, named in the path (v0.0.42), of which each Slurm release has
about four: 24.11 has 40 to 42, 26.05 has 42 to 45. All fields used here have the same names in all of them, and
the newest is taken; `REQUEUE` and `DEFAULT_PARTITION` name what only the later ones can do, `SHARING` what only the
earlier ones can.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import pwd
import re
import socket
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode

from slurm_migbatch.slurm.client import SlurmError
from slurm_migbatch.slurm.restaddress import RestAddress

#: supported versions, the best first
VERSIONS: Final = (45, 44, 43, 42, 41, 40)
#: the first version in which jobs can be requeued
REQUEUE: Final = 45
#: the first version in which a partition states that it is the default
DEFAULT_PARTITION: Final = 45
#: the last version in which jobs state whether they share their nodes (26.05.5)
SHARING: Final = 44

#: with the second 26.05 rejects a token that has expired
_REJECTED: Final = (http.client.UNAUTHORIZED, http.client.NETWORK_AUTHENTICATION_REQUIRED)
_TOKEN = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*")


class RestError(SlurmError):
    """slurmrestd reported that Slurm refuses.

    Attributes:
        number: Slurm's number of the error.
        reason: Slurm's message.
    """

    def __init__(self, message: str, number: int, reason: str) -> None:
        super().__init__(message)
        self.number, self.reason = number, reason


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class RestApi:
    """One slurmrestd.

    Args:
        address: `unix:/PATH`, `http://HOST:PORT` or `https://HOST:PORT`.
        token_file: a file with a token of auth/jwt, read again for each request; empty: slurmrestd identifies the peer
            of its socket (rest_auth/local).
        user: user of the requests: the owner of the token. Without a token it is the user of this process.
        timeout: seconds in which slurmrestd must accept, answer, and continue its answer.
        owners: uids whose token file is trusted too, besides root and this process's user.
    """

    def __init__(self, address: str, token_file: str, user: str, timeout: float, owners: Iterable[int]) -> None:
        self.address = address
        self._where = RestAddress.parse(address)
        self._token_file = token_file
        self._user = user if token_file else pwd.getpwuid(os.geteuid()).pw_name
        self._timeout = timeout
        self._owners = frozenset({0, os.geteuid(), *owners})
        self._version = 0
        self._lacking: set[int] = set()  # earlier versions that were requested and are not offered
        #: requests so far, for reports and tests
        self.requests = 0

    @property
    def version(self) -> int:
        """API version in use: 42 for v0.0.42; determined by the first request.

        Raises:
            SlurmError: slurmrestd does not answer, or offers no supported version.
        """
        if not self._version:
            tried = (number for number in VERSIONS if self._send("GET", f"v0.0.{number}/ping/", None) is not None)
            self._version = next(tried, 0)
            self._lacking.clear()
        if not self._version:
            raise SlurmError(
                f"slurmrestd at {self.address} offers none of the API versions v0.0.{VERSIONS[-1]} to "
                f"v0.0.{VERSIONS[0]}; Slurm 23.11 to 26.05 do, with the plugin openapi/slurmctld (slurmrestd -s); "
                "a much later release needs a later migbatch"
            )
        return self._version

    def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, newest: int = VERSIONS[0], **query: str
    ) -> dict[str, Any]:
        """Return the answer to a request such as `ask("GET", "jobs/")`, by the version `newest` instead of a later one
        if slurmrestd offers it.

        Raises:
            RestError: Slurm refuses.
            SlurmError: slurmrestd does not answer, or its answer is invalid.
        """
        target = quote(path) + (f"?{urlencode(query)}" if query else "")
        version = min(self.version, newest)
        if version in self._lacking:
            version = self.version
        try:
            answer = self._send(method, f"v0.0.{version}/{target}", body)
            if answer is None and version < self.version:
                self._lacking.add(version)
                version = self.version
                answer = self._send(method, f"v0.0.{version}/{target}", body)
        except RestError:
            raise
        except SlurmError:
            self._version = 0  # slurmrestd may be another release at the next request
            raise
        if answer is None:
            self._version = 0
            raise SlurmError(f"slurmrestd at {self.address} does not support {method} v0.0.{version}/{target}")
        return answer

    def _send(self, method: str, where: str, body: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Return the answer to a request; None if slurmrestd does not know the path."""
        self.requests += 1
        # with the user named, slurmrestd refuses rather than query slurmctld as a user who does not see every job
        headers = {"X-SLURM-USER-NAME": self._user, "Content-Type": "application/json", "Accept": "application/json"}
        if token := self._token():
            headers["X-SLURM-USER-TOKEN"] = token
        # texts of users may hold bytes that are not UTF-8
        data = None if body is None else json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogateescape")
        connection = self._connection()
        try:
            with contextlib.closing(connection):
                connection.request(method, f"/slurm/{where}", data, headers)
                answer = connection.getresponse()
                text = answer.read().decode("utf-8", "surrogateescape")
        except TimeoutError:
            raise SlurmError(
                f"slurmrestd at {self.address} did not answer within {self._timeout:g} s; are it and slurmctld running "
                "and not overloaded?"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise SlurmError(
                f"slurmrestd at {self.address} cannot be reached: {error or type(error).__name__}"
            ) from None
        return self._understood(method, where, answer.status, text)

    def _understood(self, method: str, where: str, status: int, text: str) -> dict[str, Any] | None:
        """Return the document of an answer; None: not found. Raises RestError (from Slurm) and SlurmError."""
        if status in _REJECTED:
            problem = (
                f"it rejects the token in {self._token_file}; replace it by one of {self._user} (scontrol token)"
                if self._token_file
                else f"it does not know this process as {self._user}; set a token ([cluster] slurmrestd_token)"
            )
            raise SlurmError(f"slurmrestd at {self.address} answered {status}: {problem}")
        try:
            answer = json.loads(text, strict=False)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            if status == http.client.NOT_FOUND:
                return None
            raise SlurmError(f"slurmrestd answered {method} {where} with {status} and invalid JSON: {text[:200]!r}")
        if errors := answer.get("errors"):
            first = errors[0] if isinstance(errors, list) and isinstance(errors[0], dict) else {}
            reason = str(first.get("error") or first.get("description") or errors)
            raise RestError(
                f"slurmrestd answered {method} {where}: {reason} ({first.get('description', '')})",
                int(first.get("error_number") or 0),
                reason,
            )
        if status >= http.client.BAD_REQUEST:
            raise SlurmError(f"slurmrestd answered {method} {where} with {status}: {text[:200]!r}")
        return answer

    def _connection(self) -> http.client.HTTPConnection:
        address = self._where
        if address.path:
            return _UnixConnection(address.path, self._timeout)
        connection_class = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
        return connection_class(address.host, address.port, timeout=self._timeout)

    def _token(self) -> str:
        if not self._token_file:
            return ""
        try:
            with Path(self._token_file).open(encoding="ascii") as file:
                status = os.fstat(file.fileno())
                text = file.read(65536).strip().removeprefix("SLURM_JWT=")
        except (OSError, ValueError) as error:
            raise SlurmError(f"the token for slurmrestd in {self._token_file} cannot be read: {error}") from None
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in self._owners or status.st_mode & 0o077:
            raise SlurmError(f"{self._token_file} must belong to this user and be readable by no other (chmod 600)")
        if not _TOKEN.fullmatch(text):
            raise SlurmError(
                f"{self._token_file} has no token; create one with `scontrol token username={self._user} lifespan=...`"
            )
        return text
